"""Tiny random models saved by transformers, read by our loader, compared tensor by tensor in float32."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tiny import fill, gap, oracle, randint, random_tokens, seeded
from torch import Tensor

from qwen_gdn import QwenGDN
from weights import load_target

transformers = oracle("transformers")

LINEAR, FULL = "linear_attention", "full_attention"
LONGEST = 130
# widths: hidden, intermediate, vocab; attention: heads, kv heads, head_dim; delta: key heads, value heads, K, V, W;
# experts: their number, how many a token goes to, their width and the shared one's
CONFIGS: dict[str, dict[str, Any]] = {
    "ratio 2, as published": {
        "widths": (32, 48, 97),
        "attention": (4, 2, 16),
        "delta": (2, 4, 8, 8, 4),
        "layer_types": ([LINEAR] * 3 + [FULL]) * 2,
    },
    "ratio 1, tied": {
        "widths": (24, 40, 61),
        "attention": (2, 2, 8),
        "delta": (3, 3, 8, 8, 4),
        "layer_types": [LINEAR, LINEAR, FULL],
        "tie_word_embeddings": True,
    },
    "ratio 3, K below V": {
        "widths": (40, 56, 71),
        "attention": (6, 2, 12),
        "delta": (2, 6, 6, 10, 3),
        "layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR],
        "factor": 0.5,
    },
    "K above V, conv of 2": {
        "widths": (32, 32, 50),
        "attention": (4, 1, 16),
        "delta": (1, 2, 16, 4, 2),
        "layer_types": [LINEAR, FULL] * 2,
        "factor": 1.0,
    },
    "odd sizes, conv of 5": {
        "widths": (37, 53, 83),
        "attention": (3, 3, 10),
        "delta": (3, 9, 7, 5, 5),
        "layer_types": [LINEAR, LINEAR, FULL, FULL, LINEAR],
        "factor": 0.4,
        "theta": 1e7,
        "tie_word_embeddings": True,
    },
    "delta layers around one attention": {
        "widths": (48, 64, 101),
        "attention": (5, 5, 8),
        "delta": (4, 4, 8, 12, 4),
        "layer_types": [LINEAR] * 4 + [FULL] + [LINEAR] * 3,
        "eps": 1e-5,
    },
    "2 of 8 experts, one by one": {
        "widths": (32, None, 97),
        "attention": (4, 2, 16),
        "delta": (2, 4, 8, 8, 4),
        "layer_types": [LINEAR, LINEAR, FULL],
        "experts": (8, 2, 24, 40),
    },
    "every expert, half as wide as the model, fused": {
        "widths": (32, None, 61),
        "attention": (2, 2, 8),
        "delta": (3, 3, 8, 8, 4),
        "layer_types": [FULL, LINEAR],
        "experts": (4, 4, 16, 16),
        "fused": True,
    },
    "1 of 16 experts, as wide as the model, one by one": {
        "widths": (24, None, 71),
        "attention": (2, 1, 8),
        "delta": (1, 2, 8, 4, 2),
        "layer_types": [LINEAR, FULL],
        "experts": (16, 1, 24, 8),
        "tie_word_embeddings": True,
    },
    "3 of 5 experts of odd width, fused": {
        "widths": (20, None, 50),
        "attention": (2, 1, 8),
        "delta": (1, 2, 8, 4, 3),
        "layer_types": [LINEAR, FULL],
        "experts": (5, 3, 7, 9),
        "fused": True,
    },
}


class Pair(NamedTuple):
    """The same weights on both sides."""

    theirs: Any
    ours: QwenGDN


class Outputs(NamedTuple):
    """logits [T, vocab] and every layer's output [T, D] in the residual stream."""

    logits: Tensor
    layers: tuple[Tensor, ...]


def text_config(spec: dict[str, Any]) -> Any:
    hidden, intermediate, vocab = spec["widths"]
    heads, kv_heads, head_dim = spec["attention"]
    key_heads, value_heads, K, V, W = spec["delta"]
    rope = {"rope_theta": spec.get("theta", 1e4), "partial_rotary_factor": spec.get("factor", 0.25)}
    if "experts" in spec:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        kind, inner = transformers.Qwen3_5MoeTextConfig, dict(zip(names, spec["experts"], strict=True))
    else:
        kind, inner = transformers.Qwen3_5TextConfig, {"intermediate_size": intermediate}
    return kind(
        **inner,
        hidden_size=hidden,
        vocab_size=vocab,
        num_hidden_layers=len(spec["layer_types"]),
        layer_types=spec["layer_types"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        linear_conv_kernel_dim=W,
        rms_norm_eps=spec.get("eps", 1e-6),
        tie_word_embeddings=spec.get("tie_word_embeddings", False),
        rope_parameters={"rope_type": "default", **rope},
    )


def make_pair(name: str, folder: Path, wild: float) -> Pair:
    """Their model, saved as published, or with its experts fused where the spec says so."""
    spec = CONFIGS[name]
    kind = transformers.Qwen3_5MoeForCausalLM if "experts" in spec else transformers.Qwen3_5ForCausalLM
    with torch.random.fork_rng():
        theirs = kind(text_config(spec)).eval()
    if "experts" in spec:
        theirs.set_experts_implementation("eager")  # one expert after another, not by the grouped product that we use
    fill(theirs, seed=len(name), wild=wild)
    theirs.save_pretrained(folder, **({"save_original_format": False} if spec.get("fused") else {}))
    stored = {tensor for file in folder.glob("*.safetensors") for tensor in load_file(file)}
    assert any(".experts.0." in name for name in stored) == ("experts" in spec and not spec.get("fused"))
    return Pair(theirs, load_target(folder, dtype=torch.float32))


@torch.no_grad()
def run_theirs(model: Any, tokens: Tensor, cuts: list[int] | None = None) -> Outputs:
    """One shot, or through transformers' cache in pieces of the given lengths."""
    seen: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.register_forward_hook(lambda module, args, out, i=i: seen[i].append(out))
        for i, layer in enumerate(model.model.layers)
    ]
    cache = transformers.DynamicCache(config=model.config) if cuts else None
    logits = [
        model(part, past_key_values=cache, use_cache=cuts is not None).logits[0]
        for part in tokens.split(cuts or [tokens.shape[1]], dim=1)
    ]
    for hook in hooks:
        hook.remove()
    return Outputs(torch.cat(logits), tuple(torch.cat(rows, dim=1)[0] for rows in seen))


