"""Figures of a comparison: of every mode on a set, of modes over each other, and of sets together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tools.measure.intervals import Interval, Resampled, interval
from tools.measure.paired import Measured, Plan
from tools.measure.prompts import PromptSet
from tools.measure.runs import PLAIN, Mode


class Figures(NamedTuple):
    """Of one mode on one set.

    speed: tokens a second.
    to_plain, to_best: speed over that of plain decoding, and of the fastest mode of a fixed budget.
    tau: accepted length.
    drafted: nodes a round.
    forwards: target forwards after the prompts, in one alternation.
    """

    mode: Mode
    speed: Interval
    to_plain: Interval
    to_best: Interval
    tau: Interval
    drafted: float
    forwards: float

    def as_json(self) -> dict[str, Any]:
        return _plainly(self)


class Over(NamedTuple):
    """Speed and accepted length of one mode over another's."""

    mode: Mode
    other: Mode
    speed: Interval
    tau: Interval


class Set:
    """A prompt set with what was measured on it; `number` tells its resamples from those of other sets.

    Attributes:
        figures: of every mode.
        best: the fastest mode of a fixed budget.
    """

    def __init__(self, prompts: PromptSet, plan: Plan, measured: Measured, number: int = 0) -> None:
        self.prompts = prompts
        self.plan = plan
        self.measured = measured
        self.resampled = Resampled(len(prompts.prompts), seed=number)
        self.best = _fastest(measured.modes, lambda mode: self.faster(mode, PLAIN))
        self.figures = [self._figures(mode) for mode in measured.modes]

    def faster(self, mode: Mode, other: Mode) -> np.ndarray:
        """The logarithm of the speed of one mode over another's, of the set and its resamples."""
        return self.measured.faster(mode, other, self.resampled)

    def over(self, mode: Mode, other: Mode) -> Over:
        lengths = [self.measured.length(each, self.resampled) for each in (mode, other)]
        return Over(mode, other, interval(np.exp(self.faster(mode, other))), interval(lengths[0] / lengths[1]))

    def _figures(self, mode: Mode) -> Figures:
        measured = self.measured
        rounds = measured.rounds[mode]
        return Figures(
            mode=mode,
            speed=interval(measured.speed(mode, self.resampled)),
            to_plain=interval(np.exp(self.faster(mode, PLAIN))),
            to_best=interval(np.exp(self.faster(mode, self.best))),
            tau=interval(measured.length(mode, self.resampled)),
            drafted=round(float(measured.drafted[mode].sum() / rounds.sum()), 2),
            forwards=float(rounds.sum() / rounds.shape[2]),
        )

    def as_json(self) -> dict[str, Any]:
        """All figures, and the ratios of every mode to those before it."""
        modes = self.measured.modes
        pairs = [self.over(mode, other) for i, mode in enumerate(modes) for other in modes[:i]]
        ties = [{"where": where} | tie._asdict() for where, tie in self.measured.ties]
        return (
            self.prompts.about()
            | {"temperature": self.plan.temperature, "seeds": self.plan.seeds, "best": self.best.word}
            | {"modes": [each.as_json() for each in self.figures], "over": [_plainly(pair) for pair in pairs]}
            | {"near_ties": ties}
        )


class Together(NamedTuple):
    """Geometric means over sets, which count alike: speeds over plain decoding's, and over `best`, the fastest of all
    modes of a fixed budget where one must serve all sets."""

    best: Mode
    to_plain: dict[Mode, Interval]
    to_best: dict[Mode, Interval]

    def as_json(self) -> dict[str, Any]:
        return {"best": self.best.word} | {
            name: {mode.word: ratio.as_json() for mode, ratio in getattr(self, name).items()}
            for name in ("to_plain", "to_best")
        }


def together(sets: Sequence[Set]) -> Together:
    """Each set's prompts are drawn again by themselves (a stratified bootstrap)."""

    def faster(mode: Mode, other: Mode) -> np.ndarray:
        return np.mean([each.faster(mode, other) for each in sets], axis=0)

    modes = sets[0].measured.modes
    best = _fastest(modes, lambda mode: faster(mode, PLAIN))
    ratios = [{mode: interval(np.exp(faster(mode, other))) for mode in modes} for other in (PLAIN, best)]
    return Together(best, *ratios)


def _fastest(modes: Sequence[Mode], faster_than_plain: Callable[[Mode], np.ndarray]) -> Mode:
    fixed = [mode for mode in modes if mode.kind != "auto"]
    return max(fixed, key=lambda mode: faster_than_plain(mode)[0])


def _plainly(found: Figures | Over) -> dict[str, Any]:
    """Modes as words, intervals as objects."""
    return {
        name: value.word if isinstance(value, Mode) else value.as_json() if isinstance(value, Interval) else value
        for name, value in found._asdict().items()
    }
