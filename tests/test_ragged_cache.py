"""Rows of their own lengths: every forward, window and commit leaves each row as a cache of its own would be."""

import copy
from collections.abc import Sequence

import pytest
import torch
from tiny import (
    EXPERTS,
    SMALL,
    TOLERANCE,
    gap,
    raising_at,
    randint,
    random_tokens,
    random_topology,
    same_bits,
    seeded,
    tiny_model,
    worst_gap,
)
from torch import Tensor

import qwen_gdn.ragged_lanes
from qwen_gdn import KVCache, QwenGDN, RaggedCache, Topology, decode

TREE = Topology([-1, 0, 0, 2, 2, 4])
CHAIN = Topology.chain(3)


def row_memory(cache: RaggedCache, row: int) -> list[Tensor]:
    """Copies of a row's committed memory, with a batch dimension of 1."""
    part, length = slice(row, row + 1), int(cache.lengths[row])
    parts: list[Tensor] = []
    for layer in cache:
        held = (t[part, :, :length] for t in layer.tensors()) if isinstance(layer, KVCache) else layer.tensors()
        parts += [t if isinstance(layer, KVCache) else t[part] for t in held]
    return [t.clone() for t in parts]


def all_memory(cache: RaggedCache) -> list[Tensor]:
    return [t for row in range(cache.batch) for t in row_memory(cache, row)]


def fresh_memory(model: QwenGDN, text: Tensor) -> list[Tensor]:
    """What a cache of its own holds after one forward over a text [1, T]."""
    cache = model.new_cache(99)
    if text.shape[1]:
        model(text, cache)
    parts: list[Tensor] = []
    for layer in cache:
        kv = isinstance(layer, KVCache)
        parts += [t[:, :, : text.shape[1]] if kv else t for t in layer.tensors()]
    return parts


def append(model: QwenGDN, cache: RaggedCache, texts: Sequence[Tensor]) -> Tensor:
    """Feeds a text [1, T] of each row, T = 0 too; returns the final states, right-aligned."""
    width = max(text.shape[1] for text in texts)
    rows = [torch.cat((torch.zeros(1, width - text.shape[1], dtype=torch.int64), text), dim=1) for text in texts]
    mask = torch.tensor([[0] * (width - text.shape[1]) + [1] * text.shape[1] for text in texts])
    return model(torch.cat(rows), cache, mask=mask).final


def started(lengths: Sequence[int], *, capacity: int = 64, seed: int = 0) -> tuple[QwenGDN, RaggedCache, list[Tensor]]:
    """A model, a cache of those lengths, and the texts that it holds."""
    model, draw = tiny_model(seed, layer_types=list(SMALL)), seeded(seed)
    cache = model.new_cache(capacity, batch=len(lengths), ragged=True)
    texts = [random_tokens(draw, 1, length) for length in lengths]
    append(model, cache, texts)
    return model, cache, texts


