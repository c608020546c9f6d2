"""Builds a target, its MTP module or a drafter from a checkpoint: every parameter filled exactly once, or one error.

Modules are built without memory, and all that configs and headers tell is checked before any data are read.
Targets may be stored in eight bits with a scale a block: linear maps stay so where the device multiplies them, the rest
is expanded here. What is quantised in another way is refused.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ddtree import drafters
from ddtree.drafter import DFlashDrafter
from qwen_gdn.block_products import expanded
from qwen_gdn.config import ModelConfig
from qwen_gdn.fp8 import keep_in_eight_bits
from qwen_gdn.model import QwenGDN
from qwen_gdn.mtp import MTP, MTPConfig
from qwen_gdn.quantised import BlockFP8
from qwen_gdn.stated import shown

from . import names
from .configs import ConfigKind, read_config
from .eight_bits import FP8, EightBits, announcement, kept, read_scales, stays
from .files import CONFIG_FILES, INDEX_FILE, CheckpointError, Part, Source, fetch_shards, one_line, resolve
from .fill import DTYPES, check, fill, set_parameter
from .shards import Stored, list_tensors, read_index
from .slots import slots

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What one load read.

    Attributes:
        folder: where the files lie.
        dtype: dtype of activations, and of the parameters but for the few kept in float32 and those in eight bits.
        tensors, nbytes: number and stored size of the tensors that fill parameters, scales included.
        skipped: rule -> number of tensors that it left out.
    """

    folder: Path
    dtype: torch.dtype
    tensors: int
    nbytes: int
    skipped: Mapping[str, int]


def load_target(
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    eight_bits: EightBits = "auto",
) -> QwenGDN:
    """A target model in eval mode, without gradients.

    Args:
        source: a folder, a hub id `owner/name`, or `bundled`.
        dtype: of weights and activations. None is float32 on a CPU and elsewhere the type in which most of the
            checkpoint's bytes are stored. A_log, dt_bias and the delta layers' norms stay in float32 regardless
            (float64 in a float64 model).
        eight_bits: what becomes of weights stored in eight bits. `auto` keeps the linear maps in eight bits where the
            device multiplies them by itself (Hopper, bfloat16 activations), and puts the activations into eight bits
            too; elsewhere it expands them to the asked dtype, as `expand` does everywhere. `keep` keeps them anywhere,
            which without such a device saves memory and costs time. Experts are expanded: torch has no product of
            theirs in such blocks. The log says what memory it takes.

    Raises:
        ValueError: the source cannot be found or read as a Qwen3.5/3.6/3.8 checkpoint, or this device or
            dtype cannot be had (mostly its subclass `CheckpointError`); one line that says what and where.
    """
    return read_target(source, device=device, dtype=dtype, eight_bits=eight_bits)[0]


def load_drafter(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> DFlashDrafter:
    """A DFlash drafter in eval mode, without gradients; arguments and errors as for `load_target`.

    The config's `architectures` names its kind: DFlash 2 gives a `DFlash2Drafter`. It has no embedding and no head:
    those are the target's, which it meets in `bind`.
    """
    return read_drafter(source, device=device, dtype=dtype)[0]


def load_mtp(
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    eight_bits: EightBits = "auto",
) -> MTP:
    """The MTP module in a target's checkpoint, in eval mode, without gradients; `MTPDrafter` drafts with it.

    Of the checkpoint it reads `mtp.*` alone. Arguments and errors as for `load_target`; a checkpoint whose config
    states no such module, or that holds none, is refused.
    """
    return read_mtp(source, device=device, dtype=dtype, eight_bits=eight_bits)[0]


def read_target(
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    eight_bits: EightBits = "auto",
) -> tuple[QwenGDN, LoadReport]:
    """`load_target`, and what was read and left out."""
    return _load(source, _TARGET, device, dtype, eight_bits)


def read_drafter(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[DFlashDrafter, LoadReport]:
    """`load_drafter`, and what was read and left out."""
    return _load(source, _DRAFTER, device, dtype)


def read_mtp(
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    eight_bits: EightBits = "auto",
) -> tuple[MTP, LoadReport]:
    """`load_mtp`, and what was read and left out."""
    return _load(source, _MTP, device, dtype, eight_bits)


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


def _load(
    source: Source,
    kind: _Kind,
    device: str | torch.device,
    dtype: torch.dtype | None,
    eight_bits: EightBits = "auto",
) -> tuple[Any, LoadReport]:
    if eight_bits not in get_args(EightBits):
        raise ValueError(f"eight_bits must be one of {', '.join(get_args(EightBits))}, got {shown(eight_bits)}")
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
    form = _form(config, kind)
    check(folder, places, plan, listing, form)
    wanted = {name: listing.stored[name] for name in plan.sources.values()}
    if dtype is None:
        dtype = torch.float32 if where.type == "cpu" else _prevailing(wanted.values())
    expand = {}
    if form is not None:
        staying = kept(plan, places, partial(stays, block=form.block, choice=eight_bits, dtype=dtype, device=where))
        _announce(plan, listing.stored, staying.values(), dtype)
        scales = read_scales(plan, listing.stored)
        _keep(module, {path: scales.pop(name).to(where) for path, name in staying.items()}, form.block)
        expand = {n: partial(expanded, scales=scale, block=form.block, dtype=dtype) for n, scale in scales.items()}
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


def _form(config: Any, kind: _Kind) -> BlockFP8 | None:
    """How the config says that weights are stored in eight bits, modules that it excludes as parameters."""
    if not isinstance(config, ModelConfig) or config.quantization is None:
        return None
    excluded = (kind.rename(f"{module}.weight") for module in config.quantization.excluded)
    return replace(config.quantization, excluded=tuple(name for name in excluded if name is not None))


def _announce(plan: names.Plan, stored: Mapping[str, Stored], staying: Collection[str], dtype: torch.dtype) -> None:
    """Says on the log what memory eight-bit weights will take; aloud where that is more than their files do."""
    words = announcement(plan, stored, staying, dtype)
    _log.log(logging.WARNING if "expanded" in words else logging.INFO, "%s", words)


def _keep(module: nn.Module, scales: Mapping[str, Tensor], block: tuple[int, int]) -> None:
    """Makes room for weights in eight bits in the linear maps that have these scales, which it fills in."""
    keep_in_eight_bits(module, scales, block)
    for path, given in scales.items():
        set_parameter(module, f"{path}.weight_scale_inv", given.float())


def _prevailing(stored: Iterable[Stored]) -> torch.dtype:
    """The dtype in which most bytes are stored, those in eight bits left out: they say nothing of the others'."""
    weight: Counter[str] = Counter()
    for entry in stored:
        if entry.dtype != FP8:
            weight[entry.dtype] += entry.nbytes
    return DTYPES[weight.most_common(1)[0][0]]
