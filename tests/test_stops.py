"""Where a text ends: stop ids, stop strings, counts and contexts, alike whatever rounds the tokens came in."""

import itertools
import random

import pytest
from proposers import PROPOSERS, Right, check_holds, small_model
from speech import Letters, last_token, stopped
from vocabularies import chunks

from ddtree import NoDrafts, generate
from ddtree.streaming import End, Step, stream
from qwen_gdn import decode
from weights.stops import StoppedText, checked_stop_strings

MODEL = small_model(3)
PROMPT = [5, 30, 11, 2]
TRUTH = list(decode(MODEL, PROMPT, max_new_tokens=48))
SPELLING = Letters()
STOPS = [("ab",), ("ba", "c"), ("cab", "a b"), ("b\n", "bcbc"), ("\ufffd",), ("abb", "bbc", "bb"), ("zé",)]


def all_of(events: stream) -> tuple[list[int], str, str]:
    """Ids, text and finish reason."""
    ids, text, reason = [], "", ""
    for event in events:
        text += event.text
        if isinstance(event, End):
            reason = event.finish_reason
        else:
            ids += event.round.tokens
    assert (ids, text) == (events.ids, events.text)
    return ids, text, reason


# The text alone.


@pytest.mark.parametrize("stop", [(), *STOPS])
def test_text_ends_before_the_stop_string_that_is_complete_first_however_it_is_cut(stop: tuple[str, ...]) -> None:
    draw = random.Random(2)
    for _ in range(150):
        ids = draw.choices(range(12), weights=(4, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1), k=draw.randrange(14))
        wanted = stopped(SPELLING.text(ids), stop)
        stream = StoppedText(SPELLING, stop)
        given = "".join([*map(stream.push, chunks(draw, ids)), stream.finish()])
        assert (given, stream.found) == wanted


def test_no_part_of_a_stop_string_is_given_out_and_no_more_than_that_is_held_back() -> None:
    stop = ("abc", "cc")
    for letters in itertools.product("abc", repeat=6):
        stream, given = StoppedText(SPELLING, stop), ""
        for n, letter in enumerate(letters, 1):
            given += stream.push([ord(letter) - ord("a")])
            text, found = stopped("".join(letters[:n]), stop)
            if found:
                assert given == text
                break
            open_ = max((k for k in range(n + 1) if any(s.startswith(text[n - k :]) for s in stop)), default=0)
            assert given == text[: n - open_]


@pytest.mark.parametrize("stop", ["END", [""], [3], b"x", None, ["a", ""]])
def test_stop_strings_that_are_none_are_refused(stop: object) -> None:
    with pytest.raises(ValueError, match="stop must be a collection of texts of at least one character, got "):
        checked_stop_strings(stop)  # type: ignore[arg-type]


# A generation.


@pytest.mark.case(23)
@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("name", ["right", "wrong", "scattered", "moody"])
def test_ids_end_with_the_token_that_completes_a_stop_string_whatever_is_drafted(
    name: str, stop: tuple[str, ...]
) -> None:
    """Cases 23, 31, 32: ids, text, reason and cache for a stop that lies anywhere in a round or spans several."""
    for start in (0, 9):
        prompt, coming = [*PROMPT, *TRUTH[:start]], TRUTH[start:]
        last = last_token(SPELLING, coming[:32], stop)
        cache = MODEL.new_cache(100)
        proposer = PROPOSERS[name]([*PROMPT, *TRUTH], 1)
        got = all_of(stream(MODEL, proposer, SPELLING, prompt, max_new_tokens=32, stop=stop, budget=9, cache=cache))
        wanted, _ = stopped(SPELLING.text(coming[: last or 32]), stop)
        assert got == (coming[: last or 32], wanted, "stop_string" if last or stop == ("\ufffd",) else "length")
        check_holds(cache, MODEL, [*prompt, *got[0]][:-1])


