"""Sessions: every turn writes what a fresh run over the whole conversation writes, and reads only what is new.

After every turn cache and drafter are held against fresh ones that read the conversation once.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from drafter_oracle import random_drafter, raw_config
from proposers import Empty, check_holds, small_model
from speech import Letters
from tiny import gap, raising_at, random_tokens, seeded
from torch import Tensor

import ddtree.loop
import ddtree.recorded_drafter
import qwen_gdn.committed
import qwen_gdn.program_set
from ddtree import DFlashConfig, DFlashDrafter, End, NoDrafts, Round, Step, Stream, generate, make_sampler, stream
from ddtree.boundaries import Boundaries
from ddtree.recorded_drafter import RecordedDrafter
from ddtree.session import Session
from qwen_gdn import HybridCache, Topology, decode
from qwen_gdn.engine import Engine
from weights import load_drafter, load_target, load_tokenizer

MODEL = small_model(3)
SPELLING: Any = Letters()
COUNT = 9


def drafter_of(*kinds: str, window: int = 16, **more: Any) -> DFlashDrafter:
    changes: dict[str, Any] = {
        "hidden_size": 16, "vocab_size": 37, "num_target_layers": 2, "sliding_window": window,
        "layer_types": [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds],
        "num_hidden_layers": len(kinds),
        "dflash_config": {"block_size": 5, "mask_token_id": 36, "target_layer_ids": [0]},
    }  # fmt: skip
    return random_drafter(DFlashConfig.from_dict(raw_config(**changes | more)))


class Fixed(Empty):
    """Reads a layer, proposes nothing, counts its rows, and cannot be put back."""

    layers = (0,)

    def __init__(self) -> None:
        super().__init__([])


DRAFTERS: dict[str, Callable[[], Any]] = {
    "full": lambda: drafter_of("f"),
    "sliding": lambda: drafter_of("s", "f", window=6),
    "none": NoDrafts,
    "not rewindable": Fixed,
}
every_drafter = pytest.mark.parametrize("name", ["sliding", "none", "not rewindable"])


def ids_of(seed: int, count: int) -> list[int]:
    tokens: list[int] = random_tokens(seeded(seed), count, vocab=37).tolist()
    return tokens


@contextmanager
def counted(model: Any = MODEL) -> Iterator[list[int]]:
    """The token counts of forwards that extend a cache, while open."""
    counts: list[int] = []
    original = model.forward

    def forward(tokens: Tensor, memory: Any = None, **how: Any) -> Any:
        if isinstance(memory, HybridCache):
            counts.append(tokens.numel())
        return original(tokens, memory, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", forward)
        yield counts


@lru_cache
def plain(conversation: tuple[int, ...], count: int) -> list[int]:
    """What plain decoding writes after it."""
    return list(decode(MODEL, conversation, max_new_tokens=count))


def taken(turn: Stream) -> list[Round]:
    return [event.round for event in turn if isinstance(event, Step)]


def said(session: Session, conversation: Sequence[int], *, reused: int, count: int = COUNT, **how: Any) -> list[int]:
    """One turn that must write what a fresh run writes after reading `conversation[reused:]` alone; its ids."""
    conversation = list(conversation)
    fresh = type(session._drafter)(session._drafter.config) if isinstance(session._drafter, DFlashDrafter) else None
    if fresh is not None:
        fresh.double().load_state_dict(session._drafter.state_dict())
    rounds = fresh and list(generate(MODEL, fresh, conversation, max_new_tokens=count, budget=4))
    with counted() as counts:
        turn = session.turn(conversation, max_new_tokens=count, budget=4, **how)
        ours = taken(turn)
    assert turn.ids == plain(tuple(conversation), count)
    assert session.reused == reused and counts[0] == len(conversation) - reused, (session.reused, counts[0])
    assert session.ids == [*conversation, *turn.ids]
    if fresh is not None:
        assert ours == rounds, "drafts on reuse are not those of a fresh run"
    check_step(session)
    return turn.ids


def check_step(session: Session) -> None:
    """Cache and drafter hold what fresh ones hold of `ids[:length]`."""
    held = session.ids[: session.length]
    check_holds(session._cache, MODEL, held)
    drafter = session._drafter
    if isinstance(drafter, DFlashDrafter) and held:
        fresh = DFlashDrafter(drafter.config).double()
        fresh.load_state_dict(drafter.state_dict())
        fresh.bind(MODEL)
        captured = MODEL(torch.tensor([held]), None, capture=fresh.layers).captured
        fresh.observe(torch.cat(captured, dim=-1))
        assert drafter.context_length == fresh.context_length == session.length
        assert gap(drafter.propose(3), fresh.propose(3)) < 1e-10
    elif not isinstance(drafter, DFlashDrafter):
        rows = drafter.context_length if isinstance(drafter, NoDrafts) else drafter.seen
        assert rows == session.length


# Going on, going back, going elsewhere.


@pytest.mark.case(21, 23)
@every_drafter
def test_turns_that_go_on_read_only_what_is_new(name: str) -> None:
    """Cases 21 and 23: the last emitted token, which is not in the cache, is the first that the next turn reads."""
    session = Session(MODEL, DRAFTERS[name](), SPELLING)
    conversation = ids_of(0, 7)
    for number in range(4):
        reused = 0 if number == 0 else len(conversation) - 1
        conversation += ids_of(number + 1, number % 4) if number else []
        conversation += said(session, conversation, reused=reused)


@every_drafter
def test_going_back_to_the_end_of_an_earlier_turn_reads_what_follows_it(name: str) -> None:
    session, rewindable = Session(MODEL, DRAFTERS[name](), SPELLING), name != "not rewindable"
    first = [*ids_of(0, 7)]
    first += said(session, first, reused=0)
    second = [*first, *ids_of(1, 4)]
    second += said(session, second, reused=len(first) - 1)
    third = [*second, *ids_of(2, 3)]
    said(session, third, reused=len(second) - 1)
    other = [*first, *ids_of(3, 5)]
    assert len(set(first[-1:] + other)) > 3
    other += said(session, other, reused=len(first) - 1 if rewindable else 0)
    said(session, [*other, 5], reused=len(other) - 1)
    said(session, [*second, 9, 9], reused=len(second) - 1 if rewindable else 0)
    said(session, [*third, 1], reused=len(second) - 1 if rewindable else 0)  # third itself ends no turn


@every_drafter
@pytest.mark.parametrize("at", [1, 15, 19])
def test_an_edit_in_the_middle_is_read_from_the_nearest_boundary(name: str, at: int) -> None:
    """Turns end with 15 (16 less the last) and 24 ids in memory."""
    session = Session(MODEL, DRAFTERS[name](), SPELLING)
    conversation = ids_of(0, 7)
    conversation += said(session, conversation, reused=0)
    conversation += said(session, conversation, reused=15)
    said(session, [*conversation, 8, 1], reused=24)
    edited = [*conversation[:at], (conversation[at] + 1) % 37, *conversation[at + 1 :], 7]
    nearest = max(end for end in (0, 15, 24) if end <= at)
    said(session, edited, reused=0 if name == "not rewindable" else nearest)


@pytest.mark.parametrize("name", ["full", "sliding", "none", "not rewindable"])
def test_an_edit_within_the_rollback_is_cropped_to_where_the_drafter_can_follow(name: str) -> None:
    session = Session(MODEL, DRAFTERS[name](), SPELLING, rollback=12, store_bytes=0)
    conversation = ids_of(0, 20)
    conversation += said(session, conversation, reused=0)
    edited = [*conversation[:-4], (conversation[-4] + 1) % 37, 3, 3]
    reused = len(edited) - 3 if name in ("full", "none") else 0  # the window of 6 rows has moved on
    said(session, edited, reused=reused)


def test_a_crop_never_takes_a_snapshot_along() -> None:
    """Rows that a crop gives up are written over in the drafter's buffer; what was kept of them must be a copy."""
    session = Session(MODEL, drafter_of("f"), SPELLING, rollback=30)
    first = [*ids_of(0, 20)]
    first += said(session, first, reused=0)
    said(session, [*first[:22], 1, 2, 3, 4, 5], reused=22)
    said(session, [*first, 6], reused=len(first) - 1)
    said(session, [*first[:23], 2, 2, 2, 2, 2], reused=23)
    said(session, [*first, 7], reused=len(first) - 1)


