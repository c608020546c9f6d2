"""Text that the target writes itself: what the drafter learns from, and what it is measured on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qwen_gdn import QwenGDN, prefill
from tools.training.data import generator, take
from tools.training.machine import damaged, write_whole
from tools.training.shapes import Shape

_TEMPERATURES = (0.3, 0.9)


class Continued(NamedTuple):
    """tokens: int16 [N, prompt + continuation]. prompt: how many of them were given."""

    tokens: Tensor
    prompt: int


@torch.no_grad()
def continue_prompts(
    model: QwenGDN, prompts: Tensor, temperatures: Tensor, count: int, draws: torch.Generator
) -> Continued:
    """Continues all prompts at once by `count` tokens each.

    Args:
        prompts: int64 [N, P].
        temperatures: [N]; 0 takes the likeliest token.
        draws: a generator on the model's device.
    """
    cache = model.new_cache(prompts.shape[1] + count, batch=len(prompts))
    # one window: a second one would need a mask, and with it a slow attention kernel
    last = prefill(model, prompts, cache, window=prompts.shape[1])
    tokens = [sample(model.logits(last), temperatures, draws)]
    while len(tokens) < count:
        last = model(tokens[-1][:, None], cache).final[:, -1]
        tokens.append(sample(model.logits(last), temperatures, draws))
    return Continued(torch.cat((prompts, torch.stack(tokens, dim=1)), dim=1).short(), prompts.shape[1])


def sample(logits: Tensor, temperatures: Tensor, draws: torch.Generator) -> Tensor:
    """A token of each row at its own temperature: the largest of logit + temperature · Gumbel noise.

    Args:
        logits: [N, vocab].
        temperatures: [N].
    """
    logits = logits.float()
    noise = torch.empty_like(logits).exponential_(generator=draws).clamp_min_(1e-30).log_().neg_()
    return torch.addcmul(logits, noise, temperatures[:, None]).argmax(dim=-1)


def training_batch(model: QwenGDN, stream: Tensor, shape: Shape, index: int, seed: int) -> Continued:
    """Batch `index` of the drafter's training text: prompts cut from the corpus anywhere, every other row greedy."""
    prompt = shape.prompts[index % len(shape.prompts)]
    lanes = max(1, min(shape.lanes, shape.prefill_tokens // prompt))
    draws = generator(stream.device, seed, index)
    starts = torch.randint(len(stream) - prompt, (lanes,), generator=draws, device=stream.device)
    low, high = _TEMPERATURES
    temperatures = low + (high - low) * torch.rand(lanes, generator=draws, device=stream.device)
    temperatures[::2] = 0.0
    return continue_prompts(model, take(stream, starts, prompt), temperatures, shape.continuation, draws)


def evaluation_batch(model: QwenGDN, prompts: Tensor, count: int) -> Continued:
    """Greedy continuations."""
    device = model.device
    prompts = prompts.to(device)
    return continue_prompts(model, prompts, torch.zeros(len(prompts), device=device), count, generator(device, 0))


def write_continued(file: Path, continued: Continued, notes: Mapping[str, object]) -> None:
    """Writes one batch with its prompt length and notes."""
    metadata = {"prompt": str(continued.prompt)} | {name: str(value) for name, value in notes.items()}
    write_whole(file, lambda part: save_file({"tokens": continued.tokens.cpu()}, part, metadata))


def read_continued(file: Path) -> Continued:
    """Reads one batch, on the CPU; ValueError if the file is damaged."""
    with _opened(file) as stored:
        return Continued(stored.get_tensor("tokens"), int(stored.metadata()["prompt"]))


def read_notes(file: Path) -> dict[str, str]:
    """What was noted with a batch; ValueError if the file is damaged."""
    with _opened(file) as stored:
        return dict(stored.metadata())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except (SafetensorError, KeyError, TypeError) as error:
        raise damaged(file, error) from None
