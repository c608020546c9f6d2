"""Builds a target, its MTP module or a drafter from a checkpoint: every parameter filled exactly once, or one error.

Modules are built without memory, and all that configs and headers tell is checked before any data are read.
Targets may be stored in eight bits with a scale a block; they are expanded here. What is quantised in another way is
refused.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddtree import drafters
from ddtree.drafter import DFlashDrafter
from qwen_gdn.config import ModelConfig
from qwen_gdn.model import QwenGDN
from qwen_gdn.mtp import MTP, MTPConfig
from qwen_gdn.quantised import BlockFP8

from . import names
from .configs import ConfigKind, read_config
from .eight_bits import FP8, announcement, expanded, read_scales
from .files import CONFIG_FILES, INDEX_FILE, CheckpointError, Part, Source, fetch_shards, one_line, resolve
from .fill import DTYPES, check, fill
from .shards import Stored, list_tensors, read_index
from .slots import slots

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What one load read.

    Attributes:
        folder: where the files lie.
        dtype: dtype of the parameters, but for the few kept in float32.
        tensors, nbytes: number and stored size of the tensors that fill parameters, scales included.
        skipped: rule -> number of tensors that it left out.
    """

    folder: Path
    dtype: torch.dtype
    tensors: int
    nbytes: int
    skipped: Mapping[str, int]


def load_target(source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> QwenGDN:
    """A target model in eval mode, without gradients.

    Args:
        source: a folder, a hub id `owner/name`, or `bundled`.
        dtype: of weights and activations. None is float32 on a CPU and elsewhere the type in which most of the
            checkpoint's bytes are stored. A_log, dt_bias and the delta layers' norms stay in float32 regardless
            (float64 in a float64 model).

    Raises:
        ValueError: the source cannot be found or read as a Qwen3.5/3.6/3.8 checkpoint, or this device or
            dtype cannot be had (mostly its subclass `CheckpointError`); one line that says what and where.
    """
    return read_target(source, device=device, dtype=dtype)[0]


def load_drafter(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> DFlashDrafter:
    """A DFlash drafter in eval mode, without gradients; arguments and errors as for `load_target`.

    The config's `architectures` names its kind: DFlash 2 gives a `DFlash2Drafter`. It has no embedding and no head:
    those are the target's, which it meets in `bind`.
    """
    return read_drafter(source, device=device, dtype=dtype)[0]


def load_mtp(source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> MTP:
    """The MTP module in a target's checkpoint, in eval mode, without gradients; `MTPDrafter` drafts with it.

    Of the checkpoint it reads `mtp.*` alone. Arguments and errors as for `load_target`; a checkpoint whose config
    states no such module, or that holds none, is refused.
    """
    return read_mtp(source, device=device, dtype=dtype)[0]


def read_target(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[QwenGDN, LoadReport]:
    """`load_target`, and what was read and left out."""
    return _load(source, _TARGET, device, dtype)


def read_drafter(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[DFlashDrafter, LoadReport]:
    """`load_drafter`, and what was read and left out."""
    return _load(source, _DRAFTER, device, dtype)


def read_mtp(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[MTP, LoadReport]:
    """`load_mtp`, and what was read and left out."""
    return _load(source, _MTP, device, dtype)


class _Kind(NamedTuple):
    """What differs between the kinds of module; `absent` is said where a checkpoint may be whole without it."""

    part: Part
    config: ConfigKind[Any]
    build: Callable[[Any], nn.Module]
    skip: names.Skip
    rename: Callable[[str], str | None]
    absent: str | None = None


_TARGET = _Kind("target", ModelConfig, QwenGDN, names.skip_in_target, names.target_parameter)
_DRAFTER = _Kind("drafter", drafters, drafters.build, names.skip_in_drafter, lambda name: name)
_MTP = _Kind(
    "target",
    MTPConfig,
    MTP,
    names.skip_in_mtp,
    names.mtp_parameter,
    "holds no mtp.* tensors, though config.json states an MTP module; fetch a release that keeps them, or use another "
    "drafter",
)


def _load(source: Source, kind: _Kind, device: str | torch.device, dtype: torch.dtype | None) -> tuple[Any, LoadReport]:
    where = _checked_device(device)
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype {dtype} is not supported; use one of {', '.join(map(str, DTYPES.values()))}")
    folder = resolve(source, kind.part, (*CONFIG_FILES, INDEX_FILE))
    config = read_config(kind.config, folder)
    with torch.device("meta"):
        module = kind.build(config)
    index = read_index(folder)
    fetch_shards(source, folder, None if index is None else {f for t, f in index.items() if not kind.skip(t)})
    listing = list_tensors(folder)
    stored = [*listing.stored, *listing.absent]
    places = slots(module, {parameter for name in stored if (parameter := kind.rename(name)) is not None})
    plan = names.plan(stored, places, kind.skip, kind.rename)
    if kind.absent and not plan.sources and not plan.unknown:
        raise CheckpointError(f"{folder} {kind.absent}")
    form: BlockFP8 | None = getattr(config, "quantization", None)
    check(folder, places, plan, listing, form)
    wanted = {name: listing.stored[name] for name in plan.sources.values()}
    if dtype is None:
        dtype = torch.float32 if where.type == "cpu" else _prevailing(wanted.values())
    expand = {} if form is None else _expanding(form, plan, listing.stored, dtype)
    fill(module, {name: places[slot] for slot, name in plan.sources.items()}, wanted, where, dtype, expand)
    read = [*wanted.values(), *(listing.stored[name] for name in plan.scales.values())]
    report = LoadReport(folder, dtype, len(read), sum(s.nbytes for s in read), dict(plan.skipped))
    _log.info("%s", report)
    return module.eval(), report


def _checked_device(device: str | torch.device) -> torch.device:
    """The device, after a trial allocation: what is missing shows before a checkpoint is read."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {one_line(error)}; use 'cpu'") from None


def _expanding(
    form: BlockFP8, plan: names.Plan, stored: Mapping[str, Stored], dtype: torch.dtype
) -> dict[str, Callable[[Tensor], Tensor]]:
    """What makes numbers of each tensor in eight bits, and says on the log what memory they will take."""
    _log.warning("%s", announcement(plan, stored, dtype))
    scales = read_scales(plan, stored)
    return {name: partial(expanded, scales=scale, block=form.block, dtype=dtype) for name, scale in scales.items()}


def _prevailing(stored: Iterable[Stored]) -> torch.dtype:
    """The dtype in which most bytes are stored, those in eight bits left out: they say nothing of the others'."""
    weight: Counter[str] = Counter()
    for entry in stored:
        if entry.dtype != FP8:
            weight[entry.dtype] += entry.nbytes
    return DTYPES[weight.most_common(1)[0][0]]