@every_drafter
def test_the_same_conversation_again_reads_at_least_its_last_id(name: str) -> None:
    session = Session(MODEL, DRAFTERS[name](), SPELLING, rollback=0)
    conversation = ids_of(0, 7)
    conversation += said(session, conversation, reused=0)
    end = [*conversation, 4]
    said(session, end, reused=15)
    said(session, end, reused=0 if name == "not rewindable" else 15)
    assert said(session, end[:1], reused=0)


def test_a_turn_of_no_tokens_reads_the_conversation_and_leaves_its_last_id() -> None:
    session = Session(MODEL, drafter_of("f"), SPELLING)
    conversation = ids_of(0, 9)
    assert list(session.turn(conversation, max_new_tokens=0)) == [End("", "length")]
    assert (session.ids, session.length) == (conversation, 8)
    check_step(session)
    said(session, conversation, reused=8)


# However a turn ends.


@pytest.mark.case(24)
@every_drafter
@pytest.mark.parametrize("rounds", [0, 3])
def test_a_closed_turn_leaves_what_its_rounds_decided(name: str, rounds: int) -> None:
    session = Session(MODEL, DRAFTERS[name](), SPELLING)
    conversation = ids_of(0, 7)
    conversation += said(session, conversation, reused=0)
    turn = session.turn([*conversation, 3], max_new_tokens=20, budget=4)
    for _ in range(rounds):
        next(turn)
    turn.close()
    assert session.ids == ([*conversation, 3, *turn.ids] if rounds else conversation)
    assert session.length == len(session.ids) - 1
    check_step(session)
    said(session, [*session.ids, 6, 2], reused=session.length)


