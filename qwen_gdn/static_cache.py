"""A hybrid cache at fixed addresses, for programs that are recorded once and replayed.

Delta memory exists twice, as two banks. A program reads the bank of the record it starts from and writes the other;
the cache then swaps its record, as it always does. So nothing is allocated from round to round, and a failure at any
point leaves the committed bank as it was. Each program is recorded once for each bank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from .cache import HybridCache
from .config import LayerType, ModelConfig
from .layer_cache import DeltaCache, KVCache, LayerCache, moved, storage_bytes
from .norms import at_least_float32

BANKS = (0, 1)


class StaticDelta(NamedTuple):
    """Delta layers as one bank's programs see them: what they read, state [layers, H, K, V] and columns
    [layers, W − 1, C], and the other bank's, which they write."""

    state: Tensor
    columns: Tensor
    next_state: Tensor
    next_columns: Tensor

    def swapped(self) -> "StaticDelta":
        return StaticDelta(self.next_state, self.next_columns, self.state, self.columns)


class StaticRows(NamedTuple):
    """Keys and values of attention layers, [layers, H_kv, rows, head_dim]."""

    keys: Tensor
    values: Tensor

    def last(self, size: int) -> "StaticRows":
        """The last rows, where trees of that size leave theirs."""
        return StaticRows(*(part[:, :, -size:] for part in self))


StaticLayer = StaticDelta | StaticRows
Layers = tuple[LayerCache, ...]


class StaticMemory:
    """Storage of one sequence at a time. It outlives its cache and is given to the next one.

    deltas: the memory of all delta layers as each bank's programs see it, one layer after another in the place of a
        batch, so that one operation can do the same for all of them.
    rows: the same of all attention layers, which have but one bank.
    banks: both by layer, in the model's order.

    Args:
        capacity: the most tokens that a cache of it can hold.
        spare: rows of keys and values beyond these, for padding to land on, and behind that a tree's own rows.
        like: a tensor of the activations' dtype on the device.
    """

    def __init__(self, config: ModelConfig, capacity: int, spare: int, like: Tensor) -> None:
        self.capacity = capacity
        deltas = _delta_storage(config, config.layer_types.count("linear_attention"), like)
        self.deltas = (deltas, deltas.swapped())
        self.rows = _row_storage(config, config.layer_types.count("full_attention"), capacity + spare, like)
        self.banks = tuple(self._by_layer(bank, config.layer_types) for bank in BANKS)

    def _by_layer(self, bank: int, kinds: Sequence[LayerType]) -> tuple[StaticLayer, ...]:
        deltas = (StaticDelta(*parts) for parts in zip(*(t.split(1) for t in self.deltas[bank]), strict=True))
        rows = (StaticRows(*parts) for parts in zip(*(t.split(1) for t in self.rows), strict=True))
        return tuple(next(rows) if kind == "full_attention" else next(deltas) for kind in kinds)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.deltas[0]
        yield from self.rows

    def empty(self, capacity: int) -> Layers:
        """The record of an empty cache of that capacity. What was held before is gone."""
        for tensor in self.tensors():
            tensor.zero_()
        return self.views(0, capacity)

    def views(self, bank: int, capacity: int) -> Layers:
        """The record of what a bank holds."""
        return tuple(_view(layer, capacity) for layer in self.banks[bank])

    def load(self, record: Layers, bank: int) -> None:
        """Copies a record's delta memory into a bank."""
        for mine, theirs in zip(self.banks[bank], record, strict=True):
            if isinstance(mine, StaticDelta) and isinstance(theirs, DeltaCache):
                mine.state.copy_(theirs.state)
                mine.columns.copy_(theirs.columns)


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
        self._views = [memory.views(bank, capacity) for bank in BANKS]
        self._banks: list[Layers | None] = [self._now.layers, None]
        self._awaited: list[Layers] = []  # records that open transactions may put back
        self._saved: dict[int, Layers] = {}  # copies of those whose bank was needed, by the records' id

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held: both banks, rows, what was computed elsewhere and an open window."""
        window = self._now.window
        records = (self._now.layers, *self._saved.values())
        held = [t for record in records for layer in record for t in layer.tensors()]
        held += self.memory.tensors()
        return storage_bytes(held) + (window.nbytes if window else 0)

    def __deepcopy__(self, memo: dict[int, object]) -> HybridCache:
        return self.fork()

    def start(self) -> tuple[int, int]:
        """Readies a program: the bank that holds what is committed, and the other one, which it may write."""
        record = self._now.layers
        bank = self._bank_of(record)
        if bank is None:
            bank = 1 if self._is_awaited(self._banks[0]) else 0
            self._vacate(bank)
            self.memory.load(record, bank)
            self._banks[bank] = record
        self._vacate(1 - bank)
        return bank, 1 - bank

    def written(self, bank: int) -> Layers:
        """The record of what a program has written to a bank."""
        record = (*self._views[bank],)  # another object each time, since records are told apart by identity
        self._banks[bank] = record
        return record

    def extend(self, count: int, bank: int) -> None:
        """Commits `count` more tokens, which a program has written to a bank."""
        self._extend(count, self.written(bank))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        record = self._now.layers
        self._awaited.append(record)
        try:
            with super().transaction():
                yield
        except BaseException:
            self._now = replace(self._now, layers=self._saved.get(id(record), record))
            raise
        finally:
            self._awaited.pop()
            if not self._is_awaited(record):
                self._saved.pop(id(record), None)

    def _bank_of(self, record: Layers) -> int | None:
        return next((bank for bank, held in enumerate(self._banks) if held is record), None)

    def _is_awaited(self, record: Layers | None) -> bool:
        return any(awaited is record for awaited in self._awaited)

    def _vacate(self, bank: int) -> None:
        """Lets a bank be written; a record in it that a transaction may put back is copied first."""
        record = self._banks[bank]
        if record is not None and self._is_awaited(record):
            copies = tuple(layer if isinstance(layer, KVCache) else layer.clone() for layer in record)
            self._saved[id(record)] = copies
        self._banks[bank] = None

    def expect(self, count: int) -> None:
        """Raises as `begin` does unless `count` more tokens can be committed now."""
        self.refuse_open_window("a chain forward")
        self._check_room(count, "tokens")

    def fork(self) -> HybridCache:
        self.refuse_open_window("a fork")
        copy = self._again(self.capacity)
        layers = (moved(mine, theirs, self.length) for mine, theirs in zip(self, copy, strict=True))
        copy._now = replace(self._now, layers=tuple(layers))
        return copy


def _row_storage(config: ModelConfig, layers: int, rows: int, like: Tensor) -> StaticRows:
    shape = (layers, config.num_key_value_heads, rows, config.head_dim)
    return StaticRows(like.new_zeros(shape), like.new_zeros(shape))


def _delta_storage(config: ModelConfig, layers: int, like: Tensor) -> StaticDelta:
    c = config
    shape = (layers, c.linear_num_value_heads, c.linear_value_head_dim, c.linear_key_head_dim)
    # transposed, as the delta rule leaves its states
    states = [at_least_float32(like[:0]).new_zeros(shape).mT for _ in BANKS]
    columns = [like.new_zeros(layers, c.linear_conv_kernel_dim - 1, c.conv_dim) for _ in BANKS]
    return StaticDelta(states[0], columns[0], states[1], columns[1])


def _view(layer: StaticLayer, capacity: int) -> LayerCache:
    if isinstance(layer, StaticRows):
        return KVCache(layer.keys[:, :, :capacity], layer.values[:, :, :capacity])
    return DeltaCache(layer.state, layer.columns)
