"""Random models to compare on: configs and well-scaled weights. No checkpoint is read here."""

from typing import Any

import torch
from torch import Tensor

from qwen_gdn import ModelConfig, QwenGDN

_PATTERN = ["linear_attention"] * 3 + ["full_attention"]


def tiny(layers: int = 8) -> dict[str, Any]:
    """A parsed config of a model that runs in milliseconds: two value heads a key head, K = V = 8."""
    return _text(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )


def published_27b(layers: int = 4, vocabulary: int = 32_768) -> dict[str, Any]:
    """The layers of the published 27B models in their own shape, fewer of them and over a smaller vocabulary."""
    return _text(
        vocab_size=vocabulary,
        hidden_size=5120,
        intermediate_size=17_408,
        layers=layers,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )


def _text(layers: int, **sizes: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return {
        "model_type": "qwen3_5_text",
        **sizes,
        "num_hidden_layers": layers,
        "layer_types": [_PATTERN[i % len(_PATTERN)] for i in range(layers)],
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }


def random_model(raw: dict[str, Any], sigma: float, *, device: torch.device | str = "cpu", seed: int = 0) -> QwenGDN:
    """A float32 model whose every weight is a bfloat16 number, so that a bfloat16 copy has the same weights.

    Matrices have spread `sigma`, conv filters 0.3, norms 0.1 around their neutral value and dt_bias 0.1; A_log is
    uniform in [-3, 2].

    Args:
        raw: a parsed `config.json`.
        device: where it is built; its own generator draws there, so weights differ between kinds of device.
    """
    with torch.device("meta"):
        model = QwenGDN(ModelConfig.from_dict(raw))
    model = model.to_empty(device=device)
    draw = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter, sigma, draw).bfloat16())
    return model.eval().requires_grad_(False)


def _values(name: str, parameter: Tensor, sigma: float, draw: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        return torch.rand(parameter.shape, generator=draw, device=draw.device) * 5 - 3
    values = torch.randn(parameter.shape, generator=draw, device=draw.device)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.1 * values
    if parameter.dim() == 1:
        return 0.1 * values
    return values * (0.3 if name.endswith("conv1d.weight") else sigma)