SITES: dict[str, tuple[Any, str]] = {
    "model": (MODEL.norm, "forward"),
    "commit": (HybridCache, "commit"),
    "accept": (ddtree.loop, "follow"),
    "observe": (DFlashDrafter, "observe"),
    "propose": (DFlashDrafter, "propose"),
    "observe, not rewindable": (Fixed, "observe"),
    "snapshot": (HybridCache, "snapshot"),
    "restore": (HybridCache, "restore"),
    "drafter's restore": (DFlashDrafter, "restore"),
}


@pytest.mark.case(24)
@pytest.mark.parametrize("site", list(SITES))
def test_a_failed_turn_leaves_a_session_that_can_be_used(site: str) -> None:
    """Case 24: in the prompt (of three windows) and in rounds, on a turn that goes on and on one that goes back."""
    start = ids_of(0, 7)
    first = [*start, *decode(MODEL, start, max_new_tokens=COUNT)]
    second = [*first, *decode(MODEL, first, max_new_tokens=COUNT)]
    for before in (first, second):
        conversation = [*before, *ids_of(5, 6)]
        for call, after, error in ((0, False, KeyboardInterrupt), (1, True, KeyboardInterrupt), (3, True, OSError)):
            drafter = Fixed() if "not" in site else drafter_of("s", "f", window=6)
            session = Session(MODEL, drafter, SPELLING)
            for turn in (start, first):
                list(session.turn(turn, max_new_tokens=COUNT))
            assert session.ids == second
            turn = session.turn(conversation, max_new_tokens=14, budget=3, prefill_window=3)
            with raising_at(*SITES[site], call, error, after=after):
                if _fails(turn, error):
                    check_ids(session, (second, before[:-1], [*conversation, *turn.ids]))
                    assert list(turn) == []
            again = [*session.ids, 4]
            usual = session.turn(again, max_new_tokens=5)
            list(usual)
            assert usual.ids == plain(tuple(again), 5)
            check_step(session)


