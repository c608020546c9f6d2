"""The borders of the speculative loop: stop ids, counts, short prompts, and what is refused at the call."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from proposers import Empty, Moody, Right, Scattered, Scripted, Wrong, check_holds, emitted, small_model, table_model
from tiny import memory_of, same_bits, seeded
from torch import Tensor

from ddtree import Acceptance, DraftTree, NoDrafts, Proposer, Round, Scores, accept, build_tree, generate
from qwen_gdn import HybridCache, QwenGDN, Topology, decode
from qwen_gdn.model import LayerId

MODEL = small_model()
PROMPT = [5, 30, 11, 2]
TRUTH = list(decode(MODEL, PROMPT, max_new_tokens=60))
TRANSCRIPT = [*PROMPT, *TRUTH]


def first_stop(tokens: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """The tokens up to the first stop id, that included."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in stop_ids]
    return list(tokens[: ends[0]] if ends else tokens)


@pytest.mark.case(31)
@pytest.mark.parametrize("budget", [0, 4, 16])
@pytest.mark.parametrize("make", [Right, Wrong, Scattered, Moody], ids=lambda make: make.__name__)
def test_a_stop_id_ends_the_output_wherever_in_a_round_it_stands(make: type[Scripted], budget: int) -> None:
    for stop in sorted(set(TRUTH[:14])):
        expected, cache = first_stop(TRUTH, [stop]), MODEL.new_cache(100)
        rounds = generate(
            MODEL, make(TRANSCRIPT), PROMPT, max_new_tokens=60, budget=budget, stop_ids={stop}, cache=cache
        )
        assert emitted(rounds) == expected
        assert next(rounds, None) is None
        check_holds(cache, MODEL, [*PROMPT, *expected[:-1]])
        if budget == 0:
            assert list(decode(MODEL, PROMPT, max_new_tokens=60, stop_ids=[stop])) == expected


@pytest.mark.case(31, 33)
def test_a_stop_id_comes_as_prefill_token_first_child_later_sibling_and_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[tuple[DraftTree, Acceptance]] = []

    def spy(tree: DraftTree, drawn: Sequence[int]) -> Acceptance:
        walks.append((tree, accept(tree, drawn)))
        return walks[-1][1]

    monkeypatch.setattr("ddtree.loop.follow", spy)
    roles: set[str] = set()
    for stop in sorted(set(TRUTH[:25])):
        for seed in range(2):
            walks.clear()
            proposer = Scattered(TRANSCRIPT, seed)
            rounds = list(generate(MODEL, proposer, PROMPT, max_new_tokens=60, budget=16, stop_ids=[stop]))
            assert emitted(rounds) == first_stop(TRUTH, [stop])
            roles.add(_role(*walks[-1], len(rounds[-1].tokens)) if walks else "prefill token")
    assert roles == {"prefill token", "first child", "later sibling", "bonus"}


def _role(tree: DraftTree, walk: Acceptance, emitted: int) -> str:
    """How the last emitted token of a round stood in it."""
    if emitted == len(walk.path):
        return "bonus"
    parent, node = walk.path[emitted - 1 : emitted + 1]
    return "first child" if tree.topology.parents.index(parent) == node else "later sibling"


@pytest.mark.case(31)
@pytest.mark.parametrize(
    "stop_ids", [[], (36,), [7, 1, 18], frozenset(range(0, 37, 5)), {1: "a", 9: "b"}, torch.tensor([26, 17])], ids=repr
)
def test_of_several_stop_ids_the_first_that_is_written_counts(stop_ids: Any) -> None:
    for proposer in (Right(TRANSCRIPT), Scattered(TRANSCRIPT), NoDrafts()):
        rounds = generate(MODEL, proposer, PROMPT, max_new_tokens=60, budget=9, stop_ids=stop_ids)
        assert emitted(rounds) == first_stop(TRUTH, [int(token) for token in stop_ids])


