"""Lanes of a cache whose rows differ in length. In every row the tokens that count come first, then padding.

Padding is finite and inert: it sees itself at least, is seen by no token that counts, and neither writes nor decays.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .conv import chain_conv, tree_conv
from .delta_rule import Factors, absorb, delta_chain, delta_window
from .lanes import Step, attention
from .layer_cache import DeltaCache, KVCache, LayerCache
from .transfer import indices

Paths = Sequence[Sequence[int]]


class Chosen(NamedTuple):
    """The tokens of a forward that are committed: of each row a path, its nodes in order, maybe none.

    row, node, place: int64 [M] of all M tokens; the row of the batch, the index in the forward, and the position.
    paths: int64 [B, P], the nodes of each row's path and then 0.
    beyond: bool [B, P], true past a path's end.
    counts: int64 [B], lengths of the paths.
    """

    row: Tensor
    node: Tensor
    place: Tensor
    paths: Tensor
    beyond: Tensor
    counts: Tensor

    @classmethod
    def of(cls, paths: Paths, lengths: Sequence[int], device: torch.device) -> "Chosen":
        """The paths of rows that hold `lengths` committed tokens."""
        steps = [(b, node, lengths[b] + i) for b, path in enumerate(paths) for i, node in enumerate(path)]
        row, node, place = (indices(part, device) for part in zip(*steps, strict=True))
        counts = indices([len(path) for path in paths], device)
        longest = max(map(len, paths))
        padded = indices([i for path in paths for i in (*path, *[0] * (longest - len(path)))], device)
        beyond = torch.arange(longest, device=device) >= counts[:, None]
        return cls(row, node, place, padded.view(len(paths), longest), beyond, counts)


class RaggedLane(Protocol):
    """Lane of a forward over tokens of which each row commits its own choice."""

    def committed(self, chosen: Chosen) -> LayerCache:
        """The layer's memory with the chosen tokens appended."""

    def tensors(self) -> tuple[Tensor, ...]:
        """What a window owns of this layer."""


class RaggedLanes(NamedTuple):
    """A window filled layer by layer, over rows that hold `lengths` committed tokens."""

    lanes: tuple[RaggedLane, ...]
    lengths: tuple[int, ...]
    device: torch.device

    def committed(self, paths: Paths) -> Iterable[LayerCache]:
        """Every layer's memory with the nodes of a root path of each row appended."""
        chosen = Chosen.of(paths, self.lengths, self.device)
        return (lane.committed(chosen) for lane in self.lanes)

    def tensors(self) -> Iterable[Tensor]:
        return (t for lane in self.lanes for t in lane.tensors())


class Prefix(NamedTuple):
    """Committed rows of keys and values as a forward sees them.

    extent: rows up to the longest row's last one.
    stale: bool [B, extent], true past a row's own length.
    """

    extent: int
    stale: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Prefix":
        extent = max(lengths)
        return cls(extent, torch.arange(extent, device=device) >= indices(lengths, device)[:, None])

    def mask(self, among: Tensor) -> Tensor:
        """What each token sees, [B, 1, T, extent + T], if it sees `among` of the new ones, [B, T, T] or [T, T]."""
        count = among.shape[-1]
        before = ~self.stale[:, None, :].expand(-1, count, -1)
        return torch.cat((before, among.expand(len(before), -1, -1)), dim=2)[:, None]


class RaggedAttention:
    """Lets tokens see their row's own prefix and what the mask says of each other; for chains and trees."""

    def __init__(self, layer: KVCache, prefix: Prefix) -> None:
        self._layer = layer
        self._prefix = prefix
        self._k: Tensor
        self._v: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        self._k, self._v = k.contiguous(), v.contiguous()
        keys, values = (self._joined(*pair) for pair in zip(self._layer.tensors(), (k, v), strict=True))
        return attention(q, keys, values, step)

    def _joined(self, rows: Tensor, new: Tensor) -> Tensor:
        extent, stale = self._prefix
        joined = torch.cat((rows[:, :, :extent], new), dim=2)
        # Rows past a length may hold anything, and 0 times what is not finite is no 0.
        joined[:, :, :extent].masked_fill_(stale[:, None, :, None], 0)
        return joined

    def committed(self, chosen: Chosen) -> LayerCache:
        for rows, new in zip(self._layer.tensors(), (self._k, self._v), strict=True):
            rows[chosen.row, :, chosen.place] = new[chosen.row, :, chosen.node]
        return self._layer

    def tensors(self) -> tuple[Tensor, ...]:
        return self._k, self._v


