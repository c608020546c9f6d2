"""Tokens a second of prompts written together, one batch of rows, against the same prompts one after another.

In one alternation every mode writes all prompts in both ways, in turns which of them first. A ratio is taken inside an
alternation before its median is.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddtree import NoDrafts, Round, build_tree, generate_batch
from tools.measure.exactness import NearTie, Referee
from tools.measure.runs import Mode, Pair, accepted_length, run, settle
from tools.measure.speed import Spread


class Batched(NamedTuple):
    """Figures of one mode.

    alone, together: tokens a second, prefill included.
    gain: the second over the first.
    forwards: target forwards after the prompts of the batch, and of the rows alone.
    tau: accepted length of the rows of the batch.
    """

    mode: Mode
    alone: Spread
    together: Spread
    gain: Spread
    forwards: tuple[int, int]
    tau: float

    def as_json(self) -> dict[str, Any]:
        spreads = {name: getattr(self, name)._asdict() for name in ("alone", "together", "gain")}
        return self._asdict() | spreads | {"mode": str(self.mode)}


class _Written(NamedTuple):
    """What all rows wrote, in how many forwards after the prompts, and in how many seconds."""

    rows: list[list[Round]]
    forwards: int
    seconds: float

    @property
    def rate(self) -> float:
        return sum(len(done.tokens) for row in self.rows for done in row) / self.seconds


def measure(
    pair: Pair, prompts: Sequence[Sequence[int]], modes: Sequence[Mode], *, alternations: int, count: int
) -> tuple[list[Batched], list[tuple[str, NearTie]]]:
    """Measures each mode, `plain` or `tree`; also where rounding parted the two ways.

    Args:
        count: tokens written after each prompt.

    Raises:
        DifferentOutputError: a row of the batch wrote something else than alone and rounding does not explain it.
    """
    referee, found, ties = Referee(pair.model), [], []
    for mode in modes:
        turns = []
        for turn in range(alternations + 1):
            ways = (_alone, _together) if turn % 2 else (_together, _alone)
            done = {way: way(pair, mode, prompts, count) for way in ways}
            turns.append((done[_alone], done[_together]))
        alone, together = turns[0]  # to warm up, and to compare
        for number, (prompt, ours, theirs) in enumerate(zip(prompts, together.rows, alone.rows, strict=True)):
            what = f"row {number}, {mode}"
            tie = referee.judge(what, prompt, _tokens(ours), _tokens(theirs))
            ties += [(what, tie)] if tie else []
        found.append(
            Batched(
                mode=mode,
                alone=Spread.of([one.rate for one, _ in turns[1:]]),
                together=Spread.of([all_.rate for _, all_ in turns[1:]]),
                gain=Spread.of([all_.rate / one.rate for one, all_ in turns[1:]]),
                forwards=(together.forwards, alone.forwards),
                tau=accepted_length([done for row in together.rows for done in row[1:]]),
            )
        )
    return found, ties


def _tokens(rounds: Sequence[Round]) -> list[int]:
    return [token for done in rounds for token in done.tokens]


def _alone(pair: Pair, mode: Mode, prompts: Sequence[Sequence[int]], count: int) -> _Written:
    """One prompt after another, by the loop that is fastest for one."""
    start = time.perf_counter()
    rows = [run(pair, mode, prompt, count).rounds for prompt in prompts]
    return _Written(rows, sum(len(row) - 1 for row in rows), time.perf_counter() - start)


def _together(pair: Pair, mode: Mode, prompts: Sequence[Sequence[int]], count: int) -> _Written:
    start = time.perf_counter()
    drafter = pair.drafter if mode.budget else NoDrafts()
    batch = generate_batch(pair.target, drafter, prompts, max_new_tokens=count, budget=mode.budget, build=build_tree)
    steps = list(batch)
    settle(pair.target.device)
    rows = [[done for done in row if done.tokens] for row in zip(*steps, strict=True)]
    return _Written(rows, len(steps) - 1, time.perf_counter() - start)
