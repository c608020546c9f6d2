"""Evaluation prompts: pieces of held-out and unseen files that stand as text and have a known number of tokens."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.training.corpus import read_split
from tools.training.machine import read_json, write_json

_TRIES_A_FILE = 12
_ROUNDS = 4


class Prompt(NamedTuple):
    """A piece of a file, and where it comes from."""

    package: str
    path: str
    licence: str
    text: str


def choose_prompts(
    tokenizer: Tokenizer, entries: Sequence[dict[str, str]], *, tokens: int, count: int, seed: int
) -> list[Prompt]:
    """Up to `count` pieces of exactly `tokens` tokens, from as many different files as there are.

    A piece starts at a line, does not end in white space, and encodes into the tokens it was cut from.
    """
    order = random.Random(seed)
    files = list(entries)
    order.shuffle(files)
    found: list[Prompt] = []
    for _ in range(_ROUNDS):
        for entry in files:
            if len(found) == count:
                return found
            text = _piece(tokenizer, entry["text"], tokens, order)
            prompt = Prompt(entry["package"], entry["path"], entry["licence"], text)
            if text and prompt not in found:
                found.append(prompt)
    return found


def _piece(tokenizer: Tokenizer, text: str, tokens: int, order: random.Random) -> str:
    """A random piece, or nothing if none was found."""
    if len(text) < tokens:
        return ""
    lines = [0, *(i + 1 for i, sign in enumerate(text) if sign == "\n")]
    for _ in range(_TRIES_A_FILE):
        start = order.choice(lines)
        # no token of source code is longer than this on average
        ids = tokenizer.encode(text[start : start + 8 * tokens], add_special_tokens=False).ids[:tokens]
        piece = str(tokenizer.decode(ids, skip_special_tokens=False))
        if len(ids) == tokens and piece == piece.rstrip() and _encode(tokenizer, piece) == ids:
            return piece
    return ""


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


class PromptSet(NamedTuple):
    """Which prompts: the split they come from and their number of tokens."""

    split: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.tokens}"


def prompt_sets(lengths: Sequence[int]) -> list[PromptSet]:
    """Both splits at the first length, held-out files at the others."""
    return [PromptSet("unseen", lengths[0]), *(PromptSet("heldout", length) for length in lengths)]


def write_prompts(
    corpus: Path, tokenizer: Tokenizer, out: Path, *, lengths: Sequence[int], count: int, seed: int
) -> dict[str, int]:
    """Writes `SPLIT-TOKENS.json` for every set that has prompts; returns how many each has."""
    for stale in out.glob("*.json"):
        stale.unlink()
    written = {}
    for one in prompt_sets(lengths):
        entries = list(read_split(corpus, one.split))
        prompts = choose_prompts(tokenizer, entries, tokens=one.tokens, count=count, seed=seed)
        if prompts:
            content = {"split": one.split, "tokens": one.tokens, "prompts": [p._asdict() for p in prompts]}
            write_json(out / f"{one.name}.json", content)
            written[one.name] = len(prompts)
    return written


def read_prompts(file: Path, tokenizer: Tokenizer) -> Tensor:
    """The prompts of a file, int64 [count, tokens]."""
    content = read_json(file, delete=file.parent.parent / "tokens")
    return torch.tensor([_encode(tokenizer, prompt["text"]) for prompt in content["prompts"]])
