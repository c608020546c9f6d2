"""All or nothing: whatever raises, wherever, the cache stands at its last committed length and goes on exactly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import memory_of, raising_at, random_tokens, same_bits, seeded, tiny_model
from torch import Tensor

import qwen_gdn.lanes
import qwen_gdn.layer_cache
from qwen_gdn import HybridCache, QwenGDN, Topology, decode

LAYERS = 8
TREE = Topology([-1, 0, 0, 2, 2, 4])
PATH = [0, 2, 4]
ERRORS = [RuntimeError, KeyboardInterrupt, MemoryError]
DRAW = seeded(0)
PREFIX, NODES, MORE = (random_tokens(DRAW, 1, n) for n in (9, 6, 4))


class Scene:
    """A cache in one of its states; `act` does what is going to fail, and what should have happened."""

    def __init__(self, rollback: int) -> None:
        self.model = tiny_model(1)
        self.cache = self.model.new_cache(64, rollback=rollback)

    def prefill(self) -> None:
        self.model(PREFIX, self.cache)

    def more(self) -> None:
        self.model(MORE, self.cache)

    def verify(self) -> None:
        self.model(NODES, self.cache.branch(TREE))

    def commit(self) -> None:
        self.cache.commit(PATH)


ROLLBACK = pytest.mark.parametrize("rollback", [0, 1], ids=["no rollback", "rollback"])


@contextmanager
def faulty_layer(model: QwenGDN, layer: int, where: str, error: type[BaseException]) -> Iterator[None]:
    """The mixer or the feed-forward of one layer raises: before its work, or with its memory already written."""
    part = model.layers[layer]
    mixer = getattr(part, part.mixer_name)
    owner = part.mlp if where == "feed-forward" else mixer
    with raising_at(owner, "forward", 0, error, after=where == "after the mixer"):
        yield


@pytest.mark.case(24)
@ROLLBACK
@pytest.mark.parametrize("where", ["before the mixer", "after the mixer", "feed-forward"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_a_failing_layer_in_a_prefill_or_a_longer_chain(where: str, error: type[BaseException], rollback: int) -> None:
    ours, twin = Scene(rollback), Scene(rollback)
    for act in (Scene.prefill, Scene.more):
        for layer in range(LAYERS):
            before, length, floor = memory_of(ours.cache), ours.cache.length, ours.cache.crop_floor
            with faulty_layer(ours.model, layer, where, error), pytest.raises(error, match="injected"):
                act(ours)
            assert (ours.cache.length, ours.cache.crop_floor) == (length, floor)
            assert same_bits(memory_of(ours.cache), before)
            ours.cache.check()
        act(ours)
        act(twin)
        assert same_bits(memory_of(ours.cache), memory_of(twin.cache))


@pytest.mark.case(24)
@ROLLBACK
@pytest.mark.parametrize("where", ["before the mixer", "after the mixer", "feed-forward"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_a_failing_layer_in_a_verify_leaves_the_window_open_and_unfilled(
    where: str, error: type[BaseException], rollback: int
) -> None:
    ours, twin = Scene(rollback), Scene(rollback)
    ours.prefill()
    twin.prefill()
    branch, before = ours.cache.branch(TREE), memory_of(ours.cache)
    for layer in range(LAYERS):
        with faulty_layer(ours.model, layer, where, error), pytest.raises(error, match="injected"):
            ours.model(NODES, branch)
        assert ours.cache.length == 9 and branch.nbytes == 0 and same_bits(memory_of(ours.cache), before)
        with pytest.raises(RuntimeError, match="forward"):
            ours.cache.commit(PATH)
        with pytest.raises(RuntimeError, match="commit or discard"):
            ours.more()
    ours.model(NODES, branch)
    ours.commit()
    twin.verify()
    twin.commit()
    assert same_bits(memory_of(ours.cache), memory_of(twin.cache))


# what a commit calls for each layer: owner, name, number of layers it is called for
SOURCES: dict[str, tuple[Any, str, int]] = {
    "attention rows": (qwen_gdn.lanes.TreeAttention, "committed", 2),
    "row write": (qwen_gdn.lanes, "_write_rows", 2),
    "delta rows": (qwen_gdn.lanes.TreeDelta, "committed", 6),
    "absorption": (qwen_gdn.layer_cache, "absorb", 6),
    "columns": (qwen_gdn.layer_cache, "_last_columns", 6),
    "raised floor": (qwen_gdn.layer_cache.DeltaCache, "with_floor", 6),
}


@pytest.mark.case(24)
@ROLLBACK
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda e: e.__name__)
def test_a_failing_layer_in_a_commit_leaves_the_window_to_commit_again(
    source: str, after: bool, error: type[BaseException], rollback: int
) -> None:
    """The first call fails, then the second, and so on, until a commit no longer makes that many."""
    owner, name, layers = SOURCES[source]
    ours, twin = Scene(rollback), Scene(rollback)
    for scene in (ours, twin):
        scene.prefill()
        scene.verify()
    before, floor = memory_of(ours.cache), ours.cache.crop_floor
    failures = 0
    while ours.cache.length == 9:
        with raising_at(owner, name, failures, error, after=after):
            try:
                ours.commit()
            except error:
                failures += 1
                assert (ours.cache.length, ours.cache.crop_floor) == (9, floor)
                assert same_bits(memory_of(ours.cache), before)
    twin.commit()
    ours.cache.check()
    assert failures >= (layers if rollback or source != "raised floor" else 0)
    assert ours.cache.crop_floor == twin.cache.crop_floor
    assert same_bits(memory_of(ours.cache), memory_of(twin.cache))


@pytest.mark.case(24)
@pytest.mark.parametrize(
    ("owner", "name", "layers"),
    [
        (qwen_gdn.layer_cache.DeltaCache, "advanced", 6),
        (qwen_gdn.layer_cache.DeltaCache, "with_floor", 6),
        (qwen_gdn.lanes.ChainAttention, "committed", 2),
    ],
    ids=["advance", "raised floor", "attention rows"],
)
def test_a_failure_while_a_forward_is_being_committed_changes_nothing(owner: Any, name: str, layers: int) -> None:
    ours, twin = Scene(1), Scene(1)
    for scene in (ours, twin):
        scene.prefill()
    before, floor = memory_of(ours.cache), ours.cache.crop_floor
    failures = 0
    while ours.cache.length == 9:
        with raising_at(owner, name, failures, KeyboardInterrupt, after=True):
            try:
                ours.more()
            except KeyboardInterrupt:
                failures += 1
                assert (ours.cache.length, ours.cache.crop_floor) == (9, floor)
                assert same_bits(memory_of(ours.cache), before)
    twin.more()
    assert failures >= layers and ours.cache.crop_floor == twin.cache.crop_floor
    assert same_bits(memory_of(ours.cache), memory_of(twin.cache))


def test_a_discard_after_a_failed_commit_or_verify_returns_to_plain_decoding() -> None:
    for failing in ("verify", "commit"):
        ours, twin = Scene(0), Scene(0)
        ours.prefill()
        twin.prefill()
        with pytest.raises(KeyboardInterrupt):
            if failing == "verify":
                with faulty_layer(ours.model, 5, "after the mixer", KeyboardInterrupt):
                    ours.verify()
            else:
                ours.verify()
                with raising_at(qwen_gdn.lanes.TreeDelta, "committed", 4, KeyboardInterrupt, after=True):
                    ours.commit()
        ours.cache.discard()
        ours.more()
        twin.more()
        assert ours.cache.length == 13 and same_bits(memory_of(ours.cache), memory_of(twin.cache))


@pytest.mark.parametrize("what", ["crop", "fork"])
@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda e: e.__name__)
def test_a_failing_layer_in_a_crop_or_a_fork_changes_nothing(what: str, error: type[BaseException]) -> None:
    ours, twin = Scene(4), Scene(4)
    for scene in (ours, twin):
        scene.prefill()
        scene.more()
    act: Callable[[HybridCache], object] = {"crop": lambda c: c.crop(11), "fork": lambda c: c.fork()}[what]
    name = {"crop": "at", "fork": "clone"}[what]
    before = memory_of(ours.cache)
    for call in range(6):
        with raising_at(qwen_gdn.layer_cache.DeltaCache, name, call, error), pytest.raises(error):
            act(ours.cache)
        assert ours.cache.length == 13 and same_bits(memory_of(ours.cache), before)
    ours.cache.crop(11)
    twin.cache.crop(11)
    assert same_bits(memory_of(ours.cache), memory_of(twin.cache))


def test_a_failing_head_or_sampler_ends_decoding_with_the_cache_at_its_rule() -> None:
    """Length is prompt and emitted tokens minus one, also when the draw after a forward fails."""
    for error in ERRORS:
        model = tiny_model(1)
        cache = model.new_cache(64)
        drawn: list[int] = []

        def sampler(logits: Tensor, drawn: list[int] = drawn, error: type[BaseException] = error) -> Tensor:
            if len(drawn) == 3:
                raise error("injected")
            drawn.append(int(logits.argmax()))
            return logits.argmax(dim=-1)

        emitted = []
        with pytest.raises(error):
            for token in decode(model, PREFIX, max_new_tokens=8, sampler=sampler, cache=cache):
                emitted.append(token)
        assert emitted == drawn and cache.length in (9 + len(emitted) - 1, 9 + len(emitted))
        cache.check()
        wanted = model.new_cache(64)
        model(torch.cat((PREFIX, torch.tensor([emitted])), dim=1)[:, : cache.length], wanted)
        assert cache.length == wanted.length


def test_a_prefill_that_fails_in_a_later_window_keeps_the_windows_before_it() -> None:
    model = tiny_model(1)
    cache = model.new_cache(64)
    tokens = random_tokens(seeded(2), 1, 50)
    with raising_at(model.layers[6].mlp, "forward", 3, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        qwen_gdn.prefill(model, tokens, cache, window=8)
    assert cache.length == 24
    twin = model.new_cache(64)
    qwen_gdn.prefill(model, tokens[:, :24], twin, window=8)
    assert same_bits(memory_of(cache), memory_of(twin))
