"""A target and its drafter as a tool's command line names them."""

import argparse
from collections.abc import Callable
from functools import cache

from ddtree import DFlashDrafter, MTPDrafter, Proposer
from ddtree.arguments import MTP
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn.engine import Engine
from tools.measure.options import DTYPES
from tools.measure.runs import Pair
from weights import load_drafter, load_mtp, load_target, load_tokenizer


def load_pair(options: argparse.Namespace) -> Pair:
    """The pair that the options name, bound; as programs if they ask for an engine of graphs."""
    where = {"device": options.device, "dtype": DTYPES[options.dtype] if options.dtype else None}
    target = load_target(options.target, **where)
    drafter: Proposer
    if options.drafter == MTP:
        drafter = MTPDrafter(load_mtp(options.target, **where))
    else:
        drafter = load_drafter(options.drafter, **where)
    drafter.bind(target)
    if options.engine == "eager":
        return Pair(target, drafter)
    return Pair(Engine(target), RecordedDrafter(drafter) if isinstance(drafter, DFlashDrafter) else drafter)


def encoder(source: str) -> Callable[[str], list[int]]:
    """Text to ids by a target's tokenizer, which is read when the first text comes."""
    tokenizer = cache(lambda: load_tokenizer(source))
    return lambda text: tokenizer().encode(text)