@pytest.mark.case(31)
def test_a_stop_id_that_is_drafted_and_rejected_stops_nothing() -> None:
    """Every token that the target does not write is a stop id, and all drafts are such tokens."""
    length = 12
    never = sorted(set(range(37)) - set(TRUTH[:length]))

    class Stops(Scripted):
        def draft(self, coming: list[int]) -> Tensor:
            logits = torch.full((len(coming), self.vocab), -torch.inf)
            logits[:, never] = 0.0
            return logits

    rounds = list(generate(MODEL, Stops(TRANSCRIPT), PROMPT, max_new_tokens=length, budget=len(never), stop_ids=never))
    assert emitted(rounds) == TRUTH[:length]
    assert sum(done.drafted for done in rounds) > 100


@pytest.mark.case(32)
@pytest.mark.parametrize("as_draft", [True, False], ids=["accepted draft", "bonus"])
def test_an_accepted_run_is_cut_by_the_count_and_by_the_stop_whichever_comes_first(as_draft: bool) -> None:
    """The target writes 9, 10, 11, 12 (the stop), 20, 21, 22, ...; the prefill's own token is 9."""
    run = [9, 10, 11, 12, 20, 21, 22, 23, 9]
    table = torch.zeros(24, 24, dtype=torch.float64)
    for token, following in pairwise([8, *run]):
        table[token, following] = 5.0
    model = table_model(table)
    for count, expected in ((5, [10, 11, 12]), (3, [10, 11, 12]), (2, [10, 11]), (1, [10])):
        cache = model.new_cache(20)
        proposer = Right([8, *run], length=15 if as_draft else 2)
        first, *rest = generate(model, proposer, [8], max_new_tokens=1 + count, stop_ids=[12], cache=cache)
        assert first.tokens == (9,)
        assert emitted(rest) == expected
        assert cache.length == 1 + len(expected)


def test_accepted_counts_what_the_target_followed_even_where_the_round_was_cut() -> None:
    stop = next(token for place, token in enumerate(TRUTH) if place > 3 and token not in TRUTH[:place])
    place = TRUTH.index(stop)
    rounds = list(generate(MODEL, Right(TRANSCRIPT, length=15), PROMPT, max_new_tokens=60, budget=15, stop_ids=[stop]))
    assert rounds == [Round((TRUTH[0],), 0, 0), Round(tuple(TRUTH[1 : place + 1]), 15, 15)]


@pytest.mark.case(32)
@pytest.mark.parametrize(
    ("make", "budget"),
    [(Right, 15), (Right, 3), (Scattered, 7), (lambda transcript: NoDrafts(), 7)],
    ids=["right", "right, small budget", "scattered", "plain"],
)
def test_every_count_gives_that_many_tokens_of_the_same_output(
    make: Callable[[Sequence[int]], Proposer], budget: int
) -> None:
    for count in range(41):
        proposer, cache = make(TRANSCRIPT), MODEL.new_cache(len(PROMPT) + 40)
        rounds = list(generate(MODEL, proposer, PROMPT, max_new_tokens=count, budget=budget, cache=cache))
        assert emitted(rounds) == TRUTH[:count]
        assert bool(rounds) == bool(count)
        assert cache.length == len(PROMPT) + count - 1
        check_holds(cache, MODEL, TRANSCRIPT[: len(PROMPT) + count - 1])


