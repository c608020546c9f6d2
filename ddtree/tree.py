"""Draft trees: which continuations a round puts before the target, and which of them it takes.

The builder is the best-first search of DDTree (arXiv 2604.12989) over draft log-probabilities. Nothing here
runs a model, draws a token or touches a cache.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qwen_gdn.checked import checked_count, holds_integers
from qwen_gdn.topology import Topology

from .scores import Prefix, Scores, Siblings, as_scores, children, tensor_of


class DraftTree(NamedTuple):
    """A root and its drafted continuations. Siblings carry distinct tokens; parents come before children."""

    tokens: Tensor  # int64 [N] on the CPU; node 0 is the last emitted token, not yet in the cache
    topology: Topology


class ScoredTree(DraftTree):
    """A draft tree that knows what its drafter makes of every node.

    Attributes:
        log_probs: for each node the score of its path, the sum of log-probabilities from the root down; 0 for the root.
            The sum of their exponentials over drafted nodes is the number of accepted drafts that the drafter expects.
    """

    log_probs: tuple[float, ...]

    def __new__(cls, tokens: Tensor, topology: Topology, log_probs: Sequence[float]) -> "ScoredTree":
        tree = super().__new__(cls, tokens, topology)
        tree.log_probs = tuple(log_probs)
        return tree

    def __getnewargs__(self) -> tuple[Tensor, Topology, tuple[float, ...]]:  # what copies are made from
        return self.tokens, self.topology, self.log_probs


_ROOT = Topology([-1])

Build = Callable[[int, Tensor | Scores, int], DraftTree]
"""Makes a tree of at most a budget's nodes, the root not counted, from a root and what was proposed after it."""


class Acceptance(NamedTuple):
    """What the target's draws took of a tree: `path` is a root path to commit, `bonus` the token after it."""

    path: list[int]  # node indices, root first; `len(path) - 1` drafted tokens were accepted
    bonus: int


def build_tree(root: int, scores: Tensor | Scores, budget: int) -> ScoredTree:
    """The `budget` most probable prefixes, best first, as a tree (DDTree, arXiv 2604.12989).

    A prefix scores the float64 sum, from the root down, of its float32 log-probabilities. Prefixes come in
    the order (-score, ranks), ranks being the places among siblings along the path; siblings rank by
    (-log-probability, token). So the tree is a function of the scores alone, ties included.

    Args:
        root: the last emitted token; it is node 0 and not counted in `budget`.
        scores: logits [L, vocab] of independent positions, or path-dependent `Scores`. A tree is at most
            `min(L, budget)` deep, and no row beyond is looked at.
        budget: the most nodes to draft. 0, or L = 0, gives the root alone. Tokens with probability zero are
            never drafted, so a tree can be smaller. A verify of N nodes makes N × N masks and products, so a
            budget beyond a few thousand costs far more than it can win.

    Raises:
        ValueError: root or budget is no int >= 0; scores are neither a real tensor [L, vocab] nor `Scores`; a row
            or a list of children holds NaN, has nothing finite in a row of logits, or a log-probability above 0;
            tokens of `Scores` are no integers, repeat, are negative, or differ in number from their
            log-probabilities.
    """
    return _grown(root, scores, budget, spine=0)


def build_spine(root: int, scores: Tensor | Scores, budget: int) -> ScoredTree:
    """The chain of `build_chain` first, and with what is left the best other prefixes in the order of `build_tree`.

    So it never accepts less than that chain, whatever the target draws; a best-first tree may, where it spends its
    budget beside the chain. Arguments and errors are those of `build_tree`.
    """
    return _grown(root, scores, budget, spine=budget)


def build_chain(root: int, scores: Tensor | Scores, budget: int) -> ScoredTree:
    """The likeliest token at each step down, `min(L, budget)` of them; arguments and errors of `build_tree`."""
    _check(root, budget)
    found = as_scores(scores, budget, width=1)

    def likeliest(path: Prefix) -> Siblings:
        tokens, log_probs = children(found, path, 1)
        return Siblings(tokens[:1], log_probs[:1])

    return grow(root, likeliest, budget)