@pytest.mark.case(7, 19)
@pytest.mark.parametrize("shape", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_windows_and_appends_leave_each_row_as_if_alone(
    seed: int, dtype: torch.dtype, shape: dict[str, object]
) -> None:
    """Logits of every node against the path alone without any cache, and memory against one fresh forward."""
    model, draw = tiny_model(seed, dtype=dtype, layer_types=list(SMALL), **shape), seeded(seed)
    rows = randint(draw, 1, 4)
    cache = model.new_cache(99, batch=rows, ragged=True)
    texts = [random_tokens(draw, 1, randint(draw, 0 if row else 1, 9)) for row in range(rows)]
    append(model, cache, texts)
    for turn in range(6):
        if turn % 3 == 2:
            more = [random_tokens(draw, 1, randint(draw, 0 if row else 1, 3)) for row in range(rows)]
            append(model, cache, more)
            texts = [torch.cat(pair, dim=1) for pair in zip(texts, more, strict=True)]
        trees = [random_topology(draw, randint(draw, 1, 20), 7) if randint(draw, 0, 3) else None for _ in range(rows)]
        trees[randint(draw, 0, rows - 1)] = random_topology(draw, randint(draw, 1, 20), 7)
        width = max(len(tree) for tree in trees if tree)
        nodes, before = random_tokens(draw, rows, width), all_memory(cache)
        final = model(nodes, cache.branch(trees)).final
        assert final.isfinite().all() and same_bits(all_memory(cache), before)
        paths: list[list[int]] = []
        for row, tree in enumerate(trees):
            path = tree.path(randint(draw, 0, len(tree) - 1)) if tree else []
            if path:
                alone = model(torch.cat((texts[row], nodes[row : row + 1, path]), dim=1)).final
                assert gap(final[row : row + 1, path], alone[:, -len(path) :]) <= TOLERANCE[dtype]
            paths.append(path[: randint(draw, 0, len(path))])
        cache.commit([torch.tensor(path, dtype=torch.int64) for path in paths] if turn % 2 else paths)
        texts = [torch.cat((text, nodes[i : i + 1, paths[i]]), dim=1) for i, text in enumerate(texts)]
        cache.check()
        assert cache.lengths.tolist() == [text.shape[1] for text in texts]
        for row, text in enumerate(texts):
            assert worst_gap(row_memory(cache, row), fresh_memory(model, text)) <= TOLERANCE[dtype]


@pytest.mark.case(19)
def test_rows_that_accept_one_and_five_tokens() -> None:
    model, cache, texts = started([7, 3])
    nodes = random_tokens(seeded(1), 2, 6)
    model(nodes, cache.branch([Topology([-1] + [0] * 5), Topology.chain(6)]))
    cache.commit([[0], [0, 1, 2, 3, 4]])
    for row, count in enumerate((1, 5)):
        text = torch.cat((texts[row], nodes[row : row + 1, :count]), dim=1)
        assert worst_gap(row_memory(cache, row), fresh_memory(model, text)) <= TOLERANCE[torch.float32]


def test_a_row_that_sits_out_keeps_every_bit() -> None:
    model, cache, _ = started([5, 2, 4])
    before = row_memory(cache, 1)
    model(random_tokens(seeded(1), 3, 6), cache.branch([TREE, None, CHAIN]))
    cache.commit([[0, 2, 4], [], [0]])
    model(torch.tensor([[3], [3], [3]]), cache, mask=torch.tensor([[1], [0], [1]]))
    assert same_bits(row_memory(cache, 1), before) and cache.lengths.tolist() == [9, 2, 6]


def test_padding_nodes_may_hold_any_token_and_scratch_rows_may_hold_anything() -> None:
    model, cache, _ = started([9, 1])
    kept, nodes = cache.fork(), random_tokens(seeded(2), 2, 6)
    finals = []
    for spoilt in (False, True):
        if spoilt:
            nodes[1, 3:] = (nodes[1, 3:] + 1) % 97
            for layer in kept:
                if isinstance(layer, KVCache):
                    layer.keys[1, :, 1:], layer.values[1, :, 1:] = torch.nan, torch.inf
        memory = kept if spoilt else cache
        finals.append(model(nodes, memory.branch([TREE, CHAIN])).final[1, :3])
        memory.commit([[0, 2], [0, 1, 2]])
        memory.check()
    assert same_bits(finals[:1], finals[1:]) and same_bits(row_memory(cache, 1), row_memory(kept, 1))


def test_the_length_is_each_rows_own() -> None:
    model, cache, _ = started([4, 2])
    assert cache.lengths.dtype == torch.int64 and cache.lengths.tolist() == [4, 2]
    assert repr(cache) == "RaggedCache(lengths=[4, 2], capacity=64, layers=3)"
    with pytest.raises(ValueError, match=r"no one length: read its lengths, \[4, 2\]"):
        _ = cache.length
    with pytest.raises(ValueError, match="takes a cache, not a window on one, nor a ragged one, got RaggedCache"):
        decode(model, [1], max_new_tokens=1, cache=cache)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keeps no log to roll back by, got rollback 3"):
        model.new_cache(9, 2, 3, ragged=True)


def test_branches_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    _, cache, _ = started([6, 2], capacity=8)
    for given in (CHAIN, [CHAIN], [CHAIN] * 3, [None, None], [CHAIN, [-1]], []):
        with pytest.raises(ValueError, match="branch takes a list of 2 topologies, one a row"):
            cache.branch(given)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"6 committed tokens and 3 more levels .* 8 in row 0; make it with new_cache\(9,"
    ):
        cache.branch([CHAIN, CHAIN])
    branch = cache.branch([None, CHAIN])  # the other row has room
    with pytest.raises(RuntimeError, match="a second branch while a window is open"):
        cache.branch([None, CHAIN])
    cache.discard()
    assert branch.nbytes == 0


