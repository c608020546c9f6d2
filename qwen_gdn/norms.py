"""RMS norms of the family. All reduce in float32 (float64 for float64 inputs), whatever the weights' dtype.

Three conventions meet in these checkpoints: the target's block norms scale by 1 + w, the delta layers'
gated norm by w itself, and the drafter's (Qwen3) norms by w after casting back.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / rms(x) · (1 + weight), cast last. Shape [..., width] in and out."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + at_least_float32(self.weight)
        return F.rms_norm(at_least_float32(x), scale.shape, scale, self.eps).to(x.dtype)


class PlainRMSNorm(nn.Module):
    """x / rms(x), cast to x's dtype, then · weight (the Qwen3 order). Shape [..., width] in and out."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(at_least_float32(x), self.weight.shape, None, self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """x / rms(x) · weight · act(gate): the norm comes before the gate. Shape [..., V] in and out."""

    def __init__(self, width: int, eps: float, gate: Literal["silu", "sigmoid"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.activation = F.silu if gate == "silu" else torch.sigmoid

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        weight = at_least_float32(self.weight)
        normed = F.rms_norm(at_least_float32(x), weight.shape, weight, self.eps)
        return (normed * self.activation(at_least_float32(gate))).to(x.dtype)
