"""How far eight bits are from expanded weights: the figures against whole forwards of the same models."""

import copy
from typing import Any

import pytest
import torch
from eight_bits import in_eight_bits
from tiny import EXPERTS, gap, random_tokens, seeded, tiny_model
from torch import Tensor, nn

from qwen_gdn import ModelConfig, QwenGDN
from qwen_gdn.fp8 import FP8Linear
from tools.measure.fidelity import TOKENS, measure, with_expanded_weights
from tools.measure.instruments import random_weights
from tools.parity.shapes import tiny

EIGHT_BITS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
CPU = torch.device("cpu")


def config(**changes: Any) -> dict[str, Any]:
    return tiny() | changes | {"quantization_config": EIGHT_BITS}


def rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def same_tokens(model: QwenGDN, a: Tensor, b: Tensor) -> float:
    """Of states before the final norm, in float32."""
    exact = copy.deepcopy(model).float() if model.dtype != torch.float64 else model
    one, other = (exact.logits(exact.norm(x.to(exact.dtype))).argmax(-1) for x in (a, b))
    return float((one == other).double().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_figures_are_those_of_whole_forwards(changes: dict[str, object], dtype: torch.dtype) -> None:
    """Layers by themselves are met where the exact model calls them, by hooks."""
    lines: list[str] = []
    figures = measure(config(**changes), CPU, dtype, lines.append)
    torch.manual_seed(0)
    eight = random_weights(QwenGDN, ModelConfig.from_dict(config(**changes)), CPU, dtype)
    full = with_expanded_weights(eight, dtype)
    exact = copy.deepcopy(full).to(torch.promote_types(dtype, torch.float32))
    met: list[dict[str, float]] = []

    def meet(layer: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
        x, lane, step = given
        i, rope = len(met) // 2, type(step.rope)(*(part.to(dtype) for part in step.rope))
        x = x.to(dtype)
        added = layer.forward(x.to(out.dtype), type(lane)(), step) - x
        for model in (eight, full):
            own = model.layers[i](x, type(lane)(), step._replace(rope=rope))
            error = rms(own.double() - x.double(), added)
            met.append({"alone": error, "alone_top1": same_tokens(full, own, added + x)})

    hooks = [layer.register_forward_hook(meet) for layer in exact.layers]
    tokens = torch.randint(exact.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    ids = range(len(exact.layers))
    with torch.no_grad():
        wanted = exact(tokens, capture=ids)
        for hook in hooks:
            hook.remove()
        for side, (name, model) in enumerate((("eight bits", eight), (str(dtype).removeprefix("torch."), full))):
            found = model(tokens, capture=ids)
            for i in ids:
                own = figures["layers"][i][name]
                ours, theirs = found.captured[i], wanted.captured[i]
                assert own["together"] == pytest.approx(rms(ours, theirs), rel=1e-3, abs=1e-6), (name, i)
                assert own["top1"] == same_tokens(full, ours, theirs), (name, i)
                assert own["alone"] == pytest.approx(met[2 * i + side]["alone"], rel=1e-3, abs=1e-6), (name, i)
                assert own["alone_top1"] == met[2 * i + side]["alone_top1"], (name, i)
            last = (full.norm(state.captured[-1].to(exact.dtype)).to(exact.dtype) for state in (found, wanted))
            logits = [exact.logits(state) for state in last]
            assert figures["logits"][name] == pytest.approx(rms(*logits), rel=1e-2, abs=1e-6)
            assert figures["top1"][name] == figures["layers"][-1][name]["top1"]
    assert [line.partition(":")[0] for line in lines] == [*(f"layer {i}" for i in ids), "logits"]


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
