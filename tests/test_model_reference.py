"""The float64 model against the independent token-by-token implementation, and its own float32 against that."""

from typing import Any

import pytest
import torch
from reference import AttentionMemory, Run, run
from tiny import gap, memory_of, random_tokens, seeded, tiny_model, tiny_raw
from torch import Tensor

from qwen_gdn import QwenGDN, Topology

LINEAR, FULL = "linear_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "as published": {},
    "one value head a key head, tied": {"linear_num_key_heads": 4, "tie_word_embeddings": True},
    "three value heads a key head, K above V": {
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 5,
        "layer_types": [LINEAR, FULL, LINEAR],
    },
    "K below V, conv of 2, full rotary": {
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 2,
        "partial_rotary_factor": 1.0,
        "layer_types": [FULL, LINEAR, LINEAR],
    },
    "conv of 5, sigmoid output gate": {
        "linear_conv_kernel_dim": 5,
        "output_gate_type": "sigmoid",
        "layer_types": [LINEAR, LINEAR, FULL],
    },
    "conv of 1, one key-value head": {
        "linear_conv_kernel_dim": 1,
        "num_key_value_heads": 1,
        "layer_types": [LINEAR, FULL],
    },
    "odd sizes": {
        "vocab_size": 53,
        "hidden_size": 27,
        "intermediate_size": 41,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 14,
        "partial_rotary_factor": 3 / 7,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 7,
        "linear_value_head_dim": 9,
        "layer_types": [LINEAR, FULL, FULL, LINEAR],
    },
    "no attention": {"layer_types": [LINEAR] * 3},
    "attention alone": {"layer_types": [FULL] * 3},
}


def reference_run(model: QwenGDN, raw: dict[str, Any], tokens: Tensor) -> Run:
    weights = {name: parameter.double().numpy() for name, parameter in model.named_parameters()}
    return run(raw, weights, tokens[0].tolist())


def outputs(model: QwenGDN, tokens: Tensor, *memory: Any) -> list[Tensor]:
    """Logits, final hidden and every layer's output, of a batch of one."""
    hidden = model(tokens, *memory, capture=range(len(model.layers)))
    return [part[0] for part in (model.logits(hidden.final), hidden.final, *hidden.captured)]


def expected_outputs(expected: Run) -> list[Tensor]:
    return [torch.from_numpy(part) for part in (expected.logits, expected.final, *expected.layers)]


@pytest.mark.case(50)
@pytest.mark.parametrize("name", CONFIGS)
def test_float64_model_equals_the_independent_one_without_and_with_cache(name: str) -> None:
    changes = CONFIGS[name]
    model = tiny_model(1, dtype=torch.float64, **changes)
    tokens = random_tokens(seeded(2), 1, 69, vocab=model.config.vocab_size)
    expected = reference_run(model, tiny_raw(**changes), tokens)
    wanted = expected_outputs(expected)
    for ours, theirs in zip(outputs(model, tokens), wanted, strict=True):
        assert gap(ours, theirs) <= 1e-10
    for split in ([69], [1, 68], [2, 3, 64], [65, 1, 1, 2], [7] * 9 + [6]):
        cache = model.new_cache(69)
        parts = [outputs(model, part, cache) for part in tokens.split(split, dim=1)]
        for ours, theirs in zip((torch.cat(part) for part in zip(*parts, strict=True)), wanted, strict=True):
            assert gap(ours, theirs) <= 1e-10, split
        remembered = iter(memory_of(cache))
        for layer in expected.memory:
            for theirs in map(torch.from_numpy, layer):
                assert gap(next(remembered)[0], theirs) <= 1e-10, split
        assert next(remembered, None) is None


@pytest.mark.case(4)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_prompts_shorter_than_the_convolution_decode_like_the_uncached_oracle(count: int) -> None:
    model = tiny_model(3, dtype=torch.float64)
    tokens = random_tokens(seeded(4), 1, count + 5)
    wanted = torch.from_numpy(reference_run(model, tiny_raw(), tokens).logits)
    cache = model.new_cache(count + 5)
    parts = [model.logits(model(tokens[:, :count], cache).final)[0]]
    parts += [model.logits(model(tokens[:, i : i + 1], cache).final)[0] for i in range(count, count + 5)]
    assert gap(torch.cat(parts), wanted) <= 1e-10


