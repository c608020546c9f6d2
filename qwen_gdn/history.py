"""What a sampler may read beside logits: the tokens that precede each row, in plain decoding and inside a tree."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .topology import Topology


class History:
    """The tokens of one generation, tallied as they come: a round costs what is new, not what there is.

    Attributes:
        tokens: all so far, oldest first: those of the prompt, then the emitted ones.
        prompt_length: how many are the prompt's, what the cache held before it included.
        ids: each token that occurs, once, int64 [U] on the CPU.
        counts: how often each of `ids` was emitted, int64 [U]; the prompt does not count.
    """

    def __init__(self, prompt: Tensor) -> None:
        """Args: prompt: int64 [T] on the CPU."""
        self.tokens: list[int] = prompt.tolist()
        self.prompt_length = len(self.tokens)
        self.ids = prompt.unique()
        self.counts = torch.zeros_like(self.ids)
        self._places: dict[int, int] = {token: place for place, token in enumerate(self.ids.tolist())}

    def locate(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those of the tokens that `ids` lacks, once each, and every token's place in `ids` followed by these."""
        fresh: dict[int, int] = {}
        known, places = len(self._places), []
        for token in tokens:
            place = self._places.get(token)
            places.append(fresh.setdefault(token, known + len(fresh)) if place is None else place)
        return list(fresh), places

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes up emitted tokens."""
        fresh, places = self.locate(tokens)
        self._places |= {token: place for place, token in enumerate(fresh, start=len(self._places))}
        self.tokens.extend(tokens)
        self.ids = torch.cat((self.ids, torch.tensor(fresh, dtype=torch.int64)))
        grown = torch.cat((self.counts, self.counts.new_zeros(len(fresh))))
        self.counts = grown.index_add_(0, torch.tensor(places, dtype=torch.int64), grown.new_ones(len(places)))


class Context(NamedTuple):
    """What precedes N rows of logits: row i follows `history` and the drafted tokens of node i's own path.

    tokens: int64 [N] on the CPU. Node 0, the root, is the last token of `history`; the others are not in it.
    topology: of the N nodes; of the root alone in plain decoding and after a prompt.
    """

    history: History
    tokens: Tensor
    topology: Topology

    def before(self, row: int) -> list[int]:
        """Every token that precedes the row's draw, oldest first."""
        return [*self.history.tokens, *self.tokens[self.topology.path(row)[1:]].tolist()]


class ContextSampler(ABC):
    """A sampler whose draws depend on more than logits. Subclasses are told by `decode` and `generate` what they read.

    It must keep no tokens of its own: of a tree most nodes are thrown away, a round that fails is taken back, and one
    sampler may serve several generations at once.
    """

    @property
    def reads_history(self) -> bool:
        """Whether calls need a context; if not, they get none, and nobody has to know what a cache holds."""
        return True

    def check(self, vocab: int) -> None:  # noqa: B027 (most samplers fit any vocabulary)
        """Asked when a generation is called for: ValueError unless it can draw from so many tokens."""

    @abstractmethod
    def __call__(self, logits: Tensor, context: Context | None = None) -> Tensor:
        """[N, vocab] -> int64 [N]; the context has N nodes."""


@runtime_checkable
class PlacedSampler(Protocol):
    """A sampler whose random numbers belong to the places of a text, not to the order of its calls.

    A token is then drawn by the number of its place whatever was drafted there, so that one seed writes one text. No
    two nodes of a path share a place, so the draws along any path are independent. A generation asks for them so; a
    plain call takes new numbers.
    """

    def at(self, depths: Sequence[int]) -> Any:
        """The sampler for rows that lie so many places ahead of the next one, 0 for that; nothing is used up."""

    def passed(self, count: int) -> None:
        """So many places are written."""
