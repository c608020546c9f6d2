"""Linear maps whose weights stay in eight bits: E4M3 numbers in blocks that share a scale.

The activations are put into the same form at every call, each row by itself and in pieces as wide as a block, with the
scale at which the greatest number of a piece is the greatest of the type (arXiv 2412.19437, section 3.3). Products of
the two are summed in float32. Where a device multiplies such blocks itself it does; elsewhere the same numbers are
multiplied at full width, which is the oracle of the other.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .norms import at_least_float32

E4M3 = torch.float8_e4m3fn
GREATEST = torch.finfo(E4M3).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_BLOCK = (128, 128)  # the one that devices multiply by themselves
_GRAIN = 16  # rows that a device multiplies are a multiple of this; its columns of scales must be aligned, too
_STRIPE = 4096  # rows of a weight that are expanded at once


class FP8Linear(nn.Module):
    """A linear map without bias, [..., D] to [..., F], in the dtype of its input; names are the checkpoint's.

    weight: float8_e4m3fn [F, D].
    weight_scale_inv: float32 [F / block[0], D / block[1]]; W = weight · scale. Blocks must be whole.

    Neither takes part in `.to(dtype)`: the type of its numbers says nothing of the activations' type, and another one
    would not hold them. It has no gradient.
    """

    def __init__(self, in_features: int, out_features: int, block: tuple[int, int]) -> None:
        super().__init__()
        self.in_features, self.out_features, self.block = in_features, out_features, block
        if not has_whole_blocks((out_features, in_features), block):
            raise ValueError(
                f"a weight of {out_features} rows and {in_features} columns is not made of whole blocks of {block[0]} "
                f"by {block[1]}; use an nn.Linear of the expanded weight"
            )
        scales = (out_features // block[0], in_features // block[1])
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=E4M3), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.empty(scales, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return block_linear(x, self.weight, self.weight_scale_inv, self.block)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, block={self.block}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FP8Linear":
        def moved(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.dtype != E4M3:
            raise ValueError(
                f"{prefix}weight is {given.dtype} and would be cast to {E4M3}; give numbers with their scales"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def keep_in_eight_bits(module: nn.Module, names: Iterable[str], block: tuple[int, int]) -> None:
    """Puts an empty `FP8Linear` in the place of each named linear map without bias, on the device where that is."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear) and linear.bias is None, name
        with linear.weight.device:
            setattr(module.get_submodule(parent), leaf, FP8Linear(linear.in_features, linear.out_features, block))


def has_whole_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether a weight of this shape [F, D] is made of whole blocks, as all that are published are."""
    return len(shape) == 2 and all(size % step == 0 for size, step in zip(shape, block, strict=True))


def block_linear(x: Tensor, weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """x [..., D] by a weight in eight bits, [..., F] in x's dtype; no row depends on another.

    Args:
        weight: float8_e4m3fn [F, D].
        scales: float32 [F / block[0], D / block[1]], without a rest.
    """
    rows = x.flatten(0, -2)
    count = rows.shape[0]
    compiling = torch.compiler.is_compiling()
    if compiling and count == 1:
        return _one_row(rows, weight, scales, block).view(*x.shape[:-1], -1)
    if rows.is_cuda and count % _GRAIN:
        rows = F.pad(rows, (0, 0, 0, -count % _GRAIN))
    numbers, factors = quantised(rows, block[1])
    products = _opaque_products if compiling else _products
    out: Tensor = products(numbers, factors.t().contiguous(), weight, scales, list(block), x.dtype)
    return out[:count].view(*x.shape[:-1], -1)


def quantised(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Rows [N, D] in eight bits: float8_e4m3fn [N, D], and the scale of each piece, float32 [N, D / width].

    What is not finite makes its piece so.
    """
    pieces = at_least_float32(rows).unflatten(1, (-1, width))
    scales = (pieces.abs().amax(dim=2).float() / GREATEST).clamp_min(_LEAST_SCALE)
    numbers = (pieces / scales[..., None]).clamp(-GREATEST, GREATEST).to(E4M3)
    return numbers.flatten(1), scales


