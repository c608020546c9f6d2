"""What a generation leaves alone and what it spends: grad modes, random generators, the head's rows, memory, stages."""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from proposers import Reading, Right, Scattered, Wrong, emitted, small_model
from tiny import memory_of, random_tokens, seeded
from torch import Tensor

from ddtree import NoDrafts, generate, make_sampler
from qwen_gdn import decode, greedy

MODEL = small_model()
PROMPT = [5, 30, 11, 2]
TRUTH = list(decode(MODEL, PROMPT, max_new_tokens=60))
TRANSCRIPT = [*PROMPT, *TRUTH]


@pytest.mark.case(10)
@pytest.mark.parametrize("window", [3, 2048])
def test_the_head_sees_one_row_of_the_prompt_and_every_node_of_a_tree(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    linear = F.linear
    assert MODEL.lm_head is not None
    head = MODEL.lm_head.weight

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is head:
            rows.append(x.numel() // x.shape[-1])
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", spy)
    rounds = list(generate(MODEL, Scattered(TRANSCRIPT), PROMPT, max_new_tokens=20, budget=7, prefill_window=window))
    assert rows == [done.drafted + 1 for done in rounds]


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=["inference", "no grad", "grad"]
)
def test_grad_mode_stays_the_callers_within_and_after(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    cache = MODEL.new_cache(60)
    with mode():
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        rounds = generate(MODEL, Reading(TRANSCRIPT), PROMPT, max_new_tokens=20, budget=5, cache=cache)
        tokens: list[int] = []
        for done in rounds:
            tokens += done.tokens
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, inference)
        assert tokens == TRUTH[:20]
        assert emitted(generate(MODEL, Right(TRANSCRIPT), PROMPT, max_new_tokens=20)) == TRUTH[:20]
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # What was filled in any mode is usable in any other.
    rest = generate(MODEL, NoDrafts(), TRUTH[19:20], max_new_tokens=10, cache=cache)
    assert emitted(rest) == TRUTH[20:30]
    assert all(not tensor.requires_grad for tensor in memory_of(cache))


def test_weights_that_require_grad_leave_no_graph_anywhere() -> None:
    def sampler(logits: Tensor) -> Tensor:
        assert not logits.requires_grad
        return greedy(logits)

    model = small_model(3).requires_grad_(True)
    cache, proposer = model.new_cache(40), Reading([1] * 40)
    list(generate(model, proposer, [1, 2], max_new_tokens=20, cache=cache, budget=4, sampler=sampler))
    assert all(tensor.grad_fn is None for layer in cache for tensor in layer.tensors())
    assert proposer.last.grad_fn is None


def test_no_global_generator_is_touched() -> None:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    for sampler in (greedy, make_sampler(0.8, seed=1), make_sampler(0.8, top_p=0.9)):
        list(generate(MODEL, Right(TRANSCRIPT), PROMPT, max_new_tokens=10, sampler=sampler))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_stages_are_named_in_the_order_of_a_round() -> None:
    stages: list[str] = []
    depth = [0]

    @contextmanager
    def note(stage: str) -> Iterator[None]:
        assert depth == [0], "stages do not nest"
        depth[0] += 1
        stages.append(stage)
        yield
        depth[0] -= 1

    rounds = generate(MODEL, Right(TRANSCRIPT), PROMPT, max_new_tokens=10, budget=3, prefill_window=3, on_stage=note)
    next(rounds)
    assert stages == ["prefill", "draft", "prefill", "draft", "sample"]  # a drafter reads rows in its own time
    stages.clear()
    next(rounds)
    assert stages == ["draft", "build", "verify", "sample", "commit"]
    stages.clear()
    list(generate(MODEL, NoDrafts(), PROMPT, max_new_tokens=2, budget=0, on_stage=note))
    assert stages == ["prefill", "draft", "sample", "verify", "sample", "commit"]


def live_tensors() -> list[Tensor]:
    """All but a compiler's stand-ins, which have no storage."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter)]


def count_and_bytes() -> tuple[int, int]:
    """Of all tensors alive, each storage counted once."""
    tensors = live_tensors()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values())


@pytest.mark.case(14)
def test_memory_stays_flat_over_four_hundred_rounds() -> None:
    truth, cache = list(decode(MODEL, PROMPT, max_new_tokens=420)), MODEL.new_cache(500)
    rounds = generate(MODEL, Wrong([*PROMPT, *truth]), PROMPT, max_new_tokens=420, budget=4, cache=cache)
    measured = []
    for number, done in enumerate(rounds):
        assert done.accepted == 0
        if number in (10, 200, 400):
            measured.append((*count_and_bytes(), cache.nbytes))
    assert len(measured) == 3
    assert len(set(measured)) == 1, measured


@pytest.mark.case(10)
def test_after_prefill_nothing_of_the_windows_stays_alive() -> None:
    prompt = random_tokens(seeded(0), 200, vocab=37).tolist()
    before = {tensor.untyped_storage().data_ptr() for tensor in live_tensors()}
    cache = MODEL.new_cache(210)
    rounds = generate(MODEL, NoDrafts(), prompt, max_new_tokens=5, cache=cache)
    next(rounds)
    before |= {tensor.untyped_storage().data_ptr() for layer in cache for tensor in layer.tensors()}
    left = [x for x in live_tensors() if x.is_floating_point() and x.untyped_storage().data_ptr() not in before]
    assert all(x.untyped_storage().nbytes() <= 37 * x.element_size() for x in left), [x.shape for x in left]
