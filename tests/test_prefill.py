"""Prefill in windows: equal to one pass, bounded by the window, with the head applied to one row."""

import gc
from typing import Any

import pytest
import torch
from tiny import SMALL, gap, memory_of, random_tokens, seeded, tiny_model, worst_gap
from torch import Tensor

from qwen_gdn import QwenGDN, decode, prefill
from qwen_gdn.decode import PREFILL_WINDOW


@pytest.fixture(scope="module")
def model() -> QwenGDN:
    return tiny_model(1, dtype=torch.float64)


@pytest.mark.case(5)
@pytest.mark.parametrize("window", [1, 3, 8, 49, 50, 51])
def test_prefill_in_windows_equals_one_pass_and_hands_out_every_row_once(model: QwenGDN, window: int) -> None:
    tokens = random_tokens(seeded(3), 1, 50)
    whole, parts = model.new_cache(50), model.new_cache(50)
    once = model(tokens, whole, capture=(6, 1, "final"))
    rows: list[tuple[int, Tensor]] = []
    last = prefill(
        model,
        tokens,
        parts,
        window=window,
        capture=(6, 1, "final"),
        on_window=lambda hidden: rows.append((parts.length, torch.cat(hidden.captured, dim=-1))),
    )
    assert gap(last, once.final[:, -1]) <= 1e-10
    assert gap(torch.cat([part for _, part in rows], dim=1), torch.cat(once.captured, dim=-1)) <= 1e-10
    assert [length for length, _ in rows] == [min(50, window * (i + 1)) for i in range(len(rows))]
    assert worst_gap(memory_of(parts), memory_of(whole)) <= 1e-10


@pytest.mark.parametrize("window", [0, -1])
def test_a_prefill_window_without_tokens_is_refused(model: QwenGDN, window: int) -> None:
    cache = model.new_cache(10)
    with pytest.raises(ValueError, match=f"window.*{window}"):
        prefill(model, random_tokens(seeded(4), 1, 6), cache, window=window)
    assert cache.length == 0


@pytest.mark.case(5)
def test_a_prompt_one_longer_than_the_default_window_keeps_all_memory() -> None:
    small = tiny_model(4, dtype=torch.float64, layer_types=SMALL)
    tokens = random_tokens(seeded(5), 1, PREFILL_WINDOW + 1)
    cache = small.new_cache(PREFILL_WINDOW + 2)
    first = next(decode(small, tokens, max_new_tokens=2, cache=cache))
    once = small(tokens)
    assert first == int(small.logits(once.final[:, -1]).argmax())
    wanted = small.new_cache(PREFILL_WINDOW + 2)
    small(tokens, wanted)
    assert worst_gap(memory_of(cache), memory_of(wanted)) <= 1e-10


@pytest.mark.case(10)
def test_the_head_sees_one_row_a_token_however_long_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = tiny_model(6, layer_types=SMALL[:2], vocab_size=50_000)
    tokens = random_tokens(seeded(7), 1, 4000, vocab=50_000)
    rows: list[int] = []
    head = wide.logits

    def counting(hidden: Tensor) -> Tensor:
        rows.append(hidden[..., 0].numel())
        return head(hidden)

    monkeypatch.setattr(wide, "logits", counting)
    first = next(decode(wide, tokens, max_new_tokens=3))
    assert rows == [1]
    assert first == int(head(wide(tokens).final[:, -1]).argmax())


def test_a_prefill_does_not_keep_the_rows_of_every_layer_until_its_end() -> None:
    """What one layer computed for the whole window is let go when the next layers run."""
    deep = tiny_model(8, layer_types=["linear_attention"] * 6)
    columns = (1, 501, deep.config.conv_dim)
    held: list[int] = []

    def count(*_: object) -> None:
        gc.collect()
        held.append(sum(type(x) is Tensor and x.shape == columns for x in gc.get_objects()))

    with deep.get_submodule("layers.5.mlp").register_forward_hook(count):
        deep(random_tokens(seeded(9), 1, 501), deep.new_cache(600))
    assert held[0] <= 1


@pytest.mark.parametrize(
    ("prompt", "window", "said"),
    [
        ([1, 2], 4, r"must be an int64 tensor \[B, T\], got list"),
        (torch.tensor([1, 2]), 4, r"must be an int64 tensor \[B, T\], got \[2\]"),
        (torch.tensor([[1, 2]]), 0, "window must be an int of at least 1, got 0"),
        (torch.tensor([[1, 2]]), 1.5, "window must be an int of at least 1, got 1.5"),
    ],
)
def test_a_prompt_or_window_of_the_wrong_kind_is_refused(prompt: Any, window: Any, said: str) -> None:
    model = tiny_model(1)
    cache = model.new_cache(9)
    with pytest.raises(ValueError, match=said):
        prefill(model, prompt, cache, window=window)
    assert cache.length == 0
