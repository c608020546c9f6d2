"""Bias, penalties and min-p: against transformers, a naive count per row, plain decoding, and enumerated laws."""

import copy
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from proposers import Branching, Moody, Right, Scattered, Scripted, Wrong, emitted, small_model, table_model
from scipy.stats import chisquare  # type: ignore[import-untyped]
from tiny import seeded
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from worlds import erratic

from ddtree import Acceptance, Budget, DraftTree, Scores, accept, build_chain, build_tree, generate, make_sampler
from ddtree.penalties import Adjusted, Penalties
from ddtree.sampling import Stochastic
from qwen_gdn import Context, ContextSampler, History, Topology, decode, greedy

MODEL = small_model()
PROMPT = [5, 30, 11, 2, 30]
EVERY: dict[str, Any] = {
    "presence_penalty": 0.9,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {7: 1.5, 30: -2.0},
}
ALONE = Topology([-1])
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def after(prompt: Sequence[int], generated: Sequence[int] = ()) -> History:
    history = History(torch.tensor(prompt, dtype=torch.int64))
    if generated:
        history.extend(generated)
    return history


def alone(prompt: Sequence[int], generated: Sequence[int] = ()) -> Context:
    return Context(after(prompt, generated), torch.tensor([*prompt, *generated][-1:]), ALONE)


def adjusted(logits: Tensor, context: Context | None, **settings: Any) -> Tensor:
    sampler = make_sampler(1.0, seed=0, **settings)
    assert isinstance(sampler, Adjusted)
    return sampler.adjusted(logits, context)


def naive(row: list[float], prompt: list[int], generated: list[int], settings: dict[str, Any]) -> list[float]:
    """One row's logits after bias and penalties, token by token in plain arithmetic."""
    changed = []
    for token, logit in enumerate(row):
        logit += settings.get("logit_bias", {}).get(token, 0.0)
        if token in prompt or token in generated:
            factor = settings.get("repetition_penalty", 1.0)
            logit = logit * factor if logit < 0 else logit / factor
        count = generated.count(token)
        logit -= settings.get("frequency_penalty", 0.0) * count
        changed.append(logit - (settings.get("presence_penalty", 0.0) if count else 0.0))
    return changed


