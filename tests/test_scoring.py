"""Scores in place of a drafter's own: tempered ones against the softmax itself, calibrated ones against their curve."""

import math
from itertools import pairwise

import pytest
import torch
from proposers import Random, Right, emitted, small_model

from ddtree import build_chain, build_tree, calibrated, generate, scored, tempered
from ddtree.dflash2 import PairScores
from ddtree.scores import Marginals
from qwen_gdn import decode

NAN = float("nan")


def normal(seed: int, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair_scores(seed: int, depth: int = 3, k: int = 4) -> PairScores:
    candidates = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(d))[:k] for d in range(depth)])
    scores = normal(seed, depth, k, k)
    scores[0] = scores[0, 0]
    return PairScores(candidates, scores.log_softmax(-1))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5, [0.5, 2.0]])
def test_tempered_logits_are_the_softmax_at_that_temperature(temperature: float | list[float]) -> None:
    logits = normal(1, 4, 11)
    each = temperature if isinstance(temperature, list) else [temperature]
    rows = torch.stack([torch.softmax(row.double() / each[min(d, len(each) - 1)], 0) for d, row in enumerate(logits)])
    tree = scored(build_tree, tempered(temperature))(3, logits, 12)
    tokens, parents = tree.tokens.tolist(), tree.topology.parents
    for node in range(1, 13):
        path = [tokens[i] for i in tree.topology.path(node)[1:]]
        assert math.exp(tree.log_probs[node]) == pytest.approx(
            math.prod(float(rows[d, token]) for d, token in enumerate(path)), rel=1e-4
        )
        assert parents[node] < node
    plain = build_tree(3, logits, 12)
    assert (tokens == plain.tokens.tolist()) == (temperature == 1.0)


def test_high_temperatures_widen_a_tree_and_low_ones_deepen_it() -> None:
    logits = normal(2, 6, 11)
    deepest = [scored(build_tree, tempered(t))(3, logits, 8).topology.max_depth for t in (0.05, 4.0, 400.0)]
    assert deepest[0] == 6 and deepest[0] > deepest[1] > deepest[2] == 1


def test_tempered_pair_scores_keep_what_the_children_have_together() -> None:
    scores = pair_scores(3)
    path = (scores.children(()).tokens[1],)
    before, after = scores.children(path), tempered(0.5)(scores, 9).children(path)
    assert before.tokens == after.tokens
    squares = [math.exp(2 * value) for value in before.log_probs]
    assert [math.exp(value) for value in after.log_probs] == pytest.approx([s / sum(squares) for s in squares])

    class Half:
        """Two of many children, half of the probability."""

        depth = 1

        def children(self, path: tuple[int, ...], /) -> tuple[list[int], list[float]]:
            return [7, 4], [math.log(0.4), math.log(0.1)]

    assert [math.exp(v) for v in tempered(0.5)(Half(), 9).children(()).log_probs] == pytest.approx(
        [0.5 * 16 / 17, 0.5 / 17]
    )


def test_calibrated_scores_are_what_the_curve_makes_of_them() -> None:
    def curve(depth: int, value: float) -> float:
        return 2 * value - 0.1 * depth

    logits = normal(4, 3, 7)
    for proposal, own in ((logits, Marginals(logits, 9)), (pair_scores(4), pair_scores(4))):
        found = calibrated(curve)(proposal, 9)
        assert found.depth == 3
        for path in ((), (own.children(()).tokens[0],)):
            before, after = own.children(path), found.children(path)
            assert after.tokens == before.tokens
            assert after.log_probs == pytest.approx([2 * value - 0.1 * (len(path) + 1) for value in before.log_probs])
    impossible = calibrated(lambda depth, value: value if value > -2 else -math.inf)(logits, 9).children(())
    assert len(impossible.tokens) < 7 and min(impossible.log_probs) > -2


@pytest.mark.parametrize("curve", [lambda d, v: 0.5, lambda d, v: NAN, lambda d, v: -1 / (1 - v) - 0.1])
def test_a_curve_that_gives_no_log_probabilities_or_turns_the_order_is_refused(curve: object) -> None:
    with pytest.raises(ValueError, match="at most 0 and keep their order"):
        scored(build_tree, calibrated(curve))(3, normal(5, 2, 5), 4)


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, NAN, [], [1.0, 0.0], ["1"]])
def test_a_temperature_that_is_none_is_refused(temperature: object) -> None:
    with pytest.raises(ValueError, match="temperatures must be finite numbers above 0"):
        tempered(temperature)


def test_another_scoring_changes_what_is_drafted_and_not_what_is_written() -> None:
    model, prompt = small_model(), [4, 9, 2]
    truth = list(decode(model, prompt, max_new_tokens=30))
    for build in (build_tree, build_chain):
        for scoring in (tempered(3.0), tempered([0.5, 4.0]), calibrated(lambda depth, value: 1.5 * value - 0.2)):
            for drafter in (Right([*prompt, *truth], 2), Random([*prompt, *truth], 2)):
                told = []
                rounds = generate(
                    model,
                    drafter,
                    prompt,
                    max_new_tokens=30,
                    build=scored(build, scoring),
                    on_round=told.append,
                )
                assert emitted(rounds) == truth
                for found in told:
                    assert all(a >= b for a, b in pairwise(found.tree.log_probs)) or build is build_chain
