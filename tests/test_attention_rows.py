"""No row of any attention is left without a key to see: a softmax over nothing is NaN, and spreads."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from drafter_oracle import bound_drafter, features_of, layered
from tiny import SMALL, random_tokens, random_topology, seeded, tiny_model
from torch import Tensor

import qwen_gdn.prefix
import qwen_gdn.program_set
from qwen_gdn import Topology
from qwen_gdn.engine import Engine

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """All masks that attention is given meanwhile, of the programs' softmax too."""
    seen: list[Tensor] = []
    usual, plain = F.scaled_dot_product_attention, qwen_gdn.prefix._plain

    def attention(*args: Tensor, attn_mask: Tensor | None = None, **how: bool) -> Tensor:
        if attn_mask is not None:
            seen.append(attn_mask)
        return usual(*args, attn_mask=attn_mask, **how)

    def softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, keys: Tensor, values: Tensor, before: Tensor) -> Tensor:
        seen.append(torch.cat((before.expand(len(mask), -1), mask), dim=1))
        return plain(q, k, v, mask, keys, values, before)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(qwen_gdn.prefix, "_plain", softmax)
    yield seen
    assert seen
    assert all(mask.dtype == torch.bool for mask in seen), "a number for what is not seen can overflow"
    assert all(bool(mask.any(-1).all()) for mask in seen)


@pytest.mark.case(8)
@DTYPES
def test_every_row_of_chains_and_trees_sees_itself(dtype: torch.dtype, masks: list[Tensor]) -> None:
    model, draw = tiny_model(1, dtype=dtype, layer_types=SMALL), seeded(2)
    for first in (0, 1, 9):
        cache = model.new_cache(60)
        for count in (first, 1, 5):
            if count:
                assert bool(model(random_tokens(draw, 1, count), cache).final.isfinite().all())
        for nodes in (1, 2, 12):
            hidden = model(random_tokens(draw, nodes), cache.branch(random_topology(draw, nodes, 5)))
            assert bool(hidden.final.isfinite().all())
            cache.commit([0])
        cache.check()


@pytest.mark.case(8)
@DTYPES
def test_every_row_of_padded_programs_sees_itself(
    dtype: torch.dtype, masks: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen_gdn.program_set, "compiled", lambda function: function)
    engine = Engine(tiny_model(1, dtype=dtype, layer_types=SMALL), sizes=(8,), chunks=(8,))
    cache = engine.new_cache(40)
    for parents in ([-1, 0, 0], [-1]):
        assert bool(engine(torch.arange(len(parents)), cache.branch(Topology(parents))).final.isfinite().all())
        cache.commit([0])
        assert bool(engine(torch.tensor([5, 1, 2]), cache).final.isfinite().all())
    cache.check()


@pytest.mark.case(8)
@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_every_row_of_a_drafters_block_sees_itself(window: int, causal: bool | None, masks: list[Tensor]) -> None:
    drafter, _ = bound_drafter(layered("s", "f", "s", window=window, is_causal=causal))
    for count in (0, 1, 4, 30):
        drafter.reset()
        drafter.observe(features_of(count))
        assert bool(drafter.propose(5).isfinite().all())  # type: ignore[union-attr]
    masks.append(torch.ones(1, 1, dtype=torch.bool))  # a wide window that is not causal needs none