@pytest.mark.case(24)
def test_rows_that_a_drafter_cannot_take_in_fail_no_other_conversation() -> None:
    """They wait in the drafter when the turn fails, and must not be looked at again by turns that give them up."""
    drafter = drafter_of("s", "f", window=6)
    session = Session(MODEL, drafter, SPELLING)

    def refuse(*_: object) -> None:
        raise OSError

    for conversation in (ids_of(0, 7), ids_of(1, 9)):
        hook = drafter.fc.register_forward_hook(refuse)
        with pytest.raises(OSError):
            list(session.turn(conversation, max_new_tokens=5))
        hook.remove()
        for other in (ids_of(2, 7), [*ids_of(2, 7), *ids_of(3, 4)]):
            usual = session.turn(other, max_new_tokens=5)
            list(usual)
            assert usual.ids == plain(tuple(other), 5)
            check_step(session)


@pytest.mark.parametrize("what", [None, 5, {"role": "user", "content": "x"}, iter([1, 2])])
def test_what_is_no_conversation_is_refused_in_one_line(what: Any) -> None:
    session = Session(MODEL, drafter_of("f"), SPELLING)
    with pytest.raises(ValueError, match="conversation: needs token ids, a text, or a list of messages, got"):
        session.turn(what, max_new_tokens=3)


