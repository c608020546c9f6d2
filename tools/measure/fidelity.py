"""How far a model in eight bits is from the same model whose weights are expanded to its dtype: layer by layer.

Errors are root mean squares relative to those of what they are errors of. Those of a layer by itself, on the input that
the expanded model gives it and of what it adds to that input, are measured against float32, where the dtype's own
rounding has an error too. Those of all layers up to one also hold what later layers make of earlier errors. Whether
that changes which token is likeliest is told of every layer, by the model's own norm and head.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qwen_gdn import ModelConfig, QwenGDN
from qwen_gdn.block_products import expanded
from qwen_gdn.fp8 import FP8Linear, is_in_eight_bits
from qwen_gdn.lanes import FreshAttention, FreshDelta, Step
from qwen_gdn.model import DecoderLayer
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
    eight = random_weights(QwenGDN, config, device, dtype)
    assert is_in_eight_bits(eight)
    full = with_expanded_weights(eight)
    tokens = torch.randint(config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    ids = range(len(full.layers))
    ours, theirs = (model(tokens, capture=("embedding", *ids)) for model in (eight, full))
    layers = []
    for i in ids:
        one = _alone(eight.layers[i], full.layers[i], theirs.captured[i], config) | {
            "together": rms_error(ours.captured[i + 1], theirs.captured[i + 1]),
            "top1": _agreement(full, *(full.norm(side.captured[i + 1]) for side in (ours, theirs))),
        }
        layers.append(one)
        alone = f"alone {one['alone']:.2e} ({dtype} {one['rounding']:.2e})"
        say(f"layer {i}: {alone}, with those before {one['together']:.2e}, top-1 agreement {one['top1']:.1%}")
    logits = rms_error(*(full.logits(side.final) for side in (ours, theirs)))
    found = {"rows": TOKENS, "layers": layers, "logits": logits, "top1": _agreement(full, ours.final, theirs.final)}
    say(f"logits: {logits:.2e}, top-1 agreement {found['top1']:.1%} of {TOKENS} rows")
    return found


def with_expanded_weights(model: QwenGDN) -> QwenGDN:
    """The model with what its weights in eight bits stand for in its own dtype; all other parameters are shared."""
    memo = {id(p): p for p in model.parameters()}
    twin = copy.deepcopy(model, memo)
    for name, part in list(twin.named_modules()):
        if isinstance(part, FP8Linear):
            linear = nn.Linear(part.in_features, part.out_features, bias=False, device="meta")
            weight = expanded(part.weight, part.weight_scale_inv, part.block, model.dtype)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            parent, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, linear)
    return twin


def _alone(eight: DecoderLayer, full: DecoderLayer, x: Tensor, config: ModelConfig) -> dict[str, float]:
    """Errors against float32 of what a layer adds to one input."""
    exact = _added(copy.deepcopy(full).float(), x.float(), config)
    return {"alone": rms_error(_added(eight, x, config), exact), "rounding": rms_error(_added(full, x, config), exact)}


def _added(layer: DecoderLayer, x: Tensor, config: ModelConfig) -> Tensor:
    rope = rotation(torch.arange(x.shape[1], device=x.device), config.rotary_dim, config.rope_theta, x.dtype)
    lane = FreshDelta() if layer.mixer_name == "linear_attn" else FreshAttention()
    return layer(x, lane, Step(rope, None, True)).float() - x.float()


def _agreement(model: QwenGDN, ours: Tensor, theirs: Tensor) -> float:
    """The share of rows whose likeliest token is the same."""
    return float((model.logits(ours).argmax(-1) == model.logits(theirs).argmax(-1)).float().mean())
