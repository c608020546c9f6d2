"""A figure of a comparison. Needs matplotlib, which is no dependency: it is imported when something is drawn."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.measure.comparison import Figures, Set
from tools.measure.intervals import Interval

PANELS: tuple[tuple[str, Callable[[Figures], Interval]], ...] = (
    ("tokens/s", lambda figures: figures.speed),
    ("speed over plain decoding", lambda figures: figures.to_plain),
    ("accepted length", lambda figures: figures.tau),
)


def plot(file: Path, sets: Sequence[Set]) -> None:
    """Draws each mode on each set with its interval, a panel a figure, modes from left to right as they were named."""
    from matplotlib.figure import Figure  # no pyplot: no window, no state of the process

    words = [each.mode.word for each in sets[0].figures]
    canvas = Figure(figsize=(max(6.0, 1.0 * len(words)), 9.0), layout="constrained")
    for axes, (label, of) in zip(canvas.subplots(len(PANELS), sharex=True), PANELS, strict=True):
        for number, each in enumerate(sets):
            places = [place + 0.6 * ((number + 0.5) / len(sets) - 0.5) for place in range(len(words))]
            _draw(axes, places, [of(figures) for figures in each.figures], each.prompts.name)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.set_xticks(range(len(words)), words, rotation=30, ha="right")
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(sets))
    canvas.savefig(file, dpi=150)


def _draw(axes: Any, places: list[float], found: list[Interval], label: str) -> None:
    reach = [[each.value - each.low for each in found], [each.high - each.value for each in found]]
    axes.errorbar(places, [each.value for each in found], yerr=reach, fmt="o", capsize=2, markersize=4, label=label)
