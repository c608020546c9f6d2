"""The greatest entries of wide rows, exactly ordered among equal ones, without a wait for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # columns that one maximum stands for when a wide row is searched for its greatest values


class Ranked(NamedTuple):
    """The k greatest entries of each row, best first, equal ones by ascending column."""

    values: Tensor  # [rows, k]
    columns: Tensor  # int64 [rows, k]


def ranked(values: Tensor, k: int) -> Ranked:
    """The min(k, width) greatest entries of each row of [rows, width], NaN counting as greatest.

    Unlike `torch.topk` it is exact among equal entries: the lower column comes first, across the k-th place
    too. It never waits for the device.
    """
    rows, width = values.shape
    k, blocks = min(k, width), width // BLOCK
    every = torch.arange(width, device=values.device)
    if blocks <= 2 * k:
        columns = leading(values, k, every)
        return Ranked(values.gather(1, columns), columns)
    # A block with one of the k first entries has fewer than k blocks before it by (greatest value, position).
    # Ascending blocks keep places in the order of columns.
    maxima = values[:, : blocks * BLOCK].view(rows, blocks, BLOCK).amax(-1)
    chosen = leading(maxima, k, every[:blocks]).sort(-1).values
    inside = (chosen.unsqueeze(-1) * BLOCK + every[:BLOCK]).flatten(1)
    columns = torch.cat((inside, every[blocks * BLOCK :].expand(rows, -1)), 1)
    candidates = values.gather(1, columns)
    places = leading(candidates, k, columns)
    return Ranked(candidates.gather(1, places), columns.gather(1, places))


def leading(values: Tensor, k: int, ids: Tensor) -> Tensor:
    """Columns of the k greatest entries of each row, best first, equal ones by ascending id (float64: column)."""
    if values.dtype == torch.float64:
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # One int64 per entry orders by value, then by id below 2^32: the bits of a float32, flipped where negative,
    # compare as the numbers do. Adding 0 makes -0 equal to 0; NaN gets the sign that sorts it first.
    bits = torch.where(values.isnan(), torch.nan, values.float() + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (order * 2**32 - ids).topk(k).indices
