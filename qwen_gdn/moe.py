"""Sparse mixture of experts as the family has it: a router in float32, fused experts, one shared expert.

Switch-style routing to several experts (arXiv 1701.06538) whose weights are renormalised, beside an expert that every
token passes, scaled by a gate of its own (Qwen2-MoE, arXiv 2407.10671). Only the weights of experts in use are read.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ExpertsConfig
from .mlp import MLP
from .norms import at_least_float32

_GROUPABLE = (torch.bfloat16, torch.float16, torch.float32)
_GATHERED = 64  # rows whose experts' weights are copied side by side at once


class Experts(nn.Module):
    """All experts of a layer, fused under the checkpoint's names.

    gate_up_proj: [E, 2F, D], of each expert the gate's F rows before the F of `up`.
    down_proj: [E, D, F].
    """

    def __init__(self, hidden: int, experts: ExpertsConfig) -> None:
        super().__init__()
        count, inner = experts.num_experts, experts.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=0.02)

    def forward(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Σ over its K experts of share · down(silu(gate(x)) · up(x)) for each row.

        Args:
            rows: [N, D].
            shares: [N, K].
            chosen: int64 [N, K], the expert of each share.

        Returns:
            [N, D] in the rows' dtype. The sum runs in the order of `chosen`, so other rows do not matter.
        """
        each = chosen.flatten()
        order = each.argsort(stable=True)
        every = torch.arange(len(self.down_proj), device=each.device)
        ends = torch.searchsorted(each[order], every, right=True).int()
        gate, up = products(rows[order // chosen.shape[1]], self.gate_up_proj, ends).chunk(2, dim=-1)
        out = products(F.silu(gate) * up, self.down_proj, ends)
        out = out[order.argsort()].unflatten(0, chosen.shape)
        return (at_least_float32(out) * shares[..., None]).sum(1).to(rows.dtype)


class SparseMoE(nn.Module):
    """The feed-forward part of a MoE layer, [B, T, D] in and out; names are the checkpoint's."""

    def __init__(self, hidden: int, experts: ExpertsConfig) -> None:
        super().__init__()
        self.chosen = experts.num_experts_per_tok
        self.gate = nn.Linear(hidden, experts.num_experts, bias=False)
        self.experts = Experts(hidden, experts)
        self.shared_expert = MLP(hidden, experts.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shared = torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        out: Tensor = self.experts(rows, *self.route(rows)) + shared
        return out.view_as(x)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The K likeliest experts of rows [N, D]: their shares, renormalised to a sum of 1, and their indices."""
        logits = F.linear(at_least_float32(rows), at_least_float32(self.gate.weight))
        shares, chosen = logits.softmax(dim=-1).topk(self.chosen, dim=-1)
        return shares / shares.sum(dim=-1, keepdim=True), chosen


def products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each row by the weight of its group: rows [n, D], weights [E, F, D] -> [n, F].

    Args:
        ends: int32 [E], the row after the last of each group; the rows of a group follow each other.
    """
    if torch.compiler.is_compiling():
        out: Tensor = _opaque_products(rows, weights, ends)
        return out
    return _products(rows, weights, ends)


def _products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if _groupable(rows, weights):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return gathered_products(rows, weights, ends) if rows.is_cuda else plain_products(rows, weights, ends)


def _groupable(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch's grouped product takes these without a wait; rows must be whole 16-byte blocks."""
    if rows.is_cuda:
        # Elsewhere than on Hopper and data-centre Blackwell, and in other types, it reads the ends on the host, which
        # no recording survives.
        capable = torch.cuda.get_device_capability(rows.device)[0] in (9, 10) and rows.dtype == torch.bfloat16
    else:
        capable = rows.dtype in _GROUPABLE
    return capable and all(size * rows.dtype.itemsize % 16 == 0 for size in weights.shape[1:])


def plain_products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`products` one group after another, which waits for the device."""
    parts, start = [rows.new_empty(0, weights.shape[1])], 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if end > start:
            parts.append(F.linear(rows[start:end], weight))
        start = end
    return torch.cat(parts)


def gathered_products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`products` over copies of the weights, which never waits: a few rows at a time."""
    group = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
    parts = zip(rows.split(_GATHERED), group.split(_GATHERED), strict=True)
    return torch.cat([torch.bmm(weights[which], part.unsqueeze(-1)).squeeze(-1) for part, which in parts])


# A compiler knows the grouped product's shape for bfloat16 alone, and could not trace the other forms at all.
@torch.library.custom_op("qwen_gdn::grouped_products", mutates_args=())
def _opaque_products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _products(rows, weights, ends)


@_opaque_products.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])
