"""A drafter, a target and a machine that exist as numbers alone, for budgets to be tried on.

Trees are real ones, built from drafted marginals; what the target draws has a law that is known, and a round takes
what a formula says. So any policy can be run in no time, and the best fixed one found by trying all.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from ddtree import AutoBudget, ScoredTree, build_tree
from ddtree.drafts import first_nodes

VOCAB, DEPTH, MOST = 24, 7, 63

Cost = Callable[[int, int], float]
"""Seconds of a round by its nodes, root included, and its context; 0 nodes are a round without a proposal."""


class Place(NamedTuple):
    """What is drafted somewhere, and which nodes of it the target would follow."""

    tree: ScoredTree
    path: tuple[int, ...]

    def within(self, nodes: int) -> tuple[int, ...]:
        """The path as far as it lies among the first drafted nodes."""
        return tuple(node for node in self.path if node <= nodes)


@cache
def places(count: int, *, seed: int = 0, sharp: float = 3.0, heat: float = 1.0, shift: float = 0.0) -> list[Place]:
    """Places where the target draws from what is drafted, heated, its odds shifted away from every drafted token.

    Args:
        sharp: deviation of the drafted logits; -inf for `shift` is a drafter that is never right.
    """
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        logits = sharp * torch.randn(DEPTH, VOCAB, generator=draw)
        tree = build_tree(0, logits, MOST)
        hits = torch.rand(DEPTH, generator=draw) < 1 / (1 + math.exp(-shift)) if shift else torch.ones(DEPTH).bool()
        drawn = torch.multinomial((logits / heat).softmax(-1), 1, generator=draw)[:, 0].where(hits, -1)
        made.append(Place(tree, followed(tree, drawn.tolist())))
    return made


def followed(tree: ScoredTree, drawn: list[int]) -> tuple[int, ...]:
    child = {place: node for node, place in enumerate(zip(tree.topology.parents, tree.tokens.tolist(), strict=True))}
    path = [0]
    for token in drawn:
        if (path[-1], token) not in child:
            break
        path.append(child[path[-1], token])
    return tuple(path)


@dataclass
class Run:
    """What came of a run: nodes drafted in each round (None where nothing was proposed), tokens and true seconds."""

    nodes: list[int | None] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Machine:
    """Time as it passes by a cost; a clock may show it with noise."""

    def __init__(self, cost: Cost, *, noise: float = 0.0, seed: int = 0) -> None:
        self.cost = cost
        self.now = 0.0
        self._noise = noise
        self._dice = random.Random(seed)

    def clock(self) -> float:
        return self.now

    def spend(self, nodes: int, context: int) -> float:
        """Lets a round's time pass; its true cost."""
        true = self.cost(nodes, context)
        self.now += true * math.exp(self._dice.gauss(0.0, self._noise))
        return true


def fixed(nodes: int | None, there: list[Place], cost: Cost, context: int = 200) -> Run:
    """A run of one budget; None proposes nothing."""
    run = Run()
    for place in there:
        path = place.within(nodes) if nodes is not None else (0,)
        run.nodes.append(nodes)
        run.seconds += cost(0 if nodes is None else 1 + min(nodes, len(place.tree.topology) - 1), context)
        run.tokens += len(path)
    return run


def best(there: list[Place], cost: Cost, context: int = 200) -> float:
    """Tokens a second of the best of all fixed budgets, plain decoding among them."""
    return max(fixed(nodes, there, cost, context).rate for nodes in (None, *range(MOST + 1)))


def auto(budget: AutoBudget, machine: Machine, there: Iterator[Place] | list[Place], context: int = 200) -> Run:
    """A run of an automatic budget whose clock is the machine's; every place is a round."""
    run = Run()
    for place in there:
        room = budget.room(context, DEPTH + 1)
        nodes = budget.choose(first_nodes(place.tree, room + 1)) if room else None
        tree = first_nodes(place.tree, 1 + (nodes or 0))
        run.nodes.append(nodes)
        run.seconds += machine.spend(0 if nodes is None else len(tree.topology), context)
        path = place.within(nodes or 0)
        budget.learn(tree, path)
        run.tokens += len(path)
    return run


class Target:
    """What a budget asks of a target: its sizes, if programs have some."""

    def __init__(self, *sizes: int) -> None:
        if sizes:
            self.sizes = sizes


def begun(machine: Machine, *sizes: int, **how: Any) -> AutoBudget:
    """An automatic budget on that machine, its first text begun."""
    budget = AutoBudget(clock=machine.clock, **how)
    budget.owner = Target(*sizes)  # type: ignore[attr-defined]  # it keeps none alive by itself
    budget.begin(budget.owner)  # type: ignore[attr-defined]
    return budget


def erratic(seed: int = 0, **how: Any) -> AutoBudget:
    """An automatic budget whose clock says anything at all, so that it gives anything, too."""
    dice = random.Random(seed)
    times = iter(lambda: dice.uniform(0.0, 1000.0) ** 2, None)
    now = [0.0]

    def clock() -> float:
        now[0] += next(times)
        return now[0]

    return AutoBudget(clock=clock, **how)