def test_what_is_no_model_drafter_or_tokenizer_is_refused_in_one_line() -> None:
    drafter = drafter_of("f")
    for given, said in (
        ((drafter, MODEL, SPELLING), "a target must have the methods new_cache, embed, logits, got"),
        ((MODEL, None, SPELLING), "a drafter must have the methods bind, reset, observe, propose, got None"),
        ((MODEL, DFlashDrafter, SPELLING), "a class; make one of it"),
        ((MODEL, drafter, None), "a tokenizer must have the methods piece, got None"),
    ):
        with pytest.raises(ValueError, match=said):
            Session(*given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a proposer must have the methods bind, reset, observe, propose, got None"):
        generate(MODEL, None, [1, 2], max_new_tokens=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a tokenizer must have the methods piece, got None"):
        stream(MODEL, drafter, None, [1, 2], max_new_tokens=3)  # type: ignore[arg-type]


def check_ids(session: Session, possible: tuple[list[int], list[int], list[int]]) -> None:
    """After a failure ids are what they were, or what the turn reuses, or what its rounds made of them, or none."""
    assert session.ids in ([], *possible)
    if session.ids:
        check_holds(session._cache, MODEL, session.ids[: session.length])
        assert session.length == len(session.ids) - (session.ids != possible[1])


def _fails(turn: Stream, error: type[BaseException]) -> bool:
    try:
        list(turn)
    except error:
        return True
    return False


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_a_failed_prompt_the_next_turn_still_reuses_what_was_there(error: type[BaseException]) -> None:
    """Also where no earlier turn is kept: the drafter, which is ahead of the cache, is put back."""
    session = Session(MODEL, drafter_of("f"), SPELLING, store_bytes=0)
    first = ids_of(0, 7)
    first += said(session, first, reused=0)
    with raising_at(MODEL.norm, "forward", 1, error), pytest.raises(error):
        list(session.turn([*first, *ids_of(1, 9)], max_new_tokens=3, prefill_window=4))
    assert session.ids == first[:-1] and session.length == 15
    said(session, [*first, *ids_of(1, 9)], reused=15)


def test_ids_that_an_interrupt_kept_from_being_noted_cost_reading_and_nothing_else() -> None:
    """As between a commit and the note of its tokens: the cache then holds more than is known of."""
    session = Session(MODEL, drafter_of("f"), SPELLING)
    conversation = ids_of(0, 7)
    conversation += said(session, conversation, reused=0)
    session._ids = session._ids[:-4]
    assert session.length == 0
    said(session, [*conversation, 3], reused=0)


def test_an_earlier_turn_is_over_when_another_begins() -> None:
    session = Session(MODEL, drafter_of("f"), SPELLING)
    old = session.turn(ids_of(0, 5), max_new_tokens=20)
    unused = session.turn(ids_of(1, 5), max_new_tokens=20)
    next(old)
    said(session, ids_of(2, 5), reused=0)
    before = session.ids
    with pytest.raises(RuntimeError, match="another one of its session has begun"):
        next(old)
    assert list(old) == [] and session.ids == before
    check_step(session)
    assert len(list(unused)) > 1 and session.ids[:5] == ids_of(1, 5)


@pytest.mark.case(23)
def test_a_turn_ended_by_an_id_or_a_string_is_continued_from_its_last_token() -> None:
    session = Session(MODEL, drafter_of("f"), SPELLING)
    conversation = ids_of(0, 7)
    coming = list(decode(MODEL, conversation, max_new_tokens=20))
    turn = session.turn(conversation, max_new_tokens=20, stop_ids=[coming[4]])
    *_, end = turn
    assert isinstance(end, End) and end.finish_reason == "stop"
    conversation += turn.ids
    assert session.ids == conversation and session.length == len(conversation) - 1
    said(session, [*conversation, 2, 5], reused=len(conversation) - 1)
    conversation = session.ids
    turn = session.turn(conversation, max_new_tokens=20, stop=["b", "a", "c"])
    *_, end = turn
    assert isinstance(end, End) and end.finish_reason == "stop_string"
    assert session.length == len(session.ids) - 1 == len(conversation) + len(turn.ids) - 1
    check_step(session)
    said(session, [*session.ids, 1], reused=session.length)


# Memory.


def test_boundaries_keep_to_their_bytes_and_drop_what_was_used_least_recently() -> None:
    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    store = Boundaries(100)
    for name, size in ((1, 40), (2, 30), (3, 30)):
        store.put((name,), Sized(size))  # type: ignore[arg-type]
    assert (len(store), store.nbytes) == (3, 100)
    assert store.longest([1, 5]) is not None and store.used((2,))
    store.put((4,), Sized(20))  # type: ignore[arg-type]
    assert [bool(store.longest([name])) for name in (1, 2, 3, 4)] == [True, True, False, True]
    store.put((5,), Sized(101))  # type: ignore[arg-type]
    assert (len(store), store.nbytes) == (3, 90)
    store.put((1, 2), Sized(10))  # type: ignore[arg-type]
    found = store.longest([1, 2, 3])
    assert found is not None and found[0] == 2
    assert store.longest([7]) is None


@pytest.mark.parametrize("name", ["sliding"])
def test_a_dropped_boundary_costs_reading_and_nothing_else(name: str) -> None:
    probe = Session(MODEL, DRAFTERS[name](), SPELLING)
    first = ids_of(0, 7)
    first += said(probe, first, reused=0)
    said(probe, [*first, 1], reused=15)
    size = probe._store.nbytes
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _kept(probe)}
    assert size == sum(held.values()) > 0
    for most, reused in ((0, 0), (size - 1, 0), (size, 15)):
        session = Session(MODEL, DRAFTERS[name](), SPELLING, store_bytes=most)
        said(session, first[:7], reused=0)
        said(session, ids_of(8, 4), reused=0)
        said(session, [*first, 2], reused=reused)
        assert session._store.nbytes <= most
        assert session.nbytes == session._cache.nbytes + session._store.nbytes


def _kept(session: Session) -> list[Tensor]:
    boundaries = session._store._kept.values()
    rows = [t for b in boundaries for rows in b.context.layers for t in rows]  # type: ignore[attr-defined]
    return [t for b in boundaries for layer in b.cache for t in layer.tensors()] + rows


def test_memory_is_flat_over_many_turns_of_one_length() -> None:
    session = Session(MODEL, drafter_of("s", "f", window=6), SPELLING, capacity=40, store_bytes=60_000)

    def live() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is Tensor]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    seen = []
    for number in range(40):
        list(session.turn(ids_of(number % 5, 12), max_new_tokens=4, budget=4))
        if number in (14, 29, 39):  # all alike in what they leave
            seen.append(live())
        assert session._store.nbytes <= 60_000
    assert seen[0] == seen[1] == seen[2]
    assert len(session._store) > 2


