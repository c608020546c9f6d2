"""Tiny checkpoints in the published formats, written to a folder. Shapes follow the published tensor tables and
are stated here on their own, so that a model that disagrees with them fails to load."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

PUBLISHED = "model.language_model."
TEXT_ONLY = "model."


def target_config(**changes: Any) -> dict[str, Any]:
    """A flat text config; `layer_types` may be given as letters, l for linear and f for full."""
    config: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": "lllf",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "tie_word_embeddings": False,
        "eos_token_id": 96,
        "max_position_embeddings": 4096,
    } | changes
    names = {"l": "linear_attention", "f": "full_attention"}
    config["layer_types"] = [names.get(kind, kind) for kind in config["layer_types"]]
    config["num_hidden_layers"] = len(config["layer_types"])
    return config


def nested(config: Mapping[str, Any], **root: Any) -> dict[str, Any]:
    """The multimodal config around a text config."""
    name, kind = ("Qwen3_5Moe", "qwen3_5_moe") if "num_experts" in config else ("Qwen3_5", "qwen3_5")
    outer = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "vision_config": {}}
    return outer | {"text_config": dict(config), "tie_word_embeddings": config["tie_word_embeddings"]} | root


def target_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random float32 tensors of a target by parameter name (no prefix), a head if the config unties it."""
    c = config
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads = c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    width, head = c["hidden_size"], c["head_dim"]
    queries, groups = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    mixers: dict[str, dict[str, tuple[int, ...]]] = {
        "linear_attention": {
            "linear_attn.in_proj_qkv.weight": (2 * keys + values, width),
            "linear_attn.in_proj_z.weight": (values, width),
            "linear_attn.in_proj_b.weight": (heads, width),
            "linear_attn.in_proj_a.weight": (heads, width),
            "linear_attn.conv1d.weight": (2 * keys + values, 1, c["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (c["linear_value_head_dim"],),
            "linear_attn.out_proj.weight": (width, values),
        },
        "full_attention": {
            "self_attn.q_proj.weight": (2 * queries, width),
            "self_attn.k_proj.weight": (groups, width),
            "self_attn.v_proj.weight": (groups, width),
            "self_attn.o_proj.weight": (width, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
        },
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c["vocab_size"], width), "norm.weight": (width,)}
    for i, kind in enumerate(c["layer_types"]):
        layer = mixers[kind] | (_sparse_block(c) if "num_experts" in c else _block(width, c["intermediate_size"]))
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], width)
    return _random(shapes, seed)


def mtp_tensors(config: Mapping[str, Any], seed: int = 2) -> dict[str, Tensor]:
    """Random float32 tensors of the MTP module beside a target, by their names in a checkpoint."""
    c = config
    width, head = c["hidden_size"], c["head_dim"]
    queries, groups = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj.weight": (2 * queries, width),
        "self_attn.k_proj.weight": (groups, width),
        "self_attn.v_proj.weight": (groups, width),
        "self_attn.o_proj.weight": (width, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    } | (_sparse_block(c) if "num_experts" in c else _block(width, c["intermediate_size"]))
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
        "mtp.norm.weight": (width,),
    }
    return _random(shapes | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}, seed)


def drafter_config(**changes: Any) -> dict[str, Any]:
    """A drafter's config in the current schema, fitting `target_config`."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 16,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "dflash_config": {"block_size": 4, "mask_token_id": 95, "target_layer_ids": [0, 2]},
    }
    return config | changes


def drafter_config2(**changes: Any) -> dict[str, Any]:
    """A DFlash 2 drafter's config, fitting `target_config`."""
    plain = drafter_config()
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 5}
    changed = {"architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": ["sliding_attention"] * 2}
    return plain | changed | {"dflash_config": plain["dflash_config"] | sizes} | changes


