"""A hybrid cache of rows that differ in length: each has its own tree in a window, and commits its own path of it.

The law is that of `HybridCache`, row by row, but for `crop`: nothing is logged from which a state could be recomputed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from .checked import shown
from .committed import CommittedMemory, Record, Window
from .integrity import check_layers
from .lanes import Pass
from .layer_cache import DeltaCache, KVCache, LayerCache
from .ragged_lanes import (
    Paths,
    Prefix,
    RaggedAttention,
    RaggedChainDelta,
    RaggedLane,
    RaggedLanes,
    RaggedTreeDelta,
)
from .topology import Path, Topology
from .transfer import indices


@dataclass(frozen=True, kw_only=True)
class _Record(Record):
    window: "RaggedBranch | None" = None
    lengths: tuple[int, ...]


class RaggedBranch(Window[RaggedLanes]):
    """A speculative window over a tree a row; made by `RaggedCache.branch`.

    Its forward takes tokens [B, N] with N the most nodes of a row; what stands past a row's own nodes is not used.
    """

    cache: "RaggedCache"

    def __init__(self, cache: "RaggedCache", topologies: tuple[Topology | None, ...]) -> None:
        super().__init__(cache)
        self.topologies = topologies

    @property
    def width(self) -> int:
        return max(len(topology) for topology in self.topologies if topology)

    def begin(self, batch: int, count: int) -> Pass[RaggedLane]:
        """The view of memory for this window's forward. Changes nothing; raises as `expect` does."""
        self.expect(batch, count)
        return self.cache.tree_pass(self.topologies)

    def finish(self, done: Pass[RaggedLane]) -> None:
        """Keeps what the forward computed."""
        self.fill(self.cache.held(done))

    def checked_paths(self, paths: Sequence[Path]) -> Paths:
        """One root path a row; ValueError names the first row that has another."""
        given = list(paths) if isinstance(paths, Sequence | Tensor) else []
        if len(given) != self.batch:
            raise ValueError(f"commit takes one path a row, a list of {self.batch}, got {shown(paths)}")
        return [_checked_path(row, *pair) for row, pair in enumerate(zip(given, self.topologies, strict=True))]


class Appending:
    """The next chain forward of a ragged cache: what the model runs over, as it does over a branch.

    Args:
        counts: how many tokens each row appends, which come first in its row; 0 leaves a row as it is.
    """

    def __init__(self, cache: "RaggedCache", counts: Sequence[int]) -> None:
        self._cache = cache
        self._counts = counts

    def begin(self, batch: int, count: int) -> Pass[RaggedLane]:
        """The view of memory for the forward.

        Raises:
            RuntimeError: a window is open.
            ValueError: the batch differs, no row has a token, or a row's tokens exceed the capacity.
        """
        self._cache.expect(batch, self._counts)
        return self._cache.chain_pass(count, self._counts)

    def finish(self, done: Pass[RaggedLane]) -> None:
        """Commits what the forward computed."""
        self._cache.extend([range(count) for count in self._counts], self._cache.held(done))


