"""The rows of a generation: what is known of each, and the target's forwards over the memory of all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from qwen_gdn.cache import HybridCache
from qwen_gdn.decode import Draws, HybridModel, OnStage, prefill
from qwen_gdn.model import Hidden, LayerId

from .proposer import Proposer
from .tree import DraftTree


class Row:
    """One sequence of a generation: what proposes, draws and ends it, and how far it has come.

    left: tokens that it may still emit, 0 once it has ended.
    root: the last token emitted.
    """

    def __init__(
        self, drafter: Proposer, draws: Draws, ends: Callable[[int], bool], max_new_tokens: int, budget: int
    ) -> None:
        self.drafter = drafter
        self.draws = draws
        self.budget = budget
        self.left = max_new_tokens
        self.root = -1
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
        self.root = tokens[-1]
        self.left = 0 if self._ended else self.left - len(tokens)


Observe = Callable[[int, Hidden], None]
"""Told what a forward has made of newly committed tokens of a row: its number, and its own part of a batch of one."""


class Forwards(Protocol):
    """The target's forwards over the memory of the rows of a generation."""

    def transaction(self) -> AbstractContextManager[None]:
        """Puts the memory of all rows back if its body raises."""

    def read(self, prompts: Sequence[Tensor], window: int, observe: Observe) -> Tensor:
        """Commits prompts [1, T], T = 0 too, of all rows window by window.

        Returns:
            each row's last final hidden state, [B, D]; anything where T = 0.
        """

    def verify(self, trees: Mapping[int, DraftTree], branched: bool) -> list[Hidden]:
        """Runs the trees of rows: through a window, or, where they are all roots alone, as tokens kept at once.

        Returns:
            the hidden states of each tree's nodes, [1, N, D], in the order of the trees.
        """

    def commit(self, paths: Mapping[int, list[int]]) -> None:
        """Keeps a path of every row's tree in the window."""


class Alone:
    """Forwards over one sequence."""

    def __init__(self, target: HybridModel, cache: HybridCache, layers: Sequence[LayerId], on_stage: OnStage) -> None:
        self.target = target
        self.cache = cache
        self.layers = layers
        self.on_stage = on_stage

    def transaction(self) -> AbstractContextManager[None]:
        return self.cache.transaction()

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
