"""Tiny random hybrids, trees and tokens for tests. Everything is seeded, and no global generator is used."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qwen_gdn import HybridCache, KVCache, ModelConfig, QwenGDN, Topology

PATTERN = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
SMALL = ("linear_attention", "full_attention", "linear_attention")
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}  # what makes a tiny model one with experts
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}


def tiny_raw(**changes: Any) -> dict[str, Any]:
    """A config as `config.json` states it: 8 layers, 2 key heads for 4 value heads, W = 4, vocabulary of 97.

    `rope_theta` and `partial_rotary_factor` may be changed by name too; `layer_types` sets the layer count.
    """
    rope = {
        "rope_type": "default",
        "rope_theta": changes.pop("rope_theta", 10000.0),
        "partial_rotary_factor": changes.pop("partial_rotary_factor", 0.25),
    }
    raw: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": list(PATTERN * 2),
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
    } | changes
    return {"num_hidden_layers": len(raw["layer_types"])} | raw


def tiny_model(seed: int = 0, *, dtype: torch.dtype = torch.float32, wild: float = 1.0, **changes: Any) -> QwenGDN:
    """A model with seeded weights; the same seed gives the same weights in every dtype, to rounding.

    Args:
        wild: factor on the spread of the matrices.
        changes: as for `tiny_raw`.
    """
    with torch.device("meta"):
        model = QwenGDN(ModelConfig.from_dict(tiny_raw(**changes)))
    model = model.to_empty(device="cpu").double()
    fill(model, seed, wild)
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def fill(model: nn.Module, seed: int, wild: float = 1.0) -> None:
    """Matrices and taps of σ 0.05 · wild, norms of σ 0.1 around neutral, dt_bias of σ 0.1, A_log in [−3, 2]."""
    draw = seeded(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        if name.endswith("A_log"):
            values = torch.rand(parameter.shape, generator=draw, dtype=torch.float64) * 5 - 3
        elif name.endswith("linear_attn.norm.weight"):
            values = 1 + 0.1 * values
        elif parameter.dim() == 1:
            values = 0.1 * values
        else:
            values = 0.05 * wild * values
        parameter.copy_(values)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randint(draw: torch.Generator, low: int, high: int) -> int:
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=draw))


def random_tokens(draw: torch.Generator, *shape: int, vocab: int = 97) -> Tensor:
    return torch.randint(vocab, shape, generator=draw)


def random_topology(draw: torch.Generator, nodes: int, max_depth: int) -> Topology:
    """A tree of that many nodes with no node below `max_depth`, wide, narrow or in between."""
    reach = randint(draw, 1, nodes)  # how far back a parent may lie: 1 makes a chain
    parents, depths = [-1], [0]
    for i in range(1, nodes):
        near = [j for j in range(max(0, i - reach), i) if depths[j] < max_depth]
        near = near or [j for j in range(i) if depths[j] < max_depth]
        parent = near[randint(draw, 0, len(near) - 1)]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return Topology(parents)


def filled(model: QwenGDN, count: int, *, capacity: int = 64, rollback: int = 0, seed: int = 0) -> HybridCache:
    """A cache of the model with that many random tokens committed."""
    cache = model.new_cache(capacity, rollback=rollback)
    model(random_tokens(seeded(seed), 1, count), cache)
    return cache


def gap(a: Tensor, b: Tensor) -> float:
    """max|a − b| / max|b|, in float64; 0 for empty tensors."""
    assert a.shape == b.shape, (a.shape, b.shape)
    if b.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    difference = float((a - b).abs().max())
    assert difference == difference, "not a number"
    return difference / max(float(b.abs().max()), 1e-30)


def memory_of(cache: HybridCache, row: int | None = None) -> list[Tensor]:
    """Copies of all committed memory, layer by layer: KV rows up to the length, state, columns.

    Args:
        row: only this row of the batch, with a batch dimension of 1.
    """
    rows = slice(None) if row is None else slice(row, row + 1)
    parts: list[Tensor] = []
    for layer in cache:
        if isinstance(layer, KVCache):
            parts += [layer.keys[rows, :, : cache.length], layer.values[rows, :, : cache.length]]
        else:
            parts += [layer.state[rows], layer.columns[rows]]
    return [part.clone() for part in parts]


def worst_gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest `gap` over paired tensors."""
    return max(gap(a, b) for a, b in zip(ours, theirs, strict=True))


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def oracle(name: str) -> ModuleType:
    """An optional package that tests compare with: skips without it, but fails where the variable CI is set."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    module: ModuleType = pytest.importorskip(name)
    return module


@contextmanager
def raising_at(owner: Any, name: str, call: int, error: type[BaseException], *, after: bool = False) -> Iterator[None]:
    """While open, the given call (0 the first) of `owner.name` raises: before it does its work, or after it.

    Whoever took hold of it meanwhile and calls it later gets the original.
    """
    original = getattr(owner, name)
    calls = iter(range(1 << 30))
    closed = False

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if closed:
            return original(*args, **kwargs)
        mine = next(calls)
        if mine == call and not after:
            raise error("injected")
        result = original(*args, **kwargs)
        if mine == call:
            raise error("injected")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, faulty)
        try:
            yield
        finally:
            closed = True
