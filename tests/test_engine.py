"""Programs over memory at fixed addresses do what the model does: forwards, commits, generation, failures.

Most tests run the programs' own code uncompiled, in float64, where a difference is a fault; a few compile it. On a
GPU the same checks run on recorded graphs.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from proposers import PROPOSERS, Right, check_holds, check_same, emitted, small_model
from tiny import (
    EXPERTS,
    SMALL,
    TOLERANCE,
    gap,
    memory_of,
    raising_at,
    random_tokens,
    random_topology,
    same_bits,
    seeded,
    tiny_model,
    worst_gap,
)

import qwen_gdn.engine
import qwen_gdn.program_set
import qwen_gdn.static_cache
from ddtree import NoDrafts, build_chain, build_tree, generate, make_sampler
from qwen_gdn import DeltaCache, HybridCache, KVCache, QwenGDN, Topology, decode, prefill
from qwen_gdn.engine import Engine
from qwen_gdn.program_set import SHORT
from qwen_gdn.static_cache import StaticCache

SIZES = (8, 32)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_gdn.program_set, "compiled", lambda function: function)


def pair(dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Engine, QwenGDN]:
    """An engine, and the same model by itself."""
    return Engine(tiny_model(dtype=dtype, **changes), sizes=SIZES), tiny_model(dtype=dtype, **changes)


CHUNKS = (4, 24, 70)


def compiling(**changes: Any) -> tuple[Engine, QwenGDN]:
    """A pair in float32, alike in all that code is made for: what one test has compiled serves the others.

    One size of trees and of commits, for a compiler takes most of a minute for each; programs that are not compiled
    have several.
    """
    model, twin = (tiny_model(layer_types=list(SMALL), **changes) for _ in range(2))
    return Engine(model, sizes=(SHORT,), chunks=(24,)), twin


def check_rounds(engine: Engine, model: QwenGDN, trees: int, *, prompt: int = 9, device: str = "cpu") -> None:
    """Prefill, then trees of all sizes with a step between, against the eager model; after each, the memory."""
    draw = seeded(5)
    tolerance = TOLERANCE[model.dtype]
    ours, theirs = engine.new_cache(600), model.new_cache(600)
    assert isinstance(ours, StaticCache)
    tokens = random_tokens(draw, 1, prompt)
    assert gap(engine(tokens, ours).final, model(tokens, theirs).final) <= tolerance
    for number in range(trees):
        nodes = int(torch.randint(1, engine.sizes[-1] + 1, (1,), generator=draw))
        topology = random_topology(draw, nodes, max_depth=15)
        tokens = random_tokens(draw, nodes)
        capture = ((0, len(model.layers) - 1, "final"), ())[number % 2]
        before = memory_of(ours)
        found = engine(tokens, branch := ours.branch(topology), capture=capture)
        wanted = model(tokens, theirs.branch(topology), capture=capture)
        assert same_bits(memory_of(ours), before)
        assert gap(found.final, wanted.final) <= tolerance
        assert all(gap(a, b) <= tolerance for a, b in zip(found.captured, wanted.captured, strict=True))
        assert branch.nbytes > 0
        path = topology.path(int(torch.randint(0, nodes, (1,), generator=draw))) if number % 5 else []
        ours.commit(path)
        theirs.commit(path)
        ours.check()
        assert ours.length == theirs.length and worst_gap(memory_of(ours), memory_of(theirs)) <= tolerance
        token = random_tokens(draw, 1)
        assert gap(engine(token, ours).final, model(token, theirs).final) <= tolerance
        assert ours.length == theirs.length and worst_gap(memory_of(ours), memory_of(theirs)) <= tolerance


SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "K is not V": {"linear_key_head_dim": 6, "linear_value_head_dim": 10},
    "narrow conv, one query head a key head": {"linear_conv_kernel_dim": 2, "num_key_value_heads": 4},
    "experts": EXPERTS,
    "all delta": {"layer_types": ["linear_attention"] * 4},
    "tied, three value heads a key head": {"tie_word_embeddings": True, "linear_num_value_heads": 6},
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_programs_follow_the_model(shape: dict[str, Any]) -> None:
    check_rounds(*pair(**shape), trees=25)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_prompts_are_read_by_padded_programs_in_any_pieces(shape: dict[str, Any]) -> None:
    model = tiny_model(dtype=torch.float64, **shape)
    engine = Engine(tiny_model(dtype=torch.float64, **shape), sizes=SIZES, chunks=CHUNKS)
    draw = seeded(6)
    ours, theirs = engine.new_cache(280), model.new_cache(280)
    for count in (3, 1, 4, 24, 2, 7, 1, 23, 67, 90, 5, 5):
        tokens = random_tokens(draw, 1, count)
        found, wanted = engine(tokens, ours, capture=(1, "final")), model(tokens, theirs, capture=(1, "final"))
        assert gap(found.final, wanted.final) <= 1e-10
        assert all(gap(a, b) <= 1e-10 for a, b in zip(found.captured, wanted.captured, strict=True))
        assert ours.length == theirs.length and worst_gap(memory_of(ours), memory_of(theirs)) <= 1e-10
    topology, tokens = Topology([-1, 0, 0, 1]), torch.tensor([3, 4, 5, 6])
    assert gap(engine(tokens, ours.branch(topology)).final, model(tokens, theirs.branch(topology)).final) <= 1e-10
    full = engine.new_cache(5)
    engine(torch.arange(5), full)
    with pytest.raises(ValueError, match="exceed its capacity"):
        engine(torch.arange(3), full)
    check_holds(full, model, range(5))


def test_a_compiled_prompt_is_read_as_the_model_reads_it() -> None:
    engine, model = compiling()
    cache = engine.new_cache(300)
    tokens = random_tokens(seeded(1), 1, 21)
    assert gap(engine(tokens, cache).final, model(tokens).final) <= 2e-5
    check_holds(cache, model, tokens[0].tolist())


@pytest.mark.usefixtures("uncompiled")
def test_a_first_round_needs_no_prompt() -> None:
    engine, model = pair()
    ours, theirs = engine.new_cache(40), model.new_cache(40)
    topology, tokens = Topology([-1, 0, 0, 1]), torch.tensor([3, 4, 5, 6])
    assert gap(engine(tokens, ours.branch(topology)).final, model(tokens, theirs.branch(topology)).final) <= 1e-10
    ours.commit([0, 1, 3])
    theirs.commit([0, 1, 3])
    assert worst_gap(memory_of(ours), memory_of(theirs)) <= 1e-10


@pytest.mark.case(63)
def test_compiled_programs_follow_the_model() -> None:
    check_rounds(*compiling(), trees=8)


@pytest.mark.case(63)
@pytest.mark.usefixtures("uncompiled")
def test_generation_through_programs_writes_what_plain_decoding_writes() -> None:
    """Every proposer over changing budgets, as trees and chains, two caches in turn on one engine."""
    engine, model = Engine(small_model(), sizes=SIZES), small_model()
    budgets = cycle((0, 3, 7, 20, 31, 1, 15))
    draw = seeded(3)
    for number, proposer in enumerate(PROPOSERS):
        prompts = [random_tokens(draw, 3 + number, vocab=37).tolist() for _ in range(2)]
        wanted = [list(decode(model, prompt, max_new_tokens=40)) for prompt in prompts]
        runs: list[Iterator[Any]] = []
        caches = [engine.new_cache(80), engine.new_cache(80)]
        for prompt, text, cache, build in zip(prompts, wanted, caches, (build_tree, build_chain), strict=True):
            drafter = PROPOSERS[proposer]([*prompt, *text], number)
            runs.append(
                generate(engine, drafter, prompt, max_new_tokens=40, budget=next(budgets), cache=cache, build=build)
            )
        written: list[list[int]] = [[], []]
        for _ in range(40):
            for run, tokens in zip(runs, written, strict=True):
                tokens += emitted(filter(None, [next(run, None)]))
        assert written == wanted, proposer
        for cache, prompt, text in zip(caches, prompts, wanted, strict=True):
            check_holds(cache, model, [*prompt, *text[:-1]])


@pytest.mark.case(63)
def test_compiled_generation_writes_what_plain_decoding_writes() -> None:
    engine, model = compiling(wild=4.0)
    budgets, draw = cycle((7, 15, 0, 12, 3)), seeded(4)
    for number, proposer in enumerate(PROPOSERS):
        prompt = random_tokens(draw, 2 + number).tolist()
        wanted = list(decode(model, prompt, max_new_tokens=40))
        rounds = generate(
            engine, PROPOSERS[proposer]([*prompt, *wanted], number), prompt, max_new_tokens=40, budget=next(budgets)
        )
        check_same(model, prompt, emitted(rounds), wanted)
        check_same(model, prompt, list(decode(engine, prompt, max_new_tokens=40)), wanted)


@pytest.mark.usefixtures("uncompiled")
def test_plain_decoding_and_sampling_run_through_programs_too() -> None:
    engine, model = Engine(small_model(), sizes=SIZES), small_model()
    prompt = [5, 9, 1]
    assert list(decode(engine, prompt, max_new_tokens=50)) == list(decode(model, prompt, max_new_tokens=50))
    for settings in ({}, {"top_p": 0.8}, {"top_k": 5}):
        ours, theirs = (
            list(decode(m, prompt, max_new_tokens=30, sampler=make_sampler(0.9, seed=1, **settings)))
            for m in (engine, model)
        )
        assert ours == theirs


@pytest.mark.case(63)
@pytest.mark.usefixtures("uncompiled")
def test_five_repeats_are_equal_bit_for_bit() -> None:
    engine = Engine(small_model(dtype=torch.float32), sizes=SIZES)
    states = []
    for _ in range(5):
        cache = engine.new_cache(100)
        tokens = emitted(generate(engine, NoDrafts(), [5, 9, 1], max_new_tokens=30, cache=cache))
        text = Right([5, 9, 1, *tokens], 0)
        again = engine.new_cache(100)
        assert emitted(generate(engine, text, [5, 9, 1], max_new_tokens=30, budget=12, cache=again))
        states.append([*memory_of(cache), *memory_of(again)])
    assert all(same_bits(states[0], other) for other in states[1:])


@pytest.mark.usefixtures("uncompiled")
def test_what_a_forward_returned_stays_when_the_next_one_runs() -> None:
    engine, _ = pair()
    cache = engine.new_cache(30)
    first = engine(torch.tensor([3]), cache, capture=(1,))
    kept = [first.final.clone(), first.captured[0].clone()]
    engine(torch.tensor([4]), cache, capture=(1,))
    assert same_bits([first.final, first.captured[0]], kept)


@pytest.mark.usefixtures("uncompiled")
def test_eager_forwards_and_programs_take_turns_on_one_cache() -> None:
    """Prefill, trees beyond the largest size and cropping are the model's own; programs go on from there."""
    engine, model = pair()
    ours, theirs = engine.new_cache(200), model.new_cache(200)
    draw = seeded(8)
    for count in (5, 1, 7, 1, 1, 40):
        tokens = random_tokens(draw, 1, count)
        assert gap(engine(tokens, ours).final, model(tokens, theirs).final) <= 1e-10
        topology = random_topology(draw, count, max_depth=9)
        tokens = random_tokens(draw, count)
        engine(tokens, ours.branch(topology))
        model(tokens, theirs.branch(topology))
        path = topology.path(count - 1)
        ours.commit(path)
        theirs.commit(path)
        assert worst_gap(memory_of(ours), memory_of(theirs)) <= 1e-10
    ours.crop(0)
    theirs.crop(0)
    for _ in range(3):
        token = random_tokens(draw, 1)
        assert gap(engine(token, ours).final, model(token, theirs).final) <= 1e-10
    with pytest.raises(ValueError, match="rollback"):
        ours.crop(1)


