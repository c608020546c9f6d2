"""The hybrid cache: committed memory of all layers, one speculative window, exact rollback.

The hybrid law: recurrent state can be extended, and it can be recomputed from stored factors; it can never be
trimmed. So a forward over a tree only fills a window, `commit` extends committed memory by exactly one root path
of it, and `crop` recomputes states from a base state and the factors logged since.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from .checked import as_integer, shown
from .committed import CommittedMemory, Record, Window
from .integrity import check_agreement, check_layers
from .lanes import ChainAttention, ChainDelta, ChainLane, Filled, Pass, TreeAttention, TreeDelta, TreeLane, TreeLanes
from .layer_cache import DeltaCache, KVCache, LayerCache
from .topology import Path, Topology


@dataclass(frozen=True, kw_only=True)
class _Record(Record):
    window: "Branch | None" = None
    length: int = 0
    floor: int = 0


class Branch(Window[Filled]):
    """A speculative window over the N nodes of a topology; made by `HybridCache.branch`."""

    cache: "HybridCache"

    def __init__(self, cache: "HybridCache", topology: Topology) -> None:
        super().__init__(cache)
        self.topology = topology

    @property
    def width(self) -> int:
        return len(self.topology)

    def begin(self, batch: int, count: int) -> Pass[TreeLane]:
        """The view of memory for this window's forward. Changes nothing; raises as `expect` does."""
        self.expect(batch, count)
        return self.cache.tree_pass(self.topology)

    def finish(self, done: Pass[TreeLane]) -> None:
        """Keeps what the forward computed."""
        self.fill(TreeLanes(done.lanes, done.positions.device))


