"""Compiled delta rule and attention, float32, against float64: nearly equal keys, strong decay, any prefix length."""

import pytest
import torch
import torch.nn.functional as F
from delta_oracle import by_hand, draw_rows, gates
from tiny import gap, random_topology, seeded

from qwen_gdn.delta_rule import delta_window
from qwen_gdn.layer_cache import DeltaRows
from qwen_gdn.prefix import attend, attend_chain, attend_seen
from qwen_gdn.programs import Picked, Place, commit_delta
from qwen_gdn.recorded import compiled
from qwen_gdn.static_cache import StaticDelta

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {"usual": (0.9, 0.0), "nearly equal keys": (0.98, 0.97), "strong decay": (1e-30, 0.5)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nodes", [64, 256])
def test_a_tree_and_its_commit_are_as_exact_as_float32_allows(nodes: int, device: str) -> None:
    for number, (decay, alike) in enumerate(CASES.values()):
        draw = seeded(nodes + number)
        rows, state = draw_rows(draw, nodes, sizes=(1, 2, 32, 32), decay=decay, alike=alike)
        rows, state = rows.rows(slice(None)), state[:1]
        rows = type(rows)(*(x[:1] for x in rows))
        topology = random_topology(draw, nodes, max_depth=15 if number % 2 else 64)
        outputs, states = by_hand(rows, state, list(topology.parents))
        small = type(rows)(*(x.float().to(device) for x in rows))
        memory = StaticDelta(torch.cat((state, state)).float().to(device), torch.zeros(2, 3, 4, device=device))
        found, factors = compiled(delta_window)(
            small.q, small.k, small.v, **gates(small), state=memory.states[:1], ancestors=topology.ancestors.to(device)
        )
        assert gap(found.cpu(), outputs) <= 5e-6
        end = max(range(nodes), key=lambda node: int(topology.depths[node]))
        path = topology.path(end)
        padded = torch.tensor(path + [0] * (nodes - len(path)), device=device)
        place = Place(*(torch.tensor([n], device=device) for n in (9, 0)))
        picked = Picked(padded, torch.tensor([len(path)], device=device))
        columns = torch.arange(nodes, device=device)[None, :, None].expand(1, -1, 4).float()
        compiled(commit_delta)(memory, DeltaRows(factors, columns), place, picked)
        assert gap(memory.states[1:].cpu(), states[:, end]) <= 5e-6
        assert gap(memory.states[:1].cpu(), state.float()) == 0
        assert memory.columns[1, :, 0].tolist() == ([0.0] * 3 + [float(node) for node in path])[-3:]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_reads_the_prefix_and_the_tree(device: str, dtype: torch.dtype) -> None:
    """Every prefix length, none among them, by one compiled function; on CUDA in bf16 that is the flash kernel."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("bf16 takes another way on CUDA alone")
    draw = seeded(1)
    heads, groups, nodes, rows, width = 2, 3, 16, 5000, 64
    q, k, v, keys, values = (
        torch.randn(1, h, n, width, generator=draw, dtype=torch.float64).to(dtype)
        for h, n in ((heads * groups, nodes), (heads, nodes), (heads, nodes), (heads, rows), (heads, rows))
    )
    topology = random_topology(draw, nodes, max_depth=9)
    there = [x.to(device) for x in (q, k, v)]
    for length in (0, 1, 63, 64, 1000, 4999, 5000):
        found = compiled(attend)(
            *there, mask=topology.ancestors.to(device), keys=keys.to(device), values=values.to(device),
            length=torch.tensor([length], device=device),
        ).cpu()  # fmt: skip
        mask = torch.cat((torch.ones(nodes, length, dtype=torch.bool), topology.ancestors), dim=1)
        wanted = F.scaled_dot_product_attention(
            q.double(),
            torch.cat((keys[:, :, :length], k), 2).double(),
            torch.cat((values[:, :, :length], v), 2).double(),
            attn_mask=mask,
            enable_gqa=True,
        )
        assert gap(found, wanted) <= (5e-6 if dtype == torch.float32 else 1.5e-2), length


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_reads_the_prefix_and_the_rows_before(device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("bf16 takes another way on CUDA alone")
    draw = seeded(3)
    heads, groups, count, rows, width = 2, 3, 200, 1200, 64
    q, k, v, keys, values = (
        torch.randn(1, h, n, width, generator=draw, dtype=torch.float64).to(dtype)
        for h, n in ((heads * groups, count), (heads, count), (heads, count), (heads, rows), (heads, rows))
    )
    there = [x.to(device) for x in (q, k, v)]
    for length in (0, 1, 500, 1200):
        place = {"keys": keys.to(device), "values": values.to(device), "length": torch.tensor([length], device=device)}
        found = compiled(attend_chain)(*there, **place).cpu()
        wanted = F.scaled_dot_product_attention(
            q.double(),
            torch.cat((keys[:, :, :length], k), 2).double(),
            torch.cat((values[:, :, :length], v), 2).double(),
            attn_mask=torch.ones(count, length + count, dtype=torch.bool).tril(length),
            enable_gqa=True,
        )
        assert gap(found, wanted) <= (5e-6 if dtype == torch.float32 else 1.5e-2), length


def test_rows_can_be_seen_in_any_order() -> None:
    draw = seeded(2)
    q, k, v, keys, values = (
        torch.randn(1, h, n, 8, generator=draw, dtype=torch.float64)
        for h, n in ((4, 5), (2, 5), (2, 5), (2, 40), (2, 40))
    )
    seen, mask = torch.rand(5, 40, generator=draw) < 0.5, torch.ones(5, 5, dtype=torch.bool).tril()
    found = attend_seen(q, k, v, mask=mask, keys=keys, values=values, seen=seen)
    wanted = F.scaled_dot_product_attention(
        q, torch.cat((keys, k), 2), torch.cat((values, v), 2), attn_mask=torch.cat((seen, mask), 1), enable_gqa=True
    )
    assert gap(found, wanted) <= 1e-12
