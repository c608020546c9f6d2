"""Products of rows in eight bits with a weight in eight bits whose blocks share a scale, summed in float32.

Where a device multiplies such blocks itself it does; elsewhere the same numbers are multiplied at full width, which is
the oracle of the other.

A device's product gives each of its units a tile of 128 outputs and up to 128 rows at a time. A weight that has fewer
tiles than the device has units, or a few more than a multiple of them, keeps only some busy; programs therefore cut it
into parts whose products run at the same time. In a part of the columns they are sums still to be added up. Small
products of the same rows at full width run beside them. A program's one row would leave most of a tile empty: it is
multiplied by sums that a compiler makes of the weight.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import product
from .recorded import compiled

E4M3 = torch.float8_e4m3fn
GRAIN = 16  # rows that a device multiplies are a multiple of this
_BLOCK = (128, 128)  # the one that devices multiply by themselves
_FOURS = 4  # columns of scales that it wants are a multiple of this
_STRIPE = 4096  # rows of a weight that are expanded at once
_TILE = 128  # rows up to which a unit's tile holds all of them
_MOST_PARTS = 4
_LEAST_PART = 8  # blocks of columns; a smaller part takes less than starting it


class BlockRows(NamedTuple):
    """Rows in eight bits.

    numbers: float8_e4m3fn [N, D / block[1], block[1]]. Programs take these pieces as they are: a compiler would write
        rows made of them in a pass of their own.
    scales: float32 [N, D / block[1]], one of each piece.
    """

    numbers: Tensor
    scales: Tensor


class BlockWeight(NamedTuple):
    """A weight in eight bits.

    numbers: float8_e4m3fn [F, D].
    scales: float32 [F / block[0], D / block[1]], without a rest.
    laid: `laid_out` of the scales, without which programs that cut the weight do so at every call.
    """

    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]
    laid: Tensor | None = None


class Part(NamedTuple):
    """Rows and columns of a weight, from and to, in blocks."""

    top: int
    bottom: int
    left: int
    right: int

    def of(self, tensor: Tensor, block: Sequence[int] = (1, 1)) -> Tensor:
        tall, wide = block
        return tensor[self.top * tall : self.bottom * tall, self.left * wide : self.right * wide]


def has_whole_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether a weight of this shape [F, D] is made of whole blocks, as all that are published are."""
    return len(shape) == 2 and all(size % step == 0 for size, step in zip(shape, block, strict=True))


@cache
def multiplies_blocks(device: torch.device) -> bool:
    """Whether torch multiplies such blocks on this device by itself; tried, as device, CUDA and torch have a say."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    tall, wide = _BLOCK
    numbers, weight = (torch.zeros(n, _FOURS * wide, dtype=E4M3, device=device) for n in (GRAIN, tall))
    factors, scales = (torch.ones(size, device=device) for size in ((_FOURS, GRAIN), (1, _FOURS)))
    try:
        _scaled(numbers, factors, weight, scales, torch.bfloat16)
    except torch.OutOfMemoryError:  # says nothing of the device, and False would be kept
        raise
    except (RuntimeError, ValueError):  # NotImplementedError among them
        return False
    return True


def is_multiplied(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device by itself multiplies rows of that dtype by a weight [F, D] of that shape."""
    fitting = block == _BLOCK and dtype == torch.bfloat16 and has_whole_blocks(shape, (block[0], _FOURS * block[1]))
    return fitting and multiplies_blocks(device)


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