@pytest.mark.usefixtures("uncompiled")
def test_a_fork_goes_its_own_way() -> None:
    engine, model = pair()
    ours = engine.new_cache(60)
    engine(random_tokens(seeded(1), 1, 6), ours)
    engine(torch.tensor([7]), ours)
    fork = ours.fork()
    assert isinstance(fork, StaticCache) and fork.length == 7 and fork.memory is not ours.memory
    before = memory_of(ours)
    for token in (3, 4):
        engine(torch.tensor([token]), fork)
    assert same_bits(memory_of(ours), before)
    check_holds(fork, model, [*random_tokens(seeded(1), 6).tolist(), 7, 3, 4])
    engine(torch.tensor([9]), ours)
    check_holds(ours, model, [*random_tokens(seeded(1), 6).tolist(), 7, 9])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["step_layer", "tree_layer", "picked_rows", "commit_delta", "commit_rows"])
def test_a_failing_layer_leaves_the_cache_at_its_last_length(name: str, error: type[BaseException]) -> None:
    engine, model = pair()
    ours, theirs = engine.new_cache(80), model.new_cache(80)
    topology, tokens = Topology([-1, 0, 0, 1, 2, 4]), torch.arange(6)
    for memory, run in ((ours, engine), (theirs, model)):
        run(random_tokens(seeded(2), 1, 9), memory)
        run(torch.tensor([1]), memory)
    before = memory_of(ours)

    def attempt() -> None:
        if name == "step_layer":
            engine(torch.tensor([5]), ours)
            return
        if ours.nbytes == empty:
            ours.discard()
            engine(tokens, ours.branch(topology))
        ours.commit([0, 2, 4, 5])

    empty, calls = ours.nbytes, 0
    while ours.length == 10:
        with raising_at(qwen_gdn.program_set, name, calls, error, after=calls % 2 == 1):
            try:
                attempt()
            except error:
                calls += 1
                assert ours.length == 10 and same_bits(memory_of(ours), before), calls
    assert calls == {"step_layer": 8, "tree_layer": 8, "picked_rows": 1, "commit_delta": 1, "commit_rows": 1}[name]
    if name == "step_layer":
        model(torch.tensor([5]), theirs)
    else:
        model(tokens, theirs.branch(topology))
        theirs.commit([0, 2, 4, 5])
    assert worst_gap(memory_of(ours), memory_of(theirs)) <= 1e-10


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("changes", ["s", "t", "e", "ss", "es", "se", "tst", "ese", "sses", "ttet"])
@pytest.mark.parametrize("last", ["s", "e"])
def test_a_transaction_takes_back_any_number_of_steps_trees_and_eager_forwards(changes: str, last: str) -> None:
    engine, model = pair()
    cache = engine.new_cache(80)
    prompt = random_tokens(seeded(2), 9).tolist()

    def change(kind: str, token: int) -> list[int]:
        if kind == "t":
            engine(torch.tensor([token, 1, 2]), cache.branch(Topology([-1, 0, 0])))
            cache.commit([0, 2])
            return [token, 2]
        tokens = [token] if kind == "s" else [token, 1, 2, 3]
        engine(torch.tensor(tokens), cache)
        return tokens

    prefill(engine, torch.tensor([prompt]), cache)
    prompt += change(last, 6)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), cache.transaction():
            for token, kind in enumerate(changes):
                change(kind, token)
                with pytest.raises(KeyError), cache.transaction():
                    change(kind, token + 7)
                    raise KeyError
            raise ZeroDivisionError
        check_holds(cache, model, prompt)
        prompt += change("s", 8)
        check_holds(cache, model, prompt)


