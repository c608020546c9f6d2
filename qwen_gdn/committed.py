"""Committed memory of all layers, and the one speculative window on it: what every kind of cache is made of.

All that is committed hangs on one record. A forward or a commit computes the record's successor on the side and
swaps it in by a single assignment, so an exception at any point, KeyboardInterrupt included, leaves a cache where it
was.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .checked import shown
from .layer_cache import LayerCache, LayerLayout, moved, storage_bytes


@dataclass(frozen=True, kw_only=True)
class Record:
    """The memory of every layer, and the open window if there is one; kinds of caches add how long it is."""

    layers: tuple[LayerCache, ...]
    window: "Window[Any] | None" = None


class Held(Protocol):
    """What a forward left in a window."""

    def tensors(self) -> Iterable[Tensor]:
        """What the window owns."""


R = TypeVar("R", bound=Record)
F = TypeVar("F", bound=Held)
C = TypeVar("C", bound="CommittedMemory[Any]")


class CommittedMemory(ABC, Generic[R]):
    """A sequence of typed layer caches (`KVCache | DeltaCache`) for B rows.

    Args:
        empty: the record to begin with.
        capacity: the most tokens of a row that can be committed.
        rollback: how many of the last tokens `crop` can always take back.
    """

    kind: str
    """What a cache is called where two that differ in it meet."""

    def __init__(self, empty: R, capacity: int, rollback: int) -> None:
        self._now = empty
        self.capacity = capacity
        self.rollback = rollback

    @property
    @abstractmethod
    def extent(self) -> int:
        """Rows of keys and values up to the last committed one."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Takes back the tokens from `length` on; 0 empties the cache, which always works."""

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

    def holds(self, window: "Window[Any]") -> bool:
        """Whether `window` is the open one."""
        return self._now.window is window

    def discard(self) -> None:
        """Drops the open window, if there is one; committed memory was never touched by it."""
        self._close(replace(self._now, window=None))

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

    def restore(self, other: "CommittedMemory[R]") -> None:
        """Takes on, in its own storage, a copy of what another cache of the same kind and model holds.

        Raises:
            RuntimeError: a window is open, here or there.
            ValueError: the other's kind, layers, batch or rollback differ, or it holds more than this one's capacity.
                Nothing is changed. If anything else is raised, this cache is empty.
        """
        for cache in (self, other):
            cache.refuse_open_window("a restore")
        for what in ("kind", "layout", "batch", "rollback"):
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours != theirs:
                raise ValueError(f"restore: {what} {shown(theirs)} differs from this cache's {shown(ours)}")
        if other.extent > self.capacity:
            raise ValueError(f"restore: {other.extent} tokens exceed this cache's capacity of {self.capacity}")
        if other is not self:
            self.crop(0)  # its rows are about to be written over
            with torch.inference_mode(False):
                layers = tuple(moved(theirs, mine, other.extent) for theirs, mine in zip(other, self, strict=True))
            self._now = replace(other._now, layers=layers)

    def refuse_open_window(self, what: str) -> None:
        """Raises RuntimeError if a window is open; `what` is what cannot be done meanwhile."""
        if self._now.window is not None:
            raise RuntimeError(f"{what} while a window is open: commit or discard it first")

    def _copied_to(self, made: C, copied: Callable[[LayerCache], LayerCache]) -> C:
        """The cache `made` of this kind, given a copy of every layer's memory."""
        with torch.inference_mode(False):  # rows made in that mode could not be written outside it
            made._now = replace(self._now, layers=tuple(copied(layer) for layer in self))
        return made

    @property
    def _any_tensor(self) -> Tensor:
        return self.layers[0].tensors()[0]

    def _close(self, record: R) -> None:
        """Swaps in a record without a window."""
        window, self._now = self._now.window, record
        if window is not None:
            window.release()


class Window(ABC, Generic[F]):
    """A speculative window on a cache. One forward fills it, then the cache's `commit` or `discard` closes it.

    It owns its storage.
    """

    def __init__(self, cache: CommittedMemory[Any]) -> None:
        self.cache = cache
        self._filled: F | None = None

    @property
    @abstractmethod
    def width(self) -> int:
        """Nodes of each row that its forward is given tokens for."""

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
        if (batch, count) != (self.batch, self.width):
            raise ValueError(
                f"tokens of shape [{batch}, {count}] for a window of shape [{self.batch}, {self.width}]; "
                "pass one token for each node"
            )

    def fill(self, computed: F) -> None:
        """Keeps what a forward computed, in whatever form."""
        self._filled = computed

    def release(self) -> None:
        """Lets go of what the forward computed; the cache has closed the window."""
        self._filled = None

    def filled(self) -> F:
        """What the forward computed; RuntimeError before it."""
        if self._filled is None:
            raise RuntimeError("commit before the window's forward: run model(tokens, branch) first, or discard")
        return self._filled
