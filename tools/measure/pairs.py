"""A target and its drafter as a tool's command line names them."""

import time
from collections.abc import Callable
from functools import cache

import torch

from ddtree import AutoBudget, DFlashDrafter, MTPDrafter
from ddtree.arguments import MTP
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn.engine import Engine
from tools.measure.options import DTYPES
from tools.measure.runs import Pair
from weights import load_drafter, load_mtp, load_target, load_tokenizer


def load_pair(
    target: str,
    drafter: str,
    device: torch.device,
    dtype: str | None,
    *,
    engine: str = "eager",
    clock: Callable[[], float] = time.perf_counter,
) -> Pair:
    """A pair, bound; drafter and engine are named as `ddtree.run` takes them, `graph` for programs."""
    where = {"device": device, "dtype": DTYPES[dtype] if dtype else None}
    model = load_target(target, **where)
    proposer = MTPDrafter(load_mtp(target, **where)) if drafter == MTP else load_drafter(drafter, **where)
    proposer.bind(model)
    if engine == "eager":
        return Pair(model, proposer, AutoBudget(clock=clock), clock)
    recorded = RecordedDrafter(proposer) if isinstance(proposer, DFlashDrafter) else proposer
    return Pair(Engine(model), recorded, AutoBudget(clock=clock), clock)


def encoder(source: str) -> Callable[[str], list[int]]:
    """Text to ids by a target's tokenizer, which is read when the first text comes."""
    tokenizer = cache(lambda: load_tokenizer(source))
    return lambda text: tokenizer().encode(text)
