"""A budget that pays for itself: every round drafts as much as is worth its time, and nothing where that is best.

A round that drafts n nodes is expected to emit 1 + E(n) tokens, E(n) being the sum of the chances of its best n nodes,
and takes c(n) seconds. Of all n the one with the most tokens a second is taken: the stopping rule of CaDDTree
(arXiv 2606.01813), with both sides measured while text is written instead of profiled before. Which budget a round
gets depends on earlier rounds and on what its drafter says, never on what the target draws in it.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any
from weakref import ref

import numpy as np

from qwen_gdn.checked import checked_callables, checked_count
from qwen_gdn.decode import HybridModel

from .calibration import Calibration, odds
from .costs import RoundCosts
from .estimate import Matrix
from .tree import DraftTree, ScoredTree

FIRST = 15  # nodes of a round before any was timed
MEMORY = 12  # rounds over which is judged whether drafting pays
HOPE = 4.0  # a round's tokens before any was drafted
MARGIN = 0.03  # by which drafting must have been worse, for looks at it cost about as much
BRIEF, FAR = 3, 0.75  # fewer rounds, which are enough if they were this much worse
FRESH = 2  # of these, as many as count when another text begins
REACH = 0.9  # of the most nodes of late rounds, for every round since
PATIENCE = 4  # plain rounds before a first look at whether drafting pays again
SHARES = 0.08, 0.02  # of the time that such looks may take: the next ones, and after many in vain


class AutoBudget:
    """How many nodes a round drafts, from what rounds take here and what of them is accepted.

    Give one to all generations of a pair of target and drafter: it keeps what it has learnt. With another target it
    starts anew. Generations may take turns with it, round by round, but not run at once in several threads.

    Args:
        most: the most nodes of a round.
        clock: seconds; whatever it says is taken as time.
    """

    def __init__(self, *, most: int = 63, clock: Callable[[], float] = perf_counter) -> None:
        checked_count("most", most, 1)
        checked_callables(clock=clock)
        self.most = most
        self._clock = clock
        self._target: ref[HybridModel] | None = None
        self._forget(())

    def _forget(self, sizes: Sequence[int]) -> None:
        self.costs = RoundCosts(self.most + 1, sizes)
        self.calibration = Calibration()
        self._met = set[int]()  # kinds of rounds whose first one, which prepares things, has been
        self._tokens = HOPE  # what drafted rounds were expected to emit, and the nodes they verified, over the last few
        self._lately = HOPE  # the same tokens, over fewer rounds
        self._nodes = min(FIRST, self.most) + 1.0
        self._rounds = FRESH  # how many these are
        self._reach = FIRST / 2  # nodes of late rounds, the most of them; the next may have twice as many
        self._idle = 0  # plain rounds since the last drafted one
        self._patience = PATIENCE
        self._look = True  # whether the next round drafts, whatever is thought of it
        # Of the round at work:
        self._looking = self._proposed = self._quiet = False
        self._context = self._depth = 0
        self._seconds = self.costs.at(0)
        self._expected = 1.0  # tokens
        self._odds: Matrix = np.zeros((1, 4))
        self._start = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle keeps what was learnt, and takes its next target for the one that it was learnt of."""
        return self.__dict__ | {"_target": None}

    def begin(self, target: HybridModel) -> None:
        """Another text: what drafting brings may differ at once, what it costs will not."""
        sizes = tuple(getattr(target, "sizes", ()))
        if (self._target is not None and self._target() is not target) or self.costs.sizes != sizes:
            self._forget(sizes)
        self._target = ref(target)
        self.calibration.begin()
        self._look = True

    def room(self, context: int, depth: int) -> int:
        """Starts the round's time; 0 where rounds without drafts are faster, but for a look now and then.

        Between looks nothing is measured, nor asked again but shortly before the next one.
        """
        self._context, self._depth = context, depth
        self._quiet = PATIENCE <= self._idle < self._patience - 1 and not self._look
        if not self._quiet:
            self._start = self._clock()
            self._seconds = self.costs.at(context)
            even = (1 - MARGIN) * self._seconds.likely[round(self._nodes)] / self._seconds.least[0]
            self._looking = bool(self._tokens < even or self._lately < FAR * even)
        drafts = not self._quiet and (not self._looking or self._look or self._idle >= self._patience)
        self._proposed = drafts and depth > 0
        if not drafts:
            self._idle += 1
        return min(self.most, round(2 * self._reach) + 1) if self._proposed else 0

    def choose(self, tree: DraftTree) -> int:
        """The number of nodes with the most expected tokens a second."""
        if not isinstance(tree, ScoredTree):
            raise ValueError(
                "budget: an AutoBudget needs trees that know their drafter's scores, as those of build_tree, "
                f"build_chain and build_spine do, got a {type(tree).__name__}; give a fixed budget"
            )
        self._odds = odds(tree)
        tokens = np.cumsum(self.calibration.chances(tree, self._odds))  # the root's own draw, and what it leads to
        claims = np.cumsum(self.calibration.claims(tree, self._odds)) if self._looking else tokens
        if self.costs:
            best = int(np.argmax(claims / self._seconds.least[1 : len(claims) + 1]))
        else:
            best = min(FIRST, len(tokens) - 1)
        self._expected = float(tokens[best])
        if tree.topology.max_depth < self._depth:  # or the end of the text says more of it than the drafter
            self._expect(self._expected, best + 1)
        return best

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Takes up the time since `room`, and what was accepted."""
        if self._quiet:
            return
        seconds = self._clock() - self._start
        nodes = len(tree.topology) if self._proposed else 0
        kind = self.costs.padded(nodes) if self.costs.sizes else -1
        if kind in self._met:
            self.costs.learn(nodes, self._context, seconds)
        self._met.add(kind)
        if self._proposed:
            self.calibration.learn(tree, self._odds, path)
            self._idle, self._reach = 0, max(REACH * self._reach, nodes - 1, FIRST / 2)
            self._judge(len(path), nodes)

    def _expect(self, tokens: float, nodes: int) -> None:
        self._rounds = min(self._rounds, FRESH if self._looking else MEMORY - 1) + 1
        self._tokens += (tokens - self._tokens) / self._rounds
        self._lately += (tokens - self._lately) / min(self._rounds, BRIEF)
        self._nodes += (nodes - self._nodes) / self._rounds

    def _judge(self, tokens: int, nodes: int) -> None:
        """Whether a look at drafting was worth it, and when the next one is due if not."""
        cost = float(self._seconds.likely[nodes] / self._seconds.likely[0])  # in tokens of plain rounds
        paid = not self._looking or tokens >= cost
        self._look = self._looking and paid
        often, seldom = (round((cost - self._expected) / share) for share in SHARES)
        self._patience = PATIENCE if paid else max(min(2 * self._patience, seldom), often, PATIENCE)