def oracle(row: list[float], prompt: list[int], generated: list[int], settings: dict[str, Any]) -> list[float]:
    """One row's law with bias, penalties, temperature and min-p."""
    logits = naive(row, prompt, generated, settings)
    weights = [math.exp((x - max(logits)) / settings["temperature"]) for x in logits]
    weights = [w if w >= settings["min_p"] * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("penalty", [0.6, 1.3, 5.0])
def test_the_repetition_penalty_is_that_of_transformers(dtype: torch.dtype, penalty: float) -> None:
    for seed in range(20):
        draw = seeded(seed)
        logits = 3 * torch.randn(1, 40, generator=draw, dtype=dtype)
        ids = torch.randint(40, (1, 25), generator=draw)
        wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
        ours = adjusted(logits, alone(ids[0, :13].tolist(), ids[0, 13:].tolist()), repetition_penalty=penalty)
        assert torch.equal(ours, wanted)


def whole_law(monkeypatch: pytest.MonkeyPatch, logits: Tensor, context: Context, **settings: Any) -> Tensor:
    """The law by which a sampler draws from one row: row i of many equal ones is made to draw the i-th column."""
    width = logits.shape[1]
    drawn: list[Tensor] = []

    def column(weights: Tensor, uniform: Tensor) -> Tensor:
        drawn.append(weights)
        return torch.arange(width).clamp(max=weights.shape[1] - 1)

    monkeypatch.setattr("ddtree.sampling.draw", column)
    sampler = make_sampler(seed=0, **settings)
    assert isinstance(sampler, Adjusted)
    tokens = sampler.sampler(sampler.adjusted(logits, context).repeat(width, 1))
    law = torch.zeros(width, dtype=logits.dtype)
    law[tokens[: drawn[0].shape[1]]] = drawn[0][0]
    return law / law.sum()


@pytest.mark.parametrize(
    "cuts",
    [
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"top_k": 9, "min_p": 0.05},
        {"top_p": 0.9, "min_p": 0.2},
        {"top_k": 20, "top_p": 0.85, "min_p": 0.15},
    ],
    ids=str,
)
def test_penalty_temperature_and_cuts_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, cuts: dict[str, Any]
) -> None:
    for seed in range(10):
        draw = seeded(seed)
        logits = 2 * torch.randn(1, 60, generator=draw, dtype=torch.float64)
        ids = torch.randint(60, (1, 25), generator=draw)
        theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.8)])
        theirs += [TopKLogitsWarper(cuts["top_k"])] if "top_k" in cuts else []
        theirs += [TopPLogitsWarper(cuts["top_p"])] if "top_p" in cuts else []
        theirs += [MinPLogitsWarper(cuts["min_p"])] if "min_p" in cuts else []
        wanted = theirs(ids, logits.clone()).softmax(-1)[0]
        context = alone(ids[0, :10].tolist(), ids[0, 10:].tolist())
        law = whole_law(monkeypatch, logits, context, temperature=0.8, repetition_penalty=1.4, **cuts)
        assert torch.equal(law > 0, wanted > 0)
        assert torch.allclose(law, wanted, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_min_p_keeps_a_share_that_is_just_enough_on_paper(dtype: torch.dtype, shift: float) -> None:
    rows = (torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log().to(dtype) + shift).repeat(400, 1)
    for min_p, kept in ((0.0, {0, 1, 2, 3}), (0.25, {0, 1, 2, 3}), (0.5, {0, 1}), (0.51, {0}), (1.0, {0})):
        assert set(make_sampler(1.0, min_p=min_p, seed=1)(rows).tolist()) == kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings", [EVERY, *({name: value} for name, value in EVERY.items()), {"frequency_penalty": -1.1}], ids=str
)
def test_each_row_is_changed_by_the_tokens_of_its_own_path(settings: dict[str, Any], dtype: torch.dtype) -> None:
    for seed in range(15):
        draw = random.Random(seed)
        nodes = draw.randrange(1, 12)
        shape = Topology([-1, *(draw.randrange(i) for i in range(1, nodes))])
        prompt, generated = [draw.choices(range(10), k=draw.randrange(1, 6)) for _ in range(2)]
        tokens = torch.tensor([generated[-1], *draw.choices(range(12), k=nodes - 1)])
        context = Context(after(prompt, generated), tokens, shape)
        logits = (2 * torch.randn(nodes, 12, generator=seeded(seed))).to(dtype)
        logits[0, 3] = -torch.inf
        before = logits.clone()
        settings = {**settings, "logit_bias": {t % 12: b for t, b in settings.get("logit_bias", {}).items()}}
        changed = adjusted(logits, context, **settings)
        assert changed.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(logits, before), "the model's logits are not written to"
        for node in range(nodes):
            path = [int(tokens[i]) for i in shape.path(node)[1:]]
            assert context.before(node) == [*prompt, *generated, *path]
            wanted = naive(before[node].tolist(), prompt, [*generated, *path], settings)
            within = 1e-12 if dtype == torch.float64 else 1e-5
            assert torch.allclose(
                changed[node].double(), torch.tensor(wanted, dtype=torch.float64), rtol=within, atol=within
            )


def test_two_branches_are_penalised_apart() -> None:
    """Each branch holds one of the two likeliest tokens; with the other's history either would repeat itself."""
    logits = torch.zeros(4, 8).index_fill(1, torch.tensor([5]), 2.0).index_fill(1, torch.tensor([6]), 1.5)
    context = Context(after([0, 1]), torch.tensor([1, 5, 6, 6]), Topology([-1, 0, 0, 1]))
    sampler = make_sampler(presence_penalty=1.0)
    assert sampler(logits, context).tolist() == [5, 6, 5, 5]  # type: ignore[call-arg]
    swapped = Context(context.history, torch.tensor([1, 6, 5, 5]), context.topology)
    assert sampler(logits, swapped).tolist() == [5, 5, 6, 5]  # type: ignore[call-arg]


def test_a_history_counts_every_token_once() -> None:
    draw = random.Random(3)
    prompt, generated = draw.choices(range(30), k=20), list[int]()
    history = after(prompt)
    for size in (1, 3, 1, 9, 12, 0, 2):
        new = draw.choices(range(40), k=size)
        history.extend(new)
        generated += new
    assert history.tokens == prompt + generated and history.prompt_length == 20
    counts = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert counts == {token: generated.count(token) for token in {*prompt, *generated}}


def varied(build: Callable[[int, Tensor | Scores, int], DraftTree], seed: int) -> Callable[..., DraftTree]:
    """The builder with another budget every round."""
    draw = random.Random(seed)
    return lambda root, scores, budget: build(root, scores, draw.randrange(budget + 1))


