"""One generation in one mode, timed from outside by `next()`. All modes ignore stop ids, so that every mode writes the
same number of tokens."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal, NamedTuple

import torch

from ddtree import AutoBudget, Proposer, Round, build_chain, build_spine, build_tree, generate
from qwen_gdn import QwenGDN, decode, greedy
from qwen_gdn.decode import HybridModel, OnStage, Sampler
from qwen_gdn.engine import Engine

_BUILDS = {"chain": build_chain, "tree": build_tree, "spine": build_spine}


class Pair(NamedTuple):
    """A target and what drafts for it.

    target: the model, or an engine that runs it.
    auto: what learns how much drafting pays; None learns it anew for each text.
    clock: seconds, by which texts are timed.
    """

    target: HybridModel
    drafter: Proposer
    auto: AutoBudget | None = None
    clock: Callable[[], float] = time.perf_counter

    @property
    def model(self) -> QwenGDN:
        """The target itself."""
        return self.target.model if isinstance(self.target, Engine) else self.target


class Mode(NamedTuple):
    """How to decode: `plain` is the model's own loop without drafts; a budget counts drafted nodes.

    `tree` is best-first; `spine` is a tree that holds the chain of its budget; `auto` is `tree` with an `AutoBudget`.
    """

    kind: Literal["plain", "chain", "tree", "spine", "auto"]
    budget: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.budget}" if self.budget else self.kind

    @property
    def word(self) -> str:
        """As a command line has it: `plain`, `tree:16`."""
        return str(self).replace(" ", ":")

    @classmethod
    def read(cls, word: str) -> "Mode":
        """The mode of a word; ValueError if there is none."""
        kind, *budget = word.split(":")
        if word in ("plain", "auto"):
            return cls(word)
        if kind in _BUILDS and len(budget) == 1 and budget[0].isascii() and budget[0].isdigit() and int(budget[0]):
            return cls(kind, int(budget[0]))
        known = ["plain", *(f"{kind}:N" for kind in _BUILDS), "auto"]
        raise ValueError(f"there is no mode {word!r}; there are {', '.join(known)}")


PLAIN = Mode("plain")


class Sample(NamedTuple):
    """One generation: what it wrote, and seconds until its first token and from there to its end."""

    tokens: list[int]
    rounds: list[Round]
    prefill: float
    rest: float

    @property
    def drafting(self) -> list[Round]:
        """The rounds that count: all but the first, which is the prefill's own token."""
        return self.rounds[1:]


STAGES = ("draft", "build", "verify", "sample", "commit")


class StageClock:
    """An `on_stage` that adds up the seconds of every stage of rounds that count, the device waited for."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._device = device
        self._first = True

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        # The first round is the prefill and the sample right after it.
        self._first = stage == "prefill" or (self._first and stage == "sample")
        start = time.perf_counter()
        yield
        settle(self._device)
        if not self._first:
            self.seconds[stage] += time.perf_counter() - start


def run(
    pair: Pair,
    mode: Mode,
    prompt: Sequence[int],
    count: int,
    on_stage: OnStage = nullcontext,
    sampler: Sampler = greedy,
) -> Sample:
    """Writes `count` tokens after a prompt; `on_stage` reaches the speculative modes only."""
    rounds: list[Round] = []
    start = pair.clock()
    stream = _stream(pair, mode, prompt, count, on_stage, sampler)
    rounds.append(next(stream))
    settle(pair.target.device)
    middle = pair.clock()
    rounds += stream
    settle(pair.target.device)
    end = pair.clock()
    return Sample([token for done in rounds for token in done.tokens], rounds, middle - start, end - middle)


def _stream(
    pair: Pair, mode: Mode, prompt: Sequence[int], count: int, on_stage: OnStage, sampler: Sampler
) -> Iterator[Round]:
    if mode.kind == "plain":
        written = decode(pair.target, prompt, max_new_tokens=count, sampler=sampler)
        return (Round((token,), 0, 0) for token in written)
    return generate(
        pair.target,
        pair.drafter,
        prompt,
        max_new_tokens=count,
        budget=(pair.auto or AutoBudget()) if mode.kind == "auto" else mode.budget,
        build=_BUILDS.get(mode.kind, build_tree),
        sampler=sampler,
        on_stage=on_stage,
    )


def accepted_length(rounds: Sequence[Round]) -> float:
    """Mean of accepted + 1 over rounds; 1 for none."""
    return sum(done.accepted + 1 for done in rounds) / len(rounds) if rounds else 1.0


def settle(device: torch.device) -> None:
    """Waits until the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