def block_products(rows: BlockRows, weight: BlockWeight, full: Tensor, others: Sequence[Tensor] = ()) -> list[Tensor]:
    """Rows by a weight, and by each of the others at full width; programs run all these products at the same time.

    Args:
        rows: on CUDA, a multiple of `GRAIN` of them unless one `is_summed`.
        full: the rows that those numbers stand for, [N', D], perhaps fewer.
        others: weights [G, D] of the dtype of the full rows.

    Returns:
        [N, F] and each [N', G], all of that dtype.
    """
    (numbers, factors), scales, dtype = rows, weight.scales, full.dtype
    given = (numbers, factors.t().contiguous(), weight.numbers)
    if not torch.compiler.is_compiling():
        whole = _products(*given, scales, weight.block, dtype, dtype)
        return [whole, *(product(full, other) for other in others)]
    units = _units(tuple(weight.numbers.shape), weight.block, dtype, numbers.device) if 1 < len(numbers) <= _TILE else 0
    parts = cut(scales.shape[0], scales.shape[1], units)
    if len(parts) > 1:
        scales = _one_after_another(scales, parts) if weight.laid is None else weight.laid
    beside = [full, *others] if units and others else []
    bounds = [bound for part in parts for bound in part]
    found = _opaque_products(*given, scales, list(weight.block), dtype, bounds, beside)
    whole = _added_up(found[: len(parts)], parts, dtype)
    return [whole, *(found[len(parts) :] if beside else [product(full, other) for other in others])]


def is_summed(rows: int) -> bool:
    """Whether rows of that number are not multiplied by the device's product; then no grain is wanted of them."""
    return rows == 1 and torch.compiler.is_compiling()


def laid_out(scales: Tensor, block: tuple[int, int]) -> Tensor | None:
    """A weight's scales once more as its device wants them of each part by itself; None if it is not cut."""
    tall, wide = scales.shape
    units = _units((tall * block[0], wide * block[1]), block, torch.bfloat16, scales.device)
    parts = cut(tall, wide, units)
    return _one_after_another(scales, parts) if len(parts) > 1 else None


