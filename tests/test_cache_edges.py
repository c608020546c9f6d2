"""The errors of the cache: what may be asked when, what check() finds, and that a refusal changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import SMALL, filled, memory_of, random_tokens, same_bits, seeded, tiny_model
from torch import Tensor

from ddtree import NoDrafts, generate
from qwen_gdn import DeltaCache, HybridCache, KVCache, QwenGDN, Topology, decode

PAIR = Topology([-1, 0, 0])


OPEN_WINDOW: dict[str, Callable[[QwenGDN, HybridCache], object]] = {
    "chain forward": lambda model, cache: model(torch.tensor([[1]]), cache),
    "second branch": lambda model, cache: cache.branch(PAIR),
    "fork": lambda model, cache: cache.fork(),
    "crop to the same length": lambda model, cache: cache.crop(cache.length),
    "crop to zero": lambda model, cache: cache.crop(0),
    "crop out of reach": lambda model, cache: cache.crop(1),
}


@pytest.mark.parametrize("what", OPEN_WINDOW)
@pytest.mark.parametrize("verified", [False, True], ids=["unfilled", "filled"])
def test_an_open_window_forbids(what: str, verified: bool) -> None:
    model = tiny_model(5)
    cache = filled(model, 6)
    before, branch = memory_of(cache), cache.branch(PAIR)
    if verified:
        model(torch.tensor([[1, 2, 3]]), branch)
    with pytest.raises(RuntimeError, match="commit or discard"):
        OPEN_WINDOW[what](model, cache)
    assert cache.length == 6 and same_bits(memory_of(cache), before)
    if not verified:
        model(torch.tensor([[1, 2, 3]]), branch)
    cache.commit([0])
    assert cache.length == 7


@pytest.mark.case(16)
def test_a_window_is_filled_once_and_closed_once() -> None:
    model = tiny_model(5)
    cache, nodes = filled(model, 6), torch.tensor([[1, 2, 3]])
    cache.discard()
    with pytest.raises(RuntimeError, match=r"cache\.branch"):
        cache.commit([0])
    branch = cache.branch(PAIR)
    for path in ([0], []):
        with pytest.raises(RuntimeError, match="forward"):
            cache.commit(path)
    model(nodes, branch)
    with pytest.raises(RuntimeError, match="has been run"):
        model(nodes, branch)
    cache.commit([0, 2])
    for again in (lambda: cache.commit([0, 2]), lambda: model(nodes, branch)):
        with pytest.raises(RuntimeError):
            again()
    assert cache.length == 8
    dropped = cache.branch(PAIR)
    cache.discard()
    with pytest.raises(RuntimeError, match="closed"):
        model(nodes, dropped)
    kept = cache.branch(PAIR)
    with pytest.raises(RuntimeError, match="closed"):
        model(nodes, dropped)
    model(nodes, kept)
    before = memory_of(cache)
    cache.commit([])
    assert cache.length == 8 and same_bits(memory_of(cache), before)
    with pytest.raises(RuntimeError):
        cache.commit([])


WRONG_PATHS: list[Any] = [
    [1],
    [0, 3],
    [0, 0],
    [0, 1, 2],
    [0, 2, 1],
    [-1],
    [3],
    [0, -1],
    torch.tensor([0, 1, 2]),
    [[0, 1]],
]


@pytest.mark.parametrize("path", WRONG_PATHS, ids=str)
def test_what_is_no_root_path_is_refused_and_the_window_stays(path: Any) -> None:
    model = tiny_model(5)
    cache = filled(model, 6)
    model(torch.tensor([[1, 2, 3]]), cache.branch(PAIR))
    before = memory_of(cache)
    with pytest.raises(ValueError, match="path"):
        cache.commit(path)
    assert cache.length == 6 and same_bits(memory_of(cache), before)
    cache.commit([0, 1])
    assert cache.length == 8


@pytest.mark.case(19)
def test_rows_that_accept_different_paths_are_refused_by_name() -> None:
    model = tiny_model(5)
    cache = model.new_cache(20, batch=2)
    model(random_tokens(seeded(1), 2, 4), cache)
    model(random_tokens(seeded(2), 2, 3), cache.branch(PAIR))
    for paths in ([[0], [0, 2]], [torch.tensor([0]), torch.tensor([0, 2])], torch.tensor([[0, 1], [0, 2]])):
        with pytest.raises(ValueError, match="path"):
            cache.commit(paths)  # type: ignore[arg-type]
    cache.commit([0, 2])
    with pytest.raises((TypeError, ValueError), match="Topology"):
        cache.branch([PAIR, PAIR])  # type: ignore[arg-type]


def test_capacity_counts_committed_tokens_and_is_checked_before_anything_is_written() -> None:
    model = tiny_model(5)
    cache = filled(model, 6, capacity=8)
    before = memory_of(cache)
    wide = Topology([-1] + [0] * 30)  # 31 nodes, but two levels: the window has its own storage
    model(random_tokens(seeded(2), 1, 31), cache.branch(wide))
    cache.discard()
    for refused in (lambda: model(torch.tensor([[1, 2, 3]]), cache), lambda: cache.branch(Topology.chain(3))):
        with pytest.raises(ValueError, match=r"6.*3.*8.*new_cache\(9\)"):
            refused()
    assert cache.length == 6 and same_bits(memory_of(cache), before)
    model(torch.tensor([[1, 2]]), cache)
    with pytest.raises(ValueError, match="capacity"):
        cache.branch(Topology.chain(1))


WRONG_TOKENS: dict[str, tuple[Tensor, str]] = {
    "another batch": (torch.ones(2, 3, dtype=torch.long), "batch 2.*1|shape"),
    "no tokens": (torch.ones(1, 0, dtype=torch.long), r"T > 0.*\[1, 0\]"),
    "three dimensions": (torch.ones(1, 1, 3, dtype=torch.long), r"\[1, 1, 3\]"),
    "not integers": (torch.ones(1, 3), "float32"),
    "id past the vocabulary": (torch.tensor([[1, 97, 2]]), r"97.*\[0, 97\)"),
    "negative id": (torch.tensor([[1, -1, 2]]), r"-1.*\[0, 97\)"),
}


@pytest.mark.parametrize("what", WRONG_TOKENS)
def test_wrong_tokens_are_refused_by_chain_and_window_alike(what: str) -> None:
    tokens, words = WRONG_TOKENS[what]
    model = tiny_model(5)
    cache = filled(model, 6)
    before = memory_of(cache)
    with pytest.raises(ValueError, match=words):
        model(tokens, cache)
    branch = cache.branch(PAIR)
    with pytest.raises(ValueError, match=words):
        model(tokens, branch)
    with pytest.raises(ValueError, match=r"\[1, 2\].*\[1, 3\]"):
        model(torch.tensor([[1, 2]]), branch)
    assert cache.length == 6 and same_bits(memory_of(cache), before)
    model(torch.tensor([1, 2, 3]), branch)  # [N] stands for a batch of one
    cache.commit([0])


@pytest.mark.parametrize("layer", [8, -1, "last", 1.5, None], ids=str)
def test_layer_ids_that_do_not_exist_are_refused(layer: Any) -> None:
    model = tiny_model(5)
    cache = filled(model, 6)
    with pytest.raises(ValueError, match=str(layer)):
        model(torch.tensor([[1]]), cache, capture=(0, layer))
    assert cache.length == 6


@pytest.mark.parametrize("numbers", [(0,), (-3,), (4, 0), (4, 1, -1), (2.5,), (True,)], ids=str)
def test_caches_of_impossible_size_are_refused(numbers: Any) -> None:
    with pytest.raises(ValueError, match=f"got {numbers[-1]}"):
        tiny_model(5).new_cache(*numbers)


def test_a_cache_of_another_model_is_refused_before_anything_runs() -> None:
    model = tiny_model(5)
    for other in (
        tiny_model(5, layer_types=SMALL),
        tiny_model(5, layer_types=["full_attention", "linear_attention"] * 4),
        tiny_model(5, linear_value_head_dim=4),
        tiny_model(5, num_key_value_heads=4),
        tiny_model(5, dtype=torch.float64),
    ):
        cache = other.new_cache(8)
        ran: list[object] = []
        hook = model.layers[0].register_forward_hook(lambda *args, ran=ran: ran.append(args))
        with hook, pytest.raises(ValueError, match="cache"):
            model(torch.tensor([[1, 2]]), cache)
        assert not ran and cache.length == 0


BROKEN: dict[str, tuple[int, dict[str, Callable[[Tensor], Tensor]], str]] = {
    "batch of a state": (0, {"state": lambda t: t.repeat(2, 1, 1, 1)}, "batch"),
    "batch of keys": (1, {"keys": lambda t: t.repeat(2, 1, 1, 1), "values": lambda t: t.repeat(2, 1, 1, 1)}, "batch"),
    "capacity": (1, {"keys": lambda t: t[:, :, :-1], "values": lambda t: t[:, :, :-1]}, "capacity"),
    "values shorter than keys": (1, {"values": lambda t: t[:, :, :-1]}, "capacity"),
    "dtype of keys": (1, {"keys": Tensor.double, "values": Tensor.double}, "dtype"),
    "dtype of columns": (2, {"columns": Tensor.double}, "dtype"),
    "a demoted state": (2, {"state": Tensor.bfloat16}, "dtype"),
    "device": (2, {"state": lambda t: t.to("meta"), "columns": lambda t: t.to("meta")}, "device"),
    "a state that is no number": (2, {"state": lambda t: t / 0}, "layer 2.*not finite"),
    "an infinite state": (0, {"state": lambda t: t + torch.inf}, "layer 0.*not finite"),
}


@pytest.mark.case(21)
@pytest.mark.parametrize("what", BROKEN)
def test_check_names_what_disagrees(what: str) -> None:
    index, changes, words = BROKEN[what]
    cache = filled(tiny_model(5, layer_types=SMALL), 6)
    cache.check()
    layers: list[Any] = list(cache)
    layers[index] = replace(layers[index], **{name: f(getattr(layers[index], name)) for name, f in changes.items()})
    made = HybridCache(layers, cache.capacity, 0)
    with pytest.raises(ValueError, match=words):
        made.check()


@pytest.mark.case(21)
@pytest.mark.parametrize("what", ["batch of a state", "batch of keys", "capacity", "dtype of keys", "a demoted state"])
def test_generation_refuses_a_cache_whose_layers_disagree(what: str) -> None:
    index, changes, words = BROKEN[what]
    model = tiny_model(5, layer_types=SMALL)
    layers: list[Any] = list(model.new_cache(30))
    layers[index] = replace(layers[index], **{name: f(getattr(layers[index], name)) for name, f in changes.items()})
    made = HybridCache(layers, 30, 0)
    with pytest.raises(ValueError, match=f"layers disagree in {words}|another architecture or dtype"):
        decode(model, [1, 2], max_new_tokens=3, cache=made)
    with pytest.raises(ValueError, match=f"layers disagree in {words}|another architecture or dtype"):
        generate(model, NoDrafts(), [1, 2], max_new_tokens=3, cache=made)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_check_finds_rows_that_are_no_numbers_among_the_committed_ones_alone(part: str) -> None:
    cache = filled(tiny_model(5, layer_types=SMALL), 6)
    rows = getattr(cache[1], part)
    rows[:, :, 6] = torch.nan  # scratch
    cache.check()
    rows[:, :, 5] = torch.nan
    with pytest.raises(ValueError, match="keys or values of layer 1 are not finite"):
        cache.check()


def test_check_finds_columns_and_logged_factors_that_are_no_numbers() -> None:
    for at in ("columns", "k", "u", "log_decay"):
        cache = filled(tiny_model(5, layer_types=SMALL), 6, rollback=4)
        layer = cache[2]
        assert isinstance(layer, DeltaCache) and layer.log is not None
        (layer.columns if at == "columns" else getattr(layer.log.since.factors, at))[:] = torch.inf
        with pytest.raises(ValueError, match="of layer 2 are not finite"):
            cache.check()


WRONG_CALLS: dict[str, tuple[Callable[[QwenGDN, HybridCache], object], str]] = {
    "a list of tokens": (lambda model, cache: model([1, 2], cache), "tokens must be .*tensor.*got list"),
    "no tokens": (lambda model, cache: model(None), "tokens must be .*tensor.*got NoneType"),
    "float tokens": (lambda model, cache: model(torch.tensor([1.0]), cache), "got torch.float32"),
    "a layer alone": (lambda model, cache: model(torch.tensor([1]), cache, capture=5), "sequence of layer ids.*got 5"),
    "a name alone": (lambda model, cache: model(torch.tensor([1]), cache, capture="final"), "got 'final'"),
    "a truth value": (lambda model, cache: model(torch.tensor([1]), cache, capture=[True]), "layer id True"),
    "layers": (lambda model, cache: model(torch.tensor([1]), list(cache)), "memory must be a cache.*got list"),
    "a topology": (lambda model, cache: model(torch.tensor([1]), PAIR), "memory must be a cache.*got Topology"),
    "crop to a half": (lambda model, cache: cache.crop(1.5), "crop to 1.5: the cache holds 6 tokens"),
    "crop to nothing": (lambda model, cache: cache.crop(None), "crop to None: the cache holds 6 tokens"),
    "crop to a truth": (lambda model, cache: cache.crop(True), "crop to True: the cache holds 6 tokens"),
}


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_arguments_of_the_wrong_kind_are_refused_in_words_and_change_nothing(what: str) -> None:
    model, (call, said) = tiny_model(5, layer_types=SMALL), WRONG_CALLS[what]
    cache = filled(model, 6, rollback=6)
    before = memory_of(cache)
    with pytest.raises(ValueError, match=said):
        call(model, cache)
    assert cache.length == 6 and same_bits(memory_of(cache), before)


def test_crop_takes_an_integer_of_any_library() -> None:
    for length in (4, torch.tensor(4), np.int64(4)):
        cache = filled(tiny_model(5, layer_types=SMALL), 6, rollback=6)
        cache.crop(length)
        assert cache.length == 4 and type(cache.length) is int


def test_check_refuses_layers_that_log_different_lengths() -> None:
    """Parts restored from two histories: one recurrent layer stands at another length than the rest."""
    model = tiny_model(5, layer_types=SMALL)
    cache, other = filled(model, 6, rollback=9), filled(model, 4, rollback=9)
    cache.check()
    mixed = cache.fork()
    mixed._now = replace(mixed._now, layers=(other[0], *list(cache)[1:]))
    with pytest.raises(ValueError, match=r"layer 0|length"):
        mixed.check()


def test_the_cache_describes_itself() -> None:
    cache = filled(tiny_model(5), 6, rollback=2)
    assert repr(cache) == "HybridCache(length=6, capacity=64, batch=1, layers=8, rollback=2)"
    assert len(cache) == 8 and isinstance(cache[3], KVCache) and isinstance(cache[0], DeltaCache)
    assert cache.device == torch.device("cpu")


@pytest.mark.case(16)
def test_keeping_nothing_of_a_window_leaves_every_bit() -> None:
    """An index of the last accepted node would be −1 here, and mean the last node of all."""
    model = tiny_model(5)
    cache = filled(model, 6, rollback=4)
    before = memory_of(cache)
    model(torch.tensor([[1, 2, 3]]), cache.branch(PAIR))
    cache.commit([])
    assert (cache.length, cache.crop_floor) == (6, 0) and same_bits(memory_of(cache), before)
    again = filled(model, 6, rollback=4)
    for each in (cache, again):
        model(torch.tensor([[7]]), each)
    assert same_bits(memory_of(cache), memory_of(again))
