"""Writes the pair as published checkpoints are laid out: names, config schemas, bf16 safetensors."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.drafter import DFlashDrafter
from qwen_gdn import QwenGDN
from tools.training.machine import write_json, write_whole
from tools.training.tokens import SEPARATOR

_PREFIX = "model.language_model."
_MOST_FILE_BYTES = 16 * 2**20
# Published in float32 by the Qwen3.5 releases: a decay rounded to bf16 drifts.
_FLOAT32 = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")


def write_target(
    model: QwenGDN, config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Path, out: Path
) -> None:
    """Writes the target's folder: weights, both configs, tokenizer.

    Raises:
        ValueError: the weights exceed 16 MiB, the most a single file of the repository may have.
    """
    tensors = {_PREFIX + name: _stored(name, tensor) for name, tensor in model.state_dict().items()}
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", generation)
    write_json(out / "tokenizer_config.json", _tokenizer_config(config))
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    _write_tensors(out / "model.safetensors", tensors)


def write_drafter(drafter: DFlashDrafter, config: Mapping[str, Any], out: Path) -> None:
    """Writes the drafter's folder: weights and config; ValueError as for the target."""
    write_json(out / "config.json", config)
    tensors = {name: _stored(name, tensor) for name, tensor in drafter.state_dict().items()}
    _write_tensors(out / "model.safetensors", tensors)


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > _MOST_FILE_BYTES:
        raise ValueError(f"{file.parent.name}: {size} bytes of weights exceed {_MOST_FILE_BYTES}; make it smaller")
    write_whole(file, lambda part: save_file(tensors, part, {"format": "pt"}))


def _stored(name: str, tensor: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16
    return tensor.detach().to("cpu", dtype).contiguous()


def _tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["text_config"]["max_position_embeddings"],
        "bos_token": None,
        "eos_token": SEPARATOR,
        "pad_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
    }