def test_memory_grows_with_the_conversation_up_to_the_context() -> None:
    limited = small_model(3)
    object.__setattr__(limited.config, "max_position_embeddings", 600)
    session = Session(limited, drafter_of("f"), SPELLING)
    assert (session.capacity, session._cache.capacity) == (600, 256)
    conversation = ids_of(0, 250)
    for capacity in (256, 512, 512, 600):
        turn = session.turn(conversation, max_new_tokens=6)
        list(turn)
        assert turn.ids == list(decode(MODEL, conversation, max_new_tokens=6))
        assert session._cache.capacity == capacity, (len(conversation), capacity)
        check_step(session)
        conversation = [*conversation, *turn.ids, *ids_of(1, 120)][:590]
    turn = session.turn(conversation, max_new_tokens=20)
    *_, end = turn
    assert isinstance(end, End) and end.finish_reason == "context"
    assert len(turn.ids) == 10 and session.ids[590:] == turn.ids
    before = session.ids
    with pytest.raises(ValueError, match="conversation of 600 tokens leaves no room in a context of 600; shorten it"):
        session.turn(session.ids, max_new_tokens=1)
    assert session.ids == before
    check_step(session)


def test_a_stated_capacity_is_made_at_once_and_holds() -> None:
    session = Session(MODEL, NoDrafts(), SPELLING, capacity=20)
    turn = session.turn(ids_of(0, 12), max_new_tokens=30)
    *_, end = turn
    assert isinstance(end, End) and end.finish_reason == "context" and len(turn.ids) == 8
    assert session._cache.capacity == 20
    with pytest.raises(ValueError, match="of 21 tokens leaves no room in a context of 20"):
        session.turn([*session.ids, 1], max_new_tokens=1)


# What is refused, and what else there is.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"conversation": []}, "the prompt is empty"),
        ({"conversation": [99]}, "token id 99 is outside the vocabulary"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"budget": -1}, "budget must be"),
        ({"prefill_window": 0}, "prefill_window must be"),
        ({"sampler": 3}, "sampler must be callable"),
        ({"stop": "x"}, "stop must be"),
        ({"stop_ids": 1}, "stop_ids must be"),
    ],
)
def test_a_wrong_argument_is_refused_at_the_call_and_changes_nothing(wrong: dict[str, Any], message: str) -> None:
    session = Session(MODEL, drafter_of("f"), SPELLING)
    said(session, ids_of(0, 5), reused=0)
    before, cache = session.ids, session._cache.length
    with pytest.raises(ValueError, match=message):
        session.turn(**{"conversation": [1, 2], "max_new_tokens": 3} | wrong)
    assert (session.ids, session._cache.length) == (before, cache)
    check_step(session)


