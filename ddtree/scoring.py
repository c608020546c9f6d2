"""Other scores for a drafter's children: tempered, calibrated, or by a rule of your own.

A scoring takes what a drafter proposed and a budget, and returns `Scores`; `scored` puts one before a builder. It
changes which nodes are drafted, never what is written.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from .scores import Prefix, Scores, Siblings, as_scores, check_scores, children
from .tree import Build

Scoring = Callable[[Tensor | Scores, int], Scores]
"""Scores in place of a proposal; neither deeper paths nor more children of one than the budget are asked for."""

Curve = Callable[[int, float], float]
"""A log-probability in place of that of a child at a depth, 1 for the root's; never falls as the old one rises."""


def scored(build: Build, scoring: Scoring) -> Build:
    """A builder whose trees are those of `build` for the scores that `scoring` makes of a proposal."""
    return lambda root, proposal, budget: build(root, scoring(proposal, budget), budget)


def tempered(temperature: float | Sequence[float]) -> Scoring:
    """Scores at another temperature: above 1 trees become wider, below 1 deeper.

    Logits are divided by it. Children of path-dependent scores, which need not be all there are, keep together the
    probability that they have together, and share it as the softmax at that temperature does.

    Args:
        temperature: of all depths, or of each, the root's children first and the last for all deeper ones.

    Raises:
        ValueError: one of them is no finite number above 0, or there are none.
    """
    given = [temperature] if isinstance(temperature, int | float) else list(temperature)
    if not given or not all(isinstance(each, int | float) and 0 < each < math.inf for each in given):
        raise ValueError(f"scoring: temperatures must be finite numbers above 0, got {temperature!r}")

    def at(depth: int) -> float:
        return given[min(depth, len(given)) - 1]

    def scoring(proposal: Tensor | Scores, budget: int) -> Scores:
        check_scores(proposal)
        if not isinstance(proposal, Tensor):
            return _Changed(proposal, budget, lambda depth, values: _shared(values, at(depth)))
        by = [at(depth) for depth in range(1, len(proposal) + 1)]
        return as_scores(proposal / proposal.new_tensor(by)[:, None], budget, width=budget)

    return scoring


def calibrated(curve: Curve) -> Scoring:
    """Scores through a curve, such as one fitted to what was really accepted.

    A tree raises ValueError where the curve gives a log-probability above 0 or NaN, or puts a child before a likelier
    one.
    """

    def scoring(proposal: Tensor | Scores, budget: int) -> Scores:
        found = as_scores(proposal, budget, width=budget)
        return _Changed(found, budget, lambda depth, values: [curve(depth, value) for value in values])

    return scoring


class _Changed:
    """Scores with other log-probabilities for the same children, in the same order.

    Args:
        change: from a depth and the log-probabilities of siblings there, best first, to the new ones.
    """

    def __init__(self, scores: Scores, budget: int, change: Callable[[int, list[float]], list[float]]) -> None:
        self._scores, self._budget, self._change = scores, budget, change
        self.depth = scores.depth

    def children(self, path: Prefix, /) -> Siblings:
        tokens, before = children(self._scores, path, self._budget)
        after = self._change(len(path) + 1, before)
        limits = zip([0.0, *after], after, strict=False)
        if not all(value <= limit for limit, value in limits):
            raise ValueError(
                f"scoring: log-probabilities {before} after {path} became {after}; they must be at most 0 and keep "
                "their order"
            )
        return Siblings(tokens, after).possible()


def _shared(values: list[float], temperature: float) -> list[float]:
    """Log-probabilities at a temperature, with their sum of probabilities as it was."""
    scaled = [value / temperature for value in values]
    shift = _log_sum(values) - _log_sum(scaled)
    return [min(value + shift, 0.0) for value in scaled]


def _log_sum(values: list[float]) -> float:
    """The logarithm of the sum of exponentials of values in descending order."""
    return values[0] + math.log(sum(math.exp(value - values[0]) for value in values)) if values else 0.0