def rows_of_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward of the target from now on."""
    rows: list[int] = []
    norm = MODEL.norm.forward

    def spy(x: Tensor) -> Tensor:
        rows.append(x.shape[1])
        return norm(x)

    monkeypatch.setattr(MODEL.norm, "forward", spy)
    return rows


def test_a_builder_that_goes_deeper_than_can_be_emitted_loses_only_those_nodes() -> None:
    def deep(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
        held = TRANSCRIPT.index(root, len(PROMPT))
        coming = torch.full((20, 37), -torch.inf)
        coming[range(20), TRANSCRIPT[held + 1 : held + 21]] = 0.0
        return build_tree(root, coming, 20)

    for stop_ids in ([], [TRUTH[5]]):
        cache = MODEL.new_cache(len(PROMPT) + 3)
        rounds = generate(
            MODEL, Empty(TRANSCRIPT), PROMPT, max_new_tokens=4, budget=20, build=deep, stop_ids=stop_ids, cache=cache
        )
        assert list(rounds) == [Round((TRUTH[0],), 0, 0), Round(tuple(TRUTH[1:4]), 2, 2)]
        check_holds(cache, MODEL, [*PROMPT, *TRUTH[:3]])


@pytest.mark.case(33)
def test_one_token_costs_one_forward_and_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = rows_of_forwards(monkeypatch)
    for stop_ids, count in (([], 1), ([TRUTH[0]], 50)):
        proposer = Right(TRANSCRIPT)
        rounds = list(generate(MODEL, proposer, PROMPT, max_new_tokens=count, stop_ids=stop_ids))
        assert rounds == [Round((TRUTH[0],), 0, 0)]
        assert proposer.asked == 0
        assert proposer.seen == len(PROMPT)
    assert forwards == [len(PROMPT)] * 2


def test_no_more_forwards_are_run_than_rounds_are_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is run ahead of the consumer, and none after the last token."""
    forwards = rows_of_forwards(monkeypatch)
    rounds = generate(MODEL, Scattered(TRANSCRIPT), PROMPT, max_new_tokens=30, budget=6)
    assert not forwards
    for number, done in enumerate(rounds):
        assert len(forwards) == number + 1
        assert number == 0 or forwards[-1] == done.drafted + 1


@pytest.mark.case(4)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_prompts_shorter_than_the_convolution_are_prompts_too(length: int) -> None:
    prompt = PROMPT[:length]
    logits = MODEL.logits(MODEL(torch.tensor([prompt])).final[0, -1])
    truth = list(decode(MODEL, prompt, max_new_tokens=12))
    assert truth[0] == int(logits.argmax())
    for window in (1, 2, 2048):
        for make in (Right, Wrong, Scattered):
            proposer, cache = make([*prompt, *truth]), MODEL.new_cache(length + 11)
            rounds = generate(MODEL, proposer, prompt, max_new_tokens=12, budget=6, cache=cache, prefill_window=window)
            assert emitted(rounds) == truth
            check_holds(cache, MODEL, [*prompt, *truth[:-1]])


@pytest.mark.case(5)
def test_a_prompt_may_exceed_the_default_window_by_one_token() -> None:
    prompt = torch.randint(37, (2049,), generator=seeded(8))
    proposer, cache = Right(prompt.tolist()), MODEL.new_cache(2060)
    rounds = generate(MODEL, proposer, prompt, max_new_tokens=5, cache=cache)
    once = MODEL.logits(MODEL(prompt).final[0, -1])
    tokens = emitted(rounds)
    assert tokens[0] == int(once.argmax())
    check_holds(cache, MODEL, [*prompt.tolist(), *tokens[:-1]])


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        torch.tensor(PROMPT),
        torch.tensor([PROMPT]),
        torch.tensor(PROMPT, dtype=torch.int32),
        [[*PROMPT]],
        torch.tensor([[token, 0] for token in PROMPT])[:, 0],
    ],
    ids=["tuple", "[T]", "[1, T]", "int32", "nested list", "a strided view"],
)
def test_a_prompt_may_be_a_sequence_or_a_tensor(prompt: Any) -> None:
    assert emitted(generate(MODEL, Right(TRANSCRIPT), prompt, max_new_tokens=10)) == TRUTH[:10]