@pytest.mark.case(1)
def test_every_split_of_a_warm_cache_equals_one_shot() -> None:
    model = tiny_model(5, dtype=torch.float64)
    draw = seeded(6)
    cases = [(37, s) for s in ([1, 36], [2, 35], [3, 34], [4, 33], [36, 1], [7, 7, 7, 7, 9], [1] * 37)]
    cases += [(T, [64, T - 64] if T > 64 else [T]) for T in (63, 64, 65, 127, 129)]
    for T, split in cases:
        tokens = random_tokens(draw, 1, T)
        whole, parts = model.new_cache(T), model.new_cache(T)
        once = outputs(model, tokens, whole)
        pieces = [outputs(model, part, parts) for part in tokens.split(split, dim=1)]
        for ours, theirs in zip((torch.cat(piece) for piece in zip(*pieces, strict=True)), once, strict=True):
            assert gap(ours, theirs) <= 1e-10, split
        for ours, theirs in zip(memory_of(parts), memory_of(whole), strict=True):
            assert gap(ours, theirs) <= 1e-10, split


def test_float32_model_rounds_the_same_formula() -> None:
    tokens = random_tokens(seeded(7), 1, 100)
    wanted = expected_outputs(reference_run(tiny_model(8, dtype=torch.float64), tiny_raw(), tokens))
    for ours, theirs in zip(outputs(tiny_model(8), tokens), wanted, strict=True):
        assert gap(ours, theirs) <= 2e-5


def test_reference_remembers_every_key_and_only_the_last_columns() -> None:
    model = tiny_model(9, dtype=torch.float64)
    for layer in reference_run(model, tiny_raw(), random_tokens(seeded(10), 1, 6)).memory:
        if isinstance(layer, AttentionMemory):
            assert layer.keys.shape == layer.values.shape == (2, 6, 16)
        else:
            assert layer.state.shape == (4, 8, 8) and layer.columns.shape == (3, 64)


@pytest.mark.case(42)
def test_captured_layers_come_in_the_asked_order_with_repeats_and_the_final_state() -> None:
    """Layer i adds 10^i to the residual stream: id L is the output of layer L, not its input."""
    model = tiny_model(11, dtype=torch.float64)
    tokens = random_tokens(seeded(12), 1, 5)
    embedded = model.embed(tokens)
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda module, args, out, i=i: args[0] + 10.0**i)
    hidden = model(tokens, capture=(6, 1, "final", 4, 1))
    for part, top in zip((0, 1, 3, 4), (6, 1, 4, 1), strict=True):
        added = sum(10.0**i for i in range(top + 1))
        assert gap(hidden.captured[part], embedded + added) <= 1e-12
    assert torch.equal(hidden.captured[2], hidden.final)


@pytest.mark.case(42)
def test_features_of_a_row_are_the_same_from_prefill_chunks_and_tree_verify() -> None:
    model = tiny_model(13, dtype=torch.float64)
    tokens = random_tokens(seeded(14), 1, 12)
    layers = (6, 1, 4)
    once = torch.cat(model(tokens, model.new_cache(12), capture=layers).captured, dim=-1)
    cache = model.new_cache(12)
    chunks = [torch.cat(model(part, cache, capture=layers).captured, dim=-1) for part in tokens[:, :8].split(3, dim=1)]
    # nodes 1, 3, 4 hold the true continuation of the root; 2 and 5 are siblings
    nodes = tokens[:, [8, 9, 9, 10, 11, 11]].clone()
    nodes[:, [2, 5]] = (nodes[:, [2, 5]] + 1) % 97
    tree = torch.cat(model(nodes, cache.branch(Topology([-1, 0, 0, 1, 3, 3])), capture=layers).captured, dim=-1)
    assert gap(torch.cat((*chunks, tree[:, [0, 1, 3, 4]]), dim=1), once) <= 1e-10
