"""How far a model in eight bits is from its expanded weights, layer by layer, beside the usual arithmetic on those.

Weights are expanded to the dtype, as a loader does it; the yardstick is float32 arithmetic on them. Errors are root
mean squares relative to those of what they are errors of. Of a layer by itself it is the error of what it adds to the
input that the yardstick gives it; with the layers before it, that of its output, in which later layers have made
something of earlier errors. Beside each stands the share of rows whose likeliest token is the yardstick's, as the
model's own norm and head tell it of the layer's output. Random weights amplify errors and have no clear favourite, so
both are to be read beside what rounding to the dtype does to the same weights.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_gdn import ModelConfig, QwenGDN
from qwen_gdn.block_products import expanded
from qwen_gdn.fp8 import FP8Linear
from qwen_gdn.lanes import FreshAttention, FreshDelta, Step
from qwen_gdn.model import DecoderLayer
from qwen_gdn.norms import at_least_float32
from qwen_gdn.rope import rotation
from tools.measure.instruments import random_weights
from tools.parity.report import rms_error

TOKENS = 256


@torch.no_grad()
def measure(
    raw: dict[str, Any], device: torch.device, dtype: torch.dtype, say: Callable[[str], None]
) -> dict[str, Any]:
    """Figures of random weights of a parsed config that says which are in eight bits.

    Raises:
        ValueError: it says that none are.
    """
    config = ModelConfig.from_dict(raw)
    if config.quantization is None:
        raise ValueError("the config states no weights in eight bits; give one of an FP8 release")
    torch.manual_seed(0)
    eight = random_weights(QwenGDN, config, device, dtype)
    sides = {"eight bits": eight, str(dtype).removeprefix("torch."): with_expanded_weights(eight, dtype)}
    tokens = torch.randint(config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    likeliest = _Head(eight)
    states = {name: model.embed(tokens) for name, model in sides.items()}
    exact = at_least_float32(eight.embed(tokens))
    layers: list[dict[str, Any]] = []
    *_, full = sides.values()
    for i, layer in enumerate(full.layers):
        wide = copy.deepcopy(layer).to(exact.dtype)
        given = exact.to(dtype)
        wanted, exact = _through(wide, given.to(exact.dtype), config), _through(wide, exact, config)
        one: dict[str, Any] = {}
        for name, model in sides.items():
            alone = _through(model.layers[i], given, config)
            states[name] = _through(model.layers[i], states[name], config)
            one[name] = {
                "alone": rms_error(alone.double() - given.double(), wanted.double() - given.double()),
                "alone_top1": likeliest.agreement(alone, wanted),
                "together": rms_error(states[name], exact),
                "top1": likeliest.agreement(states[name], exact),
            }
        layers.append(one)
        say(f"layer {i}: " + "; ".join(_told(name, own) for name, own in one.items()))
    logits = {name: rms_error(likeliest.logits(state), likeliest.logits(exact)) for name, state in states.items()}
    top1 = {name: own["top1"] for name, own in layers[-1].items()}
    say("logits: " + "; ".join(f"{name} {logits[name]:.2e}, top-1 {top1[name]:.1%} of {TOKENS}" for name in sides))
    return {"rows": TOKENS, "layers": layers, "logits": logits, "top1": top1}


def with_expanded_weights(model: QwenGDN, dtype: torch.dtype) -> QwenGDN:
    """The model with what its weights in eight bits stand for, in that dtype; all other parameters are shared."""
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for name, part in list(twin.named_modules()):
        if isinstance(part, FP8Linear):
            linear = nn.Linear(part.in_features, part.out_features, bias=False, device="meta")
            weight = expanded(part.weight, part.weight_scale_inv, part.block, dtype)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            parent, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, linear)
    return twin


class _Head:
    """Norm and head of a model in float32 or wider."""

    def __init__(self, model: QwenGDN) -> None:
        self._weight = at_least_float32((model.embed_tokens if model.lm_head is None else model.lm_head).weight)
        self._norm = copy.deepcopy(model.norm).to(self._weight.dtype)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self._norm(at_least_float32(x)), self._weight)

    def agreement(self, ours: Tensor, theirs: Tensor) -> float:
        """The share of rows whose likeliest token is the same."""
        same = self.logits(ours).argmax(-1) == self.logits(theirs).argmax(-1)
        return float(same.float().mean())


def _through(layer: DecoderLayer, x: Tensor, config: ModelConfig) -> Tensor:
    """A layer's output over tokens in a row that nothing precedes."""
    rope = rotation(torch.arange(x.shape[1], device=x.device), config.rotary_dim, config.rope_theta, x.dtype)
    lane = FreshDelta() if layer.mixer_name == "linear_attn" else FreshAttention()
    out: Tensor = layer(x, lane, Step(rope, None, True))
    return out


def _told(name: str, one: dict[str, float]) -> str:
    alone, together = f"{one['alone']:.2e} {one['alone_top1']:.1%}", f"{one['together']:.2e} {one['top1']:.1%}"
    return f"{name} alone {alone}, with those before {together}"
