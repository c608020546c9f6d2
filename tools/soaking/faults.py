"""Failures: a call somewhere below raises, or an interrupt hits some line of the packages."""

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from tiny import raising_at

import qwen_gdn.lanes
import qwen_gdn.layer_cache
import qwen_gdn.program_set
from qwen_gdn import QwenGDN
from qwen_gdn.layer_cache import DeltaCache
from qwen_gdn.static_cache import StaticCache

MESSAGE = "injected"
ERRORS: tuple[type[BaseException], ...] = (RuntimeError, KeyboardInterrupt, MemoryError)
PACKAGES = ("/qwen_gdn/", "/ddtree/")
LINES = 1500  # of the packages' code: more than most operations run


class Fault(NamedTuple):
    """A failure to come; `loose` if it may hit when the work is already done."""

    text: str
    planted: AbstractContextManager[None]
    loose: bool


def random_fault(dice: random.Random, model: QwenGDN, kind: str) -> Fault:
    """Half of them at a line, where there is one to hit: compiled code has none."""
    if kind != "compiled" and dice.random() < 0.5:
        line = int(LINES ** dice.random())
        return Fault(f"interrupted at line {line}", interrupt_at(line), loose=True)
    owner, name = dice.choice(_sites(model, kind))
    call, error, after = int(20 ** dice.random()) - 1, dice.choice(ERRORS), dice.random() < 0.5
    where = f"{'after' if after else 'before'} call {call} of {getattr(owner, '__name__', type(owner).__name__)}.{name}"
    return Fault(f"{error.__name__} {where}", raising_at(owner, name, call, error, after=after), loose=False)


def is_injected(error: BaseException) -> bool:
    return isinstance(error, ERRORS) and error.args == (MESSAGE,)


def _sites(model: QwenGDN, kind: str) -> list[tuple[Any, str]]:
    """Where a call may raise: owner and name. Code that is compiled must not change, so only calls around it may."""
    around: list[tuple[Any, str]] = [(model, "embed"), (model, "logits")]
    programs: list[tuple[Any, str]] = [
        (qwen_gdn.program_set, "_forward"),
        (qwen_gdn.program_set._Commit, "launch"),
        (StaticCache, "start"),
        (StaticCache, "written"),
    ]
    if kind == "compiled":
        return around + programs
    parts: list[tuple[Any, str]] = [
        (part, "forward")
        for layer in model.layers
        for part in (layer, getattr(layer, str(layer.mixer_name)), layer.mlp)
    ]
    eager: list[tuple[Any, str]] = [
        (qwen_gdn.lanes.TreeAttention, "committed"),
        (qwen_gdn.lanes, "_write_rows"),
        (qwen_gdn.lanes.TreeDelta, "committed"),
        (qwen_gdn.layer_cache, "absorb"),
        (qwen_gdn.layer_cache, "_last_columns"),
        (DeltaCache, "with_floor"),
        (DeltaCache, "at"),
        (DeltaCache, "clone"),
    ]
    inside = [
        (qwen_gdn.program_set, f) for f in ("step_layer", "chain_layer", "tree_layer", "commit_delta", "commit_rows")
    ]
    return [*around, *parts, *eager] + ([*programs, *inside] if kind == "programs" else [])


@contextmanager
def interrupt_at(line: int) -> Iterator[None]:
    """While open, a KeyboardInterrupt hits the given line of the packages' code that is run, if it comes to that."""
    lines = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal lines
        if not any(part in frame.f_code.co_filename for part in PACKAGES):
            return None
        if event == "line":
            lines += 1
            if lines == line:
                raise KeyboardInterrupt(MESSAGE)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)
