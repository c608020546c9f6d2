"""What a drafter's probabilities are worth, learnt from what was accepted of its trees."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .estimate import Estimate, Matrix, Vector
from .tree import DraftTree, ScoredTree

SURE = 8.0  # log-odds beyond which a drafter is not taken at its word
LEAST = 0.1  # of the weight of its log-odds, so that a likelier child stays a likelier one
BEFORE = (0.0, 0.0, 1.0, 0.0)  # its word, at any depth
UNSURE = (1.5, 1.5, 0.3, 0.3)
ROUND = (0.15, 0.15, 0.01, 0.02)  # how far that moves from round to round
TEXT = (0.5, 0.5, 0.1, 0.1)  # and from one text to the next


class Calibration:
    """Chances of draft nodes, from their drafter's word for them.

    Say the target has followed a path down to a node's parent, and has drawn none of the siblings before the node. Then
    it draws the node with the log-odds a + b l + c (d - 1), where l are those that the drafter gives it then, d is its
    depth, and a is one number for first children and another for later ones: a drafter can be wrong in what it is sure
    of and right in what it holds for the next best. The four drift, and are learnt from the children of every node that
    the target reached. So sampling at a temperature, a kind of text that the drafter has not seen, or positions far
    ahead that it is bad at, show in them.
    """

    def __init__(self) -> None:
        self._found = Estimate(BEFORE, UNSURE)
        self._moves = np.diag(np.square(ROUND))

    def chances(self, tree: ScoredTree, odds: Matrix) -> Vector:
        """Of each node, [N], that the target follows its path that far; 1 for the root.

        Args:
            odds: of the tree, or of a larger one that it begins.
        """
        return _followed(tree, odds @ self._found.mean)

    def claims(self, tree: ScoredTree, odds: Matrix) -> Vector:
        """The same if nothing had been learnt."""
        return _followed(tree, odds @ np.array(BEFORE))

    def learn(self, tree: DraftTree, odds: Matrix, path: Sequence[int]) -> None:
        """Takes up what the target followed of a tree: a root path, node 0 first."""
        self._found.drift(self._moves)
        asked = _asked(tree, path)
        if asked:
            taken = set(path)
            hits = np.array([node in taken for node in asked], dtype=np.float64)
            self._found.weigh(odds[asked], hits)
            self._found.mean[2] = max(self._found.mean[2], LEAST)

    def begin(self) -> None:
        """Another text follows."""
        self._found.drift(np.diag(np.square(TEXT)))


def _asked(tree: DraftTree, path: Sequence[int]) -> list[int]:
    """The nodes that the target drew or might have drawn: children on its way, up to the one that it took."""
    taken = dict(pairwise(path)) | {path[-1]: len(tree.topology)}
    parents = tree.topology.parents
    return [node for node in range(1, len(parents)) if parents[node] in taken and node <= taken[parents[node]]]


def odds(tree: ScoredTree) -> Matrix:
    """What each node's chances hang on, [N, 4]: is it a first child, a later one; log-odds; depth below the first.

    Of a tree's first nodes they are the first of them.
    """
    rows = [(0.0, 0.0, 0.0, 0.0)]
    depths = [0]
    left: dict[int, float] = {}  # probability of a parent's further children
    for node, parent in enumerate(tree.topology.parents[1:], 1):
        chance = math.exp(tree.log_probs[node] - tree.log_probs[parent])
        later = parent in left
        rest = left.get(parent, 1.0)
        rows.append((float(not later), float(later), _log_odds(chance, rest - chance), float(depths[parent])))
        depths.append(depths[parent] + 1)
        left[parent] = rest - chance
    return np.array(rows)


def _log_odds(chance: float, against: float) -> float:
    if against <= 0 or chance <= 0:
        return SURE if chance > 0 else -SURE
    return max(-SURE, min(SURE, math.log(chance / against)))


def _followed(tree: ScoredTree, odds: Vector) -> Vector:
    """Chances of whole paths, [N], from the log-odds of each node given its parent and the siblings before it."""
    given = (1 / (1 + np.exp(-odds))).tolist()
    chances, left = [1.0], {0: 1.0}
    for node, parent in enumerate(tree.topology.parents[1:], 1):
        chances.append(left[parent] * given[node])
        left[parent] -= chances[node]
        left[node] = chances[node]
    return np.array(chances)
