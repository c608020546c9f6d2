"""A hybrid cache at fixed addresses, for programs that are recorded once and replayed.

Delta memory exists twice, as two banks. A program reads the bank of the record it starts from and writes the other;
the cache then swaps its record, as it always does. So nothing is allocated from round to round, a failure at any
point leaves the committed bank as it was, and one step back (`transaction`) is a matter of swapping records again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from .cache import HybridCache
from .config import LayerType, ModelConfig
from .lanes import ChainLane, Pass
from .layer_cache import DeltaCache, KVCache, LayerCache
from .norms import at_least_float32


class StaticDelta(NamedTuple):
    """Two banks of a delta layer: states [2, H, K, V] and columns [2, W − 1, C]."""

    states: Tensor
    columns: Tensor


class StaticRows(NamedTuple):
    """Keys and values of an attention layer, [1, H_kv, rows, head_dim]."""

    keys: Tensor
    values: Tensor


StaticLayer = StaticDelta | StaticRows


class StaticMemory:
    """Storage of one sequence at a time. It outlives its cache and is given to the next one.

    Args:
        capacity: the most tokens that a cache of it can hold.
        spare: rows of keys and values beyond these, for padding to land on.
        like: a tensor of the activations' dtype on the device.
    """

    def __init__(self, config: ModelConfig, capacity: int, spare: int, like: Tensor) -> None:
        self.capacity = capacity
        self.layers = tuple(_storage(config, kind, capacity + spare, like) for kind in config.layer_types)
        self._banks: list[tuple[LayerCache, ...] | None] = [None, None]
        self._newest = 0

    def empty(self, capacity: int) -> tuple[LayerCache, ...]:
        """The record of an empty cache of that capacity. What was held before is gone."""
        for layer in self.layers:
            for tensor in layer:
                tensor.zero_()
        self._banks = [None, None]
        return self.written(0, capacity)

    def bank_of(self, record: tuple[LayerCache, ...]) -> int:
        """The bank that holds a record, into which it is copied if it lies elsewhere.

        Raises:
            RuntimeError: the record lay here once and has been written over.
        """
        for bank, held in enumerate(self._banks):
            if held is record:
                return bank
        if any(_lies_in(mine, theirs) for mine, theirs in zip(self.layers, record, strict=True)):
            raise RuntimeError("cache: what is to be restored has been written over; crop(0) and feed the tokens again")
        bank = 1 - self._newest
        self._banks[bank] = None
        for mine, theirs in zip(self.layers, record, strict=True):
            if isinstance(mine, StaticDelta) and isinstance(theirs, DeltaCache):
                mine.states[bank].copy_(theirs.state[0])
                mine.columns[bank].copy_(theirs.columns[0])
        self._newest = bank
        self._banks[bank] = record
        return bank

    def keep(self, record: tuple[LayerCache, ...]) -> None:
        """Says that a record is the committed one, so that what is copied in next goes into the other bank."""
        self._newest = next((bank for bank, held in enumerate(self._banks) if held is record), self._newest)

    def release(self, bank: int) -> None:
        """Says that a program is about to write a bank; the record it held is gone."""
        self._banks[bank] = None

    def written(self, bank: int, capacity: int) -> tuple[LayerCache, ...]:
        """The record of what a program has written to a bank."""
        record = tuple(_view(layer, bank, capacity) for layer in self.layers)
        self._banks[bank], self._newest = record, bank
        return record


class StaticCache(HybridCache):
    """A `HybridCache` of one sequence, without rollback, whose memory has fixed addresses.

    Everything a `HybridCache` can do it can do too; what was computed elsewhere is copied in when a program needs it.
    A layer's tensors are views, which the commit after next overwrites.

    Args:
        again: makes another cache of a given capacity.
    """

    def __init__(self, memory: StaticMemory, capacity: int, again: "Callable[[int], StaticCache]") -> None:
        self.memory = memory
        self._again = again
        super().__init__(memory.empty(capacity), capacity, rollback=0)

    def begin(self, batch: int, count: int) -> Pass[ChainLane]:
        self.memory.keep(self.layers)
        return super().begin(batch, count)

    @property
    def bank(self) -> int:
        """The bank that holds what is committed."""
        return self.memory.bank_of(self.layers)

    def extend(self, count: int, bank: int) -> tuple[LayerCache, ...]:
        """Commits `count` more tokens, which a program has written to a bank."""
        layers = self.memory.written(bank, self.capacity)
        self._extend(count, layers)
        return layers

    def expect(self, count: int) -> None:
        """Raises as `begin` does unless `count` more tokens can be committed now."""
        self.refuse_open_window("a chain forward")
        self._check_room(count, "tokens")

    def fork(self) -> HybridCache:
        self.refuse_open_window("a fork")
        copy = self._again(self.capacity)
        layers = (_moved(mine, theirs, self.length) for mine, theirs in zip(self, copy, strict=True))
        copy._now = replace(self._now, layers=tuple(layers))
        return copy


def _storage(config: ModelConfig, kind: LayerType, rows: int, like: Tensor) -> StaticLayer:
    c = config
    if kind == "full_attention":
        shape = (1, c.num_key_value_heads, rows, c.head_dim)
        return StaticRows(like.new_zeros(shape), like.new_zeros(shape))
    state = (2, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    columns = like.new_zeros(2, c.linear_conv_kernel_dim - 1, c.conv_dim)
    return StaticDelta(at_least_float32(like[:0]).new_zeros(state), columns)


def _view(layer: StaticLayer, bank: int, capacity: int) -> LayerCache:
    if isinstance(layer, StaticRows):
        return KVCache(layer.keys[:, :, :capacity], layer.values[:, :, :capacity])
    return DeltaCache(layer.states[bank : bank + 1], layer.columns[bank : bank + 1])


def _lies_in(mine: StaticLayer, theirs: LayerCache) -> bool:
    """Whether a delta layer's memory is a view of this storage."""
    if isinstance(mine, StaticRows) or isinstance(theirs, KVCache):
        return False
    return theirs.state.untyped_storage().data_ptr() == mine.states.untyped_storage().data_ptr()


def _moved(source: LayerCache, target: LayerCache, length: int) -> LayerCache:
    """A copy of a layer's memory; committed rows go into the target's storage."""
    if isinstance(source, KVCache) and isinstance(target, KVCache):
        target.keys[:, :, :length] = source.keys[:, :, :length]
        target.values[:, :, :length] = source.values[:, :, :length]
        return target
    return source.clone()
