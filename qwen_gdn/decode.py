"""Plain decoding: one token a forward, no drafts, no window. It is the oracle of everything faster.

It keeps the law of every decoding loop here: the last token emitted is not in the cache, so at any time, however
a generation ends, `cache.length` is the number of prompt and emitted tokens minus one (plus what the cache held
before).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from .cache import Branch, HybridCache
from .checked import as_integer, checked_callables, checked_count, holds_integers, shown
from .config import ModelConfig
from .history import Context, ContextSampler, History, PlacedSampler
from .lanes import Memory
from .model import Hidden, LayerId
from .topology import Topology

PREFILL_WINDOW = 2048
_ALONE = Topology([-1])


class HybridModel(Protocol):
    """What a decoding loop asks of a model; `QwenGDN` is one, and so is an `Engine` of it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self, tokens: Tensor, memory: HybridCache | Branch | None = None, *, capture: Sequence[LayerId] = ()
    ) -> Hidden: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def new_cache(self, capacity: int, batch: int = 1, rollback: int = 0) -> HybridCache: ...

    def check_memory(self, memory: Memory) -> None: ...


Sampler = Callable[[Tensor], Tensor]
"""Draws one token id for each row of logits: [N, vocab] -> int64 [N], on the CPU or on their device.

One that has to know the tokens before each row is a `ContextSampler`, which is called with them as well.
"""