class RaggedCache(CommittedMemory[_Record]):
    """Memory of a hybrid model for B sequences of their own lengths; made by `QwenGDN.new_cache(..., ragged=True)`.

    `model(tokens, cache, mask=mask)` appends to each row the tokens that its mask leaves, `branch` opens a window over
    one tree a row and `commit` keeps one path a row: all rows, or none if anything raises. `lengths` moves there alone.
    """

    kind = "a ragged cache"

    def __init__(self, layers: Iterable[LayerCache], batch: int, capacity: int) -> None:
        super().__init__(_Record(layers=tuple(layers), lengths=(0,) * batch), capacity, rollback=0)

    def __repr__(self) -> str:
        return f"RaggedCache(lengths={list(self._now.lengths)}, capacity={self.capacity}, layers={len(self)})"

    @property
    def lengths(self) -> Tensor:
        """Number of committed tokens of each row, int64 [B] on the CPU."""
        return torch.tensor(self._now.lengths)

    @property
    def length(self) -> NoReturn:
        """Raises ValueError: the rows have their own."""
        raise ValueError(f"a ragged cache has no one length: read its lengths, {list(self._now.lengths)}")

    @property
    def extent(self) -> int:
        return max(self._now.lengths)

    def expect(self, batch: int, counts: Sequence[int]) -> None:
        """Raises as `Appending.begin` does unless so many tokens a row can be appended now."""
        self.refuse_open_window("a chain forward")
        if batch != self.batch:
            raise ValueError(f"tokens have batch {batch}, the cache has {self.batch}; make it with batch={batch}")
        if not any(counts):
            raise ValueError("mask: no row has a token of its own; leave the forward out")
        self._check_room(counts, "tokens")

    def chain_pass(self, width: int, counts: Sequence[int]) -> Pass[RaggedLane]:
        """The view of memory for a forward over `width` tokens a row, the first `counts` of which are its own."""
        prefix, lengths, sizes, padding = self._facts(width, counts)
        return Pass(
            positions=(lengths + torch.arange(width, device=self.device))[:, None],
            mask=prefix.mask(torch.ones(width, width, dtype=torch.bool, device=self.device).tril()),
            causal=False,
            lanes=tuple(
                RaggedAttention(layer, prefix)
                if isinstance(layer, KVCache)
                else RaggedChainDelta(layer, sizes, padding)
                for layer in self
            ),
        )

    def branch(self, topologies: Sequence[Topology | None]) -> RaggedBranch:
        """Opens a window over one tree a row, whose root follows the row's committed tokens; a row of None sits out.

        Raises:
            RuntimeError: a window is open already.
            ValueError: they are not one topology a row, or all None, or the deepest node of one would not fit.
        """
        trees = tuple(topologies) if isinstance(topologies, Sequence) else ()
        if len(trees) != self.batch or not all(isinstance(tree, Topology | None) for tree in trees) or not any(trees):
            raise ValueError(
                f"branch takes a list of {self.batch} topologies, one a row (None for a row that sits out, not for "
                f"all), got {shown(topologies)}"
            )
        self.refuse_open_window("a second branch")
        self._check_room([tree.max_depth + 1 if tree else 0 for tree in trees], "levels of the tree")
        window = RaggedBranch(self, trees)
        self._now = replace(self._now, window=window)
        return window

    def tree_pass(self, trees: Sequence[Topology | None]) -> Pass[RaggedLane]:
        """The view of memory for a forward over the nodes of a window."""
        sizes = [len(tree) if tree else 0 for tree in trees]
        width, device = max(sizes), self.device
        prefix, lengths, _, padding = self._facts(width, sizes)
        depths = torch.zeros(len(trees), width, dtype=torch.int64)
        ancestors = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
        widths = {layer.columns.shape[1] + 1 for layer in self if isinstance(layer, DeltaCache)}
        windows = {W: torch.zeros(len(trees), width, W, dtype=torch.int64) for W in widths}
        for row, (tree, size) in enumerate(zip(trees, sizes, strict=True)):
            if tree is not None:
                depths[row, :size] = tree.depths
                ancestors[row, :size, :size] = tree.ancestors
                for W in widths:
                    windows[W][row, :size] = tree.windows(W)
        ancestors = ancestors.to(device)
        windows = {W: each.to(device) for W, each in windows.items()}
        return Pass(
            positions=(depths.to(device) + lengths)[:, None],
            mask=prefix.mask(ancestors),
            causal=False,
            lanes=tuple(
                RaggedAttention(layer, prefix)
                if isinstance(layer, KVCache)
                else RaggedTreeDelta(layer, ancestors, windows[layer.columns.shape[1] + 1], padding)
                for layer in self
            ),
        )

    def held(self, done: Pass[RaggedLane]) -> RaggedLanes:
        """What a forward over this cache has computed."""
        return RaggedLanes(done.lanes, self._now.lengths, self.device)

    def commit(self, paths: Sequence[Path]) -> None:
        """Keeps in each row the nodes of a root path, root first, and closes the window; `[]` keeps nothing of a row.

        Raises:
            RuntimeError: no window is open, or its forward has not been run.
            ValueError: they are not one root path of its own topology for each row (`[]` for a row that sat out).
                Nothing is changed.
        """
        window = self._now.window
        if window is None:
            raise RuntimeError("commit without a window: open one with cache.branch and run its forward")
        filled = window.filled()
        checked = window.checked_paths(paths)
        if not any(checked):
            return self.discard()
        self.extend(checked, filled)

    def extend(self, paths: Paths, computed: RaggedLanes) -> None:
        """Swaps in the record further on by each row's path, and with it closes the window."""
        lengths = tuple(length + len(path) for length, path in zip(self._now.lengths, paths, strict=True))
        self._close(_Record(layers=tuple(computed.committed(paths)), lengths=lengths))

    def crop(self, length: int) -> None:
        """`crop(0)` empties every row.

        Raises:
            RuntimeError: a window is open.
            ValueError: it is not 0, since no row's state could be recomputed. Nothing is changed.
        """
        self.refuse_open_window("a crop")
        if isinstance(length, bool) or length != 0:
            raise ValueError(
                f"crop to {shown(length)}: a ragged cache can be emptied, crop(0), and not shortened; fork it before "
                "tokens that are to be taken back"
            )
        layers = tuple(layer.emptied() for layer in self)
        self._now = _Record(layers=layers, lengths=(0,) * self.batch)

    def fork(self) -> "RaggedCache":
        """An independent copy that shares no storage with this cache.

        Raises:
            RuntimeError: a window is open.
        """
        self.refuse_open_window("a fork")
        return self._copied_to(RaggedCache((), self.batch, self.capacity), lambda layer: layer.clone())

    def snapshot(self) -> "RaggedCache":
        """A copy, for keeping: it shares no storage, and its capacity is the longest row's length.

        Raises:
            RuntimeError: a window is open.
        """
        self.refuse_open_window("a snapshot")
        made = RaggedCache((), self.batch, self.extent)
        return self._copied_to(made, lambda layer: layer.compact(self.extent))

    def check(self) -> None:
        """Raises ValueError if layers disagree in batch, capacity, dtype or device, or a number is not finite.

        Rows of keys and values past a row's length are scratch and may hold anything.
        """
        check_layers(self.layers, self.capacity, self._now.lengths, logged=0)

    def _facts(self, width: int, sizes: Sequence[int]) -> tuple[Prefix, Tensor, Tensor, Tensor]:
        """Of a forward over `width` tokens a row that has `sizes` of its own: the prefix, lengths [B, 1], sizes [B],
        and where padding is, bool [B, width, 1]."""
        own = indices(sizes, self.device)
        padding = torch.arange(width, device=self.device) >= own[:, None]
        lengths = indices(self._now.lengths, self.device)[:, None]
        return Prefix.of(self._now.lengths, self.device), lengths, own, padding[..., None]

    def _check_room(self, counts: Sequence[int], unit: str) -> None:
        for row, (length, count) in enumerate(zip(self._now.lengths, counts, strict=True)):
            if length + count > self.capacity:
                raise ValueError(
                    f"cache: {length} committed tokens and {count} more {unit} exceed its capacity of "
                    f"{self.capacity} in row {row}; make it with new_cache({length + count}, ...) or more"
                )


def _checked_path(row: int, path: Path, tree: Topology | None) -> list[int]:
    try:
        if tree is not None:
            return tree.check_path(path)
        if not isinstance(path, Sequence | Tensor) or len(path):
            raise ValueError(f"path: this row has no tree, so keep nothing of it, [], got {shown(path)}")
    except ValueError as error:
        raise ValueError(f"row {row}: {error}") from None
    return []
