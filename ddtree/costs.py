"""What a round takes, learnt from rounds that were timed."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .estimate import Estimate, Vector

EAGER = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Node counts between which the cost of an eager verify is taken to be linear."""

NOISE = 0.1  # of one time, relative: an ordinary machine with other work
SPEED = 0.03  # how much faster or slower a machine may get from one round to the next, in all it does
SHAPE = 0.002  # the same of every coefficient by itself
OUTLIER = 3.0  # deviations beyond which a time counts as one this far off
LEAST = 0.05  # of the first time: below it there is extrapolation alone


class Seconds(NamedTuple):
    """Of rounds by their nodes, [most + 1].

    likely: what they take as far as is known.
    least: what they may well take, one deviation less.
    """

    likely: Vector
    least: Vector


class RoundCosts:
    """Seconds of a round, by the nodes of its verify and the tokens in the cache.

    A plain round takes p + p' c for a context of c tokens. One that drafts and verifies N nodes, the root included,
    takes d + n N + n' c N more, and what is peculiar to N: an e for each of some sizes, between which it is linear. A
    target whose programs have sizes pays a whole one, so there N is the size that it is padded to. All are learnt at
    once from every time; the machine's own speed, which changes most, moves them together. Before anything is known of
    a kind of round its cost is wide open, and the least of it low enough to be worth a try.

    Args:
        most: the most nodes that are asked for, the root included.
        sizes: ascending node counts that verifies are padded to; none where each takes what it needs.
    """

    def __init__(self, most: int, sizes: Sequence[int] = ()) -> None:
        self.sizes = tuple(sizes)
        nodes = np.array([self.padded(count) for count in range(most + 1)], dtype=np.float64)
        knots = [1, *(sizes or EAGER)]
        knots = knots[: bisect_left(knots, nodes[-1]) + 1]
        hats = np.stack([np.interp(nodes, knots, row) for row in np.eye(len(knots))], axis=1)
        drafting = (nodes > 0).astype(np.float64)
        none = np.zeros_like(nodes)
        # Terms of every count, [most + 1, K], and what a thousand tokens of context add to them.
        self._terms = np.column_stack((none + 1, none, drafting, nodes / 16, none, hats * drafting[:, None]))
        self._by_context = np.column_stack((none, none + 1, none, none, nodes / 16, none[:, None] * hats))
        others = np.ones(len(knots))
        self._means = np.array([0.5, 0.0, 0.5, 0.1, 0.0, *(0.0 * others)])
        self._deviations = np.array([0.3, 0.02, 0.4, 0.3, 0.02, *(0.1 * others)])
        self._moves = np.diag(np.square(np.array([1.0, 0.02, 1.0, 0.2, 0.02, *(0.5 * others)]) * SHAPE))
        self._found: Estimate | None = None
        self._unit = 1.0  # seconds of the first round that was timed, more or less

    def __bool__(self) -> bool:
        """Whether any round was timed."""
        return self._found is not None

    def padded(self, nodes: int) -> int:
        """The nodes that a verify of so many pays for; a root alone is a single token."""
        return nodes if nodes <= 1 else next((size for size in self.sizes if size >= nodes), nodes)

    def at(self, context: int) -> "Seconds":
        """Of rounds that verify 0 to `most` nodes: the first without a proposal, the others with one."""
        if self._found is None:
            ones = np.ones(len(self._terms))
            return Seconds(ones, ones)
        terms = self._terms + context / 1000 * self._by_context
        values = terms @ self._found.mean
        doubts = np.sqrt(((terms @ self._found.covariance) * terms).sum(1))
        least = LEAST * self._unit
        return Seconds(np.maximum(values, least), np.maximum(values - np.minimum(doubts, 0.8 * values), least))

    def learn(self, nodes: int, context: int, seconds: float) -> None:
        """Takes up the time of a round of so many nodes; 0 are a round without a proposal."""
        if self._found is None and seconds <= 0:
            return  # the clock has not moved yet: nothing to measure others by
        terms = self._terms[nodes] + context / 1000 * self._by_context[nodes]
        if self._found is None:
            self._unit = seconds / float(terms @ self._means)
            self._found = Estimate(self._unit * self._means, self._unit * self._deviations)
            self._moves *= self._unit**2
        found = self._found
        found.drift(np.outer(found.mean, SPEED**2 * found.mean) + self._moves)
        value = max(found.value(terms), LEAST * self._unit)
        noise = (NOISE * value) ** 2
        most = OUTLIER * (found.variance(terms) + noise) ** 0.5
        found.learn(terms, min(max(seconds - value, -most), most), noise)
