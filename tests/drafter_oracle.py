"""What the drafter's tests share: small random drafters, a stand-in for a target, and a slow dense drafter.

The dense drafter has no cache and shares no code with the package: it looks at all context rows and at the
block, decides visibility pair by pair, and reads nothing but a config and a state dict.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ddtree import drafters
from ddtree.drafter import DFlashDrafter
from ddtree.drafter_config import DFlashConfig

VOCAB, WIDTH = 41, 24
KINDS = {"full": ("f", "f"), "sliding": ("s", "s"), "mixed": ("s", "f", "s")}


def raw_config(**changes: Any) -> dict[str, Any]:
    """A published-style config of a tiny drafter, in the newer schema, with some keys changed or added."""
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "use_sliding_window": True,
        "num_target_layers": 8,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "dflash_config": {"block_size": 5, "mask_token_id": VOCAB - 1, "target_layer_ids": [4, 1, 6]},
    }
    return raw | changes


def raw_config2(*, dflash: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A published-style config of a tiny DFlash 2 drafter; `dflash` changes or adds keys of its inner table."""
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    table = raw_config()["dflash_config"] | sizes | (dflash or {})
    raw = raw_config(
        architectures=["DFlash2DraftModel"],
        is_causal=False,
        layer_types=["sliding_attention"] * 2,
        dflash_config={key: value for key, value in table.items() if value is not None},
    )
    return raw | changes


def layered(*types: str, window: int = 8, **changes: Any) -> DFlashConfig:
    """A tiny config with these layer types, `s` for sliding and `f` for full."""
    listed = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in types]
    return DFlashConfig.from_dict(
        raw_config(layer_types=listed, num_hidden_layers=len(listed), sliding_window=window, **changes)
    )