@pytest.mark.case(32)
@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("stop_id", [None, *sorted({TRUTH[2], TRUTH[12]})])
def test_the_ids_for_n_are_the_first_n_of_those_for_more(stop: tuple[str, ...], stop_id: int | None) -> None:
    """Case 32: stop ids and strings are looked for before the count, and nothing comes after them."""
    ids = [] if stop_id is None else [stop_id]

    def up_to(count: int) -> tuple[list[int], str, str]:
        proposer = Right([*PROMPT, *TRUTH], length=5)
        asked = {"max_new_tokens": count, "stop": stop, "stop_ids": ids, "budget": 6}
        return all_of(stream(MODEL, proposer, SPELLING, PROMPT, **asked))

    ends = [n for n in (last_token(SPELLING, TRUTH[:30], stop), stop_id and TRUTH.index(stop_id) + 1) if n]
    for count in (*range(10), 12, 13, 14, 30):
        end = min(ends, default=99)
        tokens, _, reason = up_to(count)
        assert tokens == TRUTH[: min(count, end)]
        if stop_id and count >= end == TRUTH.index(stop_id) + 1:
            assert reason == "stop"
        elif stop != ("\ufffd",):
            assert reason == ("stop_string" if count >= end else "length")


def test_text_that_was_settled_before_the_end_is_the_same_for_more_tokens() -> None:
    stop, texts = ("abab", "\n\n"), []
    for count in range(1, 20):
        events = list(stream(MODEL, NoDrafts(), SPELLING, PROMPT, max_new_tokens=count, stop=stop))
        texts.append("".join(event.text for event in events if isinstance(event, Step)))
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))


def test_a_stop_token_is_not_read_as_text() -> None:
    """Its letters complete no stop string: the reason is the id."""
    events = stream(MODEL, NoDrafts(), SPELLING, PROMPT, max_new_tokens=9, stop_ids=[TRUTH[0]], stop=["a", "b", "c"])
    assert all_of(events) == (TRUTH[:1], "", "stop")


def test_a_token_is_put_to_until_once_and_before_it_is_committed() -> None:
    asked: list[tuple[int, int]] = []
    cache = MODEL.new_cache(100)

    def until(token: int) -> bool:
        asked.append((token, cache.length))
        return len(asked) == 17

    proposer = Right([*PROMPT, *TRUTH], length=5)
    rounds = list(generate(MODEL, proposer, PROMPT, max_new_tokens=40, budget=5, cache=cache, until=until))
    assert [token for token, _ in asked] == TRUTH[:17] == [token for done in rounds for token in done.tokens]
    assert [length for _, length in asked] == [4] + [4] * 6 + [10] * 6 + [16] * 4
    assert rounds[-1].accepted == 5 and len(rounds[-1].tokens) == 4
    check_holds(cache, MODEL, [*PROMPT, *TRUTH[:16]])


def test_a_failing_until_takes_its_round_back() -> None:
    cache, calls = MODEL.new_cache(100), itertools.count()

    def until(token: int) -> bool:
        if next(calls) == 8:
            raise OSError("injected")
        return False

    rounds = generate(MODEL, Right([*PROMPT, *TRUTH], length=5), PROMPT, max_new_tokens=40, cache=cache, until=until)
    with pytest.raises(OSError, match="injected"):
        list(rounds)
    check_holds(cache, MODEL, [*PROMPT, *TRUTH[:6]])


# The context.


@pytest.mark.parametrize("room", [1, 2, 7, 20])
def test_a_full_context_is_a_reason_of_its_own(room: int) -> None:
    limited = small_model(3)
    object.__setattr__(limited.config, "max_position_embeddings", len(PROMPT) + room)
    proposer = Right([*PROMPT, *TRUTH])
    ids, text, reason = all_of(stream(limited, proposer, SPELLING, PROMPT, max_new_tokens=21))
    assert (ids, reason) == (TRUTH[:room], "context")
    assert text == SPELLING.text(ids)
    ids, _, reason = all_of(stream(limited, proposer, SPELLING, PROMPT, max_new_tokens=room))
    assert (ids, reason) == (TRUTH[:room], "length")
    cache = MODEL.new_cache(len(PROMPT) + room - 1)
    ids, _, reason = all_of(stream(MODEL, proposer, SPELLING, PROMPT, max_new_tokens=21, cache=cache))
    assert (ids, reason) == (TRUTH[:room], "context")


def test_a_prompt_that_leaves_no_room_is_refused_before_any_forward() -> None:
    cache = MODEL.new_cache(6)
    list(stream(MODEL, NoDrafts(), SPELLING, PROMPT, max_new_tokens=1, cache=cache))
    for prompt in ([1, 2, 3], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=rf"of {len(prompt)} tokens after 4 in the cache leaves no room .* of 7"):
            stream(MODEL, NoDrafts(), SPELLING, prompt, max_new_tokens=1, cache=cache)
    assert list(stream(MODEL, NoDrafts(), SPELLING, [1, 2, 3], max_new_tokens=0, cache=cache)) == [End("", "length")]
    assert cache.length == 6
