"""Windows over random trees: a verify only reads, and a commit leaves exactly what a fresh cache would hold."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from tiny import (
    EXPERTS,
    SMALL,
    TOLERANCE,
    gap,
    memory_of,
    randint,
    random_tokens,
    random_topology,
    same_bits,
    seeded,
    tiny_model,
    worst_gap,
)
from torch import Tensor

import qwen_gdn.model
import qwen_gdn.rope
from qwen_gdn import HybridCache, QwenGDN, Topology

SIX = Topology([-1, 0, 0, 1, 1, 2])
VISIBLE = ["100000", "110000", "101000", "110100", "110010", "101001"]


@pytest.fixture(params=[{}, EXPERTS], ids=["dense", "experts"], autouse=True)
def dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(globals(), "tiny_model", partial(tiny_model, **request.param))
    return not request.param


BOTH = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


class Case(NamedTuple):
    """A cache with a prefix committed, and tokens [1, N] for the nodes of a tree."""

    prefix: Tensor
    cache: HybridCache
    topology: Topology
    nodes: Tensor

    def path_tokens(self, path: list[int]) -> Tensor:
        return torch.cat((self.prefix, self.nodes[:, path]), dim=1)


def make_case(
    model: QwenGDN, draw: torch.Generator, topology: Topology | None = None, prefix: int | None = None
) -> Case:
    """Prefixes of 0 to 20 tokens and trees of 1 to 64 nodes, at most 15 below the root, unless given."""
    length = randint(draw, 0, 20) if prefix is None else prefix
    topology = topology or random_topology(draw, randint(draw, 1, 64), randint(draw, 1, 15))
    before = random_tokens(draw, 1, length)
    cache = model.new_cache(64)
    if length:
        model(before, cache)
    return Case(before, cache, topology, random_tokens(draw, 1, len(topology)))


def fresh(model: QwenGDN, tokens: Tensor) -> HybridCache:
    cache = model.new_cache(64, batch=tokens.shape[0])
    if tokens.shape[1]:
        model(tokens, cache)
    return cache


def logits_of_paths_alone(model: QwenGDN, case: Case) -> Tensor:
    """[N, vocab]: the last logits of prefix + root path of every node, without any cache.

    One row for each leaf holds its ancestors too: a causal model's logits at a token are those of the text so far.
    """
    leaves = sorted(set(range(len(case.topology))) - set(case.topology.parents))
    paths = [case.topology.path(leaf) for leaf in leaves]
    longest = max(len(path) for path in paths)
    rows = [torch.cat((case.path_tokens(p)[0], torch.zeros(longest - len(p), dtype=torch.long))) for p in paths]
    logits = model.logits(model(torch.stack(rows)).final)[:, case.prefix.shape[1] :]
    where = {node: (row, depth) for row, path in enumerate(paths) for depth, node in enumerate(path)}
    return torch.stack([logits[where[node]] for node in range(len(case.topology))])


@BOTH
def test_200_random_trees_read_only_then_commit_what_a_fresh_cache_holds(dtype: torch.dtype, dense: bool) -> None:
    """Of a mixture, whose layers' memory is the same, a fifth as many; so too below."""
    model, draw, limit = tiny_model(0, dtype=dtype, layer_types=SMALL), seeded(1), TOLERANCE[dtype]
    for _ in range(200 if dense else 40):
        case = make_case(model, draw)
        before = memory_of(case.cache)
        hidden = model(case.nodes, case.cache.branch(case.topology))
        assert case.cache.length == case.prefix.shape[1] and same_bits(memory_of(case.cache), before)
        assert gap(model.logits(hidden.final[0]), logits_of_paths_alone(model, case)) <= limit
        path = case.topology.path(randint(draw, 0, len(case.topology) - 1))
        case.cache.commit(path)
        case.cache.check()
        wanted = fresh(model, case.path_tokens(path))
        assert case.cache.length == wanted.length == case.prefix.shape[1] + len(path)
        assert worst_gap(memory_of(case.cache), memory_of(wanted)) <= limit
        following = random_tokens(draw, 1, 1)
        ours, theirs = (model.logits(model(following, c).final) for c in (case.cache, wanted))
        assert gap(ours, theirs) <= limit


