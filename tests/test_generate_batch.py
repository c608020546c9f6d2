"""A batch of rows: each is written as its own generation, round by round, and its memory is that of its text."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drafter_oracle import random_drafter, raw_config, raw_config2
from proposers import (
    PROPOSERS,
    Random,
    Reading,
    Right,
    Scattered,
    Scripted,
    check_same,
    difference,
    emitted,
    small_model,
)
from test_mtp import module_of
from test_ragged_cache import fresh_memory, row_memory
from tiny import EXPERTS, SMALL, TOLERANCE, raising_at, randint, random_tokens, seeded, tiny_model, worst_gap

import ddtree.loop
from ddtree import (
    DFlash2Config,
    DFlashConfig,
    MTPDrafter,
    NoDrafts,
    Round,
    build_chain,
    generate,
    generate_batch,
    make_sampler,
)
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn import QwenGDN, RaggedCache, Topology, decode, greedy
from qwen_gdn.engine import Engine

MODEL = small_model()
PROMPTS = [[5, 30, 11, 2], [7], [5, 30, 11, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
TRUTHS = [list(decode(MODEL, prompt, max_new_tokens=60)) for prompt in PROMPTS]
TRANSCRIPTS = [[*prompt, *truth] for prompt, truth in zip(PROMPTS, TRUTHS, strict=True)]


def written(batch: Iterable[tuple[Round, ...]]) -> list[list[Round]]:
    """The rounds of each row, without those after its end."""
    rows = list(zip(*batch, strict=True))
    for row in rows:
        live = [bool(done.tokens) for done in row]
        assert live == sorted(live, reverse=True), "a row that had ended went on"
        assert all(done == ((), 0, 0) for done in row if not done.tokens)
    return [[done for done in row if done.tokens] for row in rows]


def check_memory(cache: RaggedCache, model: QwenGDN, texts: Sequence[Sequence[int]]) -> None:
    """Fails unless each row of the cache holds what one forward over its text leaves, and no window is open."""
    cache.check()
    cache.refuse_open_window("the end")
    assert cache.lengths.tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        fresh = fresh_memory(model, torch.tensor([list(text)], dtype=torch.int64))
        assert worst_gap(row_memory(cache, row), fresh) <= TOLERANCE[model.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("seed", range(2))
def test_random_batches_equal_their_rows_alone(seed: int, shape: dict[str, Any], dtype: torch.dtype) -> None:
    """Rows of 1 to 24 tokens, some twice; their own budgets, counts, proposers and prefill windows; stop ids."""
    model, draw = tiny_model(seed, dtype=dtype, wild=4.0, layer_types=list(SMALL), **shape), seeded(seed)
    prompts: list[list[int]] = [random_tokens(draw, randint(draw, 1, 24)).tolist() for _ in range(randint(draw, 1, 3))]
    prompts += [prompts[0], [randint(draw, 0, 96)]]
    counts = [randint(draw, 0, 20) for _ in prompts]
    counts[0] = 20
    budgets = [randint(draw, 0, 12) for _ in prompts]
    truths = [list(decode(model, prompt, max_new_tokens=36)) for prompt in prompts]
    stops = {truths[0][12]} if seed % 2 else set()
    names = list(PROPOSERS)
    names.remove("reading layers")  # the others read none
    makers = [PROPOSERS[names[randint(draw, 0, len(names) - 1)]] for _ in prompts]

    def proposers() -> list[Scripted]:
        made = zip(makers, prompts, truths, strict=True)
        return [make([*prompt, *truth], seed + i) for i, (make, prompt, truth) in enumerate(made)]

    cache = model.new_cache(64, batch=len(prompts), ragged=True)
    batch = generate_batch(
        model,
        proposers(),
        prompts,
        max_new_tokens=counts,
        budget=budgets,
        stop_ids=stops,
        cache=cache,
        prefill_window=randint(draw, 1, 30),
    )
    rows = written(batch)
    texts = []
    parts = zip(rows, proposers(), prompts, counts, budgets, strict=True)
    for row, proposer, prompt, count, budget in parts:
        alone = list(generate(model, proposer, prompt, max_new_tokens=count, budget=budget, stop_ids=stops))
        plain = list(decode(model, prompt, max_new_tokens=count, stop_ids=stops))
        if difference(model, prompt, emitted(row), plain) is None:
            assert row == alone
        check_same(model, prompt, emitted(row), plain)
        texts.append([*prompt, *emitted(row)][:-1])
    check_memory(cache, model, texts)


@pytest.mark.parametrize("name", list(PROPOSERS))
def test_every_proposer_of_which_each_row_has_its_own(name: str) -> None:
    def proposers() -> list[Scripted]:
        return [PROPOSERS[name](transcript, row) for row, transcript in enumerate(TRANSCRIPTS)]

    rows = written(generate_batch(MODEL, proposers(), PROMPTS, max_new_tokens=25, budget=7))
    parts = zip(rows, proposers(), PROMPTS, TRUTHS, strict=True)
    for row, proposer, prompt, truth in parts:
        assert emitted(row) == truth[:25]
        assert row == list(generate(MODEL, proposer, prompt, max_new_tokens=25, budget=7))


@pytest.mark.case(19)
def test_rows_that_accept_one_and_six_tokens_a_round() -> None:
    proposers = [PROPOSERS["wrong"](TRANSCRIPTS[0], 0), Right(TRANSCRIPTS[1])]
    rows = written(generate_batch(MODEL, proposers, PROMPTS[:2], max_new_tokens=25, budget=5, build=build_chain))
    assert [[len(done.tokens) for done in row[1:]] for row in rows] == [[1] * 24, [6] * 4]
    assert [emitted(row) for row in rows] == [truth[:25] for truth in TRUTHS[:2]]


def test_a_row_that_ends_in_the_first_round_or_asks_for_nothing_sits_out() -> None:
    counts, cache = [20, 1, 0, 12], MODEL.new_cache(99, batch=4, ragged=True)
    stop = {TRUTHS[3][0]} - {*TRUTHS[0][:20], *TRUTHS[1][:1]}
    assert stop
    batch = list(generate_batch(MODEL, NoDrafts(), PROMPTS, max_new_tokens=counts, stop_ids=stop, cache=cache))
    assert len(batch) == 20 and [len(done.tokens) for done in batch[0]] == [1, 1, 0, 1]
    assert all(done == Round((), 0, 0) for rounds in batch[1:] for done in rounds[1:])
    rows = written(batch)
    assert [emitted(row) for row in rows] == [TRUTHS[0][:20], TRUTHS[1][:1], [], TRUTHS[3][:1]]
    check_memory(cache, MODEL, [[*prompt, *emitted(row)][:-1] for prompt, row in zip(PROMPTS, rows, strict=True)])
    nothing = MODEL.new_cache(9, batch=2, ragged=True)
    assert list(generate_batch(MODEL, NoDrafts(), [[1], [4, 5]], max_new_tokens=0, cache=nothing)) == []
    check_memory(nothing, MODEL, [[], [4]])


@pytest.mark.parametrize("draft", ["dflash", "dflash 2", "recorded", "mtp", "none", "any other"])
def test_a_single_drafter_serves_every_row_with_a_context_of_its_own(draft: str) -> None:
    """And stays as it was. Accepted counts too are those of each row alone."""
    model = tiny_model(6, dtype=torch.float64, wild=4.0)
    sizes = {"vocab_size": model.config.vocab_size, "hidden_size": model.config.hidden_size}
    make: Callable[[], Any] = {
        "dflash": lambda: random_drafter(DFlashConfig.from_dict(raw_config(**sizes))),
        "dflash 2": lambda: random_drafter(DFlash2Config.from_dict(raw_config2(**sizes))),
        "recorded": lambda: RecordedDrafter(random_drafter(DFlashConfig.from_dict(raw_config(**sizes)))),
        "mtp": lambda: MTPDrafter(module_of(model.config)),
        "none": NoDrafts,
        "any other": lambda: Reading([3] * 200),
    }[draft]
    drafter = make()
    prompts = [random_tokens(seeded(i), n).tolist() for i, n in enumerate((3, 17, 1))]
    drafter.bind(model)
    before = copy.copy(drafter.__dict__)
    rows = written(generate_batch(model, drafter, prompts, max_new_tokens=12, budget=6))
    assert drafter.__dict__ == before
    for row, prompt in zip(rows, prompts, strict=True):
        alone = make().drafter if draft == "recorded" else make()
        assert row == list(generate(model, alone, prompt, max_new_tokens=12, budget=6))
        assert emitted(row) == list(decode(model, prompt, max_new_tokens=12))


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"frequency_penalty": 0.7, "logit_bias": {3: 2.0}},
]


def test_samplers_of_every_row_draw_as_they_would_alone() -> None:
    for seed in range(6):
        settings = [SAMPLERS[(seed + row) % 4] | {"seed": 10 * seed + row} for row in range(4)]
        proposers = [Random(transcript, seed) for transcript in TRANSCRIPTS]
        batch = generate_batch(
            MODEL,
            proposers,
            PROMPTS,
            max_new_tokens=[20, 9, 20, 14],
            budget=6,
            sampler=[make_sampler(**each) for each in settings],
        )
        for row, (rounds, prompt) in enumerate(zip(written(batch), PROMPTS, strict=True)):
            alone = generate(
                MODEL,
                Random(TRANSCRIPTS[row], seed),
                prompt,
                max_new_tokens=[20, 9, 20, 14][row],
                budget=6,
                sampler=make_sampler(**settings[row]),
            )
            assert rounds == list(alone)


def test_a_single_sampler_is_copied_for_every_row() -> None:
    sampler = make_sampler(1.0, seed=4)
    rows = written(generate_batch(MODEL, NoDrafts(), PROMPTS, max_new_tokens=20, sampler=sampler))
    for row, prompt in zip(rows, PROMPTS, strict=True):
        assert emitted(row) == list(decode(MODEL, prompt, max_new_tokens=20, sampler=make_sampler(1.0, seed=4)))
    assert rows[0] == rows[2] and emitted(rows[0]) != TRUTHS[0][:20]
    again = written(generate_batch(MODEL, NoDrafts(), PROMPTS, max_new_tokens=20, sampler=sampler))
    assert again == rows  # the given one has drawn nothing


@contextmanager
def forwards(model: QwenGDN) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the tokens of every forward that is run meanwhile."""
    shapes: list[tuple[int, ...]] = []
    original = model.embed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "embed", lambda tokens: (shapes.append(tuple(tokens.shape)), original(tokens))[1])
        yield shapes