class HybridCache(CommittedMemory[_Record]):
    """Memory of a hybrid model for B sequences of equal length; made by `QwenGDN.new_cache`.

    It is a sequence of typed layer caches (`KVCache | DeltaCache`), and the only owner of position: `length` counts
    committed tokens and moves in a chain forward, in `commit` and in `crop` alone.

    Args:
        layers: empty memory of every layer.
        capacity: the most tokens that can be committed.
        rollback: how many of the last tokens `crop` can always take back.
    """

    kind = "a cache of rows of equal length"

    def __init__(self, layers: Iterable[LayerCache], capacity: int, rollback: int) -> None:
        super().__init__(_Record(layers=tuple(layers)), capacity, rollback)

    def __repr__(self) -> str:
        return (
            f"HybridCache(length={self.length}, capacity={self.capacity}, batch={self.batch}, "
            f"layers={len(self)}, rollback={self.rollback})"
        )

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._now.length

    @property
    def extent(self) -> int:
        return self.length

    @property
    def crop_floor(self) -> int:
        """The lowest length above 0 that `crop` can reach."""
        return self._now.floor

    def begin(self, batch: int, count: int) -> Pass[ChainLane]:
        """The view of memory for a forward over `count` tokens that follow the committed ones.

        Raises:
            RuntimeError: a window is open.
            ValueError: the batch differs, or the tokens exceed the capacity.
        """
        self.refuse_open_window("a chain forward")
        if batch != self.batch:
            raise ValueError(f"tokens have batch {batch}, the cache has {self.batch}; make it with batch={batch}")
        self._check_room(count, "tokens")
        length, device = self.length, self.device
        lower_right = length > 0 and count > 1
        return Pass(
            positions=torch.arange(length, length + count, device=device),
            mask=torch.ones(count, length + count, dtype=torch.bool, device=device).tril(length)
            if lower_right
            else None,
            causal=count > 1 and not lower_right,
            lanes=tuple(
                ChainAttention(layer, length) if isinstance(layer, KVCache) else ChainDelta(layer) for layer in self
            ),
        )

    def finish(self, done: Pass[ChainLane]) -> None:
        """Commits what the forward computed."""
        self._extend(len(done.positions), (lane.committed() for lane in done.lanes))

    def branch(self, topology: Topology) -> Branch:
        """Opens a window over the nodes of `topology`, whose root follows the committed tokens.

        Raises:
            RuntimeError: a window is open already.
            ValueError: it is not one topology, or the deepest node would not fit the capacity.
        """
        if not isinstance(topology, Topology):
            raise ValueError(f"branch takes one Topology, shared by the whole batch, got {type(topology).__name__}")
        self.refuse_open_window("a second branch")
        self._check_room(topology.max_depth + 1, "levels of the tree")
        window = Branch(self, topology)
        self._now = replace(self._now, window=window)
        return window

    def tree_pass(self, topology: Topology) -> Pass[TreeLane]:
        """The view of memory for a forward over the nodes of a window."""
        length, device = self.length, self.device
        ancestors = topology.ancestors.to(device)
        prefix = torch.ones(len(topology), length, dtype=torch.bool, device=device)
        widths = {layer.columns.shape[1] + 1 for layer in self if isinstance(layer, DeltaCache)}
        windows = {width: topology.windows(width).to(device) for width in widths}
        return Pass(
            positions=topology.depths.to(device) + length,
            mask=torch.cat((prefix, ancestors), dim=1),
            causal=False,
            lanes=tuple(
                TreeAttention(layer, length)
                if isinstance(layer, KVCache)
                else TreeDelta(layer, ancestors, windows[layer.columns.shape[1] + 1])
                for layer in self
            ),
        )

    def commit(self, path: Path) -> None:
        """Keeps the nodes of a root path, root first, and closes the window; `[]` keeps nothing.

        Raises:
            RuntimeError: no window is open, or its forward has not been run.
            ValueError: `path` is no root path of the window's topology. Nothing is changed.
        """
        window = self._now.window
        if window is None:
            raise RuntimeError("commit without a window: open one with cache.branch and run its forward")
        filled = window.filled()
        path = window.topology.check_path(path)
        if not path:
            return self.discard()
        self._extend(len(path), filled.committed(path))

    def crop(self, length: int) -> None:
        """Takes back the tokens from `length` on, exactly. `crop(0)` empties the cache.

        Raises:
            RuntimeError: a window is open.
            ValueError: `length` cannot be reached. Nothing is changed.
        """
        self.refuse_open_window("a crop")
        now = self._now
        wanted = as_integer(length)
        if wanted is None or not 0 <= wanted <= now.length:
            raise ValueError(f"crop to {shown(length)}: the cache holds {now.length} tokens, so pass 0 to {now.length}")
        length = wanted
        if length == 0:
            self._now = _Record(layers=tuple(layer.emptied() for layer in self))
        elif length < now.floor:
            raise ValueError(
                f"crop to {length}: recurrent state cannot be trimmed, and it can be recomputed from {now.floor} on "
                f"only; make the cache with new_cache(..., rollback={now.length - length})"
            )
        elif length < now.length:
            layers = tuple(layer.at(length - now.floor) for layer in self)
            self._now = _Record(layers=layers, length=length, floor=now.floor)

    def fork(self) -> "HybridCache":
        """An independent copy that shares no storage with this cache.

        Raises:
            RuntimeError: a window is open.
        """
        self.refuse_open_window("a fork")
        return self._copied_to(HybridCache((), self.capacity, self.rollback), lambda layer: layer.clone())

    def snapshot(self) -> "HybridCache":
        """A copy, for keeping, of just what is committed: it shares no storage, and its capacity is its length.

        Raises:
            RuntimeError: a window is open.
        """
        self.refuse_open_window("a snapshot")
        made = HybridCache((), self.length, self.rollback)
        return self._copied_to(made, lambda layer: layer.compact(self.length))

    def check(self) -> None:
        """Raises ValueError if layers disagree in batch, capacity, dtype, device or length, or a number is not finite.

        Rows of keys and values past the length are scratch and may hold anything.
        """
        check_layers(self.layers, self.capacity, [self.length] * self.batch, logged=self.length - self.crop_floor)

    def check_agreement(self) -> None:
        """Raises ValueError as `check` does if layers disagree; costs no look at their numbers."""
        check_agreement(self.layers, self.capacity, logged=self.length - self.crop_floor)

    def _extend(self, count: int, layers: Iterable[LayerCache]) -> None:
        """Swaps in the record `count` tokens further on, and with it closes the window."""
        now = self._now
        length = now.length + count
        extended = tuple(layers)
        floor = now.floor if self.rollback else length
        # Raising the floor costs a product a layer, so it waits until twice the promised tokens are logged.
        if length - floor > 2 * self.rollback:
            floor = length - self.rollback
            extended = tuple(layer.with_floor(floor - now.floor) for layer in extended)
        self._close(_Record(layers=extended, length=length, floor=floor))

    def _check_room(self, count: int, unit: str) -> None:
        if self.length + count > self.capacity:
            raise ValueError(
                f"cache: {self.length} committed tokens and {count} more {unit} exceed its capacity of "
                f"{self.capacity}; make it with new_cache({self.length + count}) or more"
            )
