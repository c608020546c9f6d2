"""The gated delta rule: hand values, and chunks, trees, commits and gradients against plain per-path loops."""

import pytest
import torch
from delta_oracle import Rows, by_hand, draw_rows, gates
from tiny import TOLERANCE, gap, randint, random_topology, seeded

from qwen_gdn import Topology, delta_chunked, delta_commit, delta_recurrent, delta_tree
from qwen_gdn.delta_rule import _inverse

BANDS = {"decay 0.999": 0.999, "decay 0.5": 0.5, "decay 1e-6": 1e-6}


HAND = Rows(
    q=torch.tensor([[1, 0], [0, 1], [0.6, 0.8]]).view(1, 3, 1, 2),
    k=torch.tensor([[1, 0], [0.6, 0.8], [0, 1]]).view(1, 3, 1, 2),
    v=torch.tensor([1.0, 2, -1]).view(1, 3, 1, 1),
    log_decay=torch.tensor([1, 0.5, 0.8]).log().view(1, 3, 1),
    beta=torch.tensor([0.5, 0.25, 1]).view(1, 3, 1),
).cast(torch.float64)
HAND_OUTPUTS = torch.tensor([0.353553, 0.261630, -0.386646], dtype=torch.float64)
HAND_STATES = torch.tensor([[0.5, 0], [0.5275, 0.37], [0.422, -1]], dtype=torch.float64)


@pytest.mark.case(2)
def test_hand_values_of_one_head() -> None:
    for T in (1, 2, 3):
        rows = HAND.rows(slice(T))
        outputs, final = delta_recurrent(rows.q, rows.k, rows.v, **gates(rows), state=None)
        torch.testing.assert_close(outputs.flatten(), HAND_OUTPUTS[:T], atol=1e-6, rtol=0)
        torch.testing.assert_close(final.flatten(), HAND_STATES[T - 1], atol=1e-6, rtol=0)
        for size in (1, 2, 3, 64):
            outputs, final = delta_chunked(rows.q, rows.k, rows.v, **gates(rows), state=None, chunk_size=size)
            torch.testing.assert_close(outputs.flatten(), HAND_OUTPUTS[:T], atol=1e-6, rtol=0)
            torch.testing.assert_close(final.flatten(), HAND_STATES[T - 1], atol=1e-6, rtol=0)
    outputs, factors = delta_tree(*HAND[:3], **gates(HAND), state=None, topology=Topology.chain(3))
    torch.testing.assert_close(outputs.flatten(), HAND_OUTPUTS, atol=1e-6, rtol=0)
    for n in (1, 2, 3):
        final = delta_commit(torch.zeros(1, 1, 2, 1, dtype=torch.float64), factors, range(n))
        torch.testing.assert_close(final.flatten(), HAND_STATES[n - 1], atol=1e-6, rtol=0)


@pytest.mark.case(2)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("decay", BANDS.values(), ids=BANDS)
def test_recurrence_and_chunks_agree_for_every_length(decay: float, dtype: torch.dtype) -> None:
    rows, state = draw_rows(seeded(1), 130, sizes=(1, 2, 6, 5), decay=decay)
    outputs, states = by_hand(rows, state)
    ours, final = delta_recurrent(*rows.cast(dtype)[:3], **gates(rows.cast(dtype)), state=state.to(dtype))
    assert max(gap(ours, outputs), gap(final, states[:, -1])) <= TOLERANCE[dtype]
    for T in range(1, 131):
        some = rows.cast(dtype).rows(slice(T))
        size = 64 if T % 2 else 1 + T % 33
        ours, final = delta_chunked(*some[:3], **gates(some), state=state.to(dtype), chunk_size=size)
        assert ours.dtype == final.dtype == dtype
        assert gap(ours, outputs[:, :T]) <= TOLERANCE[dtype], (T, size)
        assert gap(final, states[:, T - 1]) <= TOLERANCE[dtype], (T, size)


def test_a_decay_of_exactly_zero_forgets_and_is_no_fault() -> None:
    """Its logarithm is -inf."""
    rows, state = draw_rows(seeded(4), 40)
    rows = rows._replace(log_decay=rows.log_decay.masked_fill(torch.arange(40).view(1, 40, 1) % 7 == 3, -torch.inf))
    wanted, end = delta_recurrent(*rows[:3], **gates(rows), state=state)
    assert bool(wanted.isfinite().all())
    for size in (1, 5, 64):
        outputs, final = delta_chunked(*rows[:3], **gates(rows), state=state, chunk_size=size)
        assert max(gap(outputs, wanted), gap(final, end)) <= 1e-10
    outputs, factors = delta_tree(*rows[:3], **gates(rows), state=state, topology=Topology.chain(40))
    assert max(gap(outputs, wanted), gap(delta_commit(state, factors, range(40)), end)) <= 1e-10


