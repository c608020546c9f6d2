"""Sampling through the speculative loop: reproducible, greedy towards temperature zero, and of the target's law.

The law is checked coarsely here, on what `generate` itself writes; samplers have tests of their own.
"""

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from proposers import Right, Scattered, Scripted, Wrong, emitted, small_model, table_model
from scipy.stats import chisquare  # type: ignore[import-untyped]
from tiny import seeded
from torch import Tensor

from ddtree import Acceptance, DraftTree, Proposer, Round, accept, generate, make_sampler
from qwen_gdn import decode

MODEL = small_model()
PROMPT = [5, 30, 11, 2]
TRUTH = list(decode(MODEL, PROMPT, max_new_tokens=60))
TRANSCRIPT = [*PROMPT, *TRUTH]


def test_a_seed_repeats_the_output_and_another_does_not() -> None:
    def run(seed: int) -> list[Round]:
        sampler = make_sampler(0.9, top_p=0.95, seed=seed)
        return list(generate(MODEL, Scattered(TRANSCRIPT), PROMPT, max_new_tokens=40, budget=7, sampler=sampler))

    assert run(3) == run(3)
    assert emitted(run(3)) != emitted(run(4))


@pytest.mark.case(37)
def test_temperature_towards_zero_is_greedy() -> None:
    for temperature in (0.0, 1e-6, 1e-12):
        for make in (Right, Wrong, Scattered):
            sampler = make_sampler(temperature, seed=0)
            rounds = generate(MODEL, make(TRANSCRIPT), PROMPT, max_new_tokens=40, budget=7, sampler=sampler)
            assert emitted(rounds) == TRUTH[:40]


class Always(Scripted):
    """The same logits whatever the context."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__([])
        self.logits = logits

    def draft(self, coming: list[int]) -> Tensor:
        return self.logits


TABLE = 1.2 * torch.randn(8, 8, generator=seeded(5), dtype=torch.float64)
DRAFTS = {
    "even": torch.zeros(4, 8),
    "one token only": torch.full((4, 8), -torch.inf).index_fill(1, torch.tensor([3]), 0.0),
    "skewed": torch.randn(4, 8, generator=seeded(6)) * 3,
}


def _misfit(drafter: Proposer, sampler: Callable[[Tensor], Tensor], law: Tensor, count: int) -> float:
    """p-value of one long output's transitions, whose law given a token is `law[token]`; rare ones are pooled."""
    model = table_model(TABLE)
    tokens = [0, *emitted(generate(model, drafter, [0], max_new_tokens=count, budget=6, sampler=sampler))]
    seen, starts = Counter(pairwise(tokens)), Counter(tokens[:-1])
    expected = {(a, b): starts[a] * float(law[a, b]) for a in range(8) for b in range(8)}
    assert all(expected[pair] > 0 for pair in seen), "a token of probability zero was written"
    common = [pair for pair, value in expected.items() if value >= 5]
    rows = [(float(seen[pair]), expected[pair]) for pair in common]
    rows.append((len(tokens) - 1 - sum(a for a, _ in rows), len(tokens) - 1 - sum(b for _, b in rows)))
    observed, wanted = zip(*[row for row in rows if row[1] > 0.5], strict=True)
    fixed = len({pair[0] for pair in common}) - 1  # each token's own number of successors is given
    return float(chisquare(observed, [w * sum(observed) / sum(wanted) for w in wanted], ddof=fixed).pvalue)


@pytest.mark.parametrize("drafts", list(DRAFTS))
def test_sampled_output_has_the_law_of_the_target_whatever_is_drafted(drafts: str) -> None:
    """Coarse: 1,000 transitions of a target whose law is a table."""
    law = (TABLE / 0.7).softmax(-1)
    kept = law.sort(-1, descending=True)
    law = law * (law >= kept.values.gather(1, ((kept.values.cumsum(-1) < 0.8).sum(-1, keepdim=True))))
    law = law / law.sum(-1, keepdim=True)
    sampler = make_sampler(0.7, top_p=0.8, seed=11)
    assert _misfit(Always(DRAFTS[drafts]), sampler, law, 1000) > 1e-3 / 4


def test_the_law_test_catches_a_walk_that_prefers_the_first_child(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)

    def biased(tree: DraftTree, drawn: Tensor) -> Acceptance:
        if len(tree.topology) > 1 and draw.random() < 0.1:
            drawn = drawn.index_fill(0, torch.tensor([0]), int(tree.tokens[1]))
        return accept(tree, drawn)

    monkeypatch.setattr("ddtree.loop.accept", biased)
    law = TABLE.softmax(-1)
    assert _misfit(Always(DRAFTS["one token only"]), make_sampler(1.0, seed=2), law, 600) < 1e-3 / 4
