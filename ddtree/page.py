"""Standard output while a text is written to it, and what was written."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Literal, NamedTuple

from qwen_gdn.decode import HybridModel

from .options import Options
from .report import Figures
from .streaming import End, Event, FinishReason, Stream
from .streams import say

Reason = FinishReason | Literal["interrupted"]


class Outcome(NamedTuple):
    """What was written; `text` is the decoding of `ids`, less a stop token or string at the end."""

    ids: list[int]
    text: str
    finish_reason: Reason


class Page:
    """Standard output while a text is written; each piece is out before the next is decided.

    Args:
        lead: what stands before the text.
    """

    def __init__(self, lead: str = "") -> None:
        self._lead = lead
        self._last = "\n"

    def write(self, text: str) -> None:
        """Writes a piece; characters that the output's encoding lacks become `?`."""
        text, self._lead = self._lead + text, ""
        if text:
            self._last = text[-1]
            encoding = sys.stdout.encoding or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)

    def end_line(self, *, always: bool) -> None:
        """Ends a line that the text left open: always, or where a terminal would show what follows behind it."""
        if self._last == "\n":
            return
        if always or sys.stdout.isatty():
            print(flush=True)
        elif sys.stderr.isatty():
            say("")


def write(page: Page, events: Stream, watch: Callable[[Stream], Iterator[Event]]) -> Outcome:
    """Writes the text as it comes, through whatever watches it; an interrupt ends it, and what was decided is kept."""
    reason: Reason = "interrupted"
    try:
        for event in watch(events):
            page.write(event.text)
            if isinstance(event, End):
                reason = event.finish_reason
    except KeyboardInterrupt:
        page.write(events.close())
    return Outcome(events.ids, events.text, reason)


def as_json(options: Options, outcome: Outcome, figures: Figures, target: HybridModel) -> str:
    """One line, in ASCII: characters at which some readers break lines are escaped."""
    numbers = asdict(figures) | {"target_forwards": figures.target_forwards}
    settings = options.settings(target)
    return json.dumps(outcome._asdict() | {"seed": options.seed, "figures": numbers, "settings": settings})
