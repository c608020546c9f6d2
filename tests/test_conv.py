"""The causal convolution: hand values for every split, trees against their paths, tails shorter than the filter."""

from typing import cast

import pytest
import torch
from tiny import gap, memory_of, random_tokens, random_topology, seeded, tiny_model
from torch import Tensor

from qwen_gdn import DeltaCache, Topology
from qwen_gdn.conv import chain_conv, tree_conv
from qwen_gdn.lanes import ChainDelta

TAPS = torch.tensor([[[1.0, 2, 3, 4]]])  # one channel
INPUTS = torch.tensor([1.0, 2, 3, 4, 5]).view(1, 5, 1)
OUTPUTS = [4.0, 11, 20, 30, 40]


def feed(layer: DeltaCache, columns: Tensor) -> tuple[Tensor, DeltaCache]:
    """Convolves the next columns of a delta layer with one head of K = V = 1 and returns its memory after them."""
    lane = ChainDelta(layer)
    out = lane.convolve(columns, TAPS)
    rows = torch.zeros(1, columns.shape[1], 1)
    lane.mix(rows[..., None], rows[..., None], rows[..., None], log_decay=rows, beta=rows)
    return out, cast(DeltaCache, lane.committed())


@pytest.mark.case(4)
@pytest.mark.parametrize("split", [[5], [1] * 5, [1, 4], [2, 3], [3, 2], [4, 1], [2, 1, 2]], ids=str)
def test_hand_values_and_tail_whatever_the_split(split: list[int]) -> None:
    layer = DeltaCache(torch.zeros(1, 1, 1, 1), torch.zeros(1, 3, 1))
    parts, seen = [], 0
    for part in INPUTS.split(split, dim=1):
        out, layer = feed(layer, part)
        parts.append(out)
        seen += part.shape[1]
        tail = [0, 0, 0, *range(1, seen + 1)][-3:]
        assert layer.columns.flatten().tolist() == tail
    assert torch.cat(parts, dim=1).flatten().tolist() == OUTPUTS


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 9])
def test_tree_windows_follow_the_path_and_then_the_committed_columns(width: int) -> None:
    draw = seeded(width)
    for _ in range(20):
        topology = random_topology(draw, 24, 8)
        committed, nodes = (torch.randn(2, n, 5, generator=draw).double() for n in (width - 1, len(topology)))
        weight = torch.randn(5, 1, width, generator=draw).double()
        ours = tree_conv(torch.cat((committed, nodes), dim=1), weight, topology.windows(width))
        for node in range(len(topology)):
            path = torch.cat((committed, nodes[:, topology.path(node)]), dim=1)[:, -width:]
            assert gap(ours[:, node], torch.einsum("bwc,cw->bc", path, weight[:, 0])) <= 1e-12


def test_tree_windows_of_other_branches_do_not_matter_bit_for_bit() -> None:
    draw = seeded(1)
    topology = Topology([-1, 0, 0, 1, 1, 2])
    columns, weight = torch.randn(1, 9, 64, generator=draw), torch.randn(64, 1, 4, generator=draw)
    before = tree_conv(columns, weight, topology.windows(4))
    for node in range(6):
        others = [3 + i for i in range(6) if i not in topology.path(node)]
        poisoned = columns.clone()
        poisoned[:, others] = 1e6
        assert torch.equal(tree_conv(poisoned, weight, topology.windows(4))[:, node], before[:, node])


def test_a_tree_that_is_a_chain_convolves_like_a_chain() -> None:
    draw = seeded(2)
    columns, weight = torch.randn(2, 13, 7, generator=draw).double(), torch.randn(7, 1, 4, generator=draw).double()
    chain = chain_conv(columns, weight)
    assert chain.shape == (2, 10, 7)
    assert gap(tree_conv(columns, weight, Topology.chain(10).windows(4)), chain) <= 1e-12


@pytest.mark.case(28)
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_committed_tails_cross_into_the_prefix_when_the_path_is_short(width: int) -> None:
    """Prefixes and paths shorter than W − 1, alone and together, leave the columns a chain would have left."""
    model = tiny_model(
        3, dtype=torch.float64, linear_conv_kernel_dim=width, layer_types=["linear_attention", "full_attention"]
    )
    draw = seeded(4)
    topology = Topology([-1, 0, 0, 2, 2, 4, 1])
    for prefix in range(4):
        for node in range(len(topology)):
            path = topology.path(node)
            before, nodes = random_tokens(draw, 1, prefix), random_tokens(draw, 1, 7)
            cache, fresh = model.new_cache(20), model.new_cache(20)
            if prefix:
                model(before, cache)
            model(nodes, cache.branch(topology))
            cache.commit(path)
            model(torch.cat((before, nodes[:, path]), dim=1), fresh)
            assert max(gap(a, b) for a, b in zip(memory_of(cache), memory_of(fresh), strict=True)) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_taps_are_summed_in_float32_by_chains_and_trees_alike(dtype: torch.dtype) -> None:
    """Rounding after every tap makes a verify and a plain step disagree more often than they must."""
    draw = seeded(5)
    columns, weight = torch.randn(1, 203, 64, generator=draw).to(dtype), torch.randn(64, 1, 4, generator=draw).to(dtype)
    exact = chain_conv(columns.double(), weight.double())
    rounded_once = gap_of_means(chain_conv(columns.float(), weight.float()).to(dtype), exact)
    for ours in (chain_conv(columns, weight), tree_conv(columns, weight, Topology.chain(200).windows(4))):
        assert ours.dtype == dtype
        assert gap_of_means(ours, exact) <= 1.05 * rounded_once


def gap_of_means(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).abs().mean() / exact.abs().mean())