SETTINGS = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"logit_bias": {3: 2.0, 20: -1e30}},
    EVERY,
]
PLAIN = list(decode(MODEL, PROMPT, max_new_tokens=40))


@pytest.mark.case(37)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_output_of_tree_and_chain_is_that_of_plain_decoding(settings: dict[str, Any]) -> None:
    sampler = make_sampler(**settings)
    truth = list(decode(MODEL, PROMPT, max_new_tokens=40, sampler=sampler))
    assert truth != PLAIN, "a setting without effect shows nothing"
    accepted = 0
    for i, make in enumerate((Right, Wrong, Scattered, Moody, Branching)):
        for build in (build_tree, varied(build_tree, i) if i % 2 else build_chain):
            drafter: Scripted = make([*PROMPT, *truth], i)
            ask: dict[str, Any] = {"max_new_tokens": 40, "budget": 9, "sampler": sampler, "build": build}
            rounds = list(generate(MODEL, drafter, PROMPT, **ask))
            assert emitted(rounds) == truth
            accepted += sum(done.accepted for done in rounds)
    assert accepted > 80


@pytest.mark.case(37)
def test_plain_greedy_decoding_with_penalties_is_that_of_a_naive_loop() -> None:
    text = list(PROMPT)
    for _ in range(40):
        row = MODEL.logits(MODEL(torch.tensor([text])).final)[0, -1].tolist()
        changed = naive(row, PROMPT, text[len(PROMPT) :], EVERY)
        text.append(changed.index(max(changed)))
    assert list(decode(MODEL, PROMPT, max_new_tokens=40, sampler=make_sampler(**EVERY))) == text[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [1e-12, 1e-6])
def test_penalties_near_temperature_zero_are_greedy(temperature: float) -> None:
    truth = list(decode(MODEL, PROMPT, max_new_tokens=40, sampler=make_sampler(**EVERY)))
    for settings in ({}, {"min_p": 0.3}, {"top_k": 3}, {"top_p": 0.5}):
        sampler = make_sampler(temperature, seed=0, **settings, **EVERY)
        drafter = Scattered([*PROMPT, *truth])
        assert emitted(generate(MODEL, drafter, PROMPT, max_new_tokens=40, budget=7, sampler=sampler)) == truth
    likeliest = make_sampler(0.8, top_k=1, **EVERY)
    assert list(decode(MODEL, PROMPT, max_new_tokens=40, sampler=likeliest)) == truth


TURNS = [[4, 9, 9, 1], [8, 20], [33, 6, 6]]


@pytest.mark.parametrize("settings", [EVERY, {"repetition_penalty": 1.5}], ids=str)
def test_a_later_turn_counts_the_tokens_of_earlier_ones(settings: dict[str, Any]) -> None:
    """Each turn over one cache equals a fresh run whose prompt is the whole transcript."""
    sampler = make_sampler(**settings)
    caches = [MODEL.new_cache(100), MODEL.new_cache(100)]
    text: list[int] = []
    forgetful = 0
    for turn in TURNS:
        held, text = text[:-1], text + turn
        ask: dict[str, Any] = {"max_new_tokens": 12, "sampler": sampler}
        truth = list(decode(MODEL, text, **ask))
        prompt = text[len(held) :]
        drafter = Scattered([*text, *truth])
        drafter.seen = len(held)
        continued = generate(MODEL, drafter, prompt, cache=caches[0], earlier_ids=held, budget=5, **ask)
        assert emitted(continued) == truth
        assert list(decode(MODEL, prompt, cache=caches[1], earlier_ids=torch.tensor(held), **ask)) == truth
        forgetful += (
            adjusted(torch.ones(1, 37), alone(prompt), **settings).tolist()
            != adjusted(torch.ones(1, 37), alone(text), **settings).tolist()
        )
        text += truth
        assert caches[0].length == caches[1].length == len(text) - 1
    assert forgetful, "the earlier tokens must matter"


VOCAB = 8
TABLE = 1.2 * torch.randn(VOCAB, VOCAB, generator=seeded(5), dtype=torch.float64)
LAW: dict[str, Any] = {
    "temperature": 0.9,
    "min_p": 0.12,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.4,
    "logit_bias": {2: 0.6},
}
BEFORE = [3, 1]
DRAFTS = {
    "even": torch.zeros(2, VOCAB),
    "one token only": torch.full((2, VOCAB), -torch.inf).index_fill(1, torch.tensor([5]), 0.0),
}
LAWS = 1e-3 / 20  # this file tests fewer laws than 20