class Untouched:
    """A proposer that must not be called at all."""

    layers: Sequence[LayerId] = ()

    def bind(self, target: QwenGDN) -> None:
        raise AssertionError("bound")

    def reset(self) -> None:
        raise AssertionError("reset")

    def observe(self, features: Tensor) -> None:
        raise AssertionError("shown rows")

    def propose(self, root: int) -> Tensor:
        raise AssertionError("asked")


BAD_CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "empty list": ([], {}),
    "empty tensor": (torch.empty(1, 0, dtype=torch.long), {}),
    "negative id": ([1, -1], {}),
    "id beyond the vocabulary": ([1, 37], {}),
    "fractions": ([1.0, 2.0], {}),
    "truth values": (torch.tensor([True, False]), {}),
    "two rows": (torch.tensor([[1, 2], [3, 4]]), {}),
    "three dimensions": (torch.tensor([[[1, 2]]]), {}),
    "negative count": (PROMPT, {"max_new_tokens": -1}),
    "negative budget": (PROMPT, {"budget": -1}),
    "no prefill window": (PROMPT, {"prefill_window": 0}),
}


@pytest.mark.case(9, 32)
@pytest.mark.parametrize("case", list(BAD_CALLS))
def test_a_bad_argument_is_one_line_at_the_call_and_touches_nothing(case: str) -> None:
    prompt, changed = BAD_CALLS[case]
    cache = MODEL.new_cache(50)
    MODEL(torch.tensor([[1, 2, 3]]), cache)
    before = memory_of(cache)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        generate(MODEL, Untouched(), prompt, cache=cache, **{"max_new_tokens": 5, **changed})
    assert cache.length == 3
    assert same_bits(memory_of(cache), before)


@pytest.mark.parametrize("held", [0, 3])
def test_a_cache_may_be_just_large_enough_and_no_smaller(held: int) -> None:
    whole = [*PROMPT[:held], *PROMPT]
    truth = list(decode(MODEL, whole, max_new_tokens=20))
    needed = len(whole) + 20 - 1

    def filled(capacity: int) -> HybridCache:
        cache = MODEL.new_cache(capacity)
        if held:
            MODEL(torch.tensor([PROMPT[:held]]), cache)
        return cache

    small = filled(needed - 1)
    before = memory_of(small)
    with pytest.raises(ValueError, match=f"(?=.*{needed})(?=.*{needed - 1})"):
        generate(MODEL, Untouched(), PROMPT, max_new_tokens=20, cache=small)
    assert small.length == held
    assert same_bits(memory_of(small), before)
    proposer, just = Right([*whole, *truth], length=40), filled(needed)
    proposer.seen = held
    assert emitted(generate(MODEL, proposer, PROMPT, max_new_tokens=20, budget=64, cache=just)) == truth
    assert just.length == just.capacity


@pytest.mark.case(19)
def test_a_cache_of_two_rows_is_refused_and_an_open_window_is_left_open() -> None:
    with pytest.raises(ValueError, match="batch"):
        generate(MODEL, Untouched(), PROMPT, max_new_tokens=2, cache=MODEL.new_cache(50, batch=2))
    cache = MODEL.new_cache(50)
    MODEL(torch.tensor([[1, 2]]), cache)
    branch = cache.branch(Topology([-1, 0]))
    with pytest.raises(RuntimeError, match="commit or discard"):
        generate(MODEL, Untouched(), PROMPT, max_new_tokens=2, cache=cache)
    MODEL(torch.tensor([[3, 4]]), branch)
    cache.commit([0, 1])
    check_holds(cache, MODEL, [1, 2, 3, 4])


def test_layers_that_the_target_lacks_are_refused_before_any_forward() -> None:
    class Reader(Empty):
        layers: Sequence[LayerId] = (0, 2)

    cache = MODEL.new_cache(50)
    with pytest.raises(ValueError, match="2"):
        list(generate(MODEL, Reader(TRANSCRIPT), PROMPT, max_new_tokens=5, cache=cache))
    assert cache.length == 0