@pytest.mark.usefixtures("uncompiled")
def test_memory_goes_from_a_dropped_cache_to_the_next_and_nothing_with_it() -> None:
    engine, model = pair()
    cache = engine.new_cache(100)
    engine(torch.tensor([1]), cache)
    assert isinstance(cache, StaticCache)
    memory = cache.memory
    for layer in memory.banks[0]:
        for tensor in layer:
            tensor.fill_(float("nan"))
    del cache, layer, tensor
    gc.collect()
    again = engine.new_cache(300)
    assert isinstance(again, StaticCache) and again.memory is memory
    engine(torch.tensor([4]), again)
    check_holds(again, model, [4])
    assert isinstance(other := engine.new_cache(100), StaticCache) and other.memory is not memory


@pytest.mark.usefixtures("uncompiled")
def test_rows_nobody_sees_may_hold_anything() -> None:
    engine, model = pair()
    cache = engine.new_cache(100)
    engine(random_tokens(seeded(2), 1, 9), cache)
    for layer in cache:
        if hasattr(layer, "keys"):
            layer.keys[:, :, 9:] = float("nan")
            layer.values[:, :, 9:] = float("inf")
    engine(torch.arange(4), cache.branch(Topology([-1, 0, 0, 1])))
    cache.commit([0, 1])
    engine(torch.tensor([6]), cache)
    check_holds(cache, model, [*random_tokens(seeded(2), 9).tolist(), 0, 1, 6])


