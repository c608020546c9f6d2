"""A generation that is closed, or fails at any point, leaves the cache at its last round; the work can be taken up."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
from proposers import Random, Reading, Scattered, check_holds, emitted, small_model
from tiny import memory_of, raising_at, same_bits
from torch import Tensor

import ddtree.loop
from ddtree import DraftTree, Scores, build_tree, generate
from qwen_gdn import HybridCache, decode, greedy

MODEL = small_model()
PROMPT = [5, 30, 11, 2]
TRUTH = list(decode(MODEL, PROMPT, max_new_tokens=60))
TRANSCRIPT = [*PROMPT, *TRUTH]


@pytest.mark.case(24)
@pytest.mark.parametrize("taken", range(6))
def test_a_closed_generation_leaves_the_cache_at_its_last_round_and_can_be_continued(taken: int) -> None:
    cache, proposer = MODEL.new_cache(100), Scattered(TRANSCRIPT)
    rounds = generate(MODEL, proposer, PROMPT, max_new_tokens=40, budget=8, cache=cache)
    tokens = emitted(next(rounds) for _ in range(taken))
    rounds.close()  # type: ignore[attr-defined]
    assert tokens == TRUTH[: len(tokens)]
    check_holds(cache, MODEL, [*PROMPT, *tokens][:-1] if taken else [])
    again = generate(MODEL, proposer, tokens[-1:] or PROMPT, max_new_tokens=40 - len(tokens), budget=8, cache=cache)
    assert tokens + emitted(again) == TRUTH[:40]
    check_holds(cache, MODEL, TRANSCRIPT[: len(PROMPT) + 39])


ERRORS = pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
SITES: dict[str, tuple[Any, str]] = {
    "embedding": (MODEL, "embed"),
    "layer 0": (MODEL.layers[0], "forward"),
    "layer 1": (MODEL.layers[1], "forward"),
    "norm": (MODEL.norm, "forward"),
    "head": (MODEL, "logits"),
    "branch": (HybridCache, "branch"),
    "commit": (HybridCache, "commit"),
    "accept": (ddtree.loop, "follow"),
    "observe": (Reading, "observe"),
    "propose": (Reading, "propose"),
}


@pytest.mark.case(24)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@ERRORS
@pytest.mark.parametrize("site", list(SITES))
def test_a_fault_leaves_the_cache_at_its_last_round(site: str, error: type[BaseException], after: bool) -> None:
    """At an early and at later calls: prefill windows, then rounds. The same cache then ends the work rightly."""
    owner, name = SITES[site]
    for call in (0, 1, 4):
        with raising_at(owner, name, call, error, after=after):
            cache, tokens, failed = _until_it_fails(error)
        assert failed
        _finish(cache, tokens)


@ERRORS
def test_a_fault_in_a_prefill_that_asks_for_no_token_takes_back_its_windows(error: type[BaseException]) -> None:
    prompt, cache = TRANSCRIPT[:20], MODEL.new_cache(30)
    with raising_at(MODEL.norm, "forward", 2, error), pytest.raises(error):
        list(generate(MODEL, Reading(TRANSCRIPT), prompt, max_new_tokens=0, cache=cache, prefill_window=4))
    assert cache.length == 0
    assert list(generate(MODEL, Reading(TRANSCRIPT), prompt, max_new_tokens=0, cache=cache)) == []
    check_holds(cache, MODEL, prompt[:-1])


@ERRORS
@pytest.mark.parametrize("part", ["sampler", "build", "on_stage enters", "on_stage leaves"])
def test_a_fault_of_what_was_passed_in_does_no_more_harm(part: str, error: type[BaseException]) -> None:
    for call in range(0, 99, 1 if part in ("sampler", "build") else 4):
        calls = iter(range(1000))

        def count(call: int = call, calls: Iterator[int] = calls) -> None:
            if next(calls) == call:
                raise error

        cache, tokens, failed = _until_it_fails(error, **_failing(part, count))
        _finish(cache, tokens)
        if not failed:
            break
    assert call > 5


def _failing(part: str, count: Callable[[], None]) -> dict[str, Any]:
    """The argument of `generate` that calls `count` each time it is used."""

    def sampler(logits: Tensor) -> Tensor:
        count()
        return greedy(logits)

    def build(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
        count()
        return build_tree(root, scores, budget)

    @contextmanager
    def on_stage(name: str) -> Iterator[None]:
        if part == "on_stage enters":
            count()
        yield
        if part == "on_stage leaves":
            count()

    return {part.split()[0]: {"sampler": sampler, "build": build, "on_stage": on_stage}[part.split()[0]]}


def _until_it_fails(error: type[BaseException], **arguments: Any) -> tuple[HybridCache, list[int], bool]:
    """Runs one generation into a planted fault, or to its end, and checks that the cache stood still in it."""
    cache, tokens, failed = MODEL.new_cache(64), list[int](), False
    before = memory_of(cache)
    rounds = generate(
        MODEL, Reading(TRANSCRIPT), PROMPT, max_new_tokens=16, budget=4, cache=cache, prefill_window=3, **arguments
    )
    try:
        for done in rounds:
            tokens += done.tokens
            before = memory_of(cache)
    except error:
        failed = True
        assert next(rounds, None) is None
    assert tokens == TRUTH[: len(tokens)]
    assert cache.length == (len(PROMPT) + len(tokens) - 1 if tokens else 0)
    assert same_bits(memory_of(cache), before)
    return cache, tokens, failed


def _finish(cache: HybridCache, tokens: list[int]) -> None:
    """Ends on the same cache, with a proposer that has seen none of it, what a fault broke off."""
    rest = generate(
        MODEL, Random(TRANSCRIPT), tokens[-1:] or PROMPT, max_new_tokens=20 - len(tokens), budget=5, cache=cache
    )
    assert tokens + emitted(rest) == TRUTH[:20]
    check_holds(cache, MODEL, TRANSCRIPT[: len(PROMPT) + 19])


@pytest.mark.case(24)
def test_an_interrupt_at_any_line_leaves_the_cache_whole() -> None:
    """It is at the last round or, where the interrupt hits between commit and yield, at the one under way."""
    cache, counts, lines = _interrupted(at=-1)
    ends = [0, *(len(PROMPT) + count - 1 for count in accumulate(counts))]
    assert ends[-1] == cache.length
    for at in sorted(random.Random(0).sample(range(lines), 60)):
        cache, counts, _ = _interrupted(at)
        assert cache.length in ends[len(counts) : len(counts) + 2]
        check_holds(cache, MODEL, TRANSCRIPT[: cache.length])


def _interrupted(at: int) -> tuple[HybridCache, list[int], int]:
    """Interrupted at the given line of the packages' code run: the cache, tokens of each round, lines run."""
    cache, counts, lines = MODEL.new_cache(64), list[int](), 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal lines
        if not any(part in frame.f_code.co_filename for part in ("/qwen_gdn/", "/ddtree/")):
            return None
        if event == "line":
            lines += 1
            if lines == at + 1:
                raise KeyboardInterrupt
        return trace

    rounds = generate(MODEL, Reading(TRANSCRIPT), PROMPT, max_new_tokens=12, budget=4, cache=cache, prefill_window=3)
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for done in rounds:
            counts.append(len(done.tokens))
    except KeyboardInterrupt:
        assert at >= 0
    finally:
        sys.settrace(previous)
    return cache, counts, lines