def test_a_session_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="vocab_size 41 differs"):
        Session(MODEL, drafter_of("f", vocab_size=41), SPELLING)
    for wrong in ({"capacity": 0}, {"store_bytes": -1}, {"rollback": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Session(MODEL, NoDrafts(), SPELLING, **wrong)


@pytest.mark.parametrize("rollback", [0, 6])
def test_programs_serve_a_session_too(monkeypatch: pytest.MonkeyPatch, rollback: int) -> None:
    for module in (qwen_gdn.program_set, ddtree.recorded_drafter):
        monkeypatch.setattr(module, "compiled", lambda function: function)
    engine = Engine(small_model(3), sizes=(8,))
    drafters = [RecordedDrafter(drafter_of("s", "f", window=6)), drafter_of("s", "f", window=6)]
    sessions = [Session(m, d, SPELLING, rollback=rollback) for m, d in zip((engine, MODEL), drafters, strict=True)]
    first = ids_of(0, 7)
    first += decode(MODEL, first, max_new_tokens=COUNT)
    for conversation in (first[:7], [*first, 1], [*first, 2, 2], [*first[:5], 3], [*first, 1, 4], first[:7]):
        ours, theirs = (taken(s.turn(conversation, max_new_tokens=COUNT, budget=4)) for s in sessions)
        assert ours == theirs
        assert sessions[0].reused == sessions[1].reused


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any, Any]:
    exact = {"dtype": torch.float64}
    return load_target("bundled", **exact), load_drafter("bundled", **exact), load_tokenizer("bundled")


def test_text_conversations_of_the_bundled_pair_accept_on_reuse_as_on_a_fresh_run(
    bundled: tuple[Any, Any, Any],
) -> None:
    target, drafter, tokenizer = bundled
    session = Session(target, drafter, tokenizer)
    fresh = load_drafter("bundled", dtype=torch.float64)
    start = "import os\n\n\nclass Stack:\n    def __init__(self):\n"
    course = [start, "\n    def push(self, item):\n", "\n    def pop(self):\n", start + "        self.items = []\n"]
    for text in course:
        conversation = text if text.startswith(start) else session.ids + tokenizer.encode(text)
        turn = session.turn(conversation, max_new_tokens=20, budget=12)
        ours = taken(turn)
        ids = session.ids[: -len(turn.ids)]
        theirs = list(generate(target, fresh, ids, max_new_tokens=20, budget=12))
        assert ours == theirs
        assert sum(done.accepted for done in ours) > 5
    assert session.reused == 0 or session.reused > 10


def test_messages_are_encoded_by_the_template(tmp_path: Any) -> None:
    import scribe

    target = scribe.write_scribe(tmp_path)
    (target / "chat_template.jinja").write_text(scribe.TEMPLATE)
    model, tokenizer = load_target(target), load_tokenizer(target)
    session = Session(model, NoDrafts(), tokenizer, enable_thinking=False)
    messages = [{"role": "user", "content": "n<|im_end|>"}]
    list(session.turn(messages, max_new_tokens=3))
    assert session.ids[:-3] == tokenizer.encode_chat(messages, enable_thinking=False)
    bare = Session(load_target("bundled"), NoDrafts(), load_tokenizer("bundled"))
    with pytest.raises(ValueError, match="no chat template; give the prompt as plain text"):
        bare.turn(messages, max_new_tokens=3)


# What a session is made of.


@pytest.mark.case(14)
def test_a_snapshot_owns_its_bytes_and_is_restored_in_place() -> None:
    cache = MODEL.new_cache(64)
    MODEL(torch.tensor([ids_of(0, 9)]), cache)
    kept = cache.snapshot()
    assert (kept.length, kept.capacity) == (9, 9)
    assert kept.nbytes == sum(t.numel() * t.element_size() for layer in kept for t in layer.tensors())
    rows = cache[1].tensors()[0].data_ptr()
    MODEL(torch.tensor([ids_of(1, 6)]), cache)
    cache.restore(kept)
    assert cache[1].tensors()[0].data_ptr() == rows and cache.capacity == 64
    check_holds(cache, MODEL, ids_of(0, 9))
    MODEL(torch.tensor([ids_of(2, 6)]), cache)
    check_holds(cache, MODEL, [*ids_of(0, 9), *ids_of(2, 6)])
    check_holds(kept, MODEL, ids_of(0, 9))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: MODEL.new_cache(9, rollback=2), "rollback 2 differs from this cache's 0"),
        (lambda: MODEL.new_cache(9, 2), "batch 2 differs from this cache's 1"),
        (lambda: small_model(dtype=torch.float32).new_cache(9), "layout .* differs"),
        (lambda: _filled(9), "9 tokens exceed this cache's capacity of 8"),
    ],
)
def test_a_restore_that_cannot_be_changes_nothing(other: Callable[[], HybridCache], message: str) -> None:
    cache = MODEL.new_cache(8)
    MODEL(torch.tensor([ids_of(0, 5)]), cache)
    with pytest.raises(ValueError, match=message):
        cache.restore(other())
    check_holds(cache, MODEL, ids_of(0, 5))


