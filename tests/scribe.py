"""Checkpoints for the command line: a tokenizer that splits characters, and targets whose text is known in advance.

A scribe is a target whose layers do nothing and whose head turns each token into one fixed next token. What it must
write is known without running any of our code, and its script spreads single characters over several tokens.
"""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints as ck
import tokenizers
import torch
from torch import Tensor

VOCAB = 300  # more rows than the tokenizer names
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
LINES = ["def fibonacci(n):", "    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)", "class Stack:"]
PROMPT = "n"
SCRIPT = "é漢🙂\n"  # 10 bytes, no two the same
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


class Full(io.StringIO):
    """A stream on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _trained() -> Any:
    """A byte-level vocabulary of a few merges; ids 0 to 2 are control tokens, `<think>` is an added plain one."""
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=[END, START, STOP],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(LINES, trainer)
    built.add_tokens(["<think>", "</think>"])
    return built


TOKENIZER = _trained()
STOP_ID: int = TOKENIZER.token_to_id(STOP)
CYCLE: list[int] = TOKENIZER.encode(PROMPT + SCRIPT).ids
assert len(CYCLE) == len((PROMPT + SCRIPT).encode()), "a merge joins bytes of the script"


def written_ids(count: int) -> list[int]:
    """The first tokens that a cycling scribe writes after the prompt."""
    return [CYCLE[(i + 1) % len(CYCLE)] for i in range(count)]


def written_text(count: int) -> str:
    """Their text; of a character that is cut at the end one U+FFFD stands there."""
    spelt = (SCRIPT + PROMPT).encode() * (count // len(CYCLE) + 1)
    return spelt[:count].decode(errors="replace")


def write_scribe(folder: Path, *, ending: bool = False, **changes: Any) -> Path:
    """A target that writes the script and then, over and over, the prompt and the script, or a stop token if `ending`.

    Every other token repeats itself.
    """
    config = ck.target_config(vocab_size=VOCAB, layer_types="lf", eos_token_id=STOP_ID, hidden_size=64) | changes
    tensors = ck.target_tensors(config)
    for name, tensor in tensors.items():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")) or name == "norm.weight":
            tensor.zero_()
    embedding = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(3))
    tensors["embed_tokens.weight"] = embedding / embedding.norm(dim=1, keepdim=True)
    tensors["lm_head.weight"] = _head(tensors["embed_tokens.weight"], [*CYCLE, STOP_ID] if ending else CYCLE)
    ck.write(folder, config, ck.as_stored(tensors))
    return write_tokenizer(folder)


def write_random_pair(
    folder: Path, *, drafter_config: Callable[..., dict[str, Any]] = ck.drafter_config, **changes: Any
) -> tuple[Path, Path]:
    """A target and its drafter with random weights."""
    config = ck.target_config(vocab_size=VOCAB, eos_token_id=0) | changes
    wild = {name: 4 * tensor for name, tensor in ck.target_tensors(config).items()}
    target = ck.write(folder / "target", config, ck.as_stored(wild))
    draft = drafter_config(vocab_size=VOCAB)
    return write_tokenizer(target), ck.write(folder / "drafter", draft, ck.drafter_tensors(draft))


def write_tokenizer(folder: Path) -> Path:
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


def _head(embedding: Tensor, script: list[int]) -> Tensor:
    """The head under which each token of the script is followed by the next, cyclically, any other by itself."""
    follower = torch.arange(VOCAB)
    follower[script] = torch.tensor([*script[1:], script[0]])
    head = torch.empty_like(embedding)
    head[follower] = embedding
    return head