def test_forwards_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    model, cache, _ = started([6, 2], capacity=8)
    before = all_memory(cache)
    with pytest.raises(ValueError, match="6 committed tokens and 3 more tokens exceed its capacity of 8 in row 0"):
        model(random_tokens(seeded(0), 2, 3), cache)
    with pytest.raises(ValueError, match="tokens have batch 3, the cache has 2"):
        model(random_tokens(seeded(0), 3, 1), cache)
    branch = cache.branch([Topology.chain(2), CHAIN])
    with pytest.raises(ValueError, match=r"tokens of shape \[2, 2\] for a window of shape \[2, 3\]"):
        model(random_tokens(seeded(0), 2, 2), branch)
    for what, act in {
        "a chain forward": lambda: model(random_tokens(seeded(0), 2, 1), cache),
        "a fork": cache.fork,
        "a snapshot": cache.snapshot,
        "a crop": lambda: cache.crop(0),
    }.items():
        with pytest.raises(RuntimeError, match=f"{what} while a window is open"):
            act()
    with pytest.raises(RuntimeError, match="commit before the window's forward"):
        cache.commit([[0], [0]])
    model(random_tokens(seeded(0), 2, 3), branch)
    with pytest.raises(RuntimeError, match="has been run"):
        model(random_tokens(seeded(0), 2, 3), branch)
    cache.discard()
    with pytest.raises(RuntimeError, match="closed"):
        model(random_tokens(seeded(0), 2, 3), branch)
    with pytest.raises(RuntimeError, match="commit without a window"):
        cache.commit([[0], [0]])
    assert same_bits(all_memory(cache), before)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([[0, 2]], "commit takes one path a row, a list of 3"),
        ([0, 2, 4], "row 0: path"),
        (5, "commit takes one path a row, a list of 3, got 5"),
        ([[0, 2], [], [0, 2]], "row 2: path: node 2 at step 1 is no child of node 0"),
        ([[0, 6], [], [0]], r"row 0: path: node 6 at step 1 is outside \[0, 6\)"),
        ([[0, 2], [0], [0, 1]], r"row 1: path: this row has no tree, so keep nothing of it, \[\], got \[0\]"),
    ],
)
def test_paths_that_are_none_are_refused_by_the_row_and_nothing_changes(paths: object, said: str) -> None:
    model, cache, _ = started([5, 2, 4])
    before, branch = all_memory(cache), cache.branch([TREE, None, CHAIN])
    model(random_tokens(seeded(1), 3, 6), branch)
    with pytest.raises(ValueError, match=said):
        cache.commit(paths)  # type: ignore[arg-type]
    assert same_bits(all_memory(cache), before) and cache.holds(branch)
    cache.commit([[], [], []])
    assert same_bits(all_memory(cache), before) and not cache.holds(branch)


ERRORS = pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])