class RaggedChainDelta:
    """Carries each row's state on through its own first tokens; all of those that count are chosen.

    Args:
        counts: int64 [B], how many of a row's tokens count.
        padding: bool [B, T, 1], true at the others.
    """

    def __init__(self, layer: DeltaCache, counts: Tensor, padding: Tensor) -> None:
        self._layer = layer
        self._counts = counts
        self._padding = padding
        self._columns: Tensor
        self._next: DeltaCache

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        joined = torch.cat((self._layer.columns, columns), dim=1)
        self._columns = _newest(joined, self._counts, self._layer)
        return chain_conv(joined, weight)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        log_decay, beta = (gate.masked_fill(self._padding, 0) for gate in (log_decay, beta))
        out, state, _ = delta_chain(q, k, v, log_decay=log_decay, beta=beta, state=self._layer.state)
        self._next = DeltaCache(state, self._columns)
        return out

    def committed(self, chosen: Chosen) -> LayerCache:
        return self._next

    def tensors(self) -> tuple[Tensor, ...]:
        return self._next.tensors()


class RaggedTreeDelta:
    """All nodes of a tree a row, from that row's one committed state.

    Args:
        ancestors: bool [B, N, N]; a padding node is its own only ancestor.
        windows: int64 [B, N, W], as `Topology.windows` has them for each row.
        padding: bool [B, N, 1], true at padding nodes.
    """

    def __init__(self, layer: DeltaCache, ancestors: Tensor, windows: Tensor, padding: Tensor) -> None:
        self._layer = layer
        self._ancestors = ancestors
        self._windows = windows
        self._padding = padding
        self._columns: Tensor
        self._factors: Factors

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        self._columns = columns.contiguous()  # a part of a joined product would keep all of it alive
        joined = torch.cat((self._layer.columns, columns), dim=1)
        batch, count = joined.shape[:2]
        # All rows as one: each row's windows lie in its own part of the columns.
        starts = torch.arange(batch, device=joined.device)[:, None, None] * count
        flat = tree_conv(joined.flatten(0, 1)[None], weight, (self._windows + starts).flatten(0, 1))
        rows: Tensor = flat[0].unflatten(0, (batch, -1))
        return rows

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        log_decay, beta = (gate.masked_fill(self._padding, 0) for gate in (log_decay, beta))
        ancestors = self._ancestors[:, None, None, None]
        out, self._factors = delta_window(
            q, k, v, log_decay=log_decay, beta=beta, state=self._layer.state, ancestors=ancestors
        )
        return out

    def committed(self, chosen: Chosen) -> LayerCache:
        each = torch.arange(len(chosen.paths), device=chosen.paths.device)[:, None]
        k, u, log_decay, columns = (part[each, chosen.paths] for part in self.tensors())
        # A token that wrote nothing and did not decay leaves a state as it is.
        beyond = chosen.beyond[..., None]
        factors = Factors(k, u.masked_fill(beyond[..., None], 0), log_decay.masked_fill(beyond, 0))
        state = absorb(self._layer.state, factors)
        joined = torch.cat((self._layer.columns, columns), dim=1)
        return DeltaCache(state, _newest(joined, chosen.counts, self._layer))

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self._factors, self._columns)


def _newest(joined: Tensor, counts: Tensor, layer: DeltaCache) -> Tensor:
    """The columns that a layer keeps next, as many as now: of its own and `counts` new ones a row, the last.

    Args:
        joined: [B, W − 1 + T, C], the layer's own and then the new ones.
        counts: int64 [B].
    """
    places = counts[:, None] + torch.arange(layer.columns.shape[1], device=counts.device)
    return joined[torch.arange(len(joined), device=counts.device)[:, None], places]
