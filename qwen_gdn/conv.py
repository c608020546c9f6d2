"""Depthwise causal convolution over a chain, or over a tree by a gather. No bias, no activation.

The taps are summed in float32 at least, and the sum is rounded once.

Both take the pre-convolution columns of the last W − 1 committed tokens in front of the new ones, oldest first.
"""

import torch
from torch import Tensor

from .norms import at_least_float32


def chain_conv(columns: Tensor, weight: Tensor) -> Tensor:
    """Convolves T tokens that follow each other.

    Args:
        columns: [B, W − 1 + T, C].
        weight: [C, 1, W]; the last tap meets the newest column.

    Returns:
        [B, T, C].
    """
    dtype, columns, taps = columns.dtype, at_least_float32(columns), at_least_float32(weight).squeeze(1).t()
    count = columns.shape[1] - len(taps) + 1
    # One multiply-add a tap: a library convolution costs more than the whole layer for a few tokens.
    out = columns[:, :count] * taps[0]
    for w in range(1, len(taps)):
        out = torch.addcmul(out, columns[:, w : w + count], taps[w])
    return out.to(dtype)


def tree_conv(columns: Tensor, weight: Tensor, windows: Tensor) -> Tensor:
    """Convolves N nodes of a tree, each over its own column and those of its nearest ancestors.

    Args:
        columns: [B, W − 1 + N, C].
        weight: [C, 1, W].
        windows: int64 [N, W], rows of `columns` per node (`Topology.windows`).

    Returns:
        [B, N, C].
    """
    gathered, taps = at_least_float32(columns[:, windows]), at_least_float32(weight).squeeze(1).t()
    return (gathered * taps).sum(dim=2).to(columns.dtype)
