"""What a trace holds, and its form as JSON lines: a run, its rounds, the spelling of their tokens, an end.

Every line is an object whose `kind` is `run`, `round`, `pieces` or `end`; its other keys are those of the classes here.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..report import Figures
from ..streaming import FinishReason
from .rounds import RoundRecord
from .totals import Totals

VERSION = 1

Reason = FinishReason | Literal["interrupted", "failed"]


@dataclass(frozen=True)
class RunRecord:
    """What was asked for.

    Attributes:
        prompt: the prompt's text, control tokens included.
        settings: whatever says how, for people.
    """

    prompt_tokens: int
    prompt: str
    settings: Mapping[str, Any]
    version: int = VERSION


@dataclass(frozen=True)
class EndRecord:
    """How it ended, and figures of the whole.

    Attributes:
        finish_reason: that of the stream's `End`; without one `failed`, or `interrupted` if nothing is known to have.
        error: what failed, in one line.
        rest: the end of the text, where its last character is not whole.
    """

    finish_reason: Reason
    error: str | None
    rest: str
    figures: Figures
    totals: Totals


@dataclass(frozen=True)
class Trace:
    """One generation, or what there is of it; `pieces` spells every token id of the rounds by itself.

    Bytes that are no character by themselves are spelt `\\xe2`.
    """

    run: RunRecord
    rounds: Sequence[RoundRecord]
    pieces: Mapping[int, str]
    end: EndRecord


def lines(trace: Trace) -> Iterator[str]:
    """The trace as JSON, an object a line, in ASCII and without `<`, so that it can stand inside a page's script."""
    yield _line("run", asdict(trace.run))
    for each in trace.rounds:
        yield _line("round", asdict(each))
    yield _line("pieces", {"pieces": trace.pieces})
    yield _line("end", asdict(trace.end))


def _line(kind: str, fields: Mapping[str, Any]) -> str:
    text = json.dumps({"kind": kind} | _finite(fields), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")  # of JSON only strings can hold one


def _finite(value: Any) -> Any:
    """The value with null for numbers that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