def test_a_round_of_all_rows_is_one_forward() -> None:
    with forwards(MODEL) as shapes:
        proposers = [Right(transcript) for transcript in TRANSCRIPTS]
        list(generate_batch(MODEL, proposers, PROMPTS, max_new_tokens=13, budget=[5, 2, 0, 5], prefill_window=4))
    assert shapes[:3] == [(4, 4), (4, 4), (4, 1)]  # the longest prompt has 9 tokens
    assert shapes[3:] == [(4, 6), (4, 6), *[(4, 3)] * 2, *[(4, 1)] * 8]


ERRORS = pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
SITES: dict[str, tuple[Any, str]] = {
    "layer 1": (MODEL.layers[1], "forward"),
    "head": (MODEL, "logits"),
    "branch": (RaggedCache, "branch"),
    "commit": (RaggedCache, "commit"),
    "accept": (ddtree.loop, "follow"),
    "observe": (Reading, "observe"),
    "propose": (Reading, "propose"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@ERRORS
@pytest.mark.parametrize("site", list(SITES))
def test_a_fault_in_one_row_commits_none(site: str, error: type[BaseException], after: bool) -> None:
    owner, name = SITES[site]
    for call in (0, 2, 5):
        cache, texts = MODEL.new_cache(99, batch=4, ragged=True), [list[int]() for _ in PROMPTS]
        proposers = [Reading(transcript) for transcript in TRANSCRIPTS]
        batch = generate_batch(MODEL, proposers, PROMPTS, max_new_tokens=30, budget=6, cache=cache, prefill_window=4)
        with raising_at(owner, name, call, error, after=after), pytest.raises(error, match="injected"):
            for rounds in batch:
                for text, done in zip(texts, rounds, strict=True):
                    text.extend(done.tokens)
        held = [[*prompt, *text][:-1] if text else [] for prompt, text in zip(PROMPTS, texts, strict=True)]
        check_memory(cache, MODEL, held)


def test_a_batch_that_is_closed_leaves_every_row_at_its_last_round() -> None:
    cache = MODEL.new_cache(99, batch=4, ragged=True)
    batch = generate_batch(
        MODEL, [Scattered(t) for t in TRANSCRIPTS], PROMPTS, max_new_tokens=40, budget=6, cache=cache
    )
    rows = list(zip(*(next(batch) for _ in range(4)), strict=True))
    batch.close()
    check_memory(cache, MODEL, [[*prompt, *emitted(row)][:-1] for prompt, row in zip(PROMPTS, rows, strict=True)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": []}, r"prompts must be a list of one prompt a row, of at least one row, got \[\]"),
        ({"prompts": 5}, "prompts must be a list of one prompt a row"),
        ({"prompts": [[1], []]}, "row 1: the prompt is empty"),
        ({"prompts": [1, 2]}, "row 0: prompt_ids must be integers"),
        ({"prompts": [[1], [37]]}, r"row 1: prompt_ids: token id 37 is outside the vocabulary \[0, 37\)"),
        ({"max_new_tokens": [3]}, "max_new_tokens: give one for all rows or one a row, got 1 for 2 prompts"),
        ({"max_new_tokens": [3, -1]}, "row 1: max_new_tokens must be an int of at least 0, got -1"),
        ({"budget": [3, 2.5]}, "budget of row 1 must be an int of at least 0, got 2.5"),
        ({"budget": [1, 2, 3]}, "budget: give one for all rows or one a row, got 3 for 2 prompts"),
        ({"sampler": [None, None]}, "sampler of row 0 must be callable, got None"),
        ({"sampler": make_sampler(logit_bias={40: 1.0})}, "40"),
        ({"sampler": [make_sampler(1.0, seed=1)] * 2}, "sampler: two rows were given one and the same; .*no list"),
        ({"stop_ids": 3}, "stop_ids must be a collection"),
        ({"prefill_window": 0}, "prefill_window must be an int of at least 1"),
        ({"build": 3}, "build must be callable"),
        ({"drafter": [NoDrafts()]}, "drafter: give one for all rows or one a row, got 1 for 2 prompts"),
        ({"drafter": [NoDrafts()] * 2}, "drafter: two rows were given one and the same"),
        ({"drafter": [NoDrafts(), Reading([])]}, r"must read the same layers .* got \(\) and \(1, 'final', 0\)"),
        ({"cache": MODEL.new_cache(9)}, r"takes an empty cache of its size, new_cache\(6, batch=2, ragged=True\)"),
        ({"cache": MODEL.new_cache(9, batch=3, ragged=True)}, "takes an empty cache of its size"),
        ({"cache": MODEL.new_cache(5, batch=2, ragged=True)}, r"got RaggedCache\(lengths=\[0, 0\], capacity=5"),
        ({"cache": tiny_model().new_cache(9, batch=2, ragged=True)}, "another architecture or dtype"),
        ({"target": Engine(small_model())}, "takes a QwenGDN, got Engine; give an engine's own .model"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_call(changes: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"target": MODEL, "drafter": NoDrafts(), "prompts": [[1, 2, 3], [4]]}
    with forwards(MODEL) as shapes, pytest.raises(ValueError, match=said) as raised:
        generate_batch(**(arguments | {"max_new_tokens": 4} | changes))
    assert shapes == [] and "\n" not in str(raised.value)


def test_a_cache_that_holds_something_or_has_a_window_open_is_refused() -> None:
    cache = MODEL.new_cache(9, batch=2, ragged=True)
    cache.branch([Topology([-1])] * 2)
    with pytest.raises(RuntimeError, match="while a window is open"):
        generate_batch(MODEL, NoDrafts(), [[1], [2]], max_new_tokens=2, cache=cache)
    cache.discard()
    MODEL(torch.tensor([[1], [2]]), cache)
    with pytest.raises(ValueError, match=r"takes an empty cache .*lengths=\[1, 1\]"):
        generate_batch(MODEL, NoDrafts(), [[1], [2]], max_new_tokens=2, cache=cache)


def test_a_function_that_samples_may_serve_several_rows() -> None:
    batch = generate_batch(MODEL, NoDrafts(), PROMPTS, max_new_tokens=5, sampler=[greedy] * 4)
    assert [emitted(row) for row in written(batch)] == [truth[:5] for truth in TRUTHS]


def test_prompts_may_be_tensors_and_rows_of_one() -> None:
    prompts = torch.tensor([[5, 30, 11, 2], [5, 30, 11, 2]])
    for given in (prompts, list(prompts), [prompts[:1], prompts[1].int()]):
        rows = written(generate_batch(MODEL, NoDrafts(), given, max_new_tokens=5))
        assert [emitted(row) for row in rows] == [TRUTHS[0][:5]] * 2
    assert [emitted(row) for row in written(generate_batch(MODEL, NoDrafts(), [[7]], max_new_tokens=5))] == [
        TRUTHS[1][:5]
    ]


def test_stages_are_named_and_grad_mode_and_global_randomness_stay_the_callers() -> None:
    stages: list[str] = []

    @contextmanager
    def on_stage(name: str) -> Iterator[None]:
        stages.append(name)
        yield

    state = torch.get_rng_state()
    batch = generate_batch(
        MODEL,
        [Right(t) for t in TRANSCRIPTS],
        PROMPTS,
        max_new_tokens=8,
        budget=4,
        on_stage=on_stage,
        sampler=make_sampler(1.0, seed=1),
    )
    for _ in batch:
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert set(stages) == {"prefill", "draft", "build", "verify", "sample", "commit"}
