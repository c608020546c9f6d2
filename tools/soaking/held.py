"""A cache under test and the reference for it: the list of tokens that it must hold, and no tensor."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from qwen_gdn import HybridCache, Topology
from qwen_gdn.cache import Branch


class DivergenceError(Exception):
    """The product did something else than the reference says."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise DivergenceError(message)


class Plan(NamedTuple):
    """`text` says what `run` will do; `run` acts on the cache and tells the reference."""

    text: str
    run: Callable[[], None]


@dataclass
class Window:
    """An open window; `final` [N, D] is what its forward returned, None before that."""

    branch: Branch
    topology: Topology
    tokens: list[int]
    final: Tensor | None = None


class UnderWay(NamedTuple):
    """What a call is about to commit, and how many of it may be committed once that call has failed.

    clean: if what failed is a call below that raised.
    loose: if an interrupt hit any line, so perhaps the one after everything was done.
    """

    tokens: Sequence[int]
    clean: Collection[int]
    loose: Collection[int]


@dataclass(eq=False)
class Held:
    """A cache and what it must hold.

    floor: the lowest length above 0 that `crop` is promised to reach.
    rows: what the last forward returned for the last committed tokens [n, D], to be compared.
    opening: a window is being opened, and is not known yet.
    emitted: the tokens that a greedy generation has just written; the cache holds all of them but the last.
    """

    name: str
    cache: HybridCache
    tokens: list[int] = field(default_factory=list)
    floor: int = 0
    window: Window | None = None
    rows: Tensor | None = None
    emitted: list[int] = field(default_factory=list)
    under_way: UnderWay | None = None
    compared: bool = False
    opening: bool = False

    @property
    def room(self) -> int:
        return self.cache.capacity - len(self.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.floor = max(self.floor, len(self.tokens) - self.cache.rollback)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        if length == 0:
            self.floor = 0

    @contextmanager
    def adding(self, tokens: Sequence[int], clean: Collection[int] = (0,)) -> Iterator[None]:
        """The body commits these tokens; `clean` as in `UnderWay`."""
        self.under_way = UnderWay(tokens, clean, (*clean, len(tokens)))
        yield
        self.append(tokens)
        self.under_way = None

    def failed(self, loose: bool) -> None:
        """Brings the reference to where a call that failed may have left the cache, or raises DivergenceError."""
        tokens, clean, end = self.under_way or UnderWay((), (0,), (0,))
        added = self.cache.length - len(self.tokens)
        allowed = end if loose else clean
        require(added in allowed, f"a failed call moved the length from {len(self.tokens)} to {self.cache.length}")
        if added:
            self.append(tokens[:added])
        self.under_way, self.rows, self.emitted = None, None, []
        if loose:
            self._close_what_is_unknown()

    def _close_what_is_unknown(self) -> None:
        """After an interrupt a window may be open that was never returned, or filled with results never seen."""
        if self.window is not None and not (self.cache.holds(self.window.branch) and self.window.final is not None):
            self.cache.discard()
            self.window = None
        if self.opening:
            self.cache.discard()
            self.opening = False