def drafter_tensors(config: Mapping[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random float32 tensors of a drafter."""
    c = config
    width, head = c["hidden_size"], c["head_dim"]
    queries, groups = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (groups, width),
        "self_attn.v_proj.weight": (groups, width),
        "self_attn.o_proj.weight": (width, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    } | _block(width, c["intermediate_size"])
    taps = len(c["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, taps * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    inner = c["dflash_config"]
    if c["architectures"] == ["DFlash2DraftModel"]:
        kernels, codebook = 2 * inner["conv_kernel_size"], (c["vocab_size"], inner["selector_rank"])
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = (2, inner["conv_kernel_size"], width)
            layer[f"{name}.kernel_projection.weight"] = (kernels * (width // inner["conv_group_size"]), width)
        shapes |= {
            "candidate_selector.predecessor_codebook": codebook,
            "candidate_selector.successor_codebook": codebook,
            "candidate_selector.hidden_projection.weight": (inner["selector_rank"], width),
        }
    for i in range(c["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return _random(shapes, seed)


def as_stored(tensors: Mapping[str, Tensor], prefix: str = PUBLISHED) -> dict[str, Tensor]:
    """Parameters under the names of a layout; the head stands at the top level in all of them."""
    return {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in tensors.items()}


def one_by_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, each expert's matrices by themselves."""
    single: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, fused, what = name.rpartition("experts.")
        for e, matrix in enumerate(tensor if fused else ()):
            parts = matrix.chunk(2) if what == "gate_up_proj" else (matrix,)
            for leaf, part in zip(("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",), parts, strict=True):
                single[f"{layer}experts.{e}.{leaf}.weight"] = part.clone()
        if not fused:
            single[name] = tensor
    return single


def extras(width: int = 32) -> dict[str, Tensor]:
    """Tensors of published checkpoints that text does without: 3 visual, 2 mtp, 1 rotary buffer."""
    return {
        "model.visual.patch_embed.proj.weight": torch.ones(4, 3, 2, 2, 2),
        "model.visual.blocks.0.attn.qkv.bias": torch.ones(12),
        "visual.merger.norm.weight": torch.ones(4),
        "mtp.fc.weight": torch.ones(width, 2 * width),
        "mtp.layers.0.input_layernorm.weight": torch.ones(width),
        "model.language_model.rotary_emb.inv_freq": torch.ones(2),
    }


def write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Writes config and tensors, in one file or in the named ones with an index; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files is None:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    write_index(folder, {name: file for file, names in files.items() for name in names})
    return folder


def write_target(
    folder: Path, tensors: Mapping[str, Tensor] | None = None, prefix: str = PUBLISHED, **changes: Any
) -> Path:
    """Writes a target in the published layout, of random tensors unless some are given by parameter name."""
    config = target_config(**changes)
    return write(folder, nested(config), as_stored(target_tensors(config) if tensors is None else tensors, prefix))


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def dealt(names: Sequence[str], *files: str) -> dict[str, list[str]]:
    """Names dealt out to files in turn."""
    return {file: list(names[i :: len(files)]) for i, file in enumerate(files)}


def hub_cache(cache: Path, repository: str, snapshot: Path, commit: str = "a" * 40) -> Path:
    """Moves a folder into a hub cache as the cached snapshot of a repository's main branch; returns its place."""
    root = cache / ("models--" + repository.replace("/", "--"))
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "snapshots").mkdir()
    return snapshot.rename(root / "snapshots" / commit)


def is_island(name: str) -> bool:
    """Whether the parameter is kept in float32 whatever dtype is asked."""
    return name.endswith(("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"))


def assert_holds(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Every parameter equals its tensor after one cast, and there are no others."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == tensors.keys()
    for name, parameter in parameters.items():
        wanted = torch.promote_types(dtype, torch.float32) if is_island(name) else dtype
        assert parameter.dtype == wanted, name
        assert torch.equal(parameter, tensors[name].to(wanted)), name


def _block(width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }


def _sparse_block(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, experts = c["hidden_size"], c["num_experts"]
    inner, shared = c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    return {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate.weight": (experts, width),
        "mlp.experts.gate_up_proj": (experts, 2 * inner, width),
        "mlp.experts.down_proj": (experts, width, inner),
        "mlp.shared_expert.gate_proj.weight": (shared, width),
        "mlp.shared_expert.up_proj.weight": (shared, width),
        "mlp.shared_expert.down_proj.weight": (width, shared),
        "mlp.shared_expert_gate.weight": (1, width),
    }


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Matrices of sigma 0.05, vectors of sigma 0.1, A_log uniform in [-3, 2]."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            tensors[name] = torch.rand(shape, generator=generator) * 5 - 3
        else:
            tensors[name] = x * (0.05 if len(shape) > 1 else 0.1)
    return tensors


def random_pair(folder: Path) -> list[str]:
    """Writes a target and its drafter; the arguments that name them to a tool."""
    target, drafter = target_config(), drafter_config()
    write(folder / "target", nested(target), as_stored(target_tensors(target)))
    write(folder / "drafter", drafter, drafter_tensors(drafter))
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
