"""Topology against a walk up the parent pointers, on random trees and by hand."""

import random

import pytest
import torch

from qwen_gdn.topology import Topology

HAND = [-1, 0, 0, 1, 1, 2]


def random_parents(rng: random.Random, most: int = 40) -> list[int]:
    n = rng.randint(1, most)
    narrow = rng.choice([1, 3, most])  # chains, thin trees and bushy ones
    return [-1, *(rng.randint(max(0, i - narrow), i - 1) for i in range(1, n))]


def climb(parents: list[int], node: int) -> list[int]:
    """Root path of a node, by following parents."""
    up = []
    while node >= 0:
        up.append(node)
        node = parents[node]
    return up[::-1]


TREES = [random_parents(random.Random(seed)) for seed in range(200)]


def test_ancestors_depths_and_paths_equal_a_walk_up_the_parents():
    for parents in TREES:
        topology = Topology(parents)
        paths = [climb(parents, i) for i in range(len(parents))]
        assert len(topology) == len(parents)
        assert [topology.path(i) for i in range(len(parents))] == paths
        assert topology.depths.tolist() == [len(path) - 1 for path in paths]
        assert topology.max_depth == max(len(path) - 1 for path in paths)
        assert topology.ancestors.tolist() == [[j in path for j in range(len(parents))] for path in paths]
        assert topology.depths.dtype == torch.int64
        assert topology.ancestors.dtype == torch.bool


@pytest.mark.case(27)
def test_no_node_sees_a_sibling_that_comes_earlier_in_the_list():
    rows = ["".join(str(int(seen)) for seen in row) for row in Topology(HAND).ancestors.tolist()]
    assert rows == ["100000", "110000", "101000", "110100", "110010", "101001"]
    assert Topology(HAND).depths.tolist() == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_a_window_is_the_end_of_the_committed_columns_followed_by_the_path(width):
    for parents in TREES[::4]:
        committed = list(range(width - 1))
        columns = [
            [*committed, *(width - 1 + node for node in climb(parents, i))][-width:] for i in range(len(parents))
        ]
        windows = Topology(parents).windows(width)
        assert windows.tolist() == columns
        assert windows.dtype == torch.int64


def test_every_prefix_of_a_root_path_is_a_path_in_any_form():
    for parents in TREES[::4]:
        topology = Topology(parents)
        path = climb(parents, len(parents) - 1)
        for cut in range(len(path) + 1):
            assert topology.check_path(path[:cut]) == path[:cut]
            assert topology.check_path(tuple(path[:cut])) == path[:cut]
            assert topology.check_path(torch.tensor(path[:cut], dtype=torch.int64)) == path[:cut]


def test_a_sequence_of_nodes_passes_only_if_it_is_a_root_path():
    refused = 0
    for seed, parents in enumerate(TREES):
        rng = random.Random(seed)
        right = climb(parents, rng.randrange(len(parents)))
        nodes = [n if rng.random() < 0.9 else rng.randint(-2, len(parents)) for n in right]
        if rng.random() < 0.3:
            nodes.insert(rng.randint(0, len(nodes)), rng.choice(nodes))
        topology = Topology(parents)
        in_range = all(0 <= n < len(parents) for n in nodes)
        if in_range and nodes == climb(parents, nodes[-1]):
            assert topology.check_path(nodes) == nodes
        else:
            refused += 1
            with pytest.raises(ValueError, match=r"^path: node -?\d+ at step \d+ "):
                topology.check_path(nodes)
    assert 50 < refused < 150


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ([1], "node 1 at step 0 is no child of a root path's start"),
        ([0, 3], "node 3 at step 1 is no child of node 0"),
        ([0, 1, 2], "node 2 at step 2 is no child of node 1"),
        ([0, 0], "node 0 at step 1 is no child of node 0"),
        ([0, 1, 3, 4], "node 4 at step 3 is no child of node 3"),
        ([0, 6], "node 6 at step 1 is outside"),
        ([-1], "node -1 at step 0 is outside"),
    ],
)
def test_the_first_wrong_step_of_a_path_is_named(path, fault):
    for form in (path, torch.tensor(path)):
        with pytest.raises(ValueError, match=fault):
            Topology(HAND).check_path(form)


@pytest.mark.parametrize("node", [-1, 6, 1.5, None, True, "1"])
def test_the_path_of_a_node_that_is_not_there_is_refused(node):
    with pytest.raises(ValueError, match="outside"):
        Topology(HAND).path(node)


@pytest.mark.parametrize(
    "parents", [[], [0], [1, -1], [-1, 1], [-1, 0, 3, 1], [-1, -1], [-1, 0, -2], [-1, 0, 2]], ids=str
)
def test_parents_that_are_no_tree_in_order_are_refused(parents):
    for form in (parents, torch.tensor(parents, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"^topology: "):
            Topology(form)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_chain_sees_everything_before_it(n):
    chain = Topology.chain(n)
    assert chain == Topology(list(range(-1, n - 1)))
    assert torch.equal(chain.ancestors, torch.ones(n, n, dtype=torch.bool).tril())
    assert chain.depths.tolist() == list(range(n))


def test_topologies_are_values_and_do_not_follow_the_list_they_were_made_from():
    parents = list(HAND)
    topology = Topology(parents)
    parents[5] = 0
    assert topology == Topology(torch.tensor(HAND))
    assert hash(topology) == hash(Topology(HAND))
    assert topology != Topology(parents)
    assert topology != HAND
    assert eval(repr(topology)) == topology


@pytest.mark.parametrize("name", ["parents", "max_depth"])
def test_the_shape_of_a_topology_cannot_be_replaced(name):
    topology = Topology(HAND)
    with pytest.raises(AttributeError):
        setattr(topology, name, (1,))
    assert topology == Topology(HAND)
