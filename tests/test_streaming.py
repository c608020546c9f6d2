"""The events of a stream, and where a cache is when a stream is closed, interrupted or fails at any point."""

from typing import Any

import pytest
from proposers import Reading, Right, Scattered, check_holds, small_model
from speech import Letters
from tiny import raising_at

import ddtree.loop
import ddtree.streaming
from ddtree import End, NoDrafts, Round, Step, generate, stream
from qwen_gdn import HybridCache, decode
from weights.stops import StoppedText

MODEL = small_model(3)
PROMPT = [5, 30, 11, 2]
TRUTH = list(decode(MODEL, PROMPT, max_new_tokens=48))
TRANSCRIPT = [*PROMPT, *TRUTH]
SPELLING = Letters()


@pytest.mark.case(33)
def test_a_stream_is_the_rounds_of_the_loop_with_their_text_and_an_end() -> None:
    rounds = list(generate(MODEL, Scattered(TRANSCRIPT), PROMPT, max_new_tokens=30, budget=8))
    events = list(stream(MODEL, Scattered(TRANSCRIPT), SPELLING, PROMPT, max_new_tokens=30, budget=8))
    assert [event.round for event in events[:-1]] == rounds
    assert events[-1] == End(events[-1].text, "length")
    assert "".join(event.text for event in events) == SPELLING.text(TRUTH[:30])


def test_text_comes_with_the_round_that_settles_it() -> None:
    ids: list[int] = []
    for event in stream(MODEL, Right(TRANSCRIPT, length=3), SPELLING, PROMPT, max_new_tokens=40, budget=3):
        if isinstance(event, Step):
            before = SPELLING.settled(ids)
            ids += event.round.tokens
            assert event == Step(SPELLING.settled(ids)[len(before) :], Round(*event.round))


@pytest.mark.parametrize("taken", [0, 1, 2, 4])
@pytest.mark.parametrize("how", ["close", "leave", "drop"])
def test_a_stream_ended_early_leaves_the_cache_at_its_last_round(how: str, taken: int) -> None:
    cache = MODEL.new_cache(100)
    events = stream(
        MODEL, Scattered(TRANSCRIPT), SPELLING, PROMPT, max_new_tokens=40, stop=["zz"], budget=6, cache=cache
    )
    with events if how == "leave" else _nothing():
        given = [next(events).text for _ in range(taken)]
    tokens = events.ids
    if how == "close":
        rest = events.close()
        assert "".join(given) + rest == SPELLING.text(tokens) == events.text
        assert events.close() == ""
    if how != "drop":
        assert list(events) == [], "a closed stream has no events"
    del events
    assert tokens == TRUTH[: len(tokens)]
    check_holds(cache, MODEL, [*PROMPT, *tokens][:-1] if taken else [])
    again = stream(MODEL, NoDrafts(), SPELLING, tokens[-1:] or PROMPT, max_new_tokens=30 - len(tokens), cache=cache)
    assert [*tokens, *(t for e in again if isinstance(e, Step) for t in e.round.tokens)] == TRUTH[:30]


class _nothing:  # noqa: N801 (it stands where a context manager does)
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


SITES: dict[str, tuple[Any, str]] = {
    "model": (MODEL.norm, "forward"),
    "commit": (HybridCache, "commit"),
    "accept": (ddtree.loop, "follow"),
    "observe": (Reading, "observe"),
    "propose": (Reading, "propose"),
    "text": (StoppedText, "push"),
    "stop strings": (ddtree.streaming._Completes, "__call__"),
}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("site", list(SITES))
def test_a_fault_or_an_interrupt_ends_a_stream_at_its_last_round(site: str, error: type[BaseException]) -> None:
    """Case 24. What the failed round would have said is said by nobody; the ids and their text agree."""
    for call, after in ((0, False), (1, True), (4, False)):
        cache = MODEL.new_cache(100)
        events = stream(
            MODEL, Reading(TRANSCRIPT), SPELLING, PROMPT, max_new_tokens=30, stop=["zz"], budget=5, cache=cache
        )
        with raising_at(*SITES[site], call, error, after=after), pytest.raises(error, match="injected"):
            list(events)
        assert list(events) == []
        tokens = events.ids
        assert tokens == TRUTH[: len(tokens)]
        events.close()
        assert events.text == SPELLING.text(tokens)
        check_holds(cache, MODEL, [*PROMPT, *tokens][:-1] if tokens else [])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop": "END"}, "stop must be a collection of texts"),
        ({"stop_ids": 3}, "stop_ids must be a collection"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an int of at least 0"),
        ({"budget": -1}, "budget must be an int of at least 0"),
        ({"cache": 3}, "cache"),
    ],
)
def test_a_wrong_argument_is_refused_at_the_call(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(MODEL, NoDrafts(), SPELLING, PROMPT, **{"max_new_tokens": 3} | wrong)


def test_a_dropped_stream_keeps_nothing_alive() -> None:
    import gc
    import weakref

    cache = MODEL.new_cache(60)
    events = stream(MODEL, NoDrafts(), SPELLING, PROMPT, max_new_tokens=30, cache=cache)
    next(events)
    seen = weakref.ref(cache)
    del cache, events
    gc.collect()
    assert seen() is None
