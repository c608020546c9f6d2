"""How far eight bits are from expanded weights: figures that a fault would change, and that rounding explains."""

import copy
from typing import Any

import pytest
import torch
from eight_bits import in_eight_bits
from tiny import EXPERTS, gap, random_tokens, seeded, tiny_model
from torch import Tensor

import tools.measure.fidelity
from qwen_gdn.fp8 import FP8Linear
from tools.measure.fidelity import measure, with_expanded_weights
from tools.parity.shapes import tiny

EIGHT_BITS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
CPU = torch.device("cpu")


def found(raw: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    lines: list[str] = []
    figures = measure(raw, CPU, dtype, lines.append)
    assert [line.partition(":")[0] for line in lines] == [f"layer {i}" for i in range(len(lines) - 1)] + ["logits"]
    return figures


@pytest.mark.parametrize("changes", [{}, EXPERTS | {"shared_expert_intermediate_size": 16}], ids=["dense", "experts"])
def test_errors_are_what_three_bits_of_mantissa_make(changes: dict[str, object]) -> None:
    raw = tiny() | changes | {"quantization_config": EIGHT_BITS}
    figures = found(raw)
    assert len(figures["layers"]) == raw["num_hidden_layers"]
    for one in figures["layers"]:
        assert 1e-3 < one["alone"] < 0.2 and one["rounding"] < 1e-5 and 1e-4 < one["together"] < 0.3
        assert 0.5 < one["top1"] <= 1
    assert figures["layers"][-1]["top1"] == figures["top1"] and 0 < figures["logits"] < 0.3


def test_bfloat16_has_an_error_of_its_own() -> None:
    for one in found(tiny() | {"quantization_config": EIGHT_BITS}, torch.bfloat16)["layers"]:
        assert 1e-4 < one["rounding"] < one["alone"]


def test_what_is_no_error_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations left as they are: then weights are the expanded ones."""
    exact = FP8Linear.beside

    def full_rows(self: FP8Linear, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        weight = tools.measure.fidelity.expanded(self.weight, self.weight_scale_inv, self.block, x.dtype)
        return (x @ weight.T, *exact(self, x, *others)[1:])

    monkeypatch.setattr(FP8Linear, "beside", full_rows)
    figures = found(tiny() | {"quantization_config": EIGHT_BITS})
    assert all(one["alone"] < 1e-5 and one["together"] < 1e-5 and one["top1"] == 1 for one in figures["layers"])
    assert figures["logits"] < 1e-5 and figures["top1"] == 1


def test_expanded_weights_leave_the_model_alone_and_share_the_rest() -> None:
    model = in_eight_bits(tiny_model())
    before = copy.deepcopy(model)
    twin = with_expanded_weights(model)
    assert not any(isinstance(part, FP8Linear) for part in twin.modules())
    assert twin.embed_tokens.weight is model.embed_tokens.weight
    tokens = random_tokens(seeded(1), 1, 9)
    with torch.no_grad():
        assert torch.equal(model(tokens).final, before(tokens).final)
        assert 1e-4 < gap(model(tokens).final, twin(tokens).final) < 0.5


def test_a_config_without_eight_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="no weights in eight bits"):
        measure(tiny(), CPU, torch.float32, print)
