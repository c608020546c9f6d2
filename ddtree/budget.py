"""How many nodes a round may draft: a fixed number, or whatever decides it from round to round."""

from collections.abc import Sequence
from typing import Protocol, cast

from qwen_gdn.checked import checked_count, shown
from qwen_gdn.decode import HybridModel

from .tree import DraftTree


class Budget(Protocol):
    """Asked before and after a round drafts, and told what became of it; `ddtree.AutoBudget` is one.

    It must not look at what the target draws in the round that it decides on: earlier rounds and the drafter's scores
    are all that a budget may follow, or the law of what is sampled would change.
    """

    def begin(self, target: HybridModel) -> None:
        """A generation of this target begins."""

    def room(self, context: int, depth: int) -> int:
        """The most nodes that the next round may draft; 0 proposes nothing.

        Args:
            context: tokens in the cache.
            depth: of the deepest draft that could still be emitted. With 0 nothing is proposed, whatever is answered.
        """

    def choose(self, tree: DraftTree) -> int:
        """How many of a drafted tree's nodes, its first ones, are put before the target; the root is not counted."""

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None:
        """The round is committed: what was put before the target, and the nodes that it followed, root first.

        If `on_round` then raises, the round is undone, and this is not taken back.
        """


class Fixed:
    """So many nodes in every round."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def begin(self, target: HybridModel) -> None: ...

    def room(self, context: int, depth: int) -> int:
        return self.nodes

    def choose(self, tree: DraftTree) -> int:
        return self.nodes

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None: ...


def checked_budget(budget: int | Budget) -> Budget:
    """The budget as one that can be asked; ValueError if it is neither a number of at least 0 nor a `Budget`."""
    if _decides(budget):
        return cast(Budget, budget)
    if not isinstance(budget, int):
        raise ValueError(f"budget must be an int of at least 0, got {shown(budget)}; or an AutoBudget(), which decides")
    return fixed("budget", budget)


def fixed(what: str, budget: object) -> Fixed:
    """A budget for rounds that other sequences share; ValueError if it is no number of at least 0."""
    if _decides(budget):
        raise ValueError(
            f"{what}: {type(budget).__name__} goes by rounds of one sequence, and rows of a batch share theirs; "
            "give a number of nodes"
        )
    checked_count(what, budget, 0)
    return Fixed(cast(int, budget))


def _decides(budget: object) -> bool:
    answers = (getattr(budget, name, None) for name in ("begin", "room", "choose", "learn"))
    return not isinstance(budget, type) and all(map(callable, answers))
