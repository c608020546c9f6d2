"""One round as a trace holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Origin = Literal["plain", "spine", "branch", "bonus"]
"""Where an emitted token came from: a round without drafts, an accepted node of the drafter's likeliest chain, an
accepted node beside that, or the target's own draw after the accepted path."""


@dataclass(frozen=True)
class RoundRecord:
    """One round; index 0 is the prefill's, which has neither nodes nor a path.

    Attributes:
        length: tokens in the cache before the round, None for the prefill's.
        tokens: emitted ids.
        texts: what each of them adds to the text. A character spread over several ids comes with its last one.
        origins: where each of them came from.
        budget: nodes that could have been drafted.
        nodes: token id of every node of the tree, the root's first.
        parents: node of the parent of each, -1 for the root's. Siblings stand in the order of their rank.
        log_probs: logarithm of the probability that the drafter gave each node's path; None if the builder knows none.
        draws: the target's token at every node.
        path: accepted nodes, root first, before any cut.
        expected: accepted drafts that the drafter expected, the sum of all its nodes' probabilities.
        accepted: accepted drafts, before any cut.
        seconds, stages: time of the whole round and by stage; the difference is what no stage covers.
    """

    index: int
    length: int | None
    tokens: Sequence[int]
    texts: Sequence[str]
    origins: Sequence[Origin]
    budget: int
    nodes: Sequence[int]
    parents: Sequence[int]
    log_probs: Sequence[float] | None
    draws: Sequence[int]
    path: Sequence[int]
    expected: float | None
    accepted: int
    seconds: float
    stages: Mapping[str, float]

    @property
    def drafted(self) -> int:
        """Drafted nodes, the root not counted."""
        return max(len(self.nodes) - 1, 0)