def test_a_state_carried_across_calls_equals_one_call() -> None:
    rows, state = draw_rows(seeded(2), 150)
    outputs, states = by_hand(rows, state)
    for cuts in ([64, 86], [1, 149], [100, 49, 1], [3] * 50):
        S, parts, start = state, [], 0
        for n in cuts:
            some = rows.rows(slice(start, start + n))
            out, S = delta_chunked(*some[:3], **gates(some), state=S)
            parts.append(out)
            start += n
        assert max(gap(torch.cat(parts, dim=1), outputs), gap(S, states[:, -1])) <= 1e-10, cuts


@pytest.mark.case(2)
def test_inert_rows_change_nothing_whatever_they_hold() -> None:
    """Padding has no decay and no write strength; its keys, queries and values must not matter, bit for bit."""
    draw = seeded(3)
    rows, state = draw_rows(draw, 50)
    outputs, states = by_hand(rows, state)
    results = []
    for scale in (1.0, 1e3):
        pad, _ = draw_rows(draw, 27)
        pad = pad._replace(v=pad.v * scale, log_decay=torch.zeros_like(pad.beta), beta=torch.zeros_like(pad.beta))
        both = Rows(*(torch.cat(pair, dim=1) for pair in zip(rows, pad, strict=True)))
        out, final = delta_chunked(*both[:3], **gates(both), state=state)
        results.append((out[:, :50], final))
        assert max(gap(out[:, :50], outputs), gap(final, states[:, -1])) <= 1e-10
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


TREES = {
    "small": (40, 15, {}),
    "wide": (256, 6, {}),
    "deep": (256, 255, {}),
    "strong decay": (128, 60, {"decay": 1e-6}),
    "hardly any decay": (128, 60, {"decay": 0.999}),
    "nearly equal keys": (256, 255, {"alike": 0.98, "decay": 0.99}),
}