@pytest.mark.usefixtures("uncompiled")
def test_other_memory_runs_on_the_model_and_errors_are_the_models() -> None:
    engine, model = pair()
    batch = engine.new_cache(20, batch=2)
    tokens = random_tokens(seeded(1), 2, 4)
    assert gap(engine(tokens, batch).final, model(tokens).final) <= 1e-10
    rolling = engine.new_cache(20, rollback=4)
    engine(random_tokens(seeded(1), 1, 6), rolling)
    rolling.crop(3)
    check_holds(rolling, model, random_tokens(seeded(1), 6)[:3].tolist())
    cache = engine.new_cache(3)
    for wrong, message in (
        ((torch.tensor([97]), cache), "outside the vocabulary"),
        ((torch.arange(4), cache), "room|exceed"),
    ):
        with pytest.raises(ValueError, match=message):
            engine(*wrong)
    window = cache.branch(Topology.chain(3))
    with pytest.raises(ValueError, match="one token for each node"):
        engine(torch.arange(2), window)
    with pytest.raises(RuntimeError, match="commit or discard"):
        engine(torch.tensor([1]), cache)
    engine(torch.arange(3), window)
    with pytest.raises(RuntimeError, match="has been run"):
        engine(torch.arange(3), window)
    cache.discard()
    with pytest.raises(RuntimeError, match="closed"):
        engine(torch.arange(3), window)
    with pytest.raises(ValueError, match="capture"):
        engine(torch.tensor([1]), cache, capture=(8,))
    with pytest.raises(ValueError, match="capacity must be"):
        engine.new_cache(0)
    for wrong in ((8, 4), (), (1, 8), (2.5, 4), 16, ("a", "b"), (True, 8)):
        with pytest.raises(ValueError, match="sizes must"):
            Engine(model, sizes=wrong)
    with pytest.raises(ValueError, match="chunks must"):
        Engine(model, chunks=(1, 8))
    with pytest.raises(ValueError, match="takes a QwenGDN"):
        Engine(engine)
    for capacity, batch, rollback in ((True, 1, 0), (5, True, 0), (5, 1.0, 0), (5, 1, 0.0)):
        with pytest.raises(ValueError, match="new_cache"):
            engine.new_cache(capacity, batch, rollback)
    assert cache.length == 0


