"""Compiled delta rule and attention, float32, against float64: nearly equal keys, strong decay, any prefix length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_oracle import by_hand, draw_rows, gates
from tiny import gap, random_topology, seeded
from torch import Tensor

from qwen_gdn.delta_rule import delta_window
from qwen_gdn.layer_cache import DeltaRows
from qwen_gdn.prefix import _alone, _masked, attend, attend_chain, attend_seen
from qwen_gdn.programs import commit_delta, picked_rows
from qwen_gdn.recorded import compiled
from qwen_gdn.static_cache import StaticDelta

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {"usual": (0.9, 0.0), "nearly equal keys": (0.98, 0.97), "strong decay": (1e-30, 0.5)}


def _as_it_stands(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nodes", [64, 256])
def test_a_tree_and_its_commit_are_as_exact_as_float32_allows(nodes: int, device: str) -> None:
    form = compiled if nodes == 64 or device == "cuda" else _as_it_stands  # one size tells what a compiler makes of it
    for number, (decay, alike) in enumerate(CASES.values()):
        draw = seeded(nodes + number)
        rows, state = draw_rows(draw, nodes, sizes=(1, 2, 32, 32), decay=decay, alike=alike)
        rows, state = rows.rows(slice(None)), state[:1]
        rows = type(rows)(*(x[:1] for x in rows))
        topology = random_topology(draw, nodes, max_depth=15 if number % 2 else 64)
        outputs, states = by_hand(rows, state, list(topology.parents))
        small = type(rows)(*(x.float().to(device) for x in rows))
        before, none = state.float().to(device), torch.zeros(1, 3, 4, device=device)
        memory = StaticDelta(before.clone(), none, before.clone(), none.clone())
        found, factors = form(delta_window)(
            small.q, small.k, small.v, **gates(small), state=memory.state, ancestors=topology.ancestors.to(device)
        )
        assert gap(found.cpu(), outputs) <= 5e-6
        end = max(range(nodes), key=lambda node: int(topology.depths[node]))
        path = topology.path(end)
        padded = torch.tensor(path + [0] * (nodes - len(path)), device=device)
        columns = torch.arange(nodes, device=device)[None, :, None].expand(1, -1, 4).float()
        picked = form(picked_rows)([DeltaRows(factors, columns)], padded)
        form(commit_delta)(memory, *picked, torch.tensor([len(path)], device=device))
        assert gap(memory.next_state.cpu(), states[:, end]) <= 5e-6
        assert torch.equal(memory.state, before)
        assert memory.next_columns[0, :, 0].tolist() == ([0.0] * 3 + [float(node) for node in path])[-3:]


FORMS = [
    ("cpu", torch.float32, 5e-6),
    pytest.param("cuda", torch.float32, 5e-6, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, 1.5e-2, marks=pytest.mark.gpu),  # by the flash kernel
]


def draw_attention(seed: int, new: int, rows: int, *, groups: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of new rows and the keys and values of a prefix, two key heads."""
    draw = seeded(seed)
    return [
        torch.randn(1, heads, count, width, generator=draw, dtype=torch.float64).to(dtype)
        for heads, count in ((2 * groups, new), (2, new), (2, new), (2, rows), (2, rows))
    ]


def exact(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """In float64, of rows that see a prefix and each other as the mask [N, rows + N] says."""
    joined = (torch.cat(pair, dim=2).double() for pair in ((keys, k), (values, v)))
    return F.scaled_dot_product_attention(q.double(), *joined, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), FORMS)
def test_attention_reads_the_prefix_and_the_tree(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Every prefix length, none among them, by one compiled function."""
    nodes = 16
    q, k, v, keys, values = draw_attention(1, nodes, 5000, groups=3, width=64, dtype=dtype)
    tree = random_topology(seeded(1), nodes, max_depth=9).ancestors
    there = {"mask": tree.to(device), "keys": keys.to(device), "values": values.to(device)}
    for length in (0, 1, 63, 64, 1000, 4999, 5000):
        new = (x.to(device) for x in (q, k, v))
        found = compiled(attend)(*new, **there, length=torch.tensor([length], device=device)).cpu()
        mask = torch.cat((torch.ones(nodes, length, dtype=torch.bool), tree), dim=1)
        assert gap(found, exact(q, k, v, keys[:, :, :length], values[:, :, :length], mask)) <= tolerance, length


@pytest.mark.parametrize(("device", "dtype", "tolerance"), FORMS)
def test_attention_reads_the_prefix_and_the_rows_before(device: str, dtype: torch.dtype, tolerance: float) -> None:
    count = 200
    q, k, v, keys, values = draw_attention(3, count, 1200, groups=3, width=64, dtype=dtype)
    there = {"keys": keys.to(device), "values": values.to(device)}
    for length in (0, 1, 500, 1200):
        new = (x.to(device) for x in (q, k, v))
        found = compiled(attend_chain)(*new, **there, length=torch.tensor([length], device=device)).cpu()
        mask = torch.ones(count, length + count, dtype=torch.bool).tril(length)
        assert gap(found, exact(q, k, v, keys[:, :, :length], values[:, :, :length], mask)) <= tolerance, length


def test_one_row_sees_itself_as_a_window_of_one() -> None:
    q, k, v, *_ = draw_attention(5, 1, 1, groups=3, width=16, dtype=torch.float64)
    folded, k, v = q.view(2, 3, 16), k[0], v[0]
    found, wanted = _alone(folded, k, v), _masked(folded, k, v, torch.ones(3, 1, dtype=torch.bool))
    assert gap(found.out.expand_as(wanted.out), wanted.out) <= 1e-6 and gap(found.weight, wanted.weight) <= 1e-6


def test_rows_can_be_seen_in_any_order() -> None:
    q, k, v, keys, values = draw_attention(2, 5, 40, groups=2, width=8, dtype=torch.float64)
    seen, mask = torch.rand(5, 40, generator=seeded(4)) < 0.5, torch.ones(5, 5, dtype=torch.bool).tril()
    found = attend_seen(q, k, v, mask=mask, keys=keys, values=values, seen=seen)
    assert gap(found, exact(q, k, v, keys, values, torch.cat((seen, mask), dim=1))) <= 1e-12