@pytest.mark.parametrize("name", TREES)
def test_tree_and_commit_equal_the_recurrence_along_every_path(name: str) -> None:
    nodes, depth, changes = TREES[name]
    draw = seeded(4)
    topologies = [random_topology(draw, nodes, depth) for _ in range(2)]
    topologies += [Topology.chain(nodes)] if depth >= nodes - 1 else []
    for topology in topologies:
        rows, state = draw_rows(draw, nodes, sizes=(1, 3, 8, 6), **changes)
        outputs, states = by_hand(rows, state, list(topology.parents))
        ours, factors = delta_tree(*rows[:3], **gates(rows), state=state, topology=topology)
        assert gap(ours, outputs) <= 1e-10
        for node in range(0, nodes, 1 + nodes // 40):
            path = topology.path(node)
            assert gap(delta_commit(state, factors, path), states[:, node]) <= 1e-10
        assert gap(delta_commit(state, factors, torch.tensor(path)), states[:, node]) <= 1e-10


@pytest.mark.parametrize("alike", [0.0, 0.98], ids=["random keys", "nearly equal keys"])
@pytest.mark.parametrize("nodes", [64, 256])
def test_float32_trees_round_no_worse_than_the_float32_recurrence(nodes: int, alike: float) -> None:
    draw = seeded(nodes)
    rows, state = draw_rows(draw, nodes, sizes=(1, 2, 128, 128), alike=alike, decay=0.95)
    for topology in (random_topology(draw, nodes, 43), Topology.chain(nodes)):
        outputs, states = by_hand(rows, state, list(topology.parents))
        single = rows.cast(torch.float32)
        ours, factors = delta_tree(*single[:3], **gates(single), state=state.float(), topology=topology)
        assert gap(ours, outputs) <= 2e-6
        deepest = int(topology.depths.argmax())
        committed = delta_commit(state.float(), factors, topology.path(deepest))
        assert gap(committed, states[:, deepest]) <= 1e-6
    ours, final = delta_chunked(*single[:3], **gates(single), state=state.float())
    assert max(gap(ours, outputs), gap(final, states[:, -1])) <= 2e-6


def test_float32_stays_finite_when_siblings_decay_very_differently() -> None:
    """A node may have decayed far less than an earlier sibling, or have forgotten everything."""
    topology = Topology([-1, 0, 0, 1, 1, 2, 3, 5])
    rows, state = draw_rows(seeded(5), 8)
    strong = torch.tensor([0.0, -300, -0.1, -2000, -1e-3, -90, 0, -500], dtype=torch.float64)
    rows = rows._replace(log_decay=strong[None, :, None].expand_as(rows.log_decay).contiguous())
    outputs, states = by_hand(rows, state, list(topology.parents))
    single = rows.cast(torch.float32)
    ours, factors = delta_tree(*single[:3], **gates(single), state=state.float(), topology=topology)
    assert gap(ours, outputs) <= 2e-6
    for node in range(8):
        assert gap(delta_commit(state.float(), factors, topology.path(node)), states[:, node]) <= 2e-6
    outputs, states = by_hand(rows, state)
    ours, final = delta_chunked(*single[:3], **gates(single), state=state.float(), chunk_size=4)
    assert max(gap(ours, outputs), gap(final, states[:, -1])) <= 2e-6


def test_nodes_in_any_topological_order_give_the_same_values() -> None:
    draw = seeded(6)
    rows, state = draw_rows(draw, 6)
    first, _ = delta_tree(*rows[:3], **gates(rows), state=state, topology=Topology([-1, 0, 0, 1, 1, 2]))
    order = [0, 2, 5, 1, 4, 3]  # old index of each new node
    moved = rows.rows(order)
    second, _ = delta_tree(*moved[:3], **gates(moved), state=state, topology=Topology([-1, 0, 1, 0, 3, 3]))
    assert gap(second, first[:, order]) <= 1e-12


def test_functions_leave_their_inputs_alone_and_an_empty_path_returns_the_state() -> None:
    rows, state = draw_rows(seeded(7), 9)
    before = [x.clone() for x in (*rows, state)]
    _, final = delta_chunked(*rows[:3], **gates(rows), state=state, chunk_size=4)
    _, factors = delta_tree(*rows[:3], **gates(rows), state=state, topology=Topology.chain(9))
    for path in ([0, 1, 2], torch.tensor([0, 1])):
        delta_commit(state, factors, path)
    assert all(torch.equal(a, b) for a, b in zip(before, (*rows, state), strict=True))
    assert torch.equal(delta_commit(state, factors, []), state)
    assert torch.equal(delta_commit(state, factors, torch.tensor([], dtype=torch.long)), state)
    assert final.untyped_storage().data_ptr() != state.untyped_storage().data_ptr()


def test_no_state_means_zeros_and_low_precision_inputs_are_computed_in_float32() -> None:
    rows, state = draw_rows(seeded(8), 20)
    zeros = torch.zeros_like(state)
    for function in (delta_recurrent, delta_chunked):
        for a, b in zip(
            function(*rows[:3], **gates(rows), state=None), function(*rows[:3], **gates(rows), state=zeros), strict=True
        ):
            assert torch.equal(a, b)
    topology = random_topology(seeded(9), 20, 9)
    out, factors = delta_tree(*rows[:3], **gates(rows), state=None, topology=topology)
    assert torch.equal(out, delta_tree(*rows[:3], **gates(rows), state=zeros, topology=topology)[0])
    low = rows.cast(torch.bfloat16)
    out, factors = delta_tree(*low[:3], **gates(low), state=None, topology=topology)
    exact, _ = by_hand(low.cast(torch.float64), zeros, list(topology.parents))
    assert out.dtype == torch.float32 and {t.dtype for t in factors} == {torch.float32}
    assert gap(out, exact) <= 2e-6


@pytest.mark.parametrize("T", [1, 5, 64, 70])
def test_gradients_through_chunks_equal_those_through_the_recurrence(T: int) -> None:
    draw = seeded(T)
    rows, state = draw_rows(draw, T, sizes=(2, 4, 5, 3))
    weights = [torch.randn(2, T, 4, 3, generator=draw).double(), torch.randn(2, 4, 5, 3, generator=draw).double()]
    found = []
    for function in (delta_recurrent, delta_chunked):
        leaves = [x.clone().requires_grad_() for x in (*rows, state)]
        q, k, v, log_decay, beta, start = leaves
        results = function(q, k, v, log_decay=log_decay, beta=beta, state=start)
        loss = torch.stack([(w * r.sin()).sum() for w, r in zip(weights, results, strict=True)]).sum()
        found.append(torch.autograd.grad(loss, leaves))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert bool(ours.isfinite().all())
        assert gap(ours, theirs) <= 1e-10


def test_gradients_stay_finite_under_strong_decay() -> None:
    rows, state = draw_rows(seeded(10), 64, decay=1e-30)
    leaves = [x.float().requires_grad_() for x in (*rows, state)]
    q, k, v, log_decay, beta, start = leaves
    out, final = delta_chunked(q, k, v, log_decay=log_decay, beta=beta, state=start)
    for gradient in torch.autograd.grad(out.sum() + final.sum(), leaves):
        assert bool(gradient.isfinite().all())


def test_rows_of_a_batch_do_not_meet() -> None:
    draw = seeded(11)
    rows, state = draw_rows(draw, 30)
    topology = random_topology(draw, 30, randint(draw, 3, 12))
    both, factors = delta_tree(*rows[:3], **gates(rows), state=state, topology=topology)
    for b in range(2):
        one = Rows(*(x[b : b + 1] for x in rows))
        alone, own = delta_tree(*one[:3], **gates(one), state=state[b : b + 1], topology=topology)
        assert gap(both[b : b + 1], alone) <= 1e-12
        assert max(gap(x[b : b + 1], y) for x, y in zip(factors, own, strict=True)) <= 1e-12


@pytest.mark.parametrize("count", [2, 16, 17, 33, 64, 100, 256])
def test_a_system_is_inverted_by_blocks_of_any_number(count: int) -> None:
    """Keys that are all but equal make every entry large."""
    x = (0.9 + 0.1 * torch.rand(2, 3, count, count, generator=seeded(count), dtype=torch.float64)).tril(-1)
    wanted = torch.linalg.inv(x + torch.eye(count, dtype=torch.float64))
    assert gap(_inverse(x), wanted) <= 1e-12
    assert gap(_inverse(x.float()), wanted) <= 5e-6
