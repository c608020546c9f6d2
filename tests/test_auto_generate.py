"""Automatic budgets in the loop: nothing but the number of drafted nodes depends on them."""

import copy
import pickle
from functools import lru_cache
from typing import Any

import pytest
import torch
from proposers import PROPOSERS, Right, Scattered, Scripted, Wrong, check_holds, check_same, emitted, small_model
from speech import Letters
from torch import Tensor
from worlds import erratic

from ddtree import (
    AutoBudget,
    DraftTree,
    End,
    Scores,
    Session,
    Verified,
    build_chain,
    build_spine,
    build_tree,
    generate,
    generate_batch,
    stream,
)
from qwen_gdn import QwenGDN, Topology, decode

TOKENS = 48
SPELLING: Any = Letters()
PROMPT = [5, 30, 11, 2]


@lru_cache
def model_of(dtype: torch.dtype) -> QwenGDN:
    return small_model(dtype=dtype)


MODEL = model_of(torch.float64)
TRUTH = list(decode(MODEL, PROMPT, max_new_tokens=TOKENS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_whatever_the_budgets_the_output_is_that_of_plain_decoding(name: str, dtype: torch.dtype) -> None:
    model, given = model_of(dtype), set[int]()
    for number, build in enumerate((build_tree, build_spine) if dtype == torch.float64 else (build_chain,)):
        prompt = [*PROMPT, number]
        truth = list(decode(model, prompt, max_new_tokens=TOKENS))
        proposer, cache = PROPOSERS[name]([*prompt, *truth], number), model.new_cache(len(prompt) + TOKENS)
        budget, tokens = erratic(number), list(prompt)
        how: dict[str, Any] = {"max_new_tokens": TOKENS, "budget": budget, "build": build, "cache": cache}
        for done in generate(model, proposer, prompt, on_round=lambda each: given.add(each.budget), **how):
            tokens += done.tokens
            assert proposer.seen == cache.length == len(tokens) - 1, "what it does not draft for it observes, too"
        check_same(model, prompt, tokens[len(prompt) :], truth)
        check_holds(cache, model, tokens[:-1])
    assert name in ("right", "empty") or len(given) > 2, given


def test_a_round_tells_what_it_was_given_and_proposes_nothing_for_nothing() -> None:
    told: list[Verified] = []
    asked: list[int] = []
    proposer = Scattered([*PROMPT, *TRUTH])

    def note(done: Verified) -> None:
        told.append(done)
        asked.append(proposer.asked)

    budget = erratic(3, most=20)
    list(generate(MODEL, proposer, PROMPT, max_new_tokens=TOKENS, budget=budget, on_round=note))
    assert all(done.budget == len(done.tree.topology) - 1 <= 20 for done in told)
    plain = [done for done, before, after in zip(told, [0, *asked], asked, strict=False) if before == after]
    assert plain and all(done.budget == 0 for done in plain)


def test_drafting_is_given_up_and_taken_up_by_what_it_brings() -> None:
    """On a clock that counts forwards, where a round with drafts takes as long as two without."""

    def run(proposer: Scripted, budget: AutoBudget) -> list[int]:
        given: list[int] = []

        def on_round(done: Verified) -> None:
            given.append(done.budget)

        how: dict[str, Any] = {"max_new_tokens": TOKENS, "budget": budget, "on_round": on_round}
        proposes = proposer.propose

        def propose(root: int) -> Tensor | Scores:
            now[0] += 1.0
            return proposes(root)

        proposer.propose = propose  # type: ignore[method-assign]
        assert emitted(generate(MODEL, proposer, PROMPT, **how)) == TRUTH
        return given

    now = [0.0]

    def clock() -> float:
        now[0] += 0.5  # asked twice a round
        return now[0]

    budget = AutoBudget(clock=clock)
    right = run(Right([*PROMPT, *TRUTH], length=9), budget)
    assert min(right[:-1]) >= 3 and len(right) < 12, right
    wrong = run(Wrong([*PROMPT, *TRUTH]), budget)
    assert wrong[10:].count(0) >= 0.8 * len(wrong[10:]), wrong
    again = run(Right([*PROMPT, *TRUTH], length=9), budget)
    assert len(again) < 30, again


def test_one_budget_serves_streams_and_the_turns_of_a_session() -> None:
    budget = erratic()
    events = list(stream(MODEL, Right([*PROMPT, *TRUTH]), SPELLING, PROMPT, max_new_tokens=9, budget=budget))
    assert isinstance(events[-1], End)
    session = Session(MODEL, Scattered([*PROMPT, *TRUTH]), SPELLING)
    first = session.turn(PROMPT, max_new_tokens=20, budget=budget)
    list(first)
    second = session.turn(session.ids, max_new_tokens=20, budget=budget)
    list(second)
    assert first.ids + second.ids == TRUTH[:40]
    before = budget.costs
    list(generate(small_model(1), Wrong([1]), [1], max_new_tokens=3, budget=budget))
    assert budget.costs is not before, "another target is another machine"


def test_a_pickled_budget_keeps_what_it_has_learnt() -> None:
    budget = AutoBudget()
    how: dict[str, Any] = {"max_new_tokens": TOKENS}
    list(generate(MODEL, Right([*PROMPT, *TRUTH], length=9), PROMPT, budget=budget, **how))
    for copied in (pickle.loads(pickle.dumps(budget)), copy.deepcopy(budget)):
        known = copied.costs
        assert known and known.sizes == budget.costs.sizes
        text = Right([*PROMPT, *TRUTH], length=9)
        assert emitted(generate(MODEL, text, PROMPT, budget=copied, **how)) == TRUTH
        assert copied.costs is known


def unscored(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    return DraftTree(torch.tensor([root]), Topology([-1]))


class Negative(AutoBudget):
    def choose(self, tree: DraftTree) -> int:
        return -1


class Roomless(AutoBudget):
    def room(self, context: int, depth: int) -> int:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"budget": "auto"}, "budget must be an int of at least 0, got 'auto'"),
        ({"budget": AutoBudget}, "budget must be an int of at least 0, got"),
        (
            {"budget": AutoBudget(), "build": unscored},
            "AutoBudget needs trees that know their drafter's scores.*DraftTree",
        ),
        ({"budget": Negative()}, "number of nodes chosen must be an int of at least 0, got -1"),
        ({"budget": Roomless()}, "the most nodes of a round must be an int of at least 0, got None"),
    ],
)
def test_what_cannot_decide_is_refused(how: dict[str, Any], words: str) -> None:
    cache = MODEL.new_cache(40)
    with pytest.raises(ValueError, match=words):
        list(generate(MODEL, Right([*PROMPT, *TRUTH]), PROMPT, max_new_tokens=9, cache=cache, **how))
    assert cache.length in (0, len(PROMPT))


def test_a_batch_refuses_what_goes_by_the_time_of_one_row() -> None:
    with pytest.raises(ValueError, match="budget of row 0: AutoBudget goes by rounds of one sequence"):
        generate_batch(MODEL, Right([1]), [[1], [2]], max_new_tokens=3, budget=AutoBudget())  # type: ignore[arg-type]
    for wrong in ({"most": 0}, {"most": 2.0}, {"clock": 3.0}):
        with pytest.raises(ValueError, match=r"(most|clock) must be"):
            AutoBudget(**wrong)  # type: ignore[arg-type]
