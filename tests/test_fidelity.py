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
MIXTURE = EXPERTS | {"shared_expert_intermediate_size": 16}
CPU = torch.device("cpu")


def found(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    lines: list[str] = []
    raw = tiny() | changes | {"quantization_config": EIGHT_BITS}
    figures = measure(raw, CPU, dtype, lines.append)
    count = raw["num_hidden_layers"]
    assert [line.partition(":")[0] for line in lines] == [*(f"layer {i}" for i in range(count)), "logits"]
    assert len(figures["layers"]) == count
    assert figures["top1"] == {name: own["top1"] for name, own in figures["layers"][-1].items()}
    return figures


@pytest.mark.parametrize("changes", [{}, MIXTURE], ids=["dense", "experts"])
def test_errors_are_what_three_bits_of_mantissa_make(changes: dict[str, object]) -> None:
    figures = found(**changes)
    for one in figures["layers"]:
        eight, full = one["eight bits"], one["float32"]
        assert 1e-3 < eight["alone"] < 0.2 and 1e-4 < eight["together"] < 0.5 and 0.2 < eight["top1"] <= 1
        assert full["alone"] < 1e-5 and full["together"] < 1e-5 and full["top1"] == full["alone_top1"] == 1
        assert 0.6 < eight["alone_top1"] <= 1
    assert figures["logits"]["float32"] < 1e-5 < 1e-3 < figures["logits"]["eight bits"] < 0.6


def test_rounding_to_bfloat16_is_a_smaller_error() -> None:
    figures = found(torch.bfloat16)
    for one in figures["layers"]:
        for what in ("alone", "together"):
            assert 1e-4 < one["bfloat16"][what] < one["eight bits"][what]
    assert figures["top1"]["bfloat16"] > figures["top1"]["eight bits"]


def test_what_is_no_error_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations left as they are: then weights are the expanded ones."""

    def full_rows(self: FP8Linear, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        weight = tools.measure.fidelity.expanded(self.weight, self.weight_scale_inv, self.block, x.dtype)
        return (x @ weight.T, *(x @ other.T for other in others))

    monkeypatch.setattr(FP8Linear, "beside", full_rows)
    figures = found()
    eight = [one["eight bits"] for one in figures["layers"]]
    assert all(one["alone"] < 1e-5 and one["together"] < 1e-5 and one["top1"] == 1 for one in eight)
    assert figures["logits"]["eight bits"] < 1e-5


def test_expanded_weights_leave_the_model_alone_and_share_the_rest() -> None:
    model = in_eight_bits(tiny_model())
    before = copy.deepcopy(model)
    twin = with_expanded_weights(model, model.dtype)
    assert not any(isinstance(part, FP8Linear) for part in twin.modules())
    assert twin.embed_tokens.weight is model.embed_tokens.weight
    tokens = random_tokens(seeded(1), 1, 9)
    with torch.no_grad():
        assert torch.equal(model(tokens).final, before(tokens).final)
        assert 1e-4 < gap(model(tokens).final, twin(tokens).final) < 0.5


def test_a_config_without_eight_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="no weights in eight bits"):
        measure(tiny(), CPU, torch.float32, print)
