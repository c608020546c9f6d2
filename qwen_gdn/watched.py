"""A model that looks at every number it computes, and raises where the first one is not finite.

It is for finding out where NaN and infinity come from; nothing of it runs unless it is asked for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .checked import NonFiniteError, shown
from .committed import Window
from .face import ModelFace
from .model import CacheOrBranch, Hidden, LayerId, QwenGDN


class Watched(ModelFace):
    """A model whose forwards raise `NonFiniteError` where numbers stop being finite; it has the model's own face.

    Before a forward it looks at the memory that this reads, then at what every module puts out, then at logits and
    embeddings. The error names stage and place, as `verify of a tree of 9 nodes: model: layers.3.mlp.down_proj`. A
    forward that raises leaves its cache as it was. Every look waits for the device, so it is slow.

    Raises:
        ValueError: it is no `QwenGDN`; programs of an `Engine` cannot be watched.
    """

    def __init__(self, model: QwenGDN) -> None:
        if not isinstance(model, QwenGDN):
            raise ValueError(f"watched: takes a QwenGDN, got {shown(model)}")
        super().__init__(model)

    def __call__(
        self,
        tokens: Tensor,
        memory: CacheOrBranch | None = None,
        *,
        mask: Tensor | None = None,
        capture: Sequence[LayerId] = (),
    ) -> Hidden:
        """What `QwenGDN.forward` does. It raises what that raises, and `NonFiniteError`."""
        with _during(_stage(tokens, memory)):
            if memory is not None:
                self.check_memory(memory)
                (memory.cache if isinstance(memory, Window) else memory).check()
            with watch(self.model, "model"):
                hidden: Hidden = self.model(tokens, memory, mask=mask, capture=capture)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        _check(logits, "model: the head's logits")
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = super().embed(tokens)
        _check(embedded, "model: embeddings")
        return embedded


@contextmanager
def watch(module: nn.Module, what: str) -> Iterator[None]:
    """While open, any part of the module that puts out a number that is not finite raises `NonFiniteError`.

    The error names the part, after `what`. Parts whose input is finite and whose own arithmetic is at fault come
    first, since inner ones are looked at before those around them.
    """

    def hook(place: str) -> Any:
        return lambda part, inputs, output: _check(output, f"{what}: {place or 'its output'}")

    hooks = [part.register_forward_hook(hook(name)) for name, part in module.named_modules()]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@contextmanager
def _during(stage: str) -> Iterator[None]:
    """Puts the stage before what went wrong in it."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{stage}: {error}") from None


def _stage(tokens: Tensor, memory: CacheOrBranch | None) -> str:
    count = tokens.shape[-1] if isinstance(tokens, Tensor) and tokens.dim() else 0
    if isinstance(memory, Window):
        return f"verify of a tree of {count} nodes"
    return "step of one token" if count == 1 else f"prefill of {count} tokens"


def _check(output: Any, place: str) -> None:
    """Raises NonFiniteError if a tensor, or one of a tuple of them, holds a number that is not finite."""
    if isinstance(output, tuple):
        for part in output:
            _check(part, place)
    elif isinstance(output, Tensor) and output.is_floating_point():
        broken = ~output.isfinite()
        if bool(broken.any()):
            first = broken.nonzero()[0].tolist()
            value, count = float(output[tuple(first)]), int(broken.sum())
            raise NonFiniteError(f"{place}: {value} at {first}, and {count - 1} more numbers that are not finite")
