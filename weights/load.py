"""Builds a target or a drafter from a checkpoint: every parameter filled exactly once, or one error.

Modules are built without memory, and all that configs and headers tell is checked before any data are read.
Quantised checkpoints are refused: their numbers mean nothing without the scales stored beside them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ddtree import drafters
from ddtree.drafter import DFlashDrafter
from qwen_gdn.config import ModelConfig
from qwen_gdn.model import QwenGDN

from . import names
from .configs import ConfigKind, read_config
from .files import CONFIG_FILES, INDEX_FILE, Part, Source, fetch_shards, one_line, resolve
from .fill import DTYPES, check, fill
from .shards import Stored, list_tensors, read_index

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What one load read.

    Attributes:
        folder: where the files lie.
        dtype: dtype of the parameters, but for the few kept in float32.
        tensors, nbytes: number and stored size of the tensors that fill parameters.
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
        ValueError: the source cannot be found or read as a dense Qwen3.5/3.6/3.8 checkpoint, or this device or
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


class _Kind(NamedTuple):
    """What differs between the two kinds of checkpoint."""

    part: Part
    config: ConfigKind[Any]
    build: Callable[[Any], nn.Module]
    skip: names.Skip
    rename: Callable[[str], str | None]


_TARGET = _Kind("target", ModelConfig, QwenGDN, names.skip_in_target, names.target_parameter)
_DRAFTER = _Kind("drafter", drafters, drafters.build, names.skip_in_drafter, lambda name: name)


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
    plan = names.plan((*listing.stored, *listing.absent), dict(module.named_parameters()), kind.skip, kind.rename)
    check(folder, module, plan, listing)
    wanted = {name: listing.stored[name] for name in plan.sources.values()}
    if dtype is None:
        dtype = torch.float32 if where.type == "cpu" else _prevailing(wanted.values())
    fill(module, plan.sources, wanted, where, dtype)
    report = LoadReport(folder, dtype, len(wanted), sum(s.nbytes for s in wanted.values()), dict(plan.skipped))
    _log.info("%s", report)
    return module.eval(), report


def _checked_device(device: str | torch.device) -> torch.device:
    """The device, after a trial allocation: what is missing shows before a checkpoint is read."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {one_line(error)}; use 'cpu'") from None


def _prevailing(stored: Iterable[Stored]) -> torch.dtype:
    """The dtype in which most bytes are stored."""
    weight: Counter[str] = Counter()
    for entry in stored:
        weight[entry.dtype] += entry.nbytes
    return DTYPES[weight.most_common(1)[0][0]]
