"""Sampling through the speculative loop: reproducible, and greedy towards temperature zero.

Its law is held against enumeration in test_law.py, and on what `generate` itself writes in test_penalties.py.
"""

import pytest
from proposers import Right, Scattered, Wrong, emitted, small_model

from ddtree import Round, generate, make_sampler
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