def _filled(count: int) -> HybridCache:
    cache = MODEL.new_cache(count)
    MODEL(torch.tensor([ids_of(0, count)]), cache)
    return cache


def test_an_interrupted_restore_leaves_an_empty_cache() -> None:
    cache = _filled(9)
    with raising_at(qwen_gdn.committed, "moved", 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        cache.restore(_filled(8))
    check_holds(cache, MODEL, [])


def test_open_windows_stand_in_the_way_of_snapshots_and_restores() -> None:
    cache, other = _filled(5), _filled(4)
    cache.crop(0)
    cache.branch(Topology([-1]))
    for call in (cache.snapshot, lambda: cache.restore(other), lambda: other.restore(cache)):
        with pytest.raises(RuntimeError, match="while a window is open"):
            call()


@pytest.mark.parametrize("programs", [False, True])
def test_a_drafter_takes_back_rows_only_as_far_as_its_windows_have_not_moved(
    programs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddtree.recorded_drafter, "compiled", lambda function: function)
    drafter: Any = drafter_of("s", "f", window=20)
    drafter = RecordedDrafter(drafter) if programs else drafter
    drafter.bind(MODEL)
    features = torch.randn(1, 60, 16, generator=seeded(4), dtype=torch.float64)

    def proposed(*parts: slice) -> Tensor:
        fresh = drafter_of("s", "f", window=20)
        fresh.bind(MODEL)
        for part in parts:
            fresh.observe(features[:, part])
        return fresh.propose(7)

    drafter.observe(features[:, :19])
    assert drafter.crop_floor == 0
    drafter.crop(11)
    assert gap(drafter.propose(7), proposed(slice(11))) < 1e-10
    early = drafter.snapshot()
    drafter.restore(early)
    drafter.crop(5)
    drafter.observe(features[:, 30:33])
    assert gap(drafter.propose(7), proposed(slice(5), slice(30, 33))) < 1e-10
    drafter.restore(early)
    assert gap(drafter.propose(7), proposed(slice(11))) < 1e-10
    drafter.observe(features[:, 30:50])
    assert gap(drafter.propose(7), proposed(slice(11), slice(30, 50))) < 1e-10
    kept = drafter.snapshot()
    assert drafter.crop_floor == drafter.context_length == 31
    with pytest.raises(ValueError, match="crop to 30, but of its 31 rows only those from 31 on"):
        drafter.crop(30)
    drafter.observe(features[:, 50:])
    drafter.restore(kept)
    assert drafter.context_length == 31
    assert gap(drafter.propose(7), proposed(slice(11), slice(30, 50))) < 1e-10


def test_penalties_count_the_whole_conversation_in_every_turn() -> None:
    session, ids = Session(MODEL, NoDrafts(), SPELLING), [5, 9, 1]
    sampler = make_sampler(repetition_penalty=3.0, frequency_penalty=0.5)
    for number in range(3):
        wanted = list(decode(MODEL, ids, max_new_tokens=COUNT, sampler=sampler))
        found = [token for event in session.turn(ids, max_new_tokens=COUNT, sampler=sampler) if isinstance(event, Step)
                 for token in event.round.tokens]  # fmt: skip
        assert found == wanted, number
        assert number == 0 or session.reused > 0
        ids = [*ids, *wanted, 2 + number]
