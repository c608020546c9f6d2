"""Traces of a generation: what every round drafted, what the target took of it, and what that took in time.

A `Recorder` watches, `lines` writes its `Trace` as JSON lines, `page` as one HTML file that needs no network.
"""

from .html import page
from .recorder import Recorder
from .records import EndRecord, RunRecord, Trace, lines
from .rounds import Origin, RoundRecord
from .totals import Totals, totals

__all__ = [
    "EndRecord",
    "Origin",
    "Recorder",
    "RoundRecord",
    "RunRecord",
    "Totals",
    "Trace",
    "lines",
    "page",
    "totals",
]
