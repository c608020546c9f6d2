"""Intervals by a bootstrap over prompts.

Prompts are what a result is meant to hold beyond, so they alone are drawn again: each of the resamples takes as many
prompts as there are, with replacement, every prompt with all that was measured on it, in all modes, so that what is
paired stays so. An interval is the span of the middle 95 % of what a statistic is over the resamples (the percentile
bootstrap; Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13). With few prompts it is a little narrow.
"""

from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


class Interval(NamedTuple):
    """A statistic of what was measured, and the bounds of its interval."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in self._asdict().items()}

    def __str__(self) -> str:
        digits = 1 if self.value >= 10 else 2
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}..{self.high:.{digits}f}]"


class Resampled:
    """Statistics of a set of prompts: of the set itself and of every resample, as vectors [1 + RESAMPLES]."""

    def __init__(self, prompts: int, seed: int = 0) -> None:
        """ValueError for fewer than two prompts, which tell nothing of others."""
        if prompts < 2:
            raise ValueError(f"an interval over prompts needs at least 2 of them, got {prompts}")
        drawn = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, size=RESAMPLES)
        self._counts = np.vstack((np.ones(prompts), drawn))  # how often each prompt is there

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean over prompts of values [P]."""
        return self.ratio(values, np.ones(len(values)))

    def ratio(self, above: np.ndarray, below: np.ndarray) -> np.ndarray:
        """The sum over prompts of one quantity [P] over that of another."""
        quotient: np.ndarray = (self._counts @ above) / (self._counts @ below)
        return quotient


def interval(statistic: np.ndarray) -> Interval:
    """The interval of a statistic [1 + RESAMPLES], whose first entry is that of what was measured."""
    low, high = np.quantile(statistic[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(statistic[0]), float(low), float(high))
