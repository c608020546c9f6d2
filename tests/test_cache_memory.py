"""What a cache and a window hold: their own bytes, no more with time, no gradients, and nothing once closed."""

import gc

import pytest
import torch
from tiny import SMALL, filled, memory_of, random_tokens, random_topology, same_bits, seeded, tiny_model
from torch import Tensor

from qwen_gdn import DeltaCache, HybridCache, KVCache, Topology

PAIR = Topology([-1, 0, 0])


def storages(cache: HybridCache) -> dict[int, int]:
    """Address -> bytes of every storage the cache holds."""
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for layer in cache
        for t in layer.tensors()
        if t.untyped_storage().nbytes()
    }


@pytest.mark.case(14)
def test_forks_are_independent_share_no_storage_and_own_their_bytes() -> None:
    model = tiny_model(2)
    for rollback in (0, 4):
        cache = filled(model, 9, rollback=rollback)
        copy = cache.fork()
        assert not storages(cache).keys() & storages(copy).keys()
        assert copy.nbytes == cache.nbytes == sum(storages(copy).values())
        assert sum(storages(copy).values()) == sum(t.numel() * t.element_size() for x in copy for t in x.tensors())
        assert (copy.length, copy.crop_floor, copy.capacity, copy.rollback) == (9, cache.crop_floor, 64, rollback)
        before = memory_of(cache)
        assert same_bits(memory_of(copy), before)
        model(random_tokens(seeded(5), 1, 4), copy)
        model(random_tokens(seeded(6), 1, 3), copy.branch(PAIR))
        copy.commit([0, 1])
        assert (cache.length, copy.length) == (9, 15) and same_bits(memory_of(cache), before)
        other = cache.fork()
        for one in (cache, other):
            model(random_tokens(seeded(7), 1, 4), one)
        assert same_bits(memory_of(cache), memory_of(other))


@pytest.mark.case(14)
def test_memory_is_flat_over_400_rounds_with_a_constant_context() -> None:
    model, draw = tiny_model(3, layer_types=SMALL), seeded(8)
    snapshot = filled(model, 20, rollback=6)
    assert sum(storages(snapshot).values()) == snapshot.nbytes
    topologies = [random_topology(draw, n, 5) for n in (1, 8, 16)]
    nodes = [random_tokens(draw, 1, len(t)) for t in topologies]

    def live() -> tuple[int, int]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is Tensor]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return len(tensors), sum(held.values())

    cache, seen = snapshot.fork(), []
    for i in range(400):
        if i % 40 == 0:
            cache = snapshot.fork()
            if i:
                seen.append(live())
        j = i % 3
        model(nodes[j], cache.branch(topologies[j]))
        cache.commit(topologies[j].path(len(topologies[j]) - 1))
        cache.crop(20)
    assert len(set(seen)) == 1, seen


def test_committed_bytes_do_not_grow_with_the_tokens_and_the_log_stays_bounded() -> None:
    model, draw = tiny_model(3, layer_types=SMALL), seeded(9)
    for rollback in (0, 4):
        cache, sizes = model.new_cache(400, rollback=rollback), []
        for _ in range(60):
            model(random_tokens(draw, 1, 8), cache.branch(Topology.chain(8)))
            cache.commit(range(3))
            sizes.append(cache.nbytes)
        assert len(set(sizes[-20:])) <= 2 * rollback + 1
        assert max(sizes[-20:]) == max(sizes[10:30])
        assert sum(storages(cache).values()) == cache.nbytes
        assert cache.nbytes == sum(t.numel() * t.element_size() for layer in cache for t in layer.tensors())


def test_nothing_in_a_cache_carries_a_gradient() -> None:
    model = tiny_model(4).requires_grad_(True)
    cache = filled(model, 5, rollback=3)
    hidden = model(random_tokens(seeded(1), 1, 3), cache.branch(PAIR), capture=(0, "final"))
    cache.commit([0, 1])
    cache.crop(6)
    tensors = [t for c in (cache, cache.fork()) for layer in c for t in layer.tensors()]
    assert not any(t.requires_grad or t.grad_fn for t in (*tensors, hidden.final, *hidden.captured))
    assert model(random_tokens(seeded(2), 1, 3)).final.grad_fn is not None


@pytest.mark.parametrize("accepted", [[0, 2], []], ids=["committed", "discarded"])
def test_a_closed_window_holds_no_memory_even_if_its_owner_keeps_it(accepted: list[int]) -> None:
    model = tiny_model(5)
    cache = filled(model, 6)
    branch = cache.branch(PAIR)
    model(torch.tensor([[1, 2, 3]]), branch)
    assert branch.nbytes > 0
    cache.commit(accepted)
    assert branch.nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_window_holds_factors_columns_and_kv_rows_of_its_nodes_and_nothing_else(
    dtype: torch.dtype, batch: int
) -> None:
    model = tiny_model(16, dtype=dtype)
    exact, small = max(4, dtype.itemsize), dtype.itemsize
    # k of 2 key heads, u of 4 value heads, g of 4; 64 channels; keys and values of 2 heads of 16
    node = 6 * ((2 * 8 + 4 * 8 + 4) * exact + 64 * small) + 2 * (2 * 2 * 16 * small)
    for N in (1, 2, 7, 64):
        cache = model.new_cache(80, batch=batch)
        model(random_tokens(seeded(N), batch, 5), cache)
        closed = cache.nbytes
        branch = cache.branch(Topology([-1] + [i // 3 for i in range(N - 1)]))
        assert (branch.nbytes, cache.nbytes) == (0, closed)
        model(random_tokens(seeded(N), batch, N), branch)
        assert (branch.nbytes, cache.nbytes) == (batch * N * node, closed + batch * N * node)
        cache.discard()
        assert cache.nbytes == closed


def test_layer_caches_are_typed_and_shaped_by_the_config() -> None:
    cache = tiny_model(17).new_cache(30, batch=2)
    for layer, kind in zip(cache, ("d", "d", "d", "a") * 2, strict=True):
        if kind == "a":
            assert isinstance(layer, KVCache) and layer.keys.shape == layer.values.shape == (2, 2, 30, 16)
        else:
            assert isinstance(layer, DeltaCache)
            assert layer.state.shape == (2, 4, 8, 8) and layer.columns.shape == (2, 3, 64)
