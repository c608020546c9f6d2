"""The hybrid cache: committed memory of all layers, one speculative window, exact rollback.

The hybrid law: recurrent state can be extended, and it can be recomputed from stored factors; it can never be
trimmed. So a forward over a tree only fills a window, `commit` extends committed memory by exactly one root path
of it, and `crop` recomputes states from a base state and the factors logged since.

All that is committed hangs on one record. A forward or a commit computes the record's successor on the side and
swaps it in by a single assignment, so an exception at any point, KeyboardInterrupt included, leaves the cache at
its last committed length.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checked import as_integer, shown
from .integrity import check_agreement, check_layers
from .lanes import ChainAttention, ChainDelta, ChainLane, Filled, Pass, TreeAttention, TreeDelta, TreeLane, TreeLanes
from .layer_cache import DeltaCache, KVCache, LayerCache, LayerLayout, moved
from .topology import Path, Topology


@dataclass(frozen=True)
class _Record:
    """All that is committed, and the open window if there is one."""

    length: int
    floor: int
    layers: tuple[LayerCache, ...]
    window: "Branch | None" = None


class Branch:
    """A speculative window over the N nodes of a topology; made by `HybridCache.branch`.

    One forward fills it, then `HybridCache.commit` or `discard` closes it. It owns its storage.
    """

    def __init__(self, cache: "HybridCache", topology: Topology) -> None:
        self.topology = topology
        self.cache = cache
        self._filled: Filled | None = None

    @property
    def batch(self) -> int:
        return self.cache.batch

    @property
    def layout(self) -> tuple[LayerLayout, ...]:
        return self.cache.layout

    @property
    def nbytes(self) -> int:
        """Bytes of factors, columns and KV rows of the nodes; 0 before the forward and once the window is closed."""
        return storage_bytes(self._filled.tensors()) if self._filled else 0

    def begin(self, batch: int, count: int) -> Pass[TreeLane]:
        """The view of memory for this window's forward. Changes nothing; raises as `expect` does."""
        self.expect(batch, count)
        return self.cache.tree_pass(self.topology)

    def expect(self, batch: int, count: int) -> None:
        """Raises unless a forward over tokens [batch, count] may fill this window now.

        Raises:
            RuntimeError: the window is closed, or its forward has been run.
            ValueError: batch or node count differ from the window's.
        """
        if not self.cache.holds(self):
            raise RuntimeError("this window is closed: it was committed or discarded; open one with cache.branch")
        if self._filled is not None:
            raise RuntimeError("this window's forward has been run: commit or discard it, then branch again")
        if (batch, count) != (self.batch, len(self.topology)):
            raise ValueError(
                f"tokens of shape [{batch}, {count}] for a window of shape [{self.batch}, {len(self.topology)}]; "
                "pass one token for each node"
            )

    def finish(self, done: Pass[TreeLane]) -> None:
        """Keeps what the forward computed."""
        self.fill(TreeLanes(done.lanes, done.positions.device))

    def fill(self, computed: Filled) -> None:
        """Keeps what a forward computed, in whatever form."""
        self._filled = computed

    def release(self) -> None:
        """Lets go of what the forward computed; the cache has closed the window."""
        self._filled = None

    def filled(self) -> Filled:
        """What the forward computed; RuntimeError before it."""
        if self._filled is None:
            raise RuntimeError("commit before the window's forward: run model(tokens, branch) first, or discard")
        return self._filled


