"""Attention of a few new rows to a long committed prefix whose length is known to the device alone.

Every new row sees the whole prefix, so that part needs no mask; which of the new rows see each other does. The two
parts are computed apart and merged by their log-sum-exps, where the device has a kernel that returns them, and
under one softmax elsewhere. Nothing waits for the length, so the same instructions serve every length.

The query heads of a key head lie one after another along the rows, G of them: kernels then need not know groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from .norms import at_least_float32

WORKERS = 192  # blocks of rows times key heads times pieces of the prefix that keep a large device busy
ROWS = 64  # rows that one of its blocks takes


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
    """softmax(q [prefix, k]^T / sqrt(head_dim)) [prefix, v].

    Args:
        q: [1, H, N, head_dim].
        k, v: those of the new rows, [1, H_kv, N, head_dim].
        mask: which new rows a row sees, itself among them; bool [N, N].
        keys, values: [1, H_kv, rows, head_dim], of which the first `length` are the prefix.
        length: int64 [1], 0 for no prefix.

    Returns:
        [1, H, N, head_dim] in q's dtype.
    """
    heads, count = k.shape[1], q.shape[2]
    folded = q.reshape(heads, -1, q.shape[3])
    mask = mask.repeat(folded.shape[1] // count, 1)
    if has_flash(q.device, q.dtype):
        own = _alone(folded, k[0], v[0]) if count == 1 else _masked(folded, k[0], v[0], mask)
        out = _merged(own, _pieces(folded, keys[0], values[0], length))
    else:
        out = _plain(folded, k[0], v[0], mask, keys[0], values[0], _before(length, keys))
    return out.to(q.dtype).reshape(q.shape)


def attend_chain(q: Tensor, k: Tensor, v: Tensor, *, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
    """`attend` for new rows that follow each other: each sees those before it. For many rows."""
    folded = q.reshape(k.shape[1], -1, q.shape[3])
    if has_flash(q.device, q.dtype):
        out = _merged(_causal(q, k, v), _pieces(folded, keys[0], values[0], length))
    else:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask.repeat(folded.shape[1] // q.shape[2], 1)
        out = _plain(folded, k[0], v[0], mask, keys[0], values[0], _before(length, keys))
    return out.to(q.dtype).reshape(q.shape)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel that returns log-sum-exps."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def attend_seen(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """`attend` where each new row sees rows of its own choice; `seen` is bool [N, rows], in any order of rows."""
    folded = q.reshape(k.shape[1], -1, q.shape[3])
    groups = folded.shape[1] // q.shape[2]
    out = _plain(folded, k[0], v[0], mask.repeat(groups, 1), keys[0], values[0], seen.repeat(groups, 1))
    return out.to(q.dtype).reshape(q.shape)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """One softmax over all rows there are; q [H_kv, G·N, head_dim], seen [G·N or 1, rows]."""
    before = (q @ keys.transpose(1, 2)).masked_fill(~seen, float("-inf"))
    among = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    scores = at_least_float32(torch.cat((before, among), dim=-1)) * q.shape[-1] ** -0.5
    weights = scores.softmax(dim=-1).to(q.dtype)
    # rows that nobody sees may hold anything, also what zero times it is not zero
    prefix = values.masked_fill(~seen.any(0)[:, None], 0.0)
    out: Tensor = weights[..., : keys.shape[1]] @ prefix + weights[..., keys.shape[1] :] @ v
    return out


def _before(length: Tensor, keys: Tensor) -> Tensor:
    return torch.arange(keys.shape[2], device=keys.device)[None] < length


class _Part(NamedTuple):
    """What rows read of some keys, float32 [..., H_kv, G·N or 1, head_dim], and the log-sum-exps [..., H_kv, G·N]."""

    out: Tensor
    weight: Tensor


def _merged(own: _Part, pieces: _Part) -> Tensor:
    """Both under one softmax; `pieces` has a dimension of them in front."""
    total = torch.cat((pieces.weight, own.weight[None])).logsumexp(dim=0)
    merged = (own.weight - total).exp()[..., None] * own.out
    for weight, out in zip(pieces.weight, pieces.out, strict=True):  # a sum over so few is slow as a reduction
        merged = merged + (weight - total).exp()[..., None] * out
    return merged


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> _Part:
    """A few new rows among themselves, summed in float32; q [H_kv, G·N, head_dim]."""
    scores = _wide(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    weight = scores.logsumexp(dim=-1)
    weights = (scores - weight[..., None]).exp().to(v.dtype)  # as a flash kernel rounds them
    return _Part(_wide(weights, v), weight)


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """The batched product in float32, of numbers as they are; only CUDA does not need them widened first."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _alone(q: Tensor, k: Tensor, v: Tensor) -> _Part:
    """One new row, which sees itself; q [H_kv, G, head_dim], k and v [H_kv, 1, head_dim]."""
    return _Part(v.float(), (q.float() * k.float()).sum(-1) * q.shape[-1] ** -0.5)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> _Part:
    """Many new rows among themselves by a flash kernel; q [1, H, N, head_dim], folded only afterwards."""
    heads, rows = q.shape[1:3]
    groups = heads // k.shape[1]
    ends = torch.arange(2, device=q.device, dtype=torch.int32) * rows
    keys, values = (x[0].repeat_interleave(groups, 0).transpose(0, 1) for x in (k, v))
    out, lse = varlen_attn(
        q[0].transpose(0, 1),
        keys,
        values,
        ends,
        ends,
        rows,
        rows,
        return_aux=AuxRequest(lse=True),
        window_size=(-1, 0),
    )
    folded = out.transpose(0, 1).float().reshape(k.shape[1], -1, q.shape[3])
    return _Part(folded, lse.reshape(k.shape[1], -1))


def _pieces(q: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> _Part:
    """What q reads of each of S pieces of the prefix, [S, H_kv, R, head_dim], and log-sum-exps [S, H_kv, R].

    The pieces are sequences of one ragged batch whose borders lie on the device; a long prefix then keeps as many
    multiprocessors busy as there are pieces. An empty piece weighs nothing.
    """
    heads, rows, width = q.shape
    count = max(1, WORKERS // (heads * -(-rows // ROWS)))
    size = (length + (count - 1)) // count
    ends = torch.minimum(torch.arange(count + 1, device=q.device) * size, length)
    starts = torch.arange(count + 1, device=q.device, dtype=torch.int32) * rows
    repeated = q.transpose(0, 1).expand(count, rows, heads, width).reshape(count * rows, heads, width)
    out, lse = varlen_attn(
        repeated,
        keys.transpose(0, 1),
        values.transpose(0, 1),
        starts,
        ends.int(),
        rows,
        -(-keys.shape[1] // count),
        return_aux=AuxRequest(lse=True),
    )
    empty = (ends[1:] == ends[:-1])[:, None, None]
    pieces = out.view(count, rows, heads, width).transpose(1, 2).float()
    weights = lse.view(heads, count, rows).transpose(0, 1)
    return _Part(pieces.masked_fill(empty[..., None], 0.0), weights.masked_fill(empty, float("-inf")))
