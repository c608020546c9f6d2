"""The two sizes in which the pair is trained, and the published config schemas that describe them.

`BUNDLED` is what the repository ships; `TOY` goes through all the same steps on a CPU in seconds and learns nothing.
"""

from dataclasses import dataclass
from typing import Any

from tools.training.schedule import Schedule


@dataclass(frozen=True)
class Shape:
    """Everything that differs between the sizes.

    Args:
        name: what the size is called.
        layers: the target's mixers, one letter a layer: l is Gated DeltaNet, f is full attention.
        delta_heads: key heads and value heads of a Gated DeltaNet layer.
        heads: query heads and key/value heads of an attention layer, in target and drafter.
        taps: target layers that the drafter reads.
        prompts: prompt lengths of the generated text, cycled through; the drafter's context rows are those of
            the last `window` prompt tokens and of the generated ones.
        lanes, prefill_tokens: the most sequences, and the most prompt tokens in all, that one batch continues.
        evaluated: prompt lengths of the evaluation.
        sample_bytes: text from which the tokenizer is made.
        target, generation, drafter: how long each stage runs by default.
    """

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: str
    heads: tuple[int, int]
    head_dim: int
    delta_heads: tuple[int, int]
    delta_dim: int
    length: int
    batch: int
    drafter_layers: int
    block: int
    window: int
    taps: tuple[int, ...]
    anchors: int
    drafter_batch: int
    prompts: tuple[int, ...]
    continuation: int
    lanes: int
    prefill_tokens: int
    evaluated: tuple[int, ...]
    evaluation_prompts: int
    evaluation_tokens: int
    sample_bytes: int
    target: Schedule
    generation: Schedule
    drafter: Schedule


BUNDLED = Shape(
    name="bundled",
    vocabulary=4096,
    hidden=256,
    intermediate=768,
    layers="lllflllf",
    heads=(4, 2),
    head_dim=64,
    delta_heads=(2, 4),
    delta_dim=64,
    length=512,
    batch=128,
    drafter_layers=3,
    block=8,
    window=256,
    taps=(1, 4, 6),
    anchors=48,
    drafter_batch=64,
    prompts=(192, 64, 1024, 192, 320, 2048, 192, 16, 1024, 1536),
    continuation=128,
    lanes=8192,
    prefill_tokens=2_000_000,
    evaluated=(192, 1000, 2000),
    evaluation_prompts=50,
    evaluation_tokens=64,
    sample_bytes=64_000_000,
    target=Schedule(seconds=230),
    generation=Schedule(seconds=60),
    drafter=Schedule(seconds=300, decay=0.5),
)
TOY = Shape(
    name="toy",
    vocabulary=300,
    hidden=32,
    intermediate=48,
    layers="lflf",
    heads=(2, 1),
    head_dim=16,
    delta_heads=(1, 2),
    delta_dim=16,
    length=32,
    batch=4,
    drafter_layers=2,
    block=4,
    window=12,
    taps=(0, 2),
    anchors=4,
    drafter_batch=4,
    prompts=(8, 20),
    continuation=16,
    lanes=8,
    prefill_tokens=128,
    evaluated=(8, 24),
    evaluation_prompts=3,
    evaluation_tokens=8,
    sample_bytes=1_000_000,
    target=Schedule(steps=6, warmup=2, evaluations=2),
    generation=Schedule(steps=2),
    drafter=Schedule(steps=6, warmup=2, evaluations=2),
)


def target_config(shape: Shape, vocabulary: int, eos: int) -> dict[str, Any]:
    """The target's `config.json`, text part nested as published."""
    kinds = {"l": "linear_attention", "f": "full_attention"}
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": len(shape.layers),
        "layer_types": [kinds[letter] for letter in shape.layers],
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_num_key_heads": shape.delta_heads[0],
        "linear_num_value_heads": shape.delta_heads[1],
        "linear_key_head_dim": shape.delta_dim,
        "linear_value_head_dim": shape.delta_dim,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "language_model_only": True,
        "text_config": text,
        "tie_word_embeddings": True,
    }


def generation_config(eos: int) -> dict[str, Any]:
    """The target's `generation_config.json`."""
    return {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos, "do_sample": False}


def drafter_config(shape: Shape, vocabulary: int, mask: int) -> dict[str, Any]:
    """The drafter's `config.json` in the newer schema: every layer slides, none is causal inside the block."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": {
            "block_size": shape.block,
            "mask_token_id": mask,
            "target_layer_ids": list(shape.taps),
        },
        "is_causal": False,
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.drafter_layers,
        "num_target_layers": len(shape.layers),
        "layer_types": ["sliding_attention"] * shape.drafter_layers,
        "use_sliding_window": True,
        "sliding_window": shape.window,
        "max_window_layers": shape.drafter_layers,
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_theta": 10_000, "rope_type": "default"},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
    }
