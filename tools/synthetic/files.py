"""Writes a checkpoint's folder: config, a tokenizer of bytes, weight files of a most size and their index."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from tqdm import tqdm

from tools.synthetic.shrink import is_drafter
from tools.synthetic.tensors import Recipe

BYTES = 256


def write(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Recipe], most: int) -> int:
    """Writes everything, or nothing if it fails, and returns the bytes of all tensors.

    In memory there are one weight file and one tensor in float32 at a time.

    Args:
        folder: is made, or is there and empty.
        most: bytes of a weight file, unless one tensor is larger.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as unfinished:
        total = _write(Path(unfinished) / "made", raw, tensors, most)
        (Path(unfinished) / "made").replace(folder)
    return total


def _write(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Recipe], most: int) -> int:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    if not is_drafter(raw) and raw.get("text_config", raw)["vocab_size"] >= BYTES:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    shards, total = list(_shards(tensors, most)), sum(recipe.nbytes for recipe in tensors.values())
    placed = {}
    with tqdm(total=total, desc="writing", unit="B", unit_scale=True, disable=None) as bar:
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            save_file({name: tensors[name].make() for name in names}, folder / file, metadata={"format": "pt"})
            placed |= dict.fromkeys(names, file)
            bar.update(sum(tensors[name].nbytes for name in names))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _shards(tensors: Mapping[str, Recipe], most: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, recipe in tensors.items():
        if names and size + recipe.nbytes > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += recipe.nbytes
    yield names


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level vocabulary without merges: every byte of a text is a token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner
