"""Committed memory of one layer, by kind. Values are replaced, never repaired: see `HybridCache`."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .config import ModelConfig
from .delta_rule import Factors, absorb
from .norms import at_least_float32


@dataclass(frozen=True)
class KVCache:
    """Memory of one full-attention layer.

    keys, values: [B, H_kv, capacity, head_dim]. Rows [0, length) are committed and rows past them are scratch;
    `length` is the owning cache's.
    """

    keys: Tensor
    values: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    @property
    def layout(self) -> "LayerLayout":
        return self.keys.dtype, self.keys.shape[1], self.keys.shape[3]

    def clone(self) -> "KVCache":
        return KVCache(self.keys.clone(), self.values.clone())

    def compact(self, length: int) -> "KVCache":
        """A copy of the first `length` rows alone."""
        return KVCache(self.keys[:, :, :length].clone(), self.values[:, :, :length].clone())

    def emptied(self) -> "KVCache":
        return self

    def at(self, since_floor: int) -> "KVCache":
        """Rows are never altered once written, so any shorter length reads the same tensors."""
        return self

    def with_floor(self, since_floor: int) -> "KVCache":
        return self


class DeltaRows(NamedTuple):
    """What is kept of a delta layer's tokens: their factors and pre-convolution columns [B, N, C]."""

    factors: Factors
    columns: Tensor

    def take(self, rows: Tensor | slice) -> "DeltaRows":
        """Some rows, in storage of their own (a view would pin the whole window)."""
        taken = (*self.factors.take(rows), self.columns[:, rows])
        k, u, log_decay, columns = (t.clone() if isinstance(rows, slice) else t for t in taken)
        return DeltaRows(Factors(k, u, log_decay), columns)

    def append(self, more: "DeltaRows") -> "DeltaRows":
        factors = (torch.cat(pair, dim=1) for pair in zip(self.factors, more.factors, strict=True))
        return DeltaRows(Factors(*factors), torch.cat((self.columns, more.columns), dim=1))

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.factors, self.columns)


class DeltaLog(NamedTuple):
    """A delta layer since the crop floor: its memory there, and the rows of every token after it."""

    state: Tensor
    columns: Tensor
    since: DeltaRows


@dataclass(frozen=True)
class DeltaCache:
    """Memory of one Gated DeltaNet layer.

    state: [B, H, K, V], float32 (float64 in a float64 model).
    columns: [B, W − 1, C], the pre-convolution columns of the last W − 1 tokens, oldest first.
    log: what rollback needs, or None if nothing is to be rolled back.
    """

    state: Tensor
    columns: Tensor
    log: DeltaLog | None = None

    @property
    def layout(self) -> "LayerLayout":
        return self.columns.dtype, *self.state.shape[1:], *self.columns.shape[1:]

    def advanced(self, state: Tensor, rows: DeltaRows) -> "DeltaCache":
        """The memory after more tokens: `state` is the state after them, `rows` what they were."""
        log = self.log and self.log._replace(since=self.log.since.append(rows))
        return DeltaCache(state, _last_columns(self.columns, rows.columns), log)

    def absorbed(self, rows: DeltaRows) -> "DeltaCache":
        """The memory after more tokens, their state computed from their factors."""
        return self.advanced(absorb(self.state, rows.factors), rows)

    def at(self, since_floor: int) -> "DeltaCache":
        """The memory that many tokens after the floor, its log cut there."""
        base, rows = self._split(since_floor)
        return replace(base.absorbed(rows), log=DeltaLog(base.state, base.columns, rows))

    def with_floor(self, since_floor: int) -> "DeltaCache":
        """The same memory with its floor moved up by that many tokens."""
        base, rows = self._split(since_floor)
        moved = base.absorbed(rows)
        assert self.log is not None
        log = DeltaLog(moved.state, moved.columns, self.log.since.take(slice(since_floor, None)))
        return replace(self, log=log)

    def _split(self, since_floor: int) -> tuple["DeltaCache", DeltaRows]:
        """The memory at the floor, without a log, and the first rows after it."""
        assert self.log is not None, "a cache without rollback has no floor below its length"
        return DeltaCache(self.log.state, self.log.columns), self.log.since.take(slice(since_floor))

    def columns_held(self) -> tuple[Tensor, ...]:
        """All tensors in the activations' dtype."""
        return (self.columns, self.log.columns, self.log.since.columns) if self.log else (self.columns,)

    def exact_held(self) -> tuple[Tensor, ...]:
        """All tensors in float32 or better: states and factors."""
        return (self.state, self.log.state, *self.log.since.factors) if self.log else (self.state,)

    def emptied(self) -> "DeltaCache":
        state, columns = torch.zeros_like(self.state), torch.zeros_like(self.columns)
        log = self.log and DeltaLog(state, columns, self.log.since.take(slice(0)))
        return DeltaCache(state, columns, log)

    def clone(self) -> "DeltaCache":
        log = self.log and DeltaLog(self.log.state.clone(), self.log.columns.clone(), self.log.since.take(slice(None)))
        return DeltaCache(self.state.clone(), self.columns.clone(), log)

    def compact(self, length: int) -> "DeltaCache":
        return self.clone()

    def tensors(self) -> tuple[Tensor, ...]:
        log = (self.log.state, self.log.columns, *self.log.since.tensors()) if self.log else ()
        return (self.state, self.columns, *log)


LayerCache = KVCache | DeltaCache
LayerLayout = tuple[torch.dtype | int, ...]
"""Dtype of activations and the sizes that do not depend on batch, capacity or history."""


def moved(source: LayerCache, target: LayerCache, length: int) -> LayerCache:
    """A copy of a layer's memory; its committed rows go into the target's storage."""
    if isinstance(source, KVCache) and isinstance(target, KVCache):
        target.keys[:, :, :length] = source.keys[:, :, :length]
        target.values[:, :, :length] = source.values[:, :, :length]
        return target
    return source.clone()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors, so that a view counts all that it keeps alive."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _last_columns(before: Tensor, after: Tensor) -> Tensor:
    """The newest of the columns before and after, as many as there were before, in storage of their own."""
    keep = before.shape[1]
    missing = keep - after.shape[1]
    if missing <= 0:
        return after[:, after.shape[1] - keep :].clone()
    return torch.cat((before[:, keep - missing :], after), dim=1)


def empty_delta_cache(config: ModelConfig, batch: int, like: Tensor, logged: bool) -> DeltaCache:
    """Memory before the first token, on the device of `like` and for activations of its dtype."""
    c = config
    exact = at_least_float32(like[:0])

    def rows(count: int) -> Tensor:
        return like.new_zeros(batch, count, c.conv_dim)

    state = exact.new_zeros(batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    columns = rows(c.linear_conv_kernel_dim - 1)
    if not logged:
        return DeltaCache(state, columns)
    none = Factors(
        exact.new_zeros(batch, 0, c.linear_num_key_heads, c.linear_key_head_dim),
        exact.new_zeros(batch, 0, c.linear_num_value_heads, c.linear_value_head_dim),
        exact.new_zeros(batch, 0, c.linear_num_value_heads),
    )
    return DeltaCache(state, columns, DeltaLog(state, columns, DeltaRows(none, rows(0))))
