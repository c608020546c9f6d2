"""Rotary position embedding with explicit positions (RoFormer, arXiv 2104.09864; half-split pairing).

Text tokens have equal temporal, height and width positions, for which the family's interleaved
multi-axis rotary is this plain one-dimensional rotary exactly.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines, each [..., T, rotary_dim], in the activations' dtype."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Angles position · theta^(−2i/rotary_dim), in float32 (float64 for a float64 model).

    Args:
        positions: int64 [..., T], absolute.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device).to(exact) / rotary_dim
    angles = positions.to(exact)[..., None] * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotates the first `rotary_dim` dimensions of every head and passes the rest through.

    Args:
        x: [B, H, T, head_dim].
    """
    width = by.cos.shape[-1]
    turning, passing = x[..., :width], x[..., width:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * by.cos + torch.cat((-second, first), dim=-1) * by.sin
    return torch.cat((turned, passing), dim=-1) if passing.shape[-1] else turned
