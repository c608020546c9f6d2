"""Figures of one generation: measured from outside, as numbers and as text. It prints nothing."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch

from .loop import Round
from .streaming import Event, Step

STAGES = ("prefill", "draft", "build", "verify", "sample", "commit")
T = TypeVar("T")
_BAR = 40  # width of the longest bar of a histogram


@dataclass(frozen=True)
class Figures:
    """Figures of one generation. Times are seconds spent generating, not in loading, compiling or writing the text.

    Attributes:
        preparing_seconds: what compiling and recording programs took, counted nowhere else.
        first_token_seconds: from the start to the prefill's own token, None if there was none.
        tokens_per_second: of the tokens after that one, None if there were none.
        accepted_lengths: accepted drafts + 1 -> number of rounds, for all rounds but the prefill's.
        mean_accepted_length: their mean, None without such a round.
        stage_seconds: time by stage; `other` is what no stage covers. They add up to `seconds`.
    """

    prompt_tokens: int
    tokens: int
    seconds: float
    preparing_seconds: float
    first_token_seconds: float | None
    tokens_per_second: float | None
    prefill_forwards: int
    verify_forwards: int
    drafted: int
    accepted_lengths: Mapping[int, int]
    mean_accepted_length: float | None
    stage_seconds: Mapping[str, float]

    @property
    def target_forwards(self) -> int:
        return self.prefill_forwards + self.verify_forwards


class Meter:
    """Times one generation: pass `stage` to it as `on_stage`, and what it yields through `rounds` or `events`.

    On CUDA the device is synchronised at both ends of each stage, or its work would be counted where it is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Begins anew, with nothing measured."""
        self._rounds: list[Round] = []
        self._seconds = 0.0
        self._preparing = 0.0
        self._first: float | None = None
        self._stages = dict.fromkeys(STAGES, 0.0)
        self._entered = Counter[str]()

    @property
    def seconds(self) -> float:
        """Time spent generating up to what was yielded last."""
        return self._seconds

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Time by stage, those that did not run yet included."""
        return dict(self._stages)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage; one that raises counts its time, and is not counted as done."""
        start, prepared = self._now(), self._preparing
        try:
            yield
            self._entered[name] += 1
        finally:
            spent = self._now() - start - (self._preparing - prepared)
            self._stages[name] = self._stages.get(name, 0.0) + spent

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Takes the time of its body out of the stage and the generation that it interrupts."""
        start = self._now()
        try:
            yield
        finally:
            self._preparing += self._now() - start

    def rounds(self, generated: Iterator[Round]) -> Iterator[Round]:
        """The same rounds; the consumer's own time is not counted."""
        for done in self._timed(generated):
            self._count(done)
            yield done

    def events(self, generated: Iterator[Event]) -> Iterator[Event]:
        """The same events; the consumer's own time is not counted."""
        for event in self._timed(generated):
            if isinstance(event, Step):
                self._count(event.round)
            yield event

    def _timed(self, generated: Iterator[T]) -> Iterator[T]:
        while True:
            start, prepared = perf_counter(), self._preparing
            try:
                done = next(generated, None)
            finally:
                self._seconds += perf_counter() - start - (self._preparing - prepared)
            if done is None:
                return
            yield done

    def _count(self, done: Round) -> None:
        if self._first is None:
            self._first = self._seconds
        self._rounds.append(done)

    def figures(self, prompt_tokens: int) -> Figures:
        """What was measured up to now."""
        lengths = Counter(done.accepted + 1 for done in self._rounds[1:])
        tokens = sum(len(done.tokens) for done in self._rounds)
        later = 0.0 if self._first is None else self._seconds - self._first
        return Figures(
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            seconds=self._seconds,
            preparing_seconds=self._preparing,
            first_token_seconds=self._first,
            tokens_per_second=(tokens - 1) / later if tokens > 1 else None,
            prefill_forwards=self._entered["prefill"],
            verify_forwards=self._entered["verify"],
            drafted=sum(done.drafted for done in self._rounds),
            accepted_lengths=dict(sorted(lengths.items())),
            mean_accepted_length=sum(n * count for n, count in lengths.items()) / lengths.total() if lengths else None,
            stage_seconds=self._stages | {"other": max(0.0, self._seconds - sum(self._stages.values()))},
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


def lines(figures: Figures) -> Iterator[str]:
    """Figures for people, line by line, in printable ASCII."""
    yield f"{figures.tokens} tokens after a prompt of {figures.prompt_tokens}"
    if figures.preparing_seconds:
        yield f"programs prepared in {figures.preparing_seconds:.1f} s, not counted below"
    if figures.first_token_seconds is not None:
        yield f"first token after {figures.first_token_seconds:.3f} s"
    if figures.tokens_per_second is not None:
        later = figures.seconds - (figures.first_token_seconds or 0.0)
        yield f"{figures.tokens_per_second:.1f} tokens/s ({figures.tokens - 1} more tokens in {later:.3f} s)"
    kinds = f"{figures.prefill_forwards} prefill, {figures.verify_forwards} verify"
    yield f"{figures.target_forwards} target forwards ({kinds})"
    if figures.mean_accepted_length is not None:
        yield f"mean accepted length {figures.mean_accepted_length:.2f}, by rounds:"
        yield from _histogram(figures.accepted_lengths)
    yield "time by stage:"
    for name, seconds in figures.stage_seconds.items():
        yield f"  {name:8} {seconds:8.3f} s {_share(seconds, figures.seconds):4.0%}"


def _histogram(counts: Mapping[int, int]) -> Iterator[str]:
    most = max(counts.values())
    for value in range(1, max(counts) + 1):
        count = counts.get(value, 0)
        yield f"  {value:3} {count:6} {'#' * -(-count * _BAR // most)}".rstrip()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
