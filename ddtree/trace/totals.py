"""Figures over all rounds of a trace: what was accepted, where in the trees, and whether the drafter knew."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from .rounds import Origin, RoundRecord

BINS = 10  # of probabilities, all of one width


@dataclass(frozen=True)
class Rate:
    """How often something came true.

    Attributes:
        value: what it is a rate of: a depth (1 for children of the root), or a rank among siblings (0 for the first).
        tried: times that it could have been.
        accepted: times that it was.
        rate: accepted / tried.
    """

    value: int
    tried: int
    accepted: int
    rate: float


@dataclass(frozen=True)
class Bin:
    """Nodes whose paths the drafter gave a probability in [low, high), the last bin's 1 included.

    Attributes:
        predicted: mean of those probabilities.
        rate: share of the nodes that were accepted, that is accepted / nodes.
    """

    low: float
    high: float
    nodes: int
    predicted: float
    accepted: int
    rate: float


@dataclass(frozen=True)
class Totals:
    """Figures over rounds; but for tokens and origins, the prefill's round is left out.

    Attributes:
        tokens_per_forward: tokens for each forward of the target, those of the prompt included.
        origins: tokens by where they came from.
        mean_length, expected_length: mean of accepted drafts + 1, over rounds whose trees have probabilities, and what
            the drafter expected of the same rounds.
        accepted_lengths: accepted drafts + 1 -> rounds.
        by_depth: of the rounds whose path came to a node at depth − 1 with children, how many went on to one of them.
        by_rank: of the steps of paths at nodes with a child of that rank, how many took it.
        calibration: predicted against real acceptance of drafted nodes, bins without nodes left out.
    """

    rounds: int
    tokens: int
    target_forwards: int
    tokens_per_forward: float | None
    origins: Mapping[str, int]
    mean_length: float | None
    expected_length: float | None
    accepted_lengths: Mapping[int, int]
    by_depth: Sequence[Rate]
    by_rank: Sequence[Rate]
    calibration: Sequence[Bin]


class Step(NamedTuple):
    """A node of a path that had children: how deep they are, how many, and the rank of the one taken, if one was."""

    depth: int
    children: int
    taken: int | None


def totals(rounds: Sequence[RoundRecord], target_forwards: int) -> Totals:
    """Figures over the rounds of a trace, the prefill's first."""
    verified = [each for each in rounds if each.nodes]
    scored = [each for each in verified if each.expected is not None]
    steps = [step for each in verified for step in _steps(each)]
    tokens = sum(len(each.tokens) for each in rounds)
    origins = Counter(origin for each in rounds for origin in each.origins)
    return Totals(
        rounds=len(verified),
        tokens=tokens,
        target_forwards=target_forwards,
        tokens_per_forward=tokens / target_forwards if target_forwards else None,
        origins={origin: origins[origin] for origin in get_args(Origin)},
        mean_length=_mean([each.accepted + 1 for each in scored]),
        expected_length=_mean([each.expected + 1 for each in scored if each.expected is not None]),
        accepted_lengths=dict(sorted(Counter(each.accepted + 1 for each in verified).items())),
        by_depth=_rates((step.depth, step.taken is not None) for step in steps),
        by_rank=_rates((rank, step.taken == rank) for step in steps for rank in range(step.children)),
        calibration=_bins([pair for each in verified for pair in _predictions(each)]),
    )


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """The children of every node, in the order of their rank."""
    found: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[parent].append(node)
    return found


def spine_of(parents: Sequence[int]) -> set[int]:
    """The nodes of the likeliest chain: from the root down, the first child of each."""
    spine, children = {0}, children_of(parents)
    node = 0
    while children[node]:
        node = children[node][0]
        spine.add(node)
    return spine


def _steps(each: RoundRecord) -> Iterator[Step]:
    children = children_of(each.parents)
    for depth, node in enumerate(each.path, 1):
        if family := children[node]:
            yield Step(depth, len(family), family.index(each.path[depth]) if depth < len(each.path) else None)


def _predictions(each: RoundRecord) -> Iterator[tuple[float, bool]]:
    """The probability of every drafted node, and whether it was accepted."""
    for node, log_prob in list(enumerate(each.log_probs or ()))[1:]:
        yield math.exp(min(log_prob, 0.0)), node in each.path


def _rates(outcomes: Iterator[tuple[int, bool]]) -> list[Rate]:
    tried, accepted = Counter[int](), Counter[int]()
    for value, true in outcomes:
        tried[value] += 1
        accepted[value] += true
    return [Rate(value, tried[value], accepted[value], accepted[value] / tried[value]) for value in sorted(tried)]


def _bins(predictions: Sequence[tuple[float, bool]]) -> list[Bin]:
    members: dict[int, list[tuple[float, bool]]] = {}
    for probability, accepted in predictions:
        members.setdefault(min(int(probability * BINS), BINS - 1), []).append((probability, accepted))
    return [_bin(place, members[place]) for place in sorted(members)]


def _bin(place: int, members: Sequence[tuple[float, bool]]) -> Bin:
    count, accepted = len(members), sum(true for _, true in members)
    predicted = sum(probability for probability, _ in members) / count
    return Bin(place / BINS, (place + 1) / BINS, count, predicted, accepted, accepted / count)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