OnStage = Callable[[str], AbstractContextManager[object]]
"""Makes the context in which a named stage runs: a timer, a progress bar, or nothing."""


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row; of equal ones the lowest id. [N, vocab] -> int64 [N] on the CPU.

    Raises:
        ValueError: the logits are not [N, vocab], or the greatest of a row is not finite.
    """
    check_shape(logits)
    tokens = logits.argmax(dim=-1, keepdim=True)
    peaks = logits.gather(1, tokens)
    # One transfer brings both, so that the host waits once; float64 holds every token id.
    both = torch.cat((tokens.double(), peaks.double()), dim=1).cpu()
    check_peaks(both[:, 1:])
    return both[:, 0].long()


def check_shape(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"sampler: logits must be [N, vocab] with a token at least, got {list(logits.shape)}")


def check_peaks(peaks: Tensor) -> None:
    """Refuses a row whose greatest logit, [N, 1], is not finite."""
    finite = peaks.isfinite()
    if not finite.all():
        row = int((~finite).nonzero()[0, 0])
        where = f"sampler: the greatest logit of row {row} is {float(peaks[row])}"
        raise ValueError(f"{where}, it must be finite: the row holds NaN, +inf or only -inf")


class Draws:
    """A sampler at work in one generation: checked, and told what it reads."""

    def __init__(self, sampler: Sampler, prompt: Tensor) -> None:
        """The prompt, int64 [T] on the CPU, begins with what the cache holds before it."""
        self._sampler = sampler
        self._reads = isinstance(sampler, ContextSampler) and sampler.reads_history
        self._placed = sampler if isinstance(sampler, PlacedSampler) else None
        self._history = History(prompt if self._reads else prompt[:0])

    def __call__(self, logits: Tensor, tokens: Tensor | None = None, topology: Topology = _ALONE) -> list[int]:
        """Token ids for rows of logits: those of a tree or, without one, the row that follows the last token."""
        sampler: Any = self._placed.at(topology.depths.tolist()) if self._placed else self._sampler
        if not self._reads:
            return checked_draws(sampler(logits), *logits.shape)
        root = torch.tensor(self._history.tokens[-1:]) if tokens is None else tokens
        return checked_draws(sampler(logits, Context(self._history, root, topology)), *logits.shape)

    def emitted(self, tokens: Sequence[int]) -> None:
        """Takes up what was emitted, once the cache has."""
        if self._reads:
            self._history.extend(tokens)
        if self._placed:
            self._placed.passed(len(tokens))


def decode(
    model: HybridModel,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampler: Sampler = greedy,
    cache: HybridCache | None = None,
    earlier_ids: Sequence[int] | Tensor = (),
) -> Iterator[int]:
    """Emits up to `max_new_tokens` token ids; a stop id is emitted and ends it.

    Args:
        prompt_ids: ids, a sequence or a tensor [T] or [1, T], of at least one token.
        cache: memory to continue from; the prompt follows what it holds. None makes one of the right size.
        earlier_ids: the tokens that the cache holds already, for samplers that depend on them, to which they are part
            of the prompt. A turn's last emitted token is not among them: it begins the next turn's prompt.

    Raises:
        ValueError: at the call, before any forward: an empty prompt, an id outside the vocabulary, a negative
            count, stop ids that are no integers, a cache of another model or batch, or too small, a sampler that is
            none for this vocabulary, or earlier ids that are needed, or given, in another number than the cache
            holds. Later, from a token: `sampler` returned something else than one id of the vocabulary.
    """
    prompt = checked_prompt(model, prompt_ids, max_new_tokens)
    stops = checked_stops(stop_ids)
    checked_callables(sampler=sampler)
    cache = fitting_cache(model, cache, prompt.shape[1] + max_new_tokens - 1)
    draws = checked_sampler(model, sampler, prompt, cache.length, earlier_ids)
    return _decode(model, prompt, max_new_tokens, stops, draws, cache)


@torch.no_grad()
def _decode(
    model: HybridModel, prompt: Tensor, count: int, stop_ids: frozenset[int], draws: Draws, cache: HybridCache
) -> Iterator[int]:
    if count == 0:
        with cache.transaction():
            prefill(model, prompt[:, :-1], cache)
        return
    step = prompt
    for emitted in range(1, count + 1):
        with cache.transaction():
            logits = model.logits(prefill(model, step, cache))
            token = draws(logits)[0]
        draws.emitted([token])
        yield token
        if emitted == count or token in stop_ids:
            return
        step = torch.tensor([[token]])


def prefill(
    model: HybridModel,
    prompt: Tensor,
    cache: HybridCache,
    *,
    window: int = PREFILL_WINDOW,
    capture: Sequence[LayerId] = (),
    on_window: Callable[[Hidden], object] = lambda hidden: None,
    on_stage: OnStage = nullcontext,
) -> Tensor:
    """Commits a prompt window by window, so that memory is bounded by the window and not by the prompt.

    Args:
        prompt: int64 [B, T]; T = 0 does nothing.
        on_window: called with what each forward returned, captured layers included, once it is committed.
        on_stage: entered as `on_stage("prefill")` around each forward.

    Returns:
        the last token's final hidden state, [B, D] (empty for T = 0).

    Raises:
        ValueError: the window holds no token, the prompt is no tensor [B, T], or a forward refuses its tokens.
    """
    if not isinstance(prompt, Tensor) or prompt.dim() != 2:
        got = list(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(f"prefill: the prompt must be an int64 tensor [B, T], got {got}")
    checked_count("prefill: window", window, 1)
    last = prompt.new_empty(prompt.shape[0], 0)
    for part in prompt.split(window, dim=1) if prompt.shape[1] else ():
        with on_stage("prefill"):
            hidden = model(part, cache, capture=capture)
        on_window(hidden)
        last = hidden.final[:, -1]
    return last


def checked_prompt(model: HybridModel, prompt_ids: Sequence[int] | Tensor, max_new_tokens: int) -> Tensor:
    """The prompt as int64 [1, T] on the CPU; ValueError names what is wrong with it or with the count."""
    checked_count("max_new_tokens", max_new_tokens, 0)
    prompt = _checked_ids("prompt_ids", prompt_ids, model.config.vocab_size)
    if prompt.numel() == 0:
        raise ValueError("the prompt is empty: give at least one token id")
    return prompt


def _checked_ids(what: str, given: Sequence[int] | Tensor, vocab: int) -> Tensor:
    """Token ids, maybe none, as int64 [1, T] on the CPU."""
    try:
        ids = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{what} must be integers of shape [T] or [1, T], got {shown(given)}") from None
    if ids.numel() == 0:
        return torch.empty(1, 0, dtype=torch.int64)
    if not holds_integers(ids) or not (ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] == 1)):
        raise ValueError(f"{what} must be integers of shape [T] or [1, T], got {ids.dtype} {list(ids.shape)}")
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if wrong.numel():
        raise ValueError(f"{what}: token id {int(wrong[0])} is outside the vocabulary [0, {vocab})")
    return ids.reshape(1, -1).long()


def checked_sampler(
    model: HybridModel, sampler: Sampler, prompt: Tensor, held: int, earlier_ids: Sequence[int] | Tensor
) -> Draws:
    """The sampler, told of the prompt [1, T] and of the `held` tokens that the cache holds before it.

    Raises:
        ValueError: it cannot draw from this vocabulary, or has to know tokens that were not given, or the earlier ids
            are not as many as the cache holds.
    """
    vocab = model.config.vocab_size
    earlier = _checked_ids("earlier_ids", earlier_ids, vocab)
    reads = False
    if isinstance(sampler, ContextSampler):
        sampler.check(vocab)
        reads = sampler.reads_history
    given = earlier.shape[1]
    if given != held and (given or reads):
        why = "this sampler depends on them" if not given else "leave them out or give all"
        raise ValueError(f"earlier_ids must be the {held} tokens that the cache holds, got {given}: {why}")
    return Draws(sampler, torch.cat((earlier, prompt), dim=1)[0])


def checked_stops(stop_ids: Collection[int]) -> frozenset[int]:
    """The stop ids; ValueError if they are no collection of integers."""
    try:
        stops = [as_integer(i) for i in stop_ids]
    except TypeError:
        stops = [None]
    if None in stops:
        raise ValueError(f"stop_ids must be a collection of token ids, got {shown(stop_ids)}")
    return frozenset(i for i in stops if i is not None)


def checked_draws(drawn: Tensor, count: int, vocab: int) -> list[int]:
    """A sampler's draws for `count` rows as ids; the host waits once at most.

    Raises:
        ValueError: they are not one integer of the vocabulary for each row.
    """
    needs = f"sampler: draws must be token ids, an integer in [0, {vocab}) for each row, as a tensor of shape [{count}]"
    if not isinstance(drawn, Tensor):
        raise ValueError(f"{needs}, got {type(drawn).__name__} {shown(drawn)}")
    if drawn.shape != (count,) or not holds_integers(drawn):
        raise ValueError(f"{needs}, got {drawn.dtype} {list(drawn.shape)}")
    tokens: list[int] = drawn.tolist()
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise ValueError(f"{needs}, got {next(t for t in tokens if not 0 <= t < vocab)}")
    return tokens


def fitting_cache(model: HybridModel, cache: HybridCache | None, count: int) -> HybridCache:
    """The given cache if it takes `count` more tokens now, or a new one of that size."""
    if cache is None:
        return model.new_cache(max(count, 1))
    model.check_memory(cache)
    if not isinstance(cache, HybridCache):
        got = type(cache).__name__
        raise ValueError(f"decoding takes a cache, not a window on one, nor a ragged one, got {got}")
    cache.check_agreement()
    if cache.batch != 1:
        raise ValueError(f"decoding takes a cache of batch 1, got batch {cache.batch}")
    cache.refuse_open_window("decoding")
    if cache.length + count > cache.capacity:
        raise ValueError(
            f"cache: {cache.length} committed tokens and {count} to come exceed its capacity of {cache.capacity}; "
            f"make it with new_cache({cache.length + count}) or more"
        )
    return cache