class HybridCache:
    """Memory of a hybrid model for B sequences of equal length; made by `QwenGDN.new_cache`.

    It is a sequence of typed layer caches (`KVCache | DeltaCache`), and the only owner of position: `length` counts
    committed tokens and moves in a chain forward, in `commit` and in `crop` alone.

    Args:
        layers: empty memory of every layer.
        capacity: the most tokens that can be committed.
        rollback: how many of the last tokens `crop` can always take back.
    """

    def __init__(self, layers: Iterable[LayerCache], capacity: int, rollback: int) -> None:
        self._now = _Record(0, 0, tuple(layers))
        self.capacity = capacity
        self.rollback = rollback

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        return self._now.layers

    @property
    def layout(self) -> tuple[LayerLayout, ...]:
        """Dtype and sizes of every layer's memory, but for batch, capacity and history."""
        return tuple(layer.layout for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

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
    def crop_floor(self) -> int:
        """The lowest length above 0 that `crop` can reach."""
        return self._now.floor

    @property
    def batch(self) -> int:
        return self._any_tensor.shape[0]

    @property
    def device(self) -> torch.device:
        return self._any_tensor.device

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held: layers, rollback log and an open window."""
        window = self._now.window
        return storage_bytes(t for layer in self for t in layer.tensors()) + (window.nbytes if window else 0)

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

    def holds(self, window: Branch) -> bool:
        """Whether `window` is the open one."""
        return self._now.window is window

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

    def discard(self) -> None:
        """Drops the open window, if there is one; committed memory was never touched by it."""
        self._close(replace(self._now, window=None))

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
            self._now = _Record(0, 0, tuple(layer.emptied() for layer in self))
        elif length < now.floor:
            raise ValueError(
                f"crop to {length}: recurrent state cannot be trimmed, and it can be recomputed from {now.floor} on "
                f"only; make the cache with new_cache(..., rollback={now.length - length})"
            )
        elif length < now.length:
            layers = tuple(layer.at(length - now.floor) for layer in self)
            self._now = _Record(length, now.floor, layers)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Puts the cache back to where it was if the body raises anything at all.

        A window opened since is closed; one that the body closed is open again, to be filled anew. It costs nothing,
        since records are replaced whole and KV rows past the length are scratch. The body may only extend the cache:
        rows cropped and written over are gone.
        """
        before = self._now
        try:
            yield
        except BaseException:
            self._now = before
            raise

    def fork(self) -> "HybridCache":
        """An independent copy that shares no storage with this cache.

        Raises:
            RuntimeError: a window is open.
        """
        self.refuse_open_window("a fork")
        return self._copied(self.capacity, lambda layer: layer.clone())

    def snapshot(self) -> "HybridCache":
        """A copy, for keeping, of just what is committed: it shares no storage, and its capacity is its length.

        Raises:
            RuntimeError: a window is open.
        """
        self.refuse_open_window("a snapshot")
        return self._copied(self.length, lambda layer: layer.compact(self.length))

    def _copied(self, capacity: int, copied: Callable[[LayerCache], LayerCache]) -> "HybridCache":
        copy = HybridCache((), capacity, self.rollback)
        with torch.inference_mode(False):  # rows made in that mode could not be written outside it
            copy._now = replace(self._now, layers=tuple(copied(layer) for layer in self))
        return copy

    def restore(self, other: "HybridCache") -> None:
        """Takes on, in its own storage, a copy of what another cache of the same model holds.

        Raises:
            RuntimeError: a window is open, here or there.
            ValueError: the other's layers, batch or rollback differ, or it holds more than this one's capacity.
                Nothing is changed. If anything else is raised, this cache is empty.
        """
        for cache in (self, other):
            cache.refuse_open_window("a restore")
        for what in ("layout", "batch", "rollback"):
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours != theirs:
                raise ValueError(f"restore: {what} {shown(theirs)} differs from this cache's {shown(ours)}")
        if other.length > self.capacity:
            raise ValueError(f"restore: {other.length} tokens exceed this cache's capacity of {self.capacity}")
        if other is not self:
            self.crop(0)  # its rows are about to be written over
            with torch.inference_mode(False):
                layers = tuple(moved(theirs, mine, other.length) for theirs, mine in zip(other, self, strict=True))
            self._now = replace(other._now, layers=layers)

    def check(self) -> None:
        """Raises ValueError if layers disagree in batch, capacity, dtype, device or length, or a number is not finite.

        Rows of keys and values past the length are scratch and may hold anything.
        """
        check_layers(self.layers, self.capacity, self.length, logged=self.length - self.crop_floor)

    def check_agreement(self) -> None:
        """Raises ValueError as `check` does if layers disagree; costs no look at their numbers."""
        check_agreement(self.layers, self.capacity, logged=self.length - self.crop_floor)

    @property
    def _any_tensor(self) -> Tensor:
        return self.layers[0].tensors()[0]

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
        self._close(_Record(length, floor, extended))

    def _close(self, record: _Record) -> None:
        """Swaps in a record without a window."""
        window, self._now = self._now.window, record
        if window is not None:
            window.release()

    def refuse_open_window(self, what: str) -> None:
        """Raises RuntimeError if a window is open; `what` is what cannot be done meanwhile."""
        if self._now.window is not None:
            raise RuntimeError(f"{what} while a window is open: commit or discard it first")

    def _check_room(self, count: int, unit: str) -> None:
        if self.length + count > self.capacity:
            raise ValueError(
                f"cache: {self.length} committed tokens and {count} more {unit} exceed its capacity of "
                f"{self.capacity}; make it with new_cache({self.length + count}) or more"
            )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors, so that a view counts all that it keeps alive."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