@ERRORS
def test_a_failure_anywhere_commits_no_row(error: type[BaseException]) -> None:
    model, cache, texts = started([5, 2, 4])
    twin, nodes = cache.fork(), random_tokens(seeded(1), 3, 6)
    lanes = qwen_gdn.ragged_lanes
    sites = [(model.layers[i], "forward", call) for i in range(3) for call in (0, 1)]
    sites += [(lane, "committed", call) for lane in (lanes.RaggedAttention, lanes.RaggedTreeDelta) for call in (0, 1)]
    sites += [(lanes.RaggedChainDelta, "committed", 0), (lanes, "absorb", 1)]
    for owner, name, call in sites:
        before = all_memory(cache)
        for after in (False, True):
            with raising_at(owner, name, call, error, after=after):
                try:
                    with cache.transaction():
                        append(model, cache, [text[:, :2] for text in texts])
                        model(nodes, cache.branch([TREE, CHAIN, None]))
                        cache.commit([[0, 2, 4], [0, 1], []])
                except error:
                    pass
            if cache.lengths.tolist() == [5, 2, 4]:
                assert same_bits(all_memory(cache), before)
                cache.check()
            else:
                cache = twin.fork()  # the site is called less often
    for each in (cache, twin):
        model(nodes, each.branch([TREE, CHAIN, None]))
        each.commit([[0, 2, 4], [0, 1], []])
    assert same_bits(all_memory(cache), all_memory(twin))


def test_forks_snapshots_and_copies_are_independent() -> None:
    model, cache, _ = started([5, 2])
    before = all_memory(cache)
    copies = [cache.fork(), cache.snapshot(), copy.deepcopy(cache)]
    assert [each.capacity for each in copies] == [64, 5, 64]
    more = random_tokens(seeded(4), 2, 2)
    model(more, cache)
    for each in copies:
        assert each.lengths.tolist() == [5, 2] and same_bits(all_memory(each), before)
    fork = copies[0]
    model(more, fork)
    assert same_bits(all_memory(fork), all_memory(cache))
    cache.restore(copies[1])
    assert same_bits(all_memory(cache), before)
    model(more, cache)
    assert same_bits(all_memory(cache), all_memory(fork))
    with pytest.raises(ValueError, match=r"kind 'a cache of rows of equal length' differs .*'a ragged cache'"):
        cache.restore(model.new_cache(9, batch=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="restore: 7 tokens exceed this cache's capacity of 5"):
        copies[1].restore(cache)


def test_a_crop_empties_or_is_refused() -> None:
    model, cache, texts = started([5, 2])
    for length in (1, 2, 5, -1, True, None):
        with pytest.raises(ValueError, match="a ragged cache can be emptied, crop\\(0\\), and not shortened; fork it"):
            cache.crop(length)  # type: ignore[arg-type]
    assert cache.lengths.tolist() == [5, 2]
    cache.crop(0)
    assert cache.lengths.tolist() == [0, 0]
    append(model, cache, texts[::-1])
    for row, text in enumerate(texts[::-1]):
        assert worst_gap(row_memory(cache, row), fresh_memory(model, text)) <= TOLERANCE[torch.float32]


def test_memory_stays_flat_over_rounds_and_keeps_no_graph() -> None:
    model, cache, _ = started([5, 2])
    model.requires_grad_(True)
    sizes = set()
    for _ in range(4):
        model(random_tokens(seeded(1), 2, 6), cache.branch([TREE, CHAIN]))
        cache.commit([[0, 2, 4], [0]])
        sizes.add(cache.nbytes)
    assert len(sizes) == 1
    assert all(t.grad_fn is None and not t.requires_grad for layer in cache for t in layer.tensors())


def test_a_check_looks_at_each_rows_own_tokens() -> None:
    _, cache, _ = started([5, 2])
    attention = cache[1]
    assert isinstance(attention, KVCache)
    attention.keys[1, 0, 2] = torch.nan
    cache.check()
    attention.keys[1, 0, 1] = torch.nan
    with pytest.raises(ValueError, match="keys or values of layer 1 are not finite"):
        cache.check()