def cut(tall: int, wide: int, units: int) -> list[Part]:
    """A weight of tall by wide blocks in parts that keep so many units busy; in one if that already does.

    What is left beyond whole rounds of all units is cut along its columns ("split K"), for as many units as are free. A
    product of whole rounds also needs no counter, which would have to be cleared first; a recording waits for that.
    """
    rest = tall % units if units else 0
    count = min(units // rest, _MOST_PARTS, wide // _LEAST_PART) if rest else 1
    if count <= 1:
        return [Part(0, tall, 0, wide)]
    whole = [Part(0, tall - rest, 0, wide)] if rest < tall else []
    bounds = [wide // _FOURS * i // count * _FOURS for i in range(count + 1)]
    return whole + [Part(tall - rest, tall, left, right) for left, right in pairwise(bounds)]


def _one_after_another(scales: Tensor, parts: Sequence[Part]) -> Tensor:
    """The scales of each part, flat."""
    return torch.cat([part.of(scales).flatten() for part in parts])


def _added_up(products: Sequence[Tensor], parts: Sequence[Part], dtype: torch.dtype) -> Tensor:
    """The product with a whole weight from those with its parts."""
    tops = sorted({part.top for part in parts})
    bands = [[own for own, part in zip(products, parts, strict=True) if part.top == top] for top in tops]
    return torch.cat([sum(band[1:], band[0]).to(dtype) for band in bands], dim=1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _units(shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, device: torch.device) -> int:
    """How many units multiply blocks of such a weight at the same time; 0 if the device does not by itself."""
    if not is_multiplied(shape, block, dtype, device):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def _products(
    numbers: Tensor,
    factors: Tensor,
    weight: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    out: torch.dtype,
) -> Tensor:
    """Products of pieces, whose scales are [D / block, N]: [N, F] of the dtype `out`."""
    if len(numbers) == 1 and numbers.is_cuda:
        one: Tensor = compiled(_summed, searched=True)(numbers, factors, weight, scales, block, out)
        return one
    if is_multiplied(tuple(weight.shape), block, dtype, weight.device):
        return _scaled(numbers.flatten(1), factors, weight, scales, out)
    exact = torch.promote_types(dtype, torch.float32)
    rows = (numbers.to(exact) * factors.t()[..., None]).flatten(1)
    stripe = max(_STRIPE // block[0], 1)
    stripes = zip(weight.split(stripe * block[0]), scales.split(stripe), strict=True)
    with torch.autocast(weight.device.type, enabled=False):
        return torch.cat([F.linear(rows, expanded(part, by, block, exact)) for part, by in stripes], 1).to(out)


def _summed(
    numbers: Tensor, factors: Tensor, weight: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """One row's products as sums over each block's columns, and their sums.

    With the usual tiles a device is busier starting groups of threads than reading: it takes a quarter longer.
    """
    tall, wide = block
    exact = torch.promote_types(dtype, torch.float32)
    sums = (weight.unflatten(1, (-1, wide)).to(exact) * numbers.to(exact)).sum(dim=2)
    scaled = sums.unflatten(0, (-1, tall)) * (scales * factors.t())[:, None]
    out: Tensor = scaled.sum(dim=2).flatten().to(dtype)[None]
    return out


def _scaled(numbers: Tensor, factors: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by the device; it wants each row's scales, and each column of blocks', as columns next to each other."""
    return F.scaled_mm(
        numbers,
        weight.t(),
        factors.t(),
        F.ScalingType.BlockWise1x128,
        scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )


# Compilers differ in which of these products they know, and none could trace what depends on the device.
@torch.library.custom_op("qwen_gdn::block_products", mutates_args=())
def _opaque_products(
    numbers: Tensor,
    factors: Tensor,
    weight: Tensor,
    scales: Tensor,
    block: list[int],
    dtype: torch.dtype,
    bounds: list[int],
    beside: list[Tensor],
) -> list[Tensor]:
    """The products of every part, float32 where other columns are still to be added, and those beside.

    Args:
        scales: of one part, as they are; of several, each part's flat, one after another.
        bounds: the four of each part.
        beside: full rows and weights by which they are multiplied, or nothing.
    """
    tall, wide = block
    parts = _from_bounds(bounds)

    def of(part: Part, own: Tensor) -> Tensor:
        pieces, by = numbers[:, part.left : part.right], factors[part.left : part.right]
        out = _sum_dtype(part, weight, block, dtype)
        return _products(pieces, by, part.of(weight, block), own, (tall, wide), dtype, out)

    sizes = [(part.bottom - part.top) * (part.right - part.left) for part in parts]
    owned = [
        own.view(part.bottom - part.top, -1) for part, own in zip(parts, scales.flatten().split(sizes), strict=True)
    ]
    calls = [partial(of, part, own) for part, own in zip(parts, owned, strict=True)]
    calls += [partial(F.linear, beside[0], other) for other in beside[1:]]
    return _at_once(calls) if numbers.is_cuda else [call() for call in calls]


@_opaque_products.register_fake
def _(
    numbers: Tensor,
    factors: Tensor,
    weight: Tensor,
    scales: Tensor,
    block: list[int],
    dtype: torch.dtype,
    bounds: list[int],
    beside: list[Tensor],
) -> list[Tensor]:
    parts = [
        numbers.new_empty(
            len(numbers), (part.bottom - part.top) * block[0], dtype=_sum_dtype(part, weight, block, dtype)
        )
        for part in _from_bounds(bounds)
    ]
    return parts + [beside[0].new_empty(len(beside[0]), len(other)) for other in beside[1:]]


def _from_bounds(bounds: Sequence[int]) -> list[Part]:
    return [Part(*bounds[i : i + 4]) for i in range(0, len(bounds), 4)]


def _sum_dtype(part: Part, weight: Tensor, block: Sequence[int], dtype: torch.dtype) -> torch.dtype:
    """The dtype of a part's product: that of whole sums, or one in which they can still be added up."""
    whole = (part.right - part.left) * block[1] == weight.shape[1]
    return dtype if whole else torch.promote_types(dtype, torch.float32)


def _at_once(calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """What the calls return, each run on a stream of its own; a recording keeps that they may run together."""
    main = torch.cuda.current_stream()
    streams = [_side_stream(main.device, i) for i in range(len(calls) - 1)]
    for stream in streams:
        stream.wait_stream(main)
    found = [calls[0]()]
    for stream, call in zip(streams, calls[1:], strict=True):
        with torch.cuda.stream(stream):
            found.append(call())
        main.wait_stream(stream)
    return found


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
