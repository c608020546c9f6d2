"""Several modes over one prompt set, each pair of them compared on the same texts.

A text is a prompt and a seed. In one alternation every text is written in all modes, one right after the other and
each time in another order; first once unmeasured. All that is written is compared with plain decoding.

Speed of a text in one mode over another is the median over alternations of the ratio of their times, taken inside an
alternation, so that whatever drifts in the machine meets both; of a prompt, the geometric mean over its seeds, and of
the set, that over prompts. The accepted length of a set is the mean of accepted + 1 over the rounds of all texts.
Tokens a second are all tokens over the sum of the texts' median times. Intervals come from a bootstrap over prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tools.measure.exactness import NearTie, Referee
from tools.measure.intervals import Resampled
from tools.measure.runs import PLAIN, Mode, Pair, Sample, run
from tools.measure.sampled import Sampling
from tools.measure.speed import in_turn, shown


class Plan(NamedTuple):
    """How a set is written: `seeds` texts of `count` tokens a prompt (one, if greedy) in so many alternations."""

    temperature: float
    seeds: int
    alternations: int
    count: int

    @property
    def samplings(self) -> list[Sampling]:
        """One for each text of a prompt."""
        return [Sampling(self.temperature, seed) for seed in range(self.seeds)]


class Measured(NamedTuple):
    """What was measured, by mode; arrays are [prompts, seeds, alternations].

    seconds: from the first token to the last.
    accepted: the sum of accepted + 1 over rounds.
    rounds: all but the prefill's.
    drafted: nodes, over all rounds.
    written: tokens after the first, of a text.
    """

    seconds: dict[Mode, np.ndarray]
    accepted: dict[Mode, np.ndarray]
    rounds: dict[Mode, np.ndarray]
    drafted: dict[Mode, np.ndarray]
    written: int
    ties: list[tuple[str, NearTie]]

    @property
    def modes(self) -> list[Mode]:
        return list(self.seconds)

    def faster(self, mode: Mode, other: Mode, resampled: Resampled) -> np.ndarray:
        """The logarithm of the speed of one mode over another's, of the set and its resamples."""
        texts = np.median(np.log(self.seconds[other] / self.seconds[mode]), axis=2)
        return resampled.mean(texts.mean(axis=1))

    def speed(self, mode: Mode, resampled: Resampled) -> np.ndarray:
        """Tokens a second."""
        texts = np.median(self.seconds[mode], axis=2)
        return resampled.ratio(np.full(len(texts), self.written * texts.shape[1]), texts.sum(axis=1))

    def length(self, mode: Mode, resampled: Resampled) -> np.ndarray:
        """Accepted length."""
        return resampled.ratio(self.accepted[mode].sum((1, 2)), self.rounds[mode].sum((1, 2)))


def measure(pair: Pair, prompts: Sequence[Sequence[int]], modes: Sequence[Mode], plan: Plan) -> Measured:
    """Writes all texts in all modes, `plain` among them or not.

    Raises:
        DifferentOutputError: a mode wrote something else than plain decoding and rounding does not explain it.
    """
    referee, ties = Referee(pair.model), dict[str, NearTie]()
    texts = [(i, prompt, sampling) for i, prompt in enumerate(prompts) for sampling in plan.samplings]
    plain = [run(pair, PLAIN, prompt, plan.count, sampler=sampling.sampler()).tokens for _, prompt, sampling in texts]

    def all_modes(turn: int) -> Iterator[list[Sample]]:
        written = shown(list(zip(texts, plain, strict=True)), f"turn {turn}")
        for number, ((i, prompt, sampling), right) in enumerate(written):
            samples = in_turn(pair, modes, prompt, plan.count, turn + number, sampling)
            for mode, sample in zip(modes, samples, strict=True):
                what = f"prompt {i}, " + (f"seed {sampling.seed}, " if sampling.temperature else "") + mode.word
                tie = referee.judge(what, prompt, sample.tokens, right, sampling)
                if tie:
                    ties[what] = tie
            yield samples

    list(all_modes(0))  # warms up
    turns = [list(all_modes(turn)) for turn in range(1, plan.alternations + 1)]

    def table(of: Callable[[Sample], float]) -> dict[Mode, np.ndarray]:
        values = np.array([[[of(sample) for sample in samples] for samples in turn] for turn in turns], dtype=float)
        shape = (plan.alternations, len(prompts), -1, len(modes))
        return dict(zip(modes, values.reshape(shape).transpose(3, 1, 2, 0), strict=True))

    return Measured(
        seconds=table(lambda sample: sample.rest),
        accepted=table(lambda sample: sum(done.accepted + 1 for done in sample.drafting)),
        rounds=table(lambda sample: len(sample.drafting)),
        drafted=table(lambda sample: sum(done.drafted for done in sample.drafting)),
        written=plan.count - 1,
        ties=list(ties.items()),
    )
