"""What a round takes, learnt from rounds that were timed."""

from collections.abc import Sequence

import numpy as np

from .estimate import Estimate, Matrix, Vector

EAGER = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Node counts between which the cost of an eager verify is taken to be linear."""

NOISE = 0.1  # of one time, relative: an ordinary machine with other work
SPEED = 0.03  # how much faster or slower a machine may get from one round to the next, in all it does
SHAPE = 0.002  # the same of every coefficient by itself
OUTLIER = 3.0  # deviations beyond which a time counts as one this far off
LEAST = 0.05  # of the first time: below it there is extrapolation alone


class RoundCosts:
    """Seconds of a round, by the nodes of its verify and the tokens in the cache.

    A plain round takes p + p' c for a context of c tokens. One that drafts and verifies N nodes, the root included,
    takes d + n N + n' c N more, and what is peculiar to N: an e for each of some sizes, between which it is linear. A
    target whose programs have sizes pays a whole one, so there N is the size that it is padded to. All are learnt at
    once from every time; the machine's own speed, which changes most, moves them together. Before anything is known of
    a kind of round its cost is wide open, which `lowest` shows.

    Args:
        sizes: ascending node counts that verifies are padded to; none where each takes what it needs.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.sizes = tuple(sizes)
        self._knots = np.array([1, *(sizes or EAGER)], dtype=np.float64)
        self._found: Estimate | None = None
        self._first = 1.0

    def __bool__(self) -> bool:
        """Whether any round was timed."""
        return self._found is not None

    def padded(self, nodes: int) -> int:
        """The nodes that a verify of so many pays for; a root alone is a single token."""
        return nodes if nodes <= 1 else next((size for size in self.sizes if size >= nodes), nodes)

    def plain(self, context: int, doubt: float = 0.0) -> float:
        """Seconds of a round without a proposal, less so many deviations of what is known of it."""
        return float(self._seconds(self._terms([0], context), doubt)[0])

    def drafted(self, most: int, context: int, doubt: float = 0.0) -> Vector:
        """Seconds of rounds that propose and verify 1 to `most` nodes, the root included, [most]."""
        return self._seconds(self._terms(range(1, most + 1), context), doubt)

    def learn(self, nodes: int, context: int, seconds: float) -> None:
        """Takes up the time of a round of so many nodes; 0 nodes are a plain one."""
        (terms,) = self._terms([nodes], context)
        if self._found is None:
            self._found = self._opinion(terms, seconds)
        found = self._found
        found.drift(np.outer(found.mean, found.mean) * SPEED**2)
        found.drift(np.diag(np.square(SHAPE * self._first * self._scales())))
        value = max(found.value(terms), LEAST * self._first)
        noise = (NOISE * value) ** 2
        most = OUTLIER * (found.variance(terms) + noise) ** 0.5
        found.learn(terms, min(max(seconds - value, -most), most), noise)

    def _seconds(self, terms: Matrix, doubt: float) -> Vector:
        if self._found is None:
            return np.ones(len(terms))
        values = terms @ self._found.mean
        if doubt:
            deviations = np.sqrt(np.einsum("nk,kl,nl->n", terms, self._found.covariance, terms))
            values -= np.minimum(doubt * deviations, 0.8 * values)
        return np.maximum(values, LEAST * self._first)

    def _terms(self, nodes: Sequence[int], context: int) -> Matrix:
        """[len(nodes), K]"""
        at = np.array([self.padded(each) for each in nodes], dtype=np.float64)
        drafting = np.array([each > 0 for each in nodes], dtype=np.float64)
        thousands = np.full(len(at), context / 1000)
        shared = np.stack((np.ones(len(at)), thousands, drafting, at / 16, thousands * at / 16), axis=1)
        upper = np.searchsorted(self._knots, at).clip(1, len(self._knots) - 1)
        share = ((at - self._knots[upper - 1]) / (self._knots[upper] - self._knots[upper - 1])).clip(0, 1)
        single = np.zeros((len(at), len(self._knots)))
        rows = np.arange(len(at))
        single[rows, upper - 1] = drafting * (1 - share)
        single[rows, upper] = drafting * share
        return np.concatenate((shared, single), axis=1)

    def _opinion(self, terms: Vector, seconds: float) -> Estimate:
        """What is thought of a machine of which a single time is known: nearly nothing."""
        means = np.array([0.5, 0.0, 0.5, 0.1, 0.0, *(0.0 for _ in self._knots)])
        self._first = seconds / float(terms @ means)
        deviations = np.array([0.3, 0.02, 0.4, 0.3, 0.02, *(0.1 for _ in self._knots)])
        return Estimate((self._first * means).tolist(), (self._first * deviations).tolist())

    def _scales(self) -> Vector:
        return np.array([1.0, 0.02, 1.0, 0.2, 0.02, *(0.5 for _ in self._knots)])
