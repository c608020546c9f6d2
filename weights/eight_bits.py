"""Weights stored in eight bits: what must stand beside them, and what they come to.

A weight is in eight bits if and only if its file says F8_E4M3; its numbers mean nothing without its scales, so neither
is ever read without the other.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from qwen_gdn.block_products import has_whole_blocks, is_multiplied
from qwen_gdn.quantised import PROJECTIONS, BlockFP8

from .files import CheckpointError, listed
from .names import SCALES, Plan
from .shards import Stored, read_tensors
from .slots import Slot

FP8 = "F8_E4M3"
EightBits = Literal["auto", "keep", "expand"]
"""What becomes of weights in eight bits: they stay so where the device multiplies them, wherever they can, or never."""
_SCALE_DTYPES = ("BF16", "F32")


def faults(
    folder: Path, form: BlockFP8, slots: Mapping[str, Slot], plan: Plan, stored: Mapping[str, Stored]
) -> Iterator[str]:
    """What does not fit between eight-bit weights, their scales and the config, each fault in words.

    Args:
        form: its excluded names are those of parameters.
    """
    weights = {name: slots[slot] for slot, name in plan.sources.items() if stored[name].dtype == FP8}
    if not weights:
        yield f"{folder / 'config.json'} says that weights are stored as {FP8}, but none is"
    for name, slot in weights.items():
        entry, scales = stored[name], plan.scales.get(name)
        if len(slot.shape) != 2:
            yield f"{entry.file}: {name} is {FP8}, which only matrices can be"
        elif scales is None:
            yield f"{entry.file}: {name} is {FP8}, but {name + SCALES} is stored nowhere"
        else:
            yield from _scale_faults(form, name, slot, scales, stored[scales])
    for slot_name, name in plan.sources.items():
        excluded, entry = slot_name in form.excluded, stored[name]
        eight = entry.dtype == FP8
        if eight and excluded:
            yield f"{entry.file}: {name} is {FP8}, but modules_to_not_convert of config.json names its module"
        elif not eight and not excluded and slot_name.removesuffix(".weight").rpartition(".")[2] in PROJECTIONS:
            yield (
                f"{entry.file}: {name} is {entry.dtype}, but config.json says {FP8} and does not name its module in "
                "modules_to_not_convert"
            )
    head, embedding = plan.tied_head or (None, None)
    if head is not None and stored[head].dtype == FP8:
        yield f"{stored[head].file}: {head} is {FP8} beside {embedding}, to which config.json ties it; leave it out"
    for weight, scales in plan.scales.items():
        if weight not in weights and weight != head:
            what = stored[weight].dtype if weight in stored else "not there"
            yield f"{stored[scales].file}: {scales} is stored, but {weight} is {what}, not {FP8}"


def _scale_faults(form: BlockFP8, name: str, slot: Slot, scales: str, entry: Stored) -> Iterator[str]:
    wanted = tuple(ceil(size / block) for size, block in zip(slot.shape, form.block, strict=True))
    if entry.shape != wanted:
        yield (
            f"{entry.file}: {scales} has shape {list(entry.shape)}, but {name} of {list(slot.shape)} in blocks of "
            f"{list(form.block)} needs {list(wanted)}"
        )
    if entry.dtype not in _SCALE_DTYPES:
        yield f"{entry.file}: {scales} is {entry.dtype}, none of the types {', '.join(_SCALE_DTYPES)}"


def read_scales(plan: Plan, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The scales of each eight-bit weight, by its name.

    Raises:
        CheckpointError: a file can no longer be read, or a scale is no finite number above 0.
    """
    weights = {scales: weight for weight, scales in plan.scales.items()}
    found: dict[str, Tensor] = {}
    for file in {stored[scales].file for scales in weights}:
        for scales, tensor in read_tensors(file, {name for name in weights if stored[name].file == file}):
            wrong = int((~(tensor.isfinite() & (tensor > 0))).sum())
            if wrong:
                raise CheckpointError(
                    f"{file}: {scales} has {wrong} values of {tensor.numel()} that are NaN, infinite or not above 0; "
                    "fetch it again"
                )
            found[weights[scales]] = tensor.clone()
    return found


def stays(
    shape: tuple[int, ...], block: tuple[int, int], choice: EightBits, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a linear map's weight of that shape stays in eight bits for activations of that dtype."""
    if choice == "keep":
        return has_whole_blocks(shape, block)
    return choice == "auto" and is_multiplied(shape, block, dtype, device)


def kept(plan: Plan, slots: Mapping[str, Slot], fits: Callable[[tuple[int, ...]], bool]) -> dict[str, str]:
    """The linear maps of the module whose weights stay in eight bits -> the names of their tensors.

    Projections alone can; experts, which are fused, and whatever else is in eight bits are expanded.

    Args:
        fits: whether a weight of that shape can stay so.
    """
    paths = {slot.removesuffix(".weight"): (slots[slot], name) for slot, name in plan.sources.items()}
    return {
        path: name
        for path, (slot, name) in paths.items()
        if name in plan.scales and slot.part is None and path.rpartition(".")[2] in PROJECTIONS and fits(slot.shape)
    }


def announcement(plan: Plan, stored: Mapping[str, Stored], staying: Collection[str], dtype: torch.dtype) -> str:
    """What a checkpoint's eight-bit weights take in memory, in words; empty if it has none.

    Args:
        staying: those that stay in eight bits; the others are expanded.
    """
    weights = {name: stored[name] for name in plan.sources.values() if stored[name].dtype == FP8}
    stay = sum(entry.nbytes for name, entry in weights.items() if name in staying)
    expand = sum(entry.nbytes for name, entry in weights.items() if name not in staying)
    said = [f"stay so, {stay / 2**30:.2f} GiB"] if stay else []
    said += [f"are expanded to {dtype}, {expand * dtype.itemsize / 2**30:.2f} GiB"] if expand else []
    files = listed(sorted({entry.file.name for entry in weights.values()}), most=2)
    return f"{files}: weights in eight bits " + "; others ".join(said) if said else ""
