"""Weights and activations in eight bits, by hand: numbers from their bits, roundings from a table, sums in float64."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from qwen_gdn.fp8 import FP8Linear, keep_in_eight_bits
from qwen_gdn.quantised import PROJECTIONS

Block = tuple[int, int]
Model = TypeVar("Model", bound=nn.Module)


def decoded(numbers: Tensor) -> Tensor:
    """E4M3 numbers as float64, from sign, four bits of exponent and three of mantissa; the last code is none."""
    bits = numbers.view(torch.uint8).long()
    sign, exponent, mantissa = 1 - 2 * (bits >> 7), (bits >> 3) & 15, bits & 7
    below = mantissa.double() * 2.0**-9
    value = torch.where(exponent == 0, below, (1 + mantissa.double() / 8) * torch.pow(2.0, exponent.double() - 7))
    return sign * torch.where(bits & 127 == 127, torch.nan, value)


def nearest(values: Tensor) -> Tensor:
    """The E4M3 number nearest to each float64 value of at most 448, ties to even, as float64."""
    table = decoded(torch.arange(127, dtype=torch.uint8, device=values.device))
    between = (table[1:] + table[:-1]) / 2
    code = torch.searchsorted(between, values.abs())
    tie = values.abs() == between[code.clamp(max=125)]
    return values.sign() * table[code + (tie & (code % 2 == 1))]


def rounded(x: Tensor, width: int) -> Tensor:
    """Rows [N, D], each piece of `width` numbers in eight bits, as float64 [N, D]."""
    pieces = (x if x.dtype == torch.float64 else x.float()).unflatten(1, (-1, width))
    scales = (pieces.abs().amax(2, keepdim=True).float() / 448).clamp_min(2.0**-126)
    return (nearest((pieces / scales).double()) * scales.double()).flatten(1)


def spread(weight: Tensor, scales: Tensor, block: Block) -> Tensor:
    """What a weight in eight bits is, as float64."""
    rows, columns = (torch.arange(n, device=weight.device) // step for n, step in zip(weight.shape, block, strict=True))
    return decoded(weight) * scales.double()[rows][:, columns]


def by_hand(linear: FP8Linear, x: Tensor) -> Tensor:
    """What the linear map makes of rows [N, D], in float64."""
    weight = spread(linear.weight, linear.weight_scale_inv, linear.block)
    return rounded(x, linear.block[1]) @ weight.T


def fill(linear: FP8Linear, weight: Tensor) -> None:
    """The weight [F, D] in eight bits: the greatest number of each block becomes the greatest of the type."""
    tall, wide = linear.block
    blocks = weight.float().unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    scales = blocks.abs().amax((1, 3)) / 448
    linear.weight_scale_inv.data.copy_(scales)
    linear.weight.data.copy_((blocks / scales[:, None, :, None]).view_as(weight).clamp(-448, 448))


def in_eight_bits(model: Model, block: Block = (16, 16)) -> Model:
    """The model, its projections in eight bits."""
    modules = dict(model.named_modules())
    names = [name for name in modules if name.rpartition(".")[2] in PROJECTIONS]
    keep_in_eight_bits(model, names, block)
    for name in names:
        fill(model.get_submodule(name), modules[name].weight)  # type: ignore[arg-type]
    return model


class Spread(nn.Module):
    """An eight-bit linear map by hand, in the dtype of its input."""

    def __init__(self, linear: FP8Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return by_hand(self.linear, x.flatten(0, -2)).to(x.dtype).unflatten(0, x.shape[:-1])
