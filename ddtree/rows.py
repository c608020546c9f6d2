"""The rows of a generation: what is known of each, and the target's forwards over the memory of all."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from qwen_gdn.cache import HybridCache
from qwen_gdn.committed import CommittedMemory
from qwen_gdn.decode import Draws, HybridModel, OnStage, prefill
from qwen_gdn.model import Hidden, LayerId

from .budget import Budget
from .proposer import Proposer
from .tree import DraftTree


class Verified(NamedTuple):
    """How a round with a verify came about; all of it lies on the host already.

    tree: what was put before the target, a `ScoredTree` if the builder knows scores; without drafts, the root alone.
    draws: the target's token at every node.
    path: the nodes that the draws followed, root first, before any cut; the draw at its last node is the bonus.
    budget: nodes that could have been drafted; where an `AutoBudget` decides, those that it gave the round.
    length: tokens in the cache before the round.
    """

    tree: DraftTree
    draws: tuple[int, ...]
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int
    length: int


def ignored(verified: Verified) -> None:
    """Nobody watches the rounds."""


class Row:
    """One sequence of a generation: what proposes, draws and ends it, and how far it has come.

    left: tokens that it may still emit, 0 once it has ended.
    root: the last token emitted.
    length: tokens in the cache before its next round, once its prompt is there.
    budget: decides how many nodes its rounds draft.
    given: what it gave the last round.
    on_round: told of every round with a verify, once it is committed.
    """

    def __init__(
        self,
        drafter: Proposer,
        draws: Draws,
        ends: Callable[[int], bool],
        max_new_tokens: int,
        budget: Budget,
        *,
        length: int,
        on_round: Callable[[Verified], None] = ignored,
    ) -> None:
        self.drafter = drafter
        self.draws = draws
        self.budget = budget
        self.given = 0
        self.left = max_new_tokens
        self.root = -1
        self.length = length
        self.on_round = on_round
        self._ends = ends
        self._ended = False

    def cut(self, tokens: list[int]) -> tuple[int, ...]:
        """What is emitted of them: up to the first that ends the generation."""
        for count, token in enumerate(tokens, 1):
            if self._ends(token):
                self._ended = True
                return tuple(tokens[:count])
        return tuple(tokens)

    def emit(self, tokens: tuple[int, ...]) -> None:
        """Takes up what was emitted, once the cache has."""
        self.draws.emitted(tokens)
        if self.root >= 0:  # the first token is the prompt's own, and not yet in the cache
            self.length += len(tokens)
        self.root = tokens[-1]
        self.left = 0 if self._ended else self.left - len(tokens)


Observe = Callable[[int, Hidden], None]
"""Told what a forward has made of newly committed tokens of a row: its number, and its own part of a batch of one."""


M = TypeVar("M", bound=HybridModel)
C = TypeVar("C", bound=CommittedMemory[Any])


class Forwards(ABC, Generic[M, C]):
    """The target's forwards over the memory of the rows of a generation."""

    def __init__(self, target: M, cache: C, layers: Sequence[LayerId], on_stage: OnStage) -> None:
        self.target = target
        self.cache = cache
        self.layers = layers
        self.on_stage = on_stage

    def transaction(self) -> AbstractContextManager[None]:
        """Puts the memory of all rows back if its body raises."""
        return self.cache.transaction()

    @abstractmethod
    def read(self, prompts: Sequence[Tensor], window: int, observe: Observe) -> Tensor:
        """Commits prompts [1, T], T = 0 too, of all rows window by window.

        Returns:
            each row's last final hidden state, [B, D]; anything where T = 0.
        """

    @abstractmethod
    def verify(self, trees: Mapping[int, DraftTree], branched: bool) -> list[Hidden]:
        """Runs the trees of rows: through a window, or, where they are all roots alone, as tokens kept at once.

        Returns:
            the hidden states of each tree's nodes, [1, N, D], in the order of the trees.
        """

    @abstractmethod
    def commit(self, paths: Mapping[int, list[int]]) -> None:
        """Keeps a path of every row's tree in the window."""


class Alone(Forwards[HybridModel, HybridCache]):
    """Forwards over one sequence."""

    def read(self, prompts: Sequence[Tensor], window: int, observe: Observe) -> Tensor:
        return prefill(
            self.target,
            prompts[0],
            self.cache,
            window=window,
            capture=self.layers,
            on_window=lambda hidden: observe(0, hidden),
            on_stage=self.on_stage,
        )

    def verify(self, trees: Mapping[int, DraftTree], branched: bool) -> list[Hidden]:
        (tree,) = trees.values()
        memory = self.cache.branch(tree.topology) if branched else self.cache
        return [self.target(tree.tokens, memory, capture=self.layers)]

    def commit(self, paths: Mapping[int, list[int]]) -> None:
        self.cache.commit(*paths.values())
