"""Tokens a second of several modes, measured side by side.

In one alternation every mode runs every prompt, and at each prompt the modes stand in another order, so that whatever
drifts in the machine meets all of them. A figure is the median over alternations; a ratio is taken inside an
alternation before its median is.
"""

from collections.abc import Iterator, Sequence
from random import Random
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from tools.measure.exactness import NearTie, Referee
from tools.measure.runs import PLAIN, Mode, Pair, Sample, StageClock, accepted_length, run
from tools.measure.sampled import GREEDY, Sampling


class Spread(NamedTuple):
    """Median, lowest and highest over alternations."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}..{self.high:.2f}]"


class Speed(NamedTuple):
    """Figures of one mode.

    decode, whole: tokens a second after the first token, and with the prefill.
    to_plain, to_chain: decode speed over that of plain decoding, and of the chain of this mode's depth.
    tau: accepted length, mean of accepted + 1 over all rounds but the first.
    forwards: target forwards after the prefill, for all prompts.
    drafted: nodes a round.
    stages: milliseconds a round of each stage, from a run of its own (empty for plain decoding).
    """

    mode: Mode
    decode: Spread
    whole: Spread
    to_plain: Spread
    to_chain: Spread | None
    tau: float
    forwards: int
    drafted: float
    stages: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        spreads = ("decode", "whole", "to_plain", "to_chain")
        table = self._asdict() | {name: s and s._asdict() for name in spreads for s in [getattr(self, name)]}
        return table | {"mode": str(self.mode)}


class Rates(NamedTuple):
    """Tokens a second of one mode in one alternation."""

    decode: float
    whole: float


class Outcome(NamedTuple):
    """speeds: of every mode. best_tree, best_chain: the fastest. tree_over_chain: decode speed of those two."""

    speeds: list[Speed]
    best_tree: Mode
    best_chain: Mode
    tree_over_chain: Spread
    ties: list[tuple[str, NearTie]]

    def as_json(self) -> dict[str, Any]:
        """All but the ties."""
        return {
            "modes": [each.as_json() for each in self.speeds],
            "best_tree": str(self.best_tree),
            "best_chain": str(self.best_chain),
            "tree_over_chain": self.tree_over_chain._asdict(),
        }


def measure(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    budgets: Sequence[int],
    depth: int,
    alternations: int,
    count: int,
) -> Outcome:
    """Measures plain decoding, and chain and tree at each budget.

    Args:
        depth: positions that the drafter proposes; chains of a larger budget are the chain of that depth.
        alternations: how often everything is run.
        count: tokens written after each prompt, at least 2.

    Raises:
        DifferentOutputError: a mode wrote something else than plain decoding and rounding does not explain it.
    """
    modes = modes_of(budgets, depth)
    first = [[run(pair, mode, prompt, count) for mode in modes] for prompt in shown(prompts, "warming up")]
    ties = list(_differences(Referee(pair.model), modes, prompts, first))
    rates: list[list[Rates]] = [[] for _ in modes]
    for turn in shown(range(alternations), "alternations"):
        samples = [in_turn(pair, modes, prompt, count, turn + i) for i, prompt in enumerate(prompts)]
        for per_mode, column in zip(rates, zip(*samples, strict=True), strict=True):
            per_mode.append(_rates(column))
    stages = [_stages(pair, mode, prompts, count) for mode in shown(modes, "stages")]
    by_mode, columns = dict(zip(modes, rates, strict=True)), zip(*first, strict=True)
    speeds = [_speed(m, depth, by_mode, c, s) for m, c, s in zip(modes, columns, stages, strict=True)]
    tree, chain = (_fastest(speeds, kind) for kind in ("tree", "chain"))
    return Outcome(speeds, tree, chain, _over(by_mode[tree], by_mode[chain]), ties)


def modes_of(budgets: Sequence[int], depth: int) -> list[Mode]:
    """Plain decoding, the chains that differ, and the trees."""
    chains = [Mode("chain", budget) for budget in sorted({min(budget, depth) for budget in budgets})]
    return [PLAIN, *chains, *(Mode("tree", budget) for budget in sorted(set(budgets)))]


def in_turn(
    pair: Pair, modes: Sequence[Mode], prompt: Sequence[int], count: int, turn: int, sampling: Sampling = GREEDY
) -> list[Sample]:
    """A sample of every mode, in the order of `modes`, taken in an order that `turn` decides.

    Not by rotation: each mode would follow the same one always, and meet what that leaves in the processor's caches.
    """
    order = Random(turn).sample(range(len(modes)), len(modes))
    taken = {i: run(pair, modes[i], prompt, count, sampler=sampling.sampler()) for i in order}
    return [taken[i] for i in range(len(modes))]


def _rates(samples: Sequence[Sample]) -> Rates:
    written = sum(len(sample.tokens) for sample in samples)
    rest = sum(sample.rest for sample in samples)
    return Rates((written - len(samples)) / rest, written / (rest + sum(sample.prefill for sample in samples)))


def _differences(
    referee: Referee,
    modes: Sequence[Mode],
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sequence[Sample]],
) -> Iterator[tuple[str, NearTie]]:
    for i, (prompt, row) in enumerate(zip(prompts, samples, strict=True)):
        for mode, sample in zip(modes, row, strict=True):
            what = f"prompt {i}, {mode}"
            tie = referee.judge(what, prompt, sample.tokens, row[0].tokens)
            if tie:
                yield what, tie


def _stages(pair: Pair, mode: Mode, prompts: Sequence[Sequence[int]], count: int) -> dict[str, float]:
    """Milliseconds a round of each stage of a speculative mode. The clock costs time, so no rate counts this run."""
    if mode.kind == "plain":
        return {}
    clock = StageClock(pair.target.device)
    rounds = sum(len(run(pair, mode, prompt, count, clock).drafting) for prompt in prompts)
    return {name: 1e3 * seconds / max(rounds, 1) for name, seconds in clock.seconds.items()}


def _speed(
    mode: Mode,
    depth: int,
    rates: dict[Mode, list[Rates]],
    samples: Sequence[Sample],
    stages: dict[str, float],
) -> Speed:
    rounds = [done for sample in samples for done in sample.drafting]
    own, chain = rates[mode], rates.get(Mode("chain", min(mode.budget, depth)))
    return Speed(
        mode=mode,
        decode=Spread.of([rate.decode for rate in own]),
        whole=Spread.of([rate.whole for rate in own]),
        to_plain=_over(own, rates[PLAIN]),
        to_chain=_over(own, chain) if chain else None,
        tau=accepted_length(rounds),
        forwards=len(rounds),
        drafted=sum(done.drafted for done in rounds) / max(len(rounds), 1),
        stages=stages,
    )


def _over(these: Sequence[Rates], those: Sequence[Rates]) -> Spread:
    """Decode speed of one mode over another's."""
    return Spread.of([a.decode / b.decode for a, b in zip(these, those, strict=True)])


def _fastest(speeds: Sequence[Speed], kind: str) -> Mode:
    return max((each for each in speeds if each.mode.kind == kind), key=lambda each: each.decode.median).mode


def shown(things: Sequence[Any], what: str) -> Any:
    """A progress bar on stderr, none where that is no terminal."""
    return tqdm(things, desc=what, disable=None, leave=False)
