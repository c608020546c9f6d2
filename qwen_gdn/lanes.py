"""What a layer sees of memory during one forward: a lane.

A lane reads committed memory and holds what the layer computed for the new tokens. It never changes committed
memory: chain lanes write only rows past the committed length, tree lanes write nothing until asked to commit.
When the forward has gone through every layer the cache takes the successors that the lanes offer; if it fails,
the lanes are dropped and nothing has happened. So a layer is the same code for a chain, a tree and a forward
without any cache.
"""

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .conv import chain_conv, tree_conv
from .delta_rule import delta_chain, delta_window
from .layer_cache import DeltaCache, DeltaRows, KVCache, LayerCache
from .rope import Rotation
from .transfer import indices


class AttentionLane(Protocol):
    """Memory side of a full-attention layer."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: "Step") -> Tensor:
        """Takes the new tokens' q [B, H, T, head_dim] and k, v [B, H_kv, T, head_dim], rotated.

        Returns:
            what each token reads of prefix and new tokens, [B, H, T, head_dim].
        """


class DeltaLane(Protocol):
    """Memory side of a Gated DeltaNet layer."""

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        """Takes the new tokens' columns [B, T, C]; returns them convolved with what precedes them."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule over the new tokens, [B, T, H, V]."""


class ChainLane(Protocol):
    """Lane of a forward whose tokens follow the committed ones."""

    def committed(self) -> LayerCache:
        """The layer's memory with the new tokens in it."""


class TreeLane(Protocol):
    """Lane of a forward over a window's nodes; afterwards, what the window keeps of the layer."""

    def committed(self, nodes: Tensor) -> LayerCache:
        """The layer's memory with the nodes of a root path, int64 [P] root first, appended."""

    def tensors(self) -> tuple[Tensor, ...]:
        """What the window owns of this layer."""


class Filled(Protocol):
    """What a window holds once its forward has been run."""

    def committed(self, path: list[int]) -> tuple[LayerCache, ...]:
        """Every layer's memory with the nodes of a root path, of one node at least, appended."""

    def tensors(self) -> Iterable[Tensor]:
        """What the window owns."""


L = TypeVar("L")


class Pass(NamedTuple, Generic[L]):
    """One forward's view of memory: what all layers share, and a lane for each.

    positions: int64 [T], or [B, 1, T] if they differ over the batch; rotary position of each new token.
    mask: bool [T, prefix + T], or [B, 1, T, prefix + T], true where a token may attend; None means all of it, or, with
        `causal`, the lower triangle.
    """

    positions: Tensor
    mask: Tensor | None
    causal: bool
    lanes: tuple[L, ...]


class Step(NamedTuple):
    """What every mixer of one forward is given; `mask` and `causal` as in `Pass`."""

    rope: Rotation
    mask: Tensor | None
    causal: bool


class TreeLanes(NamedTuple):
    """A window filled layer by layer."""

    lanes: tuple[TreeLane, ...]
    device: torch.device

    def committed(self, path: list[int]) -> tuple[LayerCache, ...]:
        nodes = indices(path, self.device)
        return tuple(lane.committed(nodes) for lane in self.lanes)

    def tensors(self) -> Iterable[Tensor]:
        return (t for lane in self.lanes for t in lane.tensors())


class Memory(Protocol):
    """What the model's forward asks of a cache or of a window."""

    def begin(self, batch: int, count: int) -> Pass[Any]:
        """The view for a forward over `count` tokens a row; raises if it may not run. Changes nothing committed."""

    def finish(self, done: Pass[Any]) -> None:
        """Takes what the lanes hold, all of it or nothing."""


class FreshAttention:
    """Attention with nothing before the first token and no memory of it afterwards."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return attention(q, k, v, step)


class FreshDelta:
    """A Gated DeltaNet layer that starts from zeros and is not remembered."""

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        return chain_conv(F.pad(columns, (0, 0, weight.shape[-1] - 1, 0)), weight)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        return delta_chain(q, k, v, log_decay=log_decay, beta=beta, state=None)[0]


class ChainAttention:
    """Writes the new rows past the committed ones, where they are scratch until the length moves."""

    def __init__(self, layer: KVCache, length: int) -> None:
        self._layer = layer
        self._length = length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return attention(q, *_write_rows(self._layer, self._length, k, v), step)

    def committed(self) -> LayerCache:
        return self._layer


class ChainDelta:
    """Carries the state on through the new tokens."""

    def __init__(self, layer: DeltaCache) -> None:
        self._layer = layer
        self._columns: Tensor
        self._next: DeltaCache

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        self._columns = columns
        return chain_conv(_join(self._layer, columns), weight)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        out, state, factors = delta_chain(q, k, v, log_decay=log_decay, beta=beta, state=self._layer.state)
        self._next = self._layer.advanced(state, DeltaRows(factors, self._columns))
        del self._columns  # a window's rows of every layer would add up until the forward's end
        return out

    def committed(self) -> LayerCache:
        return self._next


class TreeAttention:
    """Lets every node see the whole prefix and the window; which of the window is the mask's matter."""

    def __init__(self, layer: KVCache, length: int) -> None:
        self._layer = layer
        self._length = length
        self._k: Tensor
        self._v: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        self._k, self._v = k.contiguous(), v.contiguous()
        keys, values = (rows[:, :, : self._length] for rows in self._layer.tensors())
        return attention(q, torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2), step)

    def committed(self, nodes: Tensor) -> LayerCache:
        _write_rows(self._layer, self._length, self._k[:, :, nodes], self._v[:, :, nodes])
        return self._layer

    def tensors(self) -> tuple[Tensor, ...]:
        return self._k, self._v


class TreeDelta:
    """All nodes from the one committed state."""

    def __init__(self, layer: DeltaCache, ancestors: Tensor, windows: Tensor) -> None:
        self._layer = layer
        self._ancestors = ancestors
        self._windows = windows
        self._columns: Tensor
        self._rows: DeltaRows

    def convolve(self, columns: Tensor, weight: Tensor) -> Tensor:
        self._columns = columns.contiguous()  # a part of a joined product would keep all of it alive
        return tree_conv(_join(self._layer, columns), weight, self._windows)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Tensor:
        out, factors = delta_window(
            q, k, v, log_decay=log_decay, beta=beta, state=self._layer.state, ancestors=self._ancestors
        )
        self._rows = DeltaRows(factors, self._columns)
        return out

    def committed(self, nodes: Tensor) -> LayerCache:
        return self._layer.absorbed(self._rows.take(nodes))

    def tensors(self) -> tuple[Tensor, ...]:
        return self._rows.tensors()


def attention(q: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=step.mask, is_causal=step.causal, enable_gqa=True)


def _write_rows(layer: KVCache, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Puts rows at `start` and returns all rows up to their end."""
    end = start + k.shape[2]
    layer.keys[:, :, start:end] = k
    layer.values[:, :, start:end] = v
    return layer.keys[:, :, :end], layer.values[:, :, :end]


def _join(layer: DeltaCache, columns: Tensor) -> Tensor:
    return torch.cat((layer.columns, columns), dim=1)
