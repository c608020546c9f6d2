"""What one layer does in a recorded program: pure tensor code over memory at fixed addresses.

The layers are those of the model; only their lanes differ. Lengths and trees come as tensors on the device, so one
recording serves every length and every tree up to its size. Rows beyond a tree or a path are padding: no node has
one as its ancestor, and a path's padding neither writes nor decays.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .conv import chain_conv, tree_conv
from .delta_rule import Factors, absorb, delta_chain, delta_window
from .lanes import Step
from .layer_cache import DeltaRows
from .model import DecoderLayer
from .prefix import attend, attend_chain
from .rope import Rotation
from .static_cache import StaticDelta, StaticLayer, StaticRows


class Nodes(NamedTuple):
    """A padded tree, as `Topology` describes it: int64 [N], [N] and [N, W], bool [N, N]."""

    tokens: Tensor
    depths: Tensor
    windows: Tensor
    ancestors: Tensor


class _TreeRows:
    """An attention layer's lane over a tree, whose rows go to the memory's last ones until some are committed."""

    def __init__(self, rows: StaticRows, length: Tensor, nodes: Nodes) -> None:
        self._rows, self._length, self._nodes = rows, length, nodes
        self.kept = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        rows, size = self._rows, k.shape[2]
        out = attend(q, k, v, mask=self._nodes.ancestors, keys=rows.keys, values=rows.values, length=self._length)
        for part, own in zip(rows.last(size), (k, v), strict=True):
            part.copy_(own)
        return out


class _ChainRows:
    """An attention layer's lane for tokens in a row, whose rows are scratch until the length moves."""

    def __init__(self, rows: StaticRows, length: Tensor, where: Tensor) -> None:
        self._rows, self._length, self._where = rows, length, where

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        rows = self._rows
        out = attend_chain(q, k, v, keys=rows.keys, values=rows.values, length=self._length)
        _write(rows, self._where, k, v)
        return out


class _StepRows:
    """An attention layer's lane for one token, whose row is scratch until the length moves."""

    def __init__(self, rows: StaticRows, length: Tensor) -> None:
        self._rows, self._length = rows, length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        rows, length = self._rows, self._length
        alone = torch.ones(1, 1, dtype=torch.bool, device=q.device)
        out = attend(q, k, v, mask=alone, keys=rows.keys, values=rows.values, length=length)
        _write(rows, length, k, v)
        return out


class _TreeDelta:
    """A delta layer's lane over a tree."""

    def __init__(self, delta: StaticDelta, nodes: Nodes) -> None:
        self._delta, self._nodes = delta, nodes
        self._columns: Tensor
        self.kept: DeltaRows

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        joined = _after(self._delta, columns)
        self._columns = joined[:, -columns.shape[1] :]  # of what the gather reads, so that it is laid out but once
        return tree_conv(joined, weight, self._nodes.windows)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        state, ancestors = self._delta.state, self._nodes.ancestors
        out, factors = delta_window(q, k, v, log_decay=log_decay, beta=beta, state=state, ancestors=ancestors)
        self.kept = DeltaRows(factors, self._columns)
        return out


class _ChainDelta:
    """A delta layer's lane for tokens in a row, of which the first `count` [1] are real; into the other bank."""

    def __init__(self, delta: StaticDelta, count: Tensor) -> None:
        self._delta, self._count = delta, count
        self.joined: Tensor

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        self.joined = _after(self._delta, columns)
        _keep_newest(self._delta, self.joined, self._count)
        return chain_conv(self.joined, weight)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        real = (torch.arange(v.shape[1], device=v.device) < self._count)[:, None]
        log_decay, beta = log_decay.masked_fill(~real, 0.0), beta.masked_fill(~real, 0.0)
        out, after, _ = delta_chain(q, k, v, log_decay=log_decay, beta=beta, state=self._delta.state)
        self._delta.next_state.copy_(after)
        return out


class _StepDelta:
    """A delta layer's lane for one token, which goes straight into the other bank."""

    def __init__(self, delta: StaticDelta) -> None:
        self._delta = delta

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        joined = _after(self._delta, columns)
        self._delta.next_columns.copy_(joined[:, 1:])
        return chain_conv(joined, weight)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        out, after, _ = delta_chain(q, k, v, log_decay=log_decay, beta=beta, state=self._delta.state)
        self._delta.next_state.copy_(after)
        return out


def _after(delta: StaticDelta, columns: Tensor) -> Tensor:
    return torch.cat((delta.columns, columns), dim=1)


