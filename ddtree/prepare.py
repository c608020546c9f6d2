"""From options to token ids: what the checkpoints' small files say, and whether the run fits them.

No weights are read here, so a run that cannot be is refused at once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from qwen_gdn.config import ModelConfig
from qwen_gdn.decode import checked_prompt
from qwen_gdn.model import QwenGDN
from qwen_gdn.mtp import MTPConfig
from weights import CheckpointError, Tokenizer, load_target, load_tokenizer, stop_ids
from weights.configs import read_config
from weights.files import CONFIG_FILES, resolve

from . import drafters
from .arguments import MTP, UsageError, default
from .options import Options


class Job(NamedTuple):
    """What the checkpoints' small files make of the options; `notes` are for the user.

    prompt_ids: none for a run that reads its prompts later.
    """

    tokenizer: Tokenizer
    prompt_ids: list[int]
    stop_ids: tuple[int, ...]
    notes: tuple[str, ...]


def prepare(options: Options) -> Job:
    """Reads configs and tokenizer, and checks prompt and pairing against them.

    Raises:
        UsageError: options and checkpoints do not fit together.
        CheckpointError: a checkpoint is absent or damaged, or its tokenizer names tokens that it lacks.
        ValueError: the template refuses the conversation.
    """
    folder = resolve(options.target, "target", CONFIG_FILES)
    with torch.device("meta"):
        target = QwenGDN(read_config(ModelConfig, folder))
    options.check_vocabulary(target.config.vocab_size)
    if options.drafter == MTP:
        _check_module(folder)
    elif options.drafter is not None:
        _check_pairing(options.drafter, target)
    tokenizer = load_tokenizer(options.target)
    _check_vocabulary(tokenizer, target.config.vocab_size, folder)
    if options.chat and not tokenizer.has_chat_template:
        raise UsageError(f"--chat: {options.target} ships no chat template; leave it out to continue plain text")
    prompt_ids = [] if options.interactive else _prompt_ids(tokenizer, options, options.prompt or "")
    if prompt_ids:
        checked_prompt(target, prompt_ids, options.max_new_tokens)
        _check_context(len(prompt_ids), options.max_new_tokens, target.config.max_position_embeddings)
    return Job(
        tokenizer, prompt_ids, stop_ids(options.target, target.config), tuple(_notes(tokenizer, options, target.config))
    )


def _check_pairing(source: str, target: QwenGDN) -> None:
    folder = resolve(source, "drafter", CONFIG_FILES)
    with torch.device("meta"):
        drafter = drafters.build(read_config(drafters, folder))
    try:
        drafter.bind(target)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_module(folder: Path) -> None:
    """The target's config has been read before, so what can be wrong with it now is its MTP module."""
    try:
        read_config(MTPConfig, folder)
    except CheckpointError as error:
        raise UsageError(f"--drafter {MTP}: {error}") from None


def _check_vocabulary(tokenizer: Tokenizer, rows: int, folder: Path) -> None:
    """A vocabulary may name fewer ids than the model has rows, which are often padded, but none beyond."""
    if tokenizer.last_id >= rows:
        raise CheckpointError(
            f"{folder}: the tokenizer names token id {tokenizer.last_id}, which is outside the vocabulary [0, {rows}) "
            "of config.json; use the tokenizer that belongs to the weights"
        )


def _prompt_ids(tokenizer: Tokenizer, options: Options, prompt: str) -> list[int]:
    if options.chat:
        ids = tokenizer.encode_chat(_messages(options), enable_thinking=None if options.thinking else False)
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise UsageError("the prompt is empty: it holds no token of this vocabulary")
    return ids


def _messages(options: Options) -> list[dict[str, str]]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": options.prompt or ""}]


def _check_context(prompt: int, new: int, limit: int | None) -> None:
    if limit is not None and prompt + new > limit:
        raise UsageError(
            f"a prompt of {prompt} tokens and --max-new-tokens {new} are {prompt + new} tokens, but the context of "
            f"this checkpoint is {limit}; shorten one of them"
        )


def _notes(tokenizer: Tokenizer, options: Options, config: ModelConfig) -> Iterator[str]:
    if options.eight_bits != default(load_target, "eight_bits") and config.quantization is None:
        yield f"this checkpoint states no weights in eight bits, so --eight-bits {options.eight_bits} changes nothing"
    if options.chat and not options.thinking:
        asked, not_asked = (tokenizer.render_chat(_messages(options), enable_thinking=on) for on in (True, False))
        if asked == not_asked:
            yield "this chat template has no switch for --no-thinking, so it changes nothing"