@pytest.mark.usefixtures("uncompiled")
def test_a_window_says_what_it_holds() -> None:
    """A program's window is padded to its size; per node it is factors and columns, and no state.

    Its columns lie behind a copy of the committed ones; its keys and values in the cache, which counts them always.
    """
    engine, model = pair()
    ours, theirs = engine.new_cache(50), model.new_cache(50)
    mine, other = ours.branch(Topology.chain(5)), theirs.branch(Topology.chain(8))
    engine(torch.arange(5), mine)
    model(torch.arange(8), other)
    before = sum(layer.columns.nbytes for layer in theirs if isinstance(layer, DeltaCache))
    rows = sum(layer.keys[:, :, :8].nbytes * 2 for layer in theirs if isinstance(layer, KVCache))
    assert mine.nbytes == other.nbytes - rows + before
    assert ours.nbytes - mine.nbytes == sum(t.nbytes for layer in ours.memory.banks[0] for t in layer)


@pytest.mark.usefixtures("uncompiled")
def test_a_second_engine_leaves_the_weights_where_the_first_one_reads_them() -> None:
    model = tiny_model()
    Engine(model)
    before = [p.data_ptr() for p in model.parameters()]
    Engine(model)
    assert [p.data_ptr() for p in model.parameters()] == before


@pytest.mark.parametrize("mode", ["autocast", "inference", "grad"])
def test_programs_run_in_the_models_modes_whatever_the_callers(mode: str) -> None:
    """Prepared in one mode and used in the other, both ways round; compiled, since modes are what code is made for."""
    modes: dict[str, Callable[[], Any]] = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "inference": torch.inference_mode,
        "grad": torch.enable_grad,
    }
    engine, model = compiling()
    topology = Topology([-1, 0, 0, 1])

    def rounds(cache: HybridCache) -> None:
        engine(torch.tensor([3]), cache)
        engine(torch.arange(4), cache.branch(topology))
        cache.commit([0, 1, 3])

    for first in (True, False):
        cache = engine.new_cache(40)
        for turn in range(2):
            with modes[mode]() if (turn == 0) == first else torch.no_grad():
                rounds(cache)
        assert all(not t.requires_grad for layer in cache for t in layer.tensors())
        check_holds(cache, model, [3, 0, 1, 3] * 2)


