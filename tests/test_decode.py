"""Plain decoding: what it emits, where it leaves the cache however it ends, and what it refuses before it starts."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import run
from tiny import memory_of, random_tokens, same_bits, seeded, tiny_model, tiny_raw, worst_gap
from torch import Tensor

from qwen_gdn import QwenGDN, Topology, decode, greedy

PROMPT = [5, 17, 3, 96, 0, 41]


@pytest.fixture(scope="module")
def model() -> QwenGDN:
    return tiny_model(1, dtype=torch.float64, wild=3.0)


@pytest.fixture(scope="module")
def plain(model: QwenGDN) -> list[int]:
    """Twenty greedy tokens, by uncached forwards of the whole text."""
    text = list(PROMPT)
    for _ in range(20):
        text.append(int(model.logits(model(torch.tensor([text])).final)[0, -1].argmax()))
    assert len(set(text[6:])) > 5
    return text[6:]


def test_greedy_text_is_that_of_the_independent_implementation(model: QwenGDN, plain: list[int]) -> None:
    weights = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    logits = run(tiny_raw(), weights, PROMPT + plain).logits
    assert logits[5:-1].argmax(axis=1).tolist() == plain


@pytest.mark.case(23)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 20])
def test_it_emits_the_asked_number_and_stands_one_token_behind(model: QwenGDN, plain: list[int], count: int) -> None:
    cache = model.new_cache(64)
    assert list(decode(model, PROMPT, max_new_tokens=count, cache=cache)) == plain[:count]
    assert cache.length == 6 + count - 1
    wanted = model.new_cache(64)
    model(torch.tensor([(PROMPT + plain)[: 6 + count - 1]]), wanted)
    assert worst_gap(memory_of(cache), memory_of(wanted)) <= 1e-10


def test_a_stop_id_is_emitted_and_ends_it_at_every_position(model: QwenGDN, plain: list[int]) -> None:
    cache = model.new_cache(64)
    for position, stop in enumerate(plain):
        stops = ((stop,), [stop, 1000], {stop}, frozenset((96, stop)) if 96 not in plain else (stop,))[position % 4]
        cache.crop(0)
        emitted = list(decode(model, PROMPT, max_new_tokens=20, stop_ids=stops, cache=cache))
        assert emitted == plain[: plain.index(stop) + 1]
        assert cache.length == 6 + len(emitted) - 1


def test_outputs_for_smaller_counts_are_prefixes_and_the_stop_counts_too(model: QwenGDN, plain: list[int]) -> None:
    stop = plain[4]
    for count in range(9):
        emitted = list(decode(model, PROMPT, max_new_tokens=count, stop_ids=[stop]))
        assert emitted == plain[: min(count, plain.index(stop) + 1)]


def test_closing_early_at_any_token_leaves_the_cache_one_behind(model: QwenGDN, plain: list[int]) -> None:
    for taken in range(1, 8):
        cache = model.new_cache(64)
        tokens = decode(model, PROMPT, max_new_tokens=20, cache=cache)
        assert list(itertools.islice(tokens, taken)) == plain[:taken]
        tokens.close()  # type: ignore[attr-defined]
        assert cache.length == 6 + taken - 1
        # the rule says how to go on: the last emitted token is the next prompt
        rest = list(decode(model, [plain[taken - 1]], max_new_tokens=20 - taken, cache=cache))
        assert rest == plain[taken:]


def test_a_second_turn_on_the_same_cache_equals_one_fresh_transcript(model: QwenGDN) -> None:
    cache = model.new_cache(64)
    first = list(decode(model, PROMPT, max_new_tokens=17, cache=cache))
    user = random_tokens(seeded(2), 9).tolist()
    second = list(decode(model, [first[-1], *user], max_new_tokens=20, cache=cache))
    wanted = model.new_cache(64)
    assert list(decode(model, PROMPT + first + user, max_new_tokens=20, cache=wanted)) == second
    assert cache.length == wanted.length == 6 + 17 + 9 + 20 - 1
    assert worst_gap(memory_of(cache), memory_of(wanted)) <= 1e-10


def test_prompts_may_be_lists_ranges_or_tensors_of_one_row(model: QwenGDN, plain: list[int]) -> None:
    for prompt in (PROMPT, tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT]), torch.tensor(PROMPT).int()):
        assert list(decode(model, prompt, max_new_tokens=3)) == plain[:3]
    assert len(list(decode(model, range(4), max_new_tokens=2))) == 2


@pytest.mark.case(9)
def test_a_prompt_of_one_token_decodes_like_the_uncached_model(model: QwenGDN) -> None:
    text = [7]
    for token in decode(model, torch.tensor([[7]]), max_new_tokens=6):
        assert token == int(model.logits(model(torch.tensor([text])).final)[0, -1].argmax())
        text.append(token)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "empty list": ({"prompt_ids": []}, "prompt is empty"),
    "empty row": ({"prompt_ids": torch.ones(1, 0, dtype=torch.long)}, "prompt is empty"),
    "two rows": ({"prompt_ids": torch.ones(2, 3, dtype=torch.long)}, r"\[2, 3\]"),
    "fractions": ({"prompt_ids": [1.0, 2.5]}, "integers"),
    "flags": ({"prompt_ids": [True, False]}, "integers"),
    "id past the vocabulary": ({"prompt_ids": [3, 97]}, r"97.*\[0, 97\)"),
    "negative id": ({"prompt_ids": [3, -1]}, r"-1.*\[0, 97\)"),
    "negative count": ({"max_new_tokens": -1}, "-1"),
    "fractional count": ({"max_new_tokens": 2.5}, "2.5"),
    "window open": ({}, "commit or discard"),
    "small cache": ({"max_new_tokens": 60}, r"9.*65.*64.*new_cache\(74\)"),
    "cache of another batch": ({}, "batch"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_is_refused_at_the_call_before_any_forward(model: QwenGDN, what: str) -> None:
    changes, words = REFUSED[what]
    cache = model.new_cache(64, batch=3 if "batch" in what else 1)
    model(random_tokens(seeded(1), cache.batch, 9), cache)
    if what == "window open":
        cache.branch(Topology.chain(1))
    before = memory_of(cache)
    arguments: dict[str, Any] = {"prompt_ids": PROMPT, "max_new_tokens": 5} | changes
    with pytest.raises((ValueError, RuntimeError), match=words):
        decode(model, arguments.pop("prompt_ids"), cache=cache, **arguments)
    assert cache.length == 9 and same_bits(memory_of(cache), before)


def test_the_cache_may_be_exactly_as_large_as_needed(model: QwenGDN, plain: list[int]) -> None:
    assert list(decode(model, PROMPT, max_new_tokens=5, cache=model.new_cache(10))) == plain[:5]
    with pytest.raises(ValueError, match=r"new_cache\(10\)"):
        decode(model, PROMPT, max_new_tokens=5, cache=model.new_cache(9))


def test_samplers_see_one_row_of_logits_a_token_and_decide(model: QwenGDN) -> None:
    seen: list[Tensor] = []

    def second_best(logits: Tensor) -> Tensor:
        seen.append(logits)
        return logits.topk(2, dim=-1).indices[:, 1]

    emitted = list(decode(model, PROMPT, max_new_tokens=4, sampler=second_best))
    whole = model.logits(model(torch.tensor([PROMPT + emitted])).final)[0]
    assert [logits.shape for logits in seen] == [(1, 97)] * 4
    assert emitted == whole[5:-1].topk(2).indices[:, 1].tolist()


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert greedy(torch.tensor([[1.0, 3, 3], [2, 2, 1], [-torch.inf, -torch.inf, -1]])).tolist() == [1, 0, 2]


def test_rounds_that_accept_nothing_but_the_root_decode_like_plain(model: QwenGDN, plain: list[int]) -> None:
    cache, draw = model.new_cache(64), seeded(10)
    model(torch.tensor([PROMPT]), cache)
    root, emitted = plain[0], [plain[0]]
    topology = Topology([-1, 0, 0, 1, 1, 2])
    for _ in range(19):
        nodes = torch.cat((torch.tensor([[root]]), random_tokens(draw, 1, 5)), dim=1)
        hidden = model(nodes, cache.branch(topology))
        cache.commit([0])
        root = int(model.logits(hidden.final[:, 0]).argmax())
        emitted.append(root)
    assert emitted == plain and cache.length == 6 + 20 - 1
    wanted = model.new_cache(64)
    model(torch.tensor([PROMPT + plain[:-1]]), wanted)
    assert worst_gap(memory_of(cache), memory_of(wanted)) <= 1e-10


def test_decoding_starts_no_gradient_and_changes_nothing_global(model: QwenGDN) -> None:
    trained = tiny_model(1, dtype=torch.float64).requires_grad_(True)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    tokens: Iterator[int] = decode(trained, PROMPT, max_new_tokens=3)
    next(tokens)
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert trained(torch.tensor([PROMPT])).final.requires_grad
    list(tokens)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert all(parameter.grad is None for parameter in trained.parameters())