def alone(root: int) -> ScoredTree:
    """A tree without drafts."""
    return ScoredTree(torch.tensor([root]), _ROOT, (0.0,))


def accept(tree: DraftTree, target_tokens: Tensor | Sequence[int]) -> Acceptance:
    """Walks from the root while a child carries the token drawn at its parent.

    Every token this emits (those of the path below the root, then the bonus) is the target's own draw, so
    the output has the target's distribution whatever was drafted.

    Args:
        target_tokens: the target's draw at every node, [N].

    Raises:
        ValueError: there is not exactly one draw per node, or they are no token ids.
    """
    drawn = tensor_of(target_tokens, "accept: draws")
    if drawn.shape != (len(tree.topology),):
        nodes, got = len(tree.topology), list(drawn.shape)
        raise ValueError(f"accept: needs one target token per node, shape [{nodes}], got {got}")
    draws: list[int] = drawn.tolist()
    if not holds_integers(drawn) or min(draws) < 0:
        raise ValueError(f"accept: draws must be token ids, integers of at least 0, got {drawn.dtype} {draws}")
    return follow(tree, draws)


def follow(tree: DraftTree, draws: Sequence[int]) -> Acceptance:
    """`accept` of draws that have been checked."""
    places = zip(tree.topology.parents, tree.tokens.tolist(), strict=True)
    child = {place: node for node, place in enumerate(places)}
    path = [0]
    while (node := child.get((path[-1], draws[path[-1]]))) is not None:
        path.append(node)
    return Acceptance(path, draws[path[-1]])


def grow(root: int, families: Callable[[Prefix], Siblings], budget: int, spine: int = 0) -> ScoredTree:
    """The best-first search itself, on the host: pop the best prefix, push its next sibling and first child.

    No child scores above its parent, nor a sibling above the one before it, so prefixes leave the heap in
    the order of all prefixes. The first `spine` of them are first children, each of the one before it, whatever
    they score; the rest still leave in the order of all prefixes, less those.

    Args:
        families: ranks the children of a prefix; asked at most once per node.
    """
    tokens, parents, scores = [root], [-1], [0.0]
    prefixes: list[Prefix] = [()]
    ranks: list[tuple[int, ...]] = [()]
    asked: list[Siblings] = []
    heap: list[_Candidate] = []

    def candidate(parent: int, rank: int) -> _Candidate | None:
        """A child of a parent by its rank, if there are so many."""
        log_probs = asked[parent].log_probs
        if rank >= len(log_probs):
            return None
        return -(scores[parent] + log_probs[rank]), (*ranks[parent], rank), parent

    for newest in range(budget):
        asked.append(families(prefixes[newest]))
        first = candidate(newest, 0)
        if first is None:
            spine = 0  # a spine that has ended does not go on from a branch
            if not heap:
                break
            best = heapq.heappop(heap)
        else:
            best = first if newest < spine else heapq.heappushpop(heap, first)
        cost, rank, parent = best
        if sibling := candidate(parent, rank[-1] + 1):
            heapq.heappush(heap, sibling)
        token = asked[parent].tokens[rank[-1]]
        tokens.append(token)
        parents.append(parent)
        scores.append(-cost)
        prefixes.append((*prefixes[parent], token))
        ranks.append(rank)
    return ScoredTree(torch.tensor(tokens), Topology(parents), scores)


_Candidate = tuple[float, tuple[int, ...], int]  # the negative score, the ranks along the path, the parent's node


def _grown(root: int, scores: Tensor | Scores, budget: int, spine: int) -> ScoredTree:
    _check(root, budget)
    found = as_scores(scores, budget, width=budget)
    return grow(root, lambda path: children(found, path, budget), budget, spine)


def _check(root: int, budget: int) -> None:
    checked_count("draft tree: root token", root, 0)
    checked_count("draft tree: budget", budget, 0)