def random_drafter(config: DFlashConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> DFlashDrafter:
    """A drafter with every parameter random, the norms around one."""
    generator = torch.Generator().manual_seed(seed)
    drafter = drafters.build(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = 1.0 if "codebook" in name else 0.2
            parameter.copy_(1 + 0.1 * noise if "norm" in name else spread * noise)
    return drafter.to(dtype)


class StandIn(nn.Module):
    """A target reduced to what a drafter borrows. It records the tokens that it embeds."""

    def __init__(self, dtype: torch.dtype = torch.float64, **sizes: int) -> None:
        super().__init__()
        known = {"hidden_size": WIDTH, "vocab_size": VOCAB, "num_hidden_layers": 8} | sizes
        self.config = SimpleNamespace(**known)
        generator = torch.Generator().manual_seed(77)
        shape = (known["vocab_size"], known["hidden_size"])
        self.table = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        self.head = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        self.embedded: list[list[int]] = []

    def embed(self, tokens: Tensor) -> Tensor:
        self.embedded += tokens.tolist()
        return self.table[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T


def features_of(rows: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Target states of three layers, [1, rows, 3 · WIDTH]."""
    return torch.randn(1, rows, 3 * WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bound_drafter(config: DFlashConfig, dtype: torch.dtype = torch.float64) -> tuple[DFlashDrafter, StandIn]:
    drafter, target = random_drafter(config, dtype), StandIn(dtype)
    drafter.bind(target)
    return drafter, target


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Whether the largest difference is within tolerance of the largest value."""
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


def is_visible(config: DFlashConfig, kind: str, query: int, key: int) -> bool:
    """Whether a block row at position `query` sees the row at position `key`."""
    slides = kind == "sliding_attention"
    causal = slides if config.is_causal is None else config.is_causal
    if causal and key > query:
        return False
    return not slides or abs(query - key) < config.sliding_window


def dense_proposal(drafter: DFlashDrafter, target: StandIn, features: Tensor, root: int) -> Tensor:
    """What `propose(root)` must give after observing features [1, T, 3 · D]: logits [block − 1, vocab]."""
    tokens = [root] + [drafter.config.mask_token_id] * (drafter.config.block_size - 1)
    block = torch.stack([target.table[token] for token in tokens]).detach()
    hidden = dense_hidden(drafter.state_dict(), drafter.config, features[0], block)
    return (hidden @ target.head.T)[1:].detach()


def dense_hidden(weights: dict[str, Tensor], config: DFlashConfig, features: Tensor, block: Tensor) -> Tensor:
    """Hidden states [Q, D] of a block [Q, D] that follows rows of features [T, 3 · D]."""
    context = _normed(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    x, count = block, len(features)
    for i, kind in enumerate(config.layer_types):
        layer = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        normed = _normed(x, layer["input_layernorm.weight"])
        seen = [[is_visible(config, kind, count + q, k) for k in range(count + len(block))] for q in range(len(block))]
        before, after = _convolutions(layer, "attention_conv", normed)
        own = before(normed)
        x = x + after(_attended(layer, config, own, torch.cat((context, own)), torch.tensor(seen)))
        normed = _normed(x, layer["post_attention_layernorm.weight"])
        before, after = _convolutions(layer, "mlp_conv", normed)
        gate = before(normed) @ layer["mlp.gate_proj.weight"].T
        up = before(normed) @ layer["mlp.up_proj.weight"].T
        x = x + after((gate / (1 + torch.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T)
    return _normed(x, weights["norm.weight"])


def _convolutions(layer: dict[str, Tensor], name: str, normed: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """The convolutions of a sublayer's input and output, whose taps the normed input gives; neither, if it has none."""
    if f"{name}.base_kernel" not in layer:
        return [lambda rows: rows] * 2
    base, dynamic = layer[f"{name}.base_kernel"], normed @ layer[f"{name}.kernel_projection.weight"].T
    taps, width = base.shape[1:]
    groups = dynamic.shape[1] // (2 * taps)

    def of(which: int) -> Callable[[Tensor], Tensor]:
        def convolve(rows: Tensor) -> Tensor:
            out = torch.zeros_like(rows)
            for t in range(len(rows)):
                for c in range(width):
                    for back in range(min(taps, t + 1)):
                        column = (which * taps + back) * groups + c // (width // groups)
                        out[t, c] += (base[which, back, c] + dynamic[t, column]) * rows[t - back, c]
            return out

        return convolve

    return [of(0), of(1)]


def _attended(layer: dict[str, Tensor], config: DFlashConfig, x: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """Attention head by head. `rows` holds everything with a key, the queries' own rows last."""
    size, first = config.head_dim, len(rows) - len(x)
    heads = []
    for head in range(config.num_attention_heads):
        shared = head * config.num_key_value_heads // config.num_attention_heads
        q = x @ layer["self_attn.q_proj.weight"][head * size : (head + 1) * size].T
        k = rows @ layer["self_attn.k_proj.weight"][shared * size : (shared + 1) * size].T
        v = rows @ layer["self_attn.v_proj.weight"][shared * size : (shared + 1) * size].T
        q = _turned(_normed(q, layer["self_attn.q_norm.weight"]), first, config.rope_theta)
        k = _turned(_normed(k, layer["self_attn.k_norm.weight"]), 0, config.rope_theta)
        scores = (q @ k.T / size**0.5).masked_fill(~seen, float("-inf"))
        heads.append(scores.softmax(dim=-1) @ v)
    return torch.cat(heads, dim=-1) @ layer["self_attn.o_proj.weight"].T


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def _turned(x: Tensor, start: int, theta: float) -> Tensor:
    """Rotary by complex numbers: dimension i and i + half are a plane, row t turns by (start + t) · theta^(-i/half)."""
    half = x.shape[-1] // 2
    rates = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    turns = torch.arange(start, start + len(x), dtype=torch.float64)[:, None] * rates
    planes = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat((planes.real, planes.imag), dim=-1).to(x.dtype)
