"""Places of conversations that a session can go back to: copies of memory, least recently used dropped first."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from qwen_gdn.cache import HybridCache

from .contexts import Kept


class Boundary(NamedTuple):
    """Memory of exactly some ids: the target's and the proposer's."""

    cache: HybridCache
    context: Kept

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.context.nbytes


class Boundaries:
    """Boundaries by their ids, of at most `most` bytes together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[tuple[int, ...], Boundary] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held."""
        return sum(boundary.nbytes for boundary in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def used(self, ids: tuple[int, ...]) -> bool:
        """Whether there is one of just these ids, which then counts as used."""
        if ids in self._kept:
            self._kept.move_to_end(ids)
        return ids in self._kept

    def put(self, ids: tuple[int, ...], boundary: Boundary) -> None:
        """Keeps one; others are dropped for it as needed, and it itself if it is too large."""
        self._kept[ids] = boundary
        while self.nbytes > self.most:
            oldest = ids if boundary.nbytes > self.most else next(iter(self._kept))
            del self._kept[oldest]

    def longest(self, ids: Sequence[int]) -> tuple[int, Boundary] | None:
        """Length and memory of the one that begins the given ids with most of them, which then counts as used."""
        fitting = [key for key in self._kept if key == tuple(ids[: len(key)])]
        if not fitting:
            return None
        key = max(fitting, key=len)
        self._kept.move_to_end(key)
        return len(key), self._kept[key]
