"""Fills a module that was built on `meta` with stored tensors, after checking that they fit it.

Host memory holds one tensor beyond the module itself, whatever the size of the checkpoint.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .files import CheckpointError, listed
from .names import HEAD, Plan, is_quantised, needs_float32
from .shards import Listing, Stored, read_tensors, same_values

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_QUANTISED_DTYPES = ("F8_", "F6_", "F4")
_MOST = 6  # faults spelled out in one message


def check(folder: Path, module: nn.Module, plan: Plan, listing: Listing) -> None:
    """Checks names, dtypes and shapes against the module, and a stored head of a tied model against its embedding.

    Raises:
        CheckpointError: something does not fit. All faults of one check are in one line, with their files.
    """
    stored, absent = listing
    used = {name for names in plan.doubled.values() for name in names}
    used |= {*plan.sources.values(), *plan.unknown, *(plan.tied_head or ())}
    lost = sorted(used & absent.keys())
    if lost:
        raise CheckpointError(f"{absent[lost[0]]} is missing, with {listed(lost)}; fetch the checkpoint again")
    quantised = [n for n in used if stored[n].dtype.startswith(_QUANTISED_DTYPES) or is_quantised(n)]
    if quantised:
        name = min(quantised)
        raise CheckpointError(
            f"{stored[name].file} is quantised ({name} is {stored[name].dtype}), which is not read here; "
            "use the BF16 release"
        )
    faults = [*_name_faults(folder, plan, stored), *_content_faults(module, plan, stored)]
    if faults:
        more = f"; and {len(faults) - _MOST} more faults" if len(faults) > _MOST else ""
        raise CheckpointError("; ".join(faults[:_MOST]) + more)
    if plan.tied_head is not None:
        head, embedding = plan.tied_head
        if not same_values((head, stored[head]), (embedding, stored[embedding])):
            raise CheckpointError(
                f"{stored[head].file}: {head} differs from {embedding}, but config.json ties them; "
                "set tie_word_embeddings to false to use both"
            )


def fill(
    module: nn.Module,
    sources: Mapping[str, str],
    stored: Mapping[str, Stored],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Replaces every parameter by its tensor, converted, without gradient; bytes read show on a terminal's stderr.

    Args:
        sources: parameter name -> tensor name.
        stored: tensor name -> where it lies.

    Raises:
        CheckpointError: a file can no longer be read, or a value is too large for the dtype.
    """
    parameters = {name: parameter for parameter, name in sources.items()}
    by_file: dict[Path, list[str]] = {}
    for name, entry in stored.items():
        by_file.setdefault(entry.file, []).append(name)
    total = sum(entry.nbytes for entry in stored.values())
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        for file, names in by_file.items():
            for name, tensor in read_tensors(file, names):
                path, _, leaf = parameters[name].rpartition(".")
                wide = torch.promote_types(dtype, torch.float32) if needs_float32(parameters[name]) else dtype
                try:
                    value = _converted(tensor, device, wide)
                except ValueError as error:
                    raise CheckpointError(f"{file}: {name} {error}") from None
                setattr(module.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))
                bar.update(stored[name].nbytes)


def _name_faults(folder: Path, plan: Plan, stored: Mapping[str, Stored]) -> Iterator[str]:
    for parameter, names in plan.doubled.items():
        places = " and as ".join(f"{name} in {stored[name].file}" for name in names)
        yield f"{parameter} is stored as {places}"
    if plan.missing:
        remedy = " (a head that shares the embedding needs tie_word_embeddings true)" if HEAD in plan.missing else ""
        yield f"{folder} lacks {listed(_as_stored(plan))}{remedy}"
    by_file: dict[Path, list[str]] = {}
    for name in plan.unknown:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        yield f"{file} holds tensors that this model has no place for: {listed(names)}"


def _as_stored(plan: Plan) -> list[str]:
    """Missing parameters under the prefix that this checkpoint uses, if any of its tensors shows it."""
    for parameter, name in plan.sources.items():
        if parameter != HEAD:
            prefix = name.removesuffix(parameter)
            return [missing if missing == HEAD else prefix + missing for missing in plan.missing]
    return plan.missing


def _content_faults(module: nn.Module, plan: Plan, stored: Mapping[str, Stored]) -> Iterator[str]:
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for parameter, name in plan.sources.items():
        entry = stored[name]
        if entry.dtype not in DTYPES:
            yield f"{entry.file}: {name} is {entry.dtype}, no floating-point type"
        if entry.shape != shapes[parameter]:
            yield (
                f"{entry.file}: {name} has shape {list(entry.shape)}, "
                f"but config.json asks for {list(shapes[parameter])}"
            )


def _converted(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy with storage of its own. It moves before it is cast: checkpoints are rarely wider than models."""
    value = tensor.to(device).to(dtype)
    if value is tensor:
        value = tensor.clone()
    narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if narrower and not bool(value.isfinite().all()):
        raise ValueError(f"has values that {dtype} cannot hold; ask for a wider dtype")
    return value