@pytest.mark.usefixtures("uncompiled")
def test_a_recast_model_needs_a_new_engine() -> None:
    engine = Engine(tiny_model(), sizes=SIZES)
    cache = engine.new_cache(20)
    engine(torch.tensor([3]), cache)
    engine.model.double()
    for refused in (lambda: engine(torch.tensor([3]), cache), lambda: engine.new_cache(20)):
        with pytest.raises(ValueError, match=r"was torch\.float32 on cpu and now is torch\.float64 on cpu"):
            refused()


@pytest.mark.usefixtures("uncompiled")
def test_memory_that_is_given_up_is_freed_at_once() -> None:
    engine, _ = pair()
    gc.collect()
    gc.disable()
    try:
        memories = []
        for capacity in (1000, 2000, 3000, 4000, 5000):
            cache = engine.new_cache(capacity)
            engine(torch.tensor([1]), cache)
            engine(torch.arange(3), cache.branch(Topology.chain(3)))
            cache.commit([0])
            assert isinstance(cache, StaticCache)
            memories.append(weakref.ref(cache.memory))
            del cache
        assert sum(memory() is not None for memory in memories) == 2
    finally:
        gc.enable()


@pytest.mark.usefixtures("uncompiled")
def test_a_cache_counts_all_it_holds_and_copies_itself_alone() -> None:
    engine, model = pair()
    cache = engine.new_cache(40)
    whole = cache.nbytes
    engine(random_tokens(seeded(1), 1, 5), cache)
    loose = sum(layer.state.nbytes + layer.columns.nbytes for layer in cache if isinstance(layer, DeltaCache))
    assert cache.nbytes == whole + loose
    copied = copy.deepcopy(cache)
    assert isinstance(copied, StaticCache) and copied.memory is not cache.memory
    engine(torch.tensor([7]), cache)
    assert cache.nbytes == whole
    check_holds(copied, model, random_tokens(seeded(1), 5).tolist())


def test_programs_are_announced_once() -> None:
    said: list[str] = []

    class Said:
        def __init__(self, name: str) -> None:
            said.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_gdn.program_set, "compiled", lambda function: function)
        engine = Engine(tiny_model(), sizes=SIZES, announce=Said)
        cache = engine.new_cache(50)
        for _ in range(2):
            engine(torch.tensor([1]), cache)
            engine(torch.arange(3), cache.branch(Topology.chain(3)))
            cache.commit([0])
    assert said == ["one token", "trees of 8 nodes", "commits of 8 from trees of 8 nodes"]


@pytest.mark.usefixtures("uncompiled")
def test_padding_finds_room_behind_a_full_cache() -> None:
    """A capacity that memory is sized by exactly, filled to its end by a padded tree."""
    engine, model = pair()
    ours, theirs = engine.new_cache(1024), model.new_cache(1024)
    prompt = random_tokens(seeded(6), 1, 1014)
    for run, cache in ((engine, ours), (model, theirs)):
        run(prompt, cache)
        topology = Topology.chain(10)
        found = run(torch.arange(10), cache.branch(topology)).final
        cache.commit(list(range(10)))
        assert cache.length == 1024 and bool(found.isfinite().all())
    assert worst_gap(memory_of(ours), memory_of(theirs)) <= TOLERANCE[torch.float64]


@pytest.mark.usefixtures("uncompiled")
def test_a_cache_that_could_not_be_made_leaves_nothing() -> None:
    """An interrupt while memory is cleared, or between a cache and its registration."""
    engine, model = pair()
    cache = engine.new_cache(64)
    engine(torch.tensor([4]), cache)

    def sets() -> int:
        gc.collect()
        return len(engine._own)

    for make in (lambda: engine.new_cache(3000), cache.fork):
        before = sets()
        with raising_at(qwen_gdn.static_cache.StaticMemory, "empty", 0, MemoryError), pytest.raises(MemoryError):
            make()
        with raising_at(qwen_gdn.engine.weakref, "finalize", 0, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            make()
        assert sets() == before
    check_holds(cache, model, [4])
