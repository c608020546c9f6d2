"""The Gated DeltaNet mixer (arXiv 2412.06464) as the family has it: projections, conv, gates, delta rule, norm."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .joined import ReadsOnce
from .lanes import DeltaLane, Step
from .norms import GatedRMSNorm, at_least_float32
from .products import LinearMap

_L2_EPS = 1e-6


class CausalConv(nn.Module):
    """Holds the depthwise filter under the checkpoint's name; the lane applies it."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)


class GatedDeltaNet(ReadsOnce):
    """One linear-attention mixer, [B, T, D] in and out; names are the checkpoint's.

    Gates, l2 norms, delta rule, state and gated norm are float32 whatever the weights' dtype. `A_log`, `dt_bias`
    and the norm's weight are never demoted below float32 by `.to(dtype)`: a decay rounded to bf16 drifts.
    """

    reads = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        self.split = (config.key_dim, config.key_dim, config.value_dim)
        heads = config.linear_num_value_heads
        self.in_proj_qkv = nn.Linear(config.hidden_size, config.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, config.value_dim, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, heads, bias=False)
        self.conv1d = CausalConv(config.conv_dim, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps, config.output_gate)
        self.out_proj = LinearMap(config.value_dim, config.hidden_size)

    def forward(self, x: Tensor, lane: DeltaLane, step: Step) -> Tensor:
        """x [B, T, D] -> [B, T, D]. Nothing of `step` is read: order is in the lane."""
        columns, z, b, a = self.read(x)
        mixed = F.silu(lane.convolve(columns, self.conv1d.weight))
        q, k, v = mixed.split(self.split, dim=-1)
        q = _l2_norm(q.unflatten(-1, (-1, self.key_head_dim)))
        k = _l2_norm(k.unflatten(-1, (-1, self.key_head_dim)))
        v = v.unflatten(-1, (-1, self.value_head_dim))
        log_decay, beta = self.gates(a, b)
        out = lane.mix(q, k, v, log_decay=log_decay, beta=beta).to(x.dtype)
        normed = self.norm(out, z.unflatten(-1, (-1, self.value_head_dim)))
        projected: Tensor = self.out_proj(normed.flatten(2))
        return projected

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Log-decay g = −e^A softplus(a + dt_bias) and write strength β = sigmoid(b), each [B, T, H]."""
        a, b = at_least_float32(a), at_least_float32(b)
        rate = at_least_float32(self.A_log).exp()
        return -rate * F.softplus(a + at_least_float32(self.dt_bias)), torch.sigmoid(b)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GatedDeltaNet":
        exact = (self.A_log, self.dt_bias, self.norm.weight)
        kept = [p.detach() for p in exact]
        super()._apply(fn, recurse)
        for parameter, before in zip((self.A_log, self.dt_bias, self.norm.weight), kept, strict=True):
            if parameter.dtype.itemsize < torch.float32.itemsize <= before.dtype.itemsize:
                parameter.data = before.to(parameter.device, torch.float32)
        return self


def _l2_norm(x: Tensor) -> Tensor:
    x = at_least_float32(x)
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _L2_EPS)
