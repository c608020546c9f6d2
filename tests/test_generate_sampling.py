"""Sampling through the speculative loop: reproducible, and greedy towards temperature zero.

Its law is held against enumeration in test_law.py, and on what `generate` itself writes in test_penalties.py.
"""

from typing import Any

import pytest
from proposers import Right, Scattered, Wrong, emitted, small_model

from ddtree import Round, Verified, build_chain, build_tree, generate, make_sampler
from qwen_gdn import Sampler, decode

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


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.95}, {"top_k": 9, "repetition_penalty": 1.2, "presence_penalty": 0.3}]
)
def test_a_seed_writes_one_text_whatever_is_drafted(settings: dict[str, Any]) -> None:
    """And goes on from there in a next text: numbers belong to places, not to nodes."""

    def plain(sampler: Sampler) -> list[int]:
        return list(decode(MODEL, PROMPT, max_new_tokens=70, sampler=sampler))

    alone = make_sampler(0.9, seed=3, **settings)
    texts = [plain(alone), plain(alone)]
    assert texts[0] != texts[1] and len(set(texts[0])) > 10
    for make, build, budget in ((Right, build_tree, 1), (Scattered, build_tree, 20), (Wrong, build_chain, 6)):
        sampler = make_sampler(0.9, seed=3, **settings)
        for text in texts:
            rounds = generate(
                MODEL, make([*PROMPT, *text]), PROMPT, max_new_tokens=70, budget=budget, build=build, sampler=sampler
            )
            assert emitted(rounds) == text


def test_a_round_that_is_taken_back_is_drawn_again_alike() -> None:
    sampler = make_sampler(0.9, seed=5)
    text = list(decode(MODEL, PROMPT, max_new_tokens=40, sampler=make_sampler(0.9, seed=5)))
    cache = MODEL.new_cache(80)

    def fails(verified: Verified) -> None:
        if verified.length > 12:
            raise RuntimeError("no")

    rounds, written = (
        generate(
            MODEL, Scattered([*PROMPT, *text]), PROMPT, max_new_tokens=40, cache=cache, sampler=sampler, on_round=fails
        ),
        [],
    )
    with pytest.raises(RuntimeError, match="no"):
        for done in rounds:
            written += done.tokens
    assert 5 < len(written) < 40 and cache.length == len(PROMPT) + len(written) - 1
    left = 40 - len(written)
    again = generate(MODEL, Wrong(text), written[-1:], max_new_tokens=left, cache=cache, sampler=sampler)
    assert [*written, *emitted(again)] == text


@pytest.mark.case(37)
def test_temperature_towards_zero_is_greedy() -> None:
    for temperature in (0.0, 1e-6, 1e-12):
        for make in (Right, Wrong, Scattered):
            sampler = make_sampler(temperature, seed=0)
            rounds = generate(MODEL, make(TRANSCRIPT), PROMPT, max_new_tokens=40, budget=7, sampler=sampler)
            assert emitted(rounds) == TRUTH[:40]