@BOTH
def test_every_root_path_of_20_random_trees_commits_what_a_fresh_cache_holds(dtype: torch.dtype, dense: bool) -> None:
    model, draw, limit = tiny_model(2, dtype=dtype, layer_types=SMALL), seeded(3), TOLERANCE[dtype]
    for _ in range(20 if dense else 4):
        case = make_case(model, draw)
        following = random_tokens(draw, 1, 1)
        by_depth: dict[int, list[int]] = {}
        for node, depth in enumerate(case.topology.depths.tolist()):
            by_depth.setdefault(depth, []).append(node)
        for level in by_depth.values():
            paths = [case.topology.path(node) for node in level]
            wanted = fresh(model, torch.cat([case.path_tokens(path) for path in paths]))
            remembered = [memory_of(wanted, row) for row in range(len(level))]
            after = model.logits(model(following.expand(len(level), 1), wanted).final)
            for row, path in enumerate(paths):
                cache = case.cache.fork()
                model(case.nodes, cache.branch(case.topology))
                cache.commit(path)
                assert worst_gap(memory_of(cache), remembered[row]) <= limit
                assert gap(model.logits(model(following, cache).final)[0], after[row]) <= limit


@pytest.mark.case(25, 27)
def test_rotary_position_is_length_plus_depth_and_nodes_see_prefix_and_ancestors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, draw = tiny_model(4, dtype=torch.float64), seeded(5)
    case = make_case(model, draw, SIX, prefix=20)
    seen: list[list[int]] = []
    original = qwen_gdn.rope.rotation

    def spy(positions: Tensor, *rest: object) -> object:
        seen.append(positions.tolist())
        return original(positions, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(qwen_gdn.model, "rotation", spy)
    hidden = model(case.nodes, case.cache.branch(SIX))
    assert seen == [[20, 21, 21, 22, 22, 22]]
    assert ["".join(str(int(x)) for x in row) for row in SIX.ancestors] == VISIBLE
    assert gap(model.logits(hidden.final[0]), logits_of_paths_alone(model, case)) <= 1e-10


@pytest.mark.case(27)
@BOTH
def test_tokens_of_other_branches_change_nothing_bit_for_bit(dtype: torch.dtype, dense: bool) -> None:
    """Every node's output, and what a commit of its path leaves, whatever its siblings and descendants hold.

    An expert's product may be rounded by the number of rows that it gets.
    """
    model, draw, limit = tiny_model(6, dtype=dtype), seeded(7), 0.0 if dense else TOLERANCE[dtype]
    model.embed_tokens.weight[90:] *= 1e4  # the poison
    for topology in [SIX] + [random_topology(draw, 40, 8) for _ in range(8)]:
        case = make_case(model, draw, topology)
        case.nodes.clamp_(max=89)
        cache = case.cache.fork()
        clean = model(case.nodes, cache.branch(topology), capture=range(8))
        for node in {0, len(topology) - 1, *(randint(draw, 0, len(topology) - 1) for _ in range(4))}:
            path = topology.path(node)
            poisoned = torch.randint(90, 97, case.nodes.shape, generator=draw)
            poisoned[:, path] = case.nodes[:, path]
            left = []
            for tokens in (case.nodes, poisoned):
                one = case.cache.fork()
                hidden = model(tokens, one.branch(topology), capture=range(8))
                for ours, theirs in zip((hidden.final, *hidden.captured), (clean.final, *clean.captured), strict=True):
                    assert gap(ours[:, path], theirs[:, path]) <= limit
                one.commit(path)
                left.append(memory_of(one))
            assert same_bits(*left) or (not dense and worst_gap(*left) <= limit)


@pytest.mark.case(27)
def test_nodes_in_any_topological_order_give_the_same_logits() -> None:
    model, draw = tiny_model(8, dtype=torch.float64), seeded(9)
    case = make_case(model, draw, SIX, prefix=20)
    first = model(case.nodes, case.cache.fork().branch(SIX)).final[0]
    for order, parents in (
        ([0, 2, 1, 5, 4, 3], [-1, 0, 0, 1, 2, 2]),
        ([0, 1, 3, 4, 2, 5], [-1, 0, 1, 1, 0, 4]),
        ([0, 2, 5, 1, 4, 3], [-1, 0, 1, 0, 3, 3]),
    ):
        again = model(case.nodes[:, order], case.cache.fork().branch(Topology(parents))).final[0]
        assert gap(again, first[order]) <= 1e-10


@pytest.mark.case(28)
@BOTH
def test_decoding_after_a_scattered_path_equals_a_fresh_prefill(dtype: torch.dtype) -> None:
    """Every root path of a six-node tree, the root alone included, then eight plain tokens."""
    model, draw, limit = tiny_model(10, dtype=dtype), seeded(11), TOLERANCE[dtype]
    for prefix in (0, 2, 20):
        case = make_case(model, draw, SIX, prefix=prefix)
        more = random_tokens(draw, 1, 8)
        for node in range(6):
            cache, path = case.cache.fork(), SIX.path(node)
            model(case.nodes, cache.branch(SIX))
            cache.commit(torch.tensor(path))
            logits = torch.cat([model.logits(model(token, cache).final) for token in more.split(1, dim=1)], dim=1)
            wanted = fresh(model, torch.cat((case.path_tokens(path), more), dim=1))
            assert worst_gap(memory_of(cache), memory_of(wanted)) <= limit
            whole = model.logits(model(torch.cat((case.path_tokens(path), more), dim=1)).final)
            assert gap(logits, whole[:, -8:]) <= limit


@pytest.mark.case(26)
def test_sixty_rounds_of_single_file_trees_equal_the_chain_and_do_not_drift() -> None:
    model, draw = tiny_model(12, layer_types=SMALL), seeded(13)
    tree, chain = model.new_cache(400), model.new_cache(400)
    tokens: list[Tensor] = [random_tokens(draw, 1, 5)]
    for cache in (tree, chain):
        model(tokens[0], cache)
    drift = []
    for _ in range(60):
        block = random_tokens(draw, 1, randint(draw, 1, 8))
        accepted = randint(draw, 1, block.shape[1])
        hidden = model(block, tree.branch(Topology.chain(block.shape[1])))
        tree.commit(range(accepted))
        one_by_one = model(block[:, :accepted], chain)
        assert gap(hidden.final[:, :accepted], one_by_one.final) <= 2e-5
        tokens.append(block[:, :accepted])
        whole = model.new_cache(400)
        model(torch.cat(tokens, dim=1), whole)
        assert tree.length == chain.length == whole.length
        drift.append(worst_gap(memory_of(tree), memory_of(whole)))
    assert max(drift) <= 1e-4 and sum(drift[-20:]) <= 2 * sum(drift[:20]) + 20e-6


@pytest.mark.parametrize("batch", [2, 3])
def test_rows_of_a_batch_equal_their_own_runs(batch: int) -> None:
    model, draw = tiny_model(14, dtype=torch.float64), seeded(15)
    prefix, nodes = random_tokens(draw, batch, 9), random_tokens(draw, batch, 24)
    topology = random_topology(draw, 24, 7)
    path = topology.path(23)
    cache = model.new_cache(40, batch=batch, rollback=8)
    chain, tree = model(prefix, cache).final, model(nodes, cache.branch(topology)).final
    cache.commit(path)
    cache.crop(cache.length - 1)
    for row in range(batch):
        alone = model.new_cache(40, rollback=8)
        one = slice(row, row + 1)
        assert gap(chain[one], model(prefix[one], alone).final) <= 1e-12
        assert gap(tree[one], model(nodes[one], alone.branch(topology)).final) <= 1e-12
        alone.commit(path)
        alone.crop(alone.length - 1)
        assert worst_gap(memory_of(cache, row), memory_of(alone)) <= 1e-12
