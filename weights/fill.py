"""Fills a module that was built on `meta` with stored tensors, after checking that they fit it.

Host memory holds one tensor beyond the module itself, whatever the size of the checkpoint.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qwen_gdn.block_products import E4M3
from qwen_gdn.quantised import BlockFP8

from .eight_bits import FP8
from .eight_bits import faults as eight_bit_faults
from .files import CheckpointError, listed
from .names import EMBEDDING, HEAD, SCALES, Plan, is_quantised, needs_float32
from .shards import Listing, Stored, read_tensors, same_values
from .slots import Slot

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_QUANTISED_DTYPES = ("F8_", "F6_", "F4")
_MOST = 6  # faults spelled out in one message


def check(folder: Path, slots: Mapping[str, Slot], plan: Plan, listing: Listing, form: BlockFP8 | None = None) -> None:
    """Checks names, dtypes and shapes against a module's slots, and a tied model's stored head against its embedding.

    Args:
        form: how the config says that weights are stored in eight bits, if they are.

    Raises:
        CheckpointError: something does not fit. All faults of one check are in one line, with their files.
    """
    stored, absent = listing
    used = {name for names in plan.doubled.values() for name in names}
    used |= {*plan.sources.values(), *plan.unknown, *plan.scales.values(), *(plan.tied_head or ())}
    lost = sorted(used & absent.keys())
    if lost:
        raise CheckpointError(f"{absent[lost[0]]} is missing, with {listed(lost)}; fetch the checkpoint again")
    known = {name for name in used if stored[name].dtype == FP8 or name.endswith(SCALES)} if form else set()
    quantised = [n for n in used - known if stored[n].dtype.startswith(_QUANTISED_DTYPES) or is_quantised(n)]
    if quantised:
        name = min(quantised)
        raise CheckpointError(
            f"{stored[name].file} is quantised ({name} is {stored[name].dtype}) in a way that config.json does not "
            "state or that is not read here; use the BF16 or the FP8 release"
        )
    faults = [*_name_faults(folder, plan, stored), *_content_faults(slots, plan, stored, known)]
    faults += eight_bit_faults(folder, form, slots, plan, stored) if form else ()
    if faults:
        more = f"; and {len(faults) - _MOST} more faults" if len(faults) > _MOST else ""
        remedy = "config.json and weights do not belong together: fetch both again, or correct config.json"
        raise CheckpointError("; ".join(faults[:_MOST]) + f"{more}; {remedy}")
    if plan.tied_head is not None:
        head, embedding = plan.tied_head
        if not same_values((head, stored[head]), (embedding, stored[embedding])):
            raise CheckpointError(
                f"{stored[head].file}: {head} differs from {embedding} in {stored[embedding].file}, but "
                f"{folder / 'config.json'} ties them; set tie_word_embeddings to false there to use both"
            )


def fill(
    module: nn.Module,
    places: Mapping[str, Slot],
    stored: Mapping[str, Stored],
    device: torch.device,
    dtype: torch.dtype,
    expand: Mapping[str, Callable[[Tensor], Tensor]],
) -> None:
    """Replaces parameters by their tensors, converted, without gradient; bytes read show on a terminal's stderr.

    Args:
        places: tensor name -> the slot that it fills; together they fill every parameter but the scales of what stays
            in eight bits.
        stored: tensor name -> where it lies.
        expand: name of a tensor stored in eight bits -> what makes numbers of it. Without such an entry it stays so.

    Raises:
        CheckpointError: a file can no longer be read, or a value is not finite or too large for the dtype.
    """
    by_file: dict[Path, set[str]] = {}
    for name, entry in stored.items():
        by_file.setdefault(entry.file, set()).add(name)
    for name in {slot.parameter for slot in places.values() if slot.part is not None}:
        set_parameter(module, name, torch.empty(module.get_parameter(name).shape, dtype=dtype, device=device))
    total = sum(entry.nbytes for entry in stored.values())
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        for file, names in by_file.items():
            finite: dict[str, Tensor] = {}
            for name, tensor in read_tensors(file, names):
                finite[name] = _is_finite(_put(module, places[name], tensor, device, dtype, expand.get(name)))
                bar.update(stored[name].nbytes)
            _check_finite(file, finite, dtype)


def _name_faults(folder: Path, plan: Plan, stored: Mapping[str, Stored]) -> Iterator[str]:
    for parameter, names in plan.doubled.items():
        places = " and as ".join(f"{name} in {stored[name].file}" for name in names)
        yield f"{parameter} is stored as {places}"
    if plan.missing:
        remedy = " (a head that shares the embedding needs tie_word_embeddings true)" if HEAD in plan.missing else ""
        yield f"{_place(folder, stored)} lacks {listed(_as_stored(plan))} that config.json asks for{remedy}"
    by_file: dict[Path, list[str]] = {}
    for name in plan.unknown:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        yield f"{file} holds tensors that this model has no place for: {listed(names)}"


def _place(folder: Path, stored: Mapping[str, Stored]) -> str:
    """The one weight file of a checkpoint, or what stands for its several."""
    files = {entry.file for entry in stored.values()}
    return str(files.pop()) if len(files) == 1 else f"{folder} ({len(files)} weight files)"


def _as_stored(plan: Plan) -> list[str]:
    """Missing parameters under the prefix that this checkpoint uses, if any of its tensors shows it."""
    for parameter, name in plan.sources.items():
        if parameter != HEAD:
            prefix = name.removesuffix(parameter)
            return [missing if missing == HEAD else prefix + missing for missing in plan.missing]
    return plan.missing


def _content_faults(
    slots: Mapping[str, Slot], plan: Plan, stored: Mapping[str, Stored], known: Collection[str]
) -> Iterator[str]:
    wanted = [(name, slots[slot].shape) for slot, name in plan.sources.items()]
    if plan.tied_head is not None:
        wanted.append((plan.tied_head[0], slots[EMBEDDING].shape))
    for name, shape in wanted:
        entry = stored[name]
        if entry.dtype not in DTYPES and name not in known:
            yield f"{entry.file}: {name} is {entry.dtype}, none of the types {', '.join(DTYPES)}"
        if entry.shape != shape:
            yield f"{entry.file}: {name} has shape {list(entry.shape)}, but config.json asks for {list(shape)}"


def _put(
    module: nn.Module,
    slot: Slot,
    tensor: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    expand: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Fills a slot and returns what it holds now."""
    if slot.part is not None:
        expert, rows = slot.part
        value = tensor if expand is None else expand(tensor.to(device))
        return module.get_parameter(slot.parameter)[expert, rows].copy_(value)
    if expand is not None:
        value = expand(tensor.to(device))
    elif tensor.dtype == E4M3:
        value = _converted(tensor, device, E4M3)
    else:
        wide = torch.promote_types(dtype, torch.float32) if needs_float32(slot.parameter) else dtype
        value = _converted(tensor, device, wide)
    set_parameter(module, slot.parameter, value)
    return value


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Puts a parameter without gradient in the place of another."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def _converted(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy with storage of its own. It moves before it is cast: checkpoints are rarely wider than models."""
    value = tensor.to(device).to(dtype)
    return tensor.clone() if value is tensor else value


def _is_finite(value: Tensor) -> Tensor:
    """Whether all values are, as a tensor on their device: asking one by one would wait for it every time."""
    if value.dtype == E4M3:  # the type's one number that is not finite has two signs
        return (value.view(torch.int8).amax() < 0x7F) & (value.view(torch.uint8).amax() < 0xFF)
    # NaN wins over any number in both, so one pass without temporaries tells.
    least, greatest = value.aminmax()
    return least.isfinite() & greatest.isfinite()


def _check_finite(file: Path, finite: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Refuses the first tensor of a file that is not finite, by what the file itself holds for it."""
    flags = torch.stack(tuple(finite.values()))
    broken = [] if flags.is_meta else [name for name, fine in zip(finite, flags.tolist(), strict=True) if not fine]
    for name, tensor in read_tensors(file, broken[:1]):
        tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor
        if bool(_is_finite(tensor)):
            raise CheckpointError(f"{file}: {name} has values that {dtype} cannot hold; ask for a wider dtype")
        wrong = (~tensor.isfinite()).sum()
        raise CheckpointError(
            f"{file}: {name} has {int(wrong)} values of {tensor.numel()} that are NaN or infinite; "
            "fetch the file again, and if it stays so use another checkpoint"
        )
