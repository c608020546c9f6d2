"""What a drafter's probabilities are worth, learnt from what was accepted of its trees."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .estimate import Estimate, Vector
from .tree import ScoredTree

SURE = 8.0  # log-odds beyond which a drafter is not taken at its word
LEAST = 0.1  # of the weight of its log-odds, so that a likelier child stays a likelier one
BEFORE = (0.0, 1.0, 0.0)  # its word, at any depth
UNSURE = (1.0, 0.3, 0.3)
ROUND = (0.15, 0.01, 0.02)  # how far that moves from round to round
TEXT = (0.5, 0.1, 0.1)  # and from one text to the next


class Calibration:
    """Chances of draft nodes, from their drafter's word for them.

    Given that the target has followed a path down to a node's parent, it draws the node with the log-odds
    a + b l + c (d - 1), where l are those that the drafter gives it and d is its depth. The three drift, quickest the
    first, and are learnt from the children of every node that the target reached. So sampling at a temperature, a kind
    of text that the drafter has not seen, or positions far ahead that it is bad at, show in them.
    """

    def __init__(self) -> None:
        self._found = Estimate(BEFORE, UNSURE)

    def chances(self, tree: ScoredTree) -> list[float]:
        """Of each node, that the target follows its path that far; 1 for the root."""
        return self._chances(tree, self._found.mean)

    def claims(self, tree: ScoredTree) -> list[float]:
        """The same if nothing had been learnt."""
        return self._chances(tree, np.array(BEFORE))

    def learn(self, tree: ScoredTree, path: Sequence[int]) -> None:
        """Takes up what the target followed of a tree: a root path, node 0 first."""
        self._found.drift(np.diag(np.square(ROUND)))
        taken = set(path)
        seen = list(self._children(tree, taken))
        if seen:
            hits = np.array([node in taken for node, _ in seen], dtype=np.float64)
            self._found.weigh(np.stack([terms for _, terms in seen]), hits)
            self._found.mean[1] = max(self._found.mean[1], LEAST)

    def begin(self) -> None:
        """Another text follows."""
        self._found.drift(np.diag(np.square(TEXT)))

    def _children(self, tree: ScoredTree, reached: set[int]) -> Iterator[tuple[int, Vector]]:
        depths = tree.topology.depths.tolist()
        for node, parent in enumerate(tree.topology.parents):
            if parent in reached:
                odds = _log_odds(tree.log_probs[node] - tree.log_probs[parent])
                yield node, np.array((1.0, odds, depths[node] - 1.0))

    def _chances(self, tree: ScoredTree, mean: Vector) -> list[float]:
        base, weight, deeper = mean.tolist()
        chances = [1.0]
        depths = [0]
        pairs = zip(tree.topology.parents[1:], tree.log_probs[1:], strict=True)
        for parent, log_prob in pairs:
            depths.append(depths[parent] + 1)
            odds = base + weight * _log_odds(log_prob - tree.log_probs[parent]) + deeper * depths[parent]
            chances.append(chances[parent] / (1 + math.exp(-odds)))
        return chances


def _log_odds(log_prob: float) -> float:
    """Of a log-probability, within what is believed."""
    against = -math.expm1(min(log_prob, 0.0))
    return max(-SURE, min(SURE, log_prob - math.log(against))) if against > 0 else SURE