def run_ours(model: QwenGDN, tokens: Tensor, cuts: list[int] | None = None) -> Outputs:
    """One shot, or through the cache in pieces of the given lengths."""
    every = range(len(model.layers))
    cache = model.new_cache(tokens.shape[1]) if cuts else None
    parts = [model(part, cache, capture=every) for part in tokens.split(cuts or [tokens.shape[1]], dim=1)]
    logits = torch.cat([model.logits(part.final)[0] for part in parts])
    return Outputs(logits, tuple(torch.cat([part.captured[i] for part in parts], dim=1)[0] for i in every))


def widest(a: Outputs, b: Outputs) -> float:
    return max(gap(x, y) for x, y in zip((a.logits, *a.layers), (b.logits, *b.layers), strict=True))


def random_cuts(draw: torch.Generator, total: int) -> list[int]:
    cuts: list[int] = []
    while sum(cuts) < total:
        cuts.append(min(randint(draw, 1, randint(draw, 1, total)), total - sum(cuts)))
    return cuts


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {name: make_pair(name, tmp_path_factory.mktemp("pair"), wild=1.0) for name in CONFIGS}


@pytest.mark.case(50)
@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=CONFIGS)
def test_all_outputs_agree_for_lengths_1_to_130_one_shot_and_split(index: int, pairs: dict[str, Pair]) -> None:
    """Lengths near the chunk's edges for every model; all the others are dealt out among the models."""
    pair, draw = list(pairs.values())[index], seeded(index)
    edges = {1, 2, 3, 4, 5, 63, 64, 65, 128, 129, 130}
    for T in sorted(edges | set(range(1 + index, LONGEST + 1, len(pairs)))):
        tokens = random_tokens(draw, 1, T, vocab=pair.ours.config.vocab_size)
        wanted = run_theirs(pair.theirs, tokens)
        assert widest(run_ours(pair.ours, tokens), wanted) <= 2e-5, T
        cuts = random_cuts(draw, T)
        assert widest(run_ours(pair.ours, tokens, cuts), wanted) <= 2e-5, cuts


@pytest.mark.parametrize("name", CONFIGS)
def test_any_split_through_the_cache_agrees(name: str, pairs: dict[str, Pair]) -> None:
    pair, draw = pairs[name], seeded(9)
    tokens = random_tokens(draw, 1, LONGEST, vocab=pair.ours.config.vocab_size)
    wanted = run_theirs(pair.theirs, tokens)
    fixed = [[1] * LONGEST, [64, 66], [65, 65], [1, 129], [129, 1], [3, 63, 64], [128, 2]]
    for cuts in fixed + [random_cuts(draw, LONGEST) for _ in range(5)]:
        assert widest(run_ours(pair.ours, tokens, cuts), wanted) <= 2e-5, cuts


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=CONFIGS)
def test_wild_weights_agree_as_well_as_transformers_with_itself(index: int, tmp_path: Path) -> None:
    """Matrices of σ 0.2 or 0.5 amplify rounding; transformers' one-shot against its cached run says how much."""
    pair, draw = make_pair(list(CONFIGS)[index], tmp_path, wild=(4.0, 10.0)[index % 2]), seeded(10)
    length = 72  # beyond one chunk
    tokens = random_tokens(draw, 1, length, vocab=pair.ours.config.vocab_size)
    wanted = run_theirs(pair.theirs, tokens)
    own = [run_theirs(pair.theirs, tokens, cuts) for cuts in ([1] * length, [65] + [1] * 7)]
    for cuts in (None, [1] * length, random_cuts(draw, length)):
        ours = run_ours(pair.ours, tokens, cuts)
        assert gap(ours.logits, wanted.logits) <= max(2e-5, 4 * max(gap(o.logits, wanted.logits) for o in own)), cuts
        assert widest(ours, wanted) <= max(2e-5, 4 * max(widest(o, wanted) for o in own)), cuts


def test_loaded_parameters_are_the_saved_ones(pairs: dict[str, Pair]) -> None:
    for pair in pairs.values():
        saved = pair.theirs.state_dict()
        for name, parameter in pair.ours.named_parameters():
            stored = saved[name if name == "lm_head.weight" else "model." + name]
            assert torch.equal(parameter, stored), name