class Always(Scripted):
    """The same logits whatever the context."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__([])
        self.logits = logits

    def draft(self, coming: list[int]) -> Tensor:
        return self.logits


def misfit(build: Callable[..., DraftTree], drafts: str, count: int, budget: int | Budget = 5) -> float:
    """p-value of the second and third token of `count` generations, which are drawn over trees of a whole loop."""
    model, sampler = table_model(TABLE), make_sampler(seed=4, **LAW)
    drafter, seen = Always(DRAFTS[drafts]), Counter[tuple[int, ...]]()
    for _ in range(count):
        written = emitted(
            generate(model, drafter, BEFORE, max_new_tokens=3, budget=budget, sampler=sampler, build=build)
        )
        seen[tuple(written[1:])] += 1
    expected: Counter[tuple[int, ...]] = Counter()
    for a, p in enumerate(oracle(TABLE[BEFORE[-1]].tolist(), BEFORE, [], LAW)):
        for b, q in enumerate(oracle(TABLE[a].tolist(), BEFORE, [a], LAW)):
            for c, r in enumerate(oracle(TABLE[b].tolist(), BEFORE, [a, b], LAW)):
                expected[b, c] += p * q * r * count  # type: ignore[assignment]
    if not all(expected[pair] > 0 for pair in seen):
        return 0.0
    common = [pair for pair, value in expected.items() if value >= 5]
    rows = [(float(seen[pair]), float(expected[pair])) for pair in common]
    rows.append((count - sum(a for a, _ in rows), count - sum(b for _, b in rows)))
    return float(chisquare(*zip(*rows, strict=True)).pvalue)


@pytest.mark.parametrize("build", [build_tree, build_chain])
def test_what_generate_writes_has_the_enumerated_law(build: Callable[..., DraftTree]) -> None:
    assert misfit(build, "even", 150) > LAWS


def test_budgets_that_are_decided_leave_the_law_as_it_is() -> None:
    assert misfit(build_tree, "even", 150, erratic()) > LAWS


def test_a_walk_that_prefers_the_first_child_is_caught_in_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)

    def biased(tree: DraftTree, drawn: Sequence[int]) -> Acceptance:
        if len(tree.topology) > 1 and draw.random() < 0.5:
            drawn = [int(tree.tokens[1]), *drawn[1:]]
        return accept(tree, drawn)

    monkeypatch.setattr("ddtree.loop.follow", biased)
    assert misfit(build_tree, "one token only", 200) < LAWS


@pytest.mark.case(38)
@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"min_p": -0.1}, r"min_p must lie in \[0, 1\], got -0.1"),
        ({"min_p": 1.1}, r"min_p must lie in \[0, 1\], got 1.1"),
        ({"min_p": math.nan}, "min_p must lie in .*, got nan"),
        ({"min_p": True}, "min_p must lie in .*, got True"),
        ({"presence_penalty": math.inf}, "presence_penalty must lie in .*, got inf"),
        ({"presence_penalty": "1"}, "presence_penalty must lie in .*, got '1'"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must lie in .*, got nan"),
        ({"frequency_penalty": None}, "frequency_penalty must lie in .*, got None"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must lie in .*, got 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must lie in .*, got -1.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must lie in .*, got inf"),
        ({"logit_bias": [3]}, r"logit_bias must map token ids to numbers, got \[3\]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must name token ids, ints of at least 0, got -1"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must name token ids, .*, got '3'"),
        ({"logit_bias": {True: 1.0}}, "logit_bias must name token ids, .*, got True"),
        ({"logit_bias": {3: -math.inf}}, "logit_bias must lie in .*, got -inf at 3"),
        ({"logit_bias": {3: None}}, "logit_bias must lie in .*, got None at 3"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_settings_out_of_range_are_refused(settings: dict[str, Any], fault: str, temperature: float) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        make_sampler(temperature, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("run", [decode, lambda model, *args, **how: generate(model, Right([]), *args, **how)])
def test_what_a_sampler_lacks_is_refused_at_the_call(run: Callable[..., Iterator[object]]) -> None:
    cache = MODEL.new_cache(40)
    MODEL(torch.tensor([[1, 2, 3]]), cache)
    penalised = make_sampler(presence_penalty=1.0)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sampler": make_sampler(logit_bias={37: 1.0})}, r"token id 37 is outside the vocabulary \[0, 37\)"),
        ({"sampler": penalised, "cache": cache}, "earlier_ids must be the 3 tokens .* got 0: this sampler depends on"),
        ({"sampler": penalised, "cache": cache, "earlier_ids": [1, 2]}, "the 3 tokens that the cache holds, got 2"),
        ({"cache": cache, "earlier_ids": [1, 2, 3, 4]}, "the 3 tokens that the cache holds, got 4: leave them out"),
        ({"earlier_ids": [1]}, "the 0 tokens that the cache holds, got 1"),
        ({"cache": cache, "earlier_ids": [1, 2, 37]}, "earlier_ids: token id 37 is outside the vocabulary"),
        ({"cache": cache, "earlier_ids": [1.0, 2.0, 3.0]}, "earlier_ids must be integers of shape"),
        ({"cache": cache, "earlier_ids": "abc"}, "earlier_ids must be integers of shape"),
    ]
    for how, fault in cases:
        with pytest.raises(ValueError, match=fault) as caught:
            run(MODEL, PROMPT, max_new_tokens=3, **how)
        assert "\n" not in str(caught.value)
    assert cache.length == 3
    for sampler in (greedy, make_sampler(0.8, min_p=0.1), make_sampler(logit_bias={3: 1.0})):
        assert len(list(run(MODEL, PROMPT, max_new_tokens=1, sampler=sampler, cache=cache.fork()))) == 1


def test_a_call_that_does_not_fit_is_refused() -> None:
    sampler = make_sampler(**EVERY)
    assert isinstance(sampler, ContextSampler)
    logits = torch.zeros(2, 37)
    with pytest.raises(ValueError, match="penalties depend on the tokens before each row; give a Context"):
        sampler(logits)
    with pytest.raises(ValueError, match="a node for each of 2 rows of logits, got 1 nodes with 1 tokens"):
        sampler(logits, alone(PROMPT))
    with pytest.raises(ValueError, match=r"token id 40 of the context is outside the vocabulary \[0, 37\)"):
        sampler(logits[:1], alone([40, 3]))
    with pytest.raises(ValueError, match=r"token id 30 is outside the vocabulary \[0, 20\)"):
        sampler(torch.zeros(1, 20), alone([3]))
    with pytest.raises(ValueError, match=r"logits must be \[N, vocab\]"):
        sampler(torch.zeros(37), alone([3]))
    with pytest.raises(ValueError, match="row 0 is nan, it must be finite"):
        sampler(torch.full((1, 37), math.nan), alone([3]))


def test_neutral_settings_change_nothing_and_only_penalties_read_a_history() -> None:
    neutral: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    assert make_sampler(**neutral, logit_bias={}) is greedy
    assert make_sampler(**neutral, logit_bias={4: 0.0}) is greedy
    assert isinstance(make_sampler(1.0, **neutral), Stochastic)
    biased = make_sampler(logit_bias={4: 1.0})
    assert isinstance(biased, ContextSampler) and not biased.reads_history
    assert biased(torch.zeros(3, 9)).tolist() == [4, 4, 4]
    forbidden = make_sampler(1.0, logit_bias={4: -1e30}, seed=0)
    assert 4 not in forbidden(torch.zeros(5000, 9)).tolist()


def test_a_penalising_sampler_can_be_copied_shown_and_shared() -> None:
    sampler = make_sampler(0.9, seed=4, **EVERY)
    logits, context = torch.zeros(1, 37), alone(PROMPT)
    copies = [pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)]
    assert all(torch.equal(copied(logits, context), sampler(logits, context)) for copied in copies[:1])
    assert "frequency=0.4" in repr(sampler) and "temperature=0.9" in repr(sampler)
    penalised = make_sampler(**EVERY)
    truth = list(decode(MODEL, PROMPT, max_new_tokens=20, sampler=penalised))
    left, right = (decode(MODEL, PROMPT, max_new_tokens=20, sampler=penalised) for _ in range(2))
    assert list(zip(left, right, strict=True)) == [(token, token) for token in truth]
    assert Penalties() == Penalties(1.0, 0.0, 0.0)


@pytest.mark.gpu
@CUDA
def test_on_a_gpu_logits_are_changed_alike_and_the_host_never_waits() -> None:
    tree = build_tree(2, torch.randn(4, 500, generator=seeded(1)), 40)
    context = Context(after(PROMPT, [9, 2]), tree.tokens, tree.topology)
    logits = torch.randn(41, 500, generator=seeded(2))
    wanted = adjusted(logits, context, **EVERY)
    there = logits.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        changed = adjusted(there, context, **EVERY)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(changed.cpu(), wanted, rtol=1e-6, atol=1e-6)  # devices round powers differently