def expanded(weight: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """weight · scale, multiplied in float32 or wider and rounded once; by rows of blocks, to hold little beside it.

    Args:
        weight: float8_e4m3fn [rows, columns].
        scales: [rows / block, columns / block], rounded up.
    """
    tall, wide = (min(size, step) for size, step in zip(weight.shape, block, strict=True))
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    exact = torch.promote_types(dtype, torch.float32)
    scales = scales.to(weight.device, exact)
    for part, by, into in zip(weight.split(tall), scales, out.split(tall), strict=True):
        into.copy_(part.to(exact) * by.repeat_interleave(wide)[: weight.shape[1]])
    return out


@cache
def multiplies_blocks(device: torch.device) -> bool:
    """Whether torch multiplies such blocks on this device by itself; tried, as device, CUDA and torch have a say."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    tall, wide = _BLOCK
    numbers, weight = (torch.zeros(n, 4 * wide, dtype=E4M3, device=device) for n in (_GRAIN, tall))
    factors, scales = (torch.ones(size, device=device) for size in ((4, _GRAIN), (1, 4)))
    try:
        _scaled(numbers, factors, weight, scales)
    except (RuntimeError, ValueError):  # NotImplementedError among them
        return False
    return True


def is_multiplied(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device by itself multiplies rows of that dtype by a weight [F, D] of that shape."""
    # The product wants columns of scales in fours.
    fitting = block == _BLOCK and dtype == torch.bfloat16 and has_whole_blocks(shape, (block[0], 4 * block[1]))
    return fitting and multiplies_blocks(device)


def _one_row(row: Tensor, weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """One row [1, D] as a sum that a compiler makes one pass over the weight of; [1, F]."""
    numbers, factors = quantised(row, block[1])
    wide = at_least_float32(row).dtype
    x = numbers.to(wide) * factors.repeat_interleave(block[1], dim=1)
    # A view that states its strides is written out first. The quantisation would be done over for every output else.
    x = x.as_strided(x.shape, (x.shape[1], 1))
    by = scales.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return (weight.to(wide) * by * x).sum(dim=1, dtype=wide).to(row.dtype)[None]


def _products(
    numbers: Tensor, factors: Tensor, weight: Tensor, scales: Tensor, block: list[int], dtype: torch.dtype
) -> Tensor:
    """Rows in eight bits [N, D], of scales [D / block, N], by the weight: [N, F] of the dtype."""
    tall, wide = block
    if is_multiplied(tuple(weight.shape), (tall, wide), dtype, weight.device):
        return _scaled(numbers, factors, weight, scales)
    exact = torch.promote_types(dtype, torch.float32)
    rows = numbers.to(exact) * factors.t().repeat_interleave(wide, dim=1)
    stripe = max(_STRIPE // tall, 1)
    stripes = zip(weight.split(stripe * tall), scales.split(stripe), strict=True)
    return torch.cat([F.linear(rows, expanded(part, by, (tall, wide), exact)) for part, by in stripes], 1).to(dtype)


def _scaled(numbers: Tensor, factors: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The same by the device; it wants each row's scales, and each column of blocks', as columns next to each other."""
    return F.scaled_mm(
        numbers,
        weight.t(),
        factors.t(),
        F.ScalingType.BlockWise1x128,
        scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


# Compilers differ in which of these products they know, and none could trace what depends on the device.
@torch.library.custom_op("qwen_gdn::block_products", mutates_args=())
def _opaque_products(
    numbers: Tensor, factors: Tensor, weight: Tensor, scales: Tensor, block: list[int], dtype: torch.dtype
) -> Tensor:
    return _products(numbers, factors, weight, scales, block, dtype)


@_opaque_products.register_fake
def _(numbers: Tensor, factors: Tensor, weight: Tensor, scales: Tensor, block: list[int], dtype: torch.dtype) -> Tensor:
    return numbers.new_empty(numbers.shape[0], weight.shape[0], dtype=dtype)