def _write(rows: StaticRows, where: Tensor, k: Tensor, v: Tensor) -> None:
    """Puts keys and values at the rows `where` [T]."""
    rows.keys.index_copy_(2, where, k)
    rows.values.index_copy_(2, where, v)


def _keep_newest(delta: StaticDelta, columns: Tensor, count: Tensor) -> None:
    """Writes to the other bank the columns [1, W − 1 + T, C] before which `count` of the T new ones end."""
    newest = count + torch.arange(delta.columns.shape[1], device=count.device)
    delta.next_columns.copy_(columns[:, newest])


def tree_layer(
    layer: DecoderLayer, x: Tensor, update: Tensor, rope: Rotation, memory: StaticLayer, length: Tensor, nodes: Nodes
) -> tuple[Tensor, Tensor, Any]:
    """One layer over a tree: its output as two summands, and what the window keeps of a delta layer.

    The input too comes as two summands here and below, as the layer before has left it.
    """
    lane = _TreeRows(memory, length, nodes) if isinstance(memory, StaticRows) else _TreeDelta(memory, nodes)
    return *layer.updated(x + update, lane, Step(rope, None, False)), lane.kept


def step_layer(
    layer: DecoderLayer, x: Tensor, update: Tensor, rope: Rotation, memory: StaticLayer, length: Tensor
) -> tuple[Tensor, Tensor]:
    """One layer over one token, which is written to the other bank and behind the committed rows."""
    lane = _StepRows(memory, length) if isinstance(memory, StaticRows) else _StepDelta(memory)
    return layer.updated(x + update, lane, Step(rope, None, False))


def chain_layer(
    layer: DecoderLayer,
    x: Tensor,
    update: Tensor,
    rope: Rotation,
    memory: StaticLayer,
    length: Tensor,
    count: Tensor,
    where: Tensor,
) -> tuple[Tensor, Tensor, Any]:
    """One layer over tokens in a row, the first `count` [1] of them real; `where` [T] are the rows they go to.

    Returns:
        its output as two summands, and a delta layer's joined columns: a compiler lays out what is returned once,
        where it would otherwise join them again for every tap that reads them.
    """
    lane = _ChainRows(memory, length, where) if isinstance(memory, StaticRows) else _ChainDelta(memory, count)
    return *layer.updated(x + update, lane, Step(rope, None, False)), getattr(lane, "joined", None)


def normed(norm: nn.Module, x: Tensor, update: Tensor) -> Tensor:
    """The norm of what a layer has left as two summands."""
    out: Tensor = norm(x + update)
    return out


def picked_rows(layers: Sequence[DeltaRows], nodes: Tensor) -> tuple[Tensor, Tensor]:
    """What windows keep of some nodes, int64 [P], of delta layers: rows of k, u and log-decays, and columns."""
    taken = [rows.factors.take(nodes) for rows in layers]
    numbers = [torch.cat([part.flatten(2) for part in factors], dim=2) for factors in taken]
    return torch.cat(numbers), torch.cat([rows.columns[:, nodes] for rows in layers])


def commit_delta(memory: StaticDelta, numbers: Tensor, columns: Tensor, length: Tensor) -> None:
    """Writes to the other bank what delta layers remember after a path, of whose rows the first `length` [1] count.

    Args:
        numbers, columns: the path's `picked_rows`, [layers, P, ...].
    """
    _, heads, key_width, value_width = memory.state.shape
    writes = heads * value_width
    k, u, log_decay = numbers.split([numbers.shape[2] - writes - heads, writes, heads], dim=2)
    # rows past the path come after it, so that without writes and decay they leave the state alone
    real = (torch.arange(columns.shape[1], device=length.device) < length)[:, None]
    u, log_decay = u.masked_fill(~real, 0.0), log_decay.masked_fill(~real, 0.0)
    factors = Factors(k.unflatten(2, (-1, key_width)), u.unflatten(2, (heads, -1)), log_decay)
    memory.next_state.copy_(absorb(memory.state, factors))
    _keep_newest(memory, _after(memory, columns), length)


def commit_rows(memory: StaticRows, size: int, length: Tensor, nodes: Tensor) -> None:
    """Writes what a tree of `size` nodes left of a padded path, in all layers, behind the committed keys and values.

    Its padding lands on scratch rows. The tree's own stay, so that a commit which failed can be tried again.
    """
    where = length + torch.arange(len(nodes), device=nodes.device)
    _write(memory, where, *(part[:, :, nodes] for part in memory.last(size)))
