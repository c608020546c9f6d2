"""Automatic budgets in worlds of known cost and acceptance, against the best of all fixed budgets there."""

from itertools import pairwise

import pytest
from worlds import MOST, Machine, auto, begun, best, fixed, places

SIZES = (16, 32, 64, 128)


def eager(nodes: int, context: int) -> float:
    """A small model on a CPU."""
    return 0.011 if nodes == 0 else 0.0207 + 0.0003 * nodes


def dear(nodes: int, context: int) -> float:
    """Every node costs half a step of one token."""
    return 0.01 if nodes == 0 else 0.012 + 0.005 * nodes


def free(nodes: int, context: int) -> float:
    """Memory alone counts, however many nodes."""
    return 0.01 if nodes == 0 else 0.013


def stairs(nodes: int, context: int) -> float:
    """Programs of some sizes, the larger ones ever dearer."""
    steps = {1: 0.018, 16: 0.0224, 32: 0.0232, 64: 0.0258, 128: 0.034}
    return 0.015 if nodes == 0 else next(cost for size, cost in steps.items() if size >= nodes)


WORLDS = {"eager": (eager, ()), "dear": (dear, ()), "free": (free, ()), "stairs": (stairs, SIZES)}


@pytest.mark.parametrize("sharp", [1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_as_good_as_the_best_fixed_budget(world: str, sharp: float) -> None:
    cost, sizes = WORLDS[world]
    there = places(250, seed=int(sharp), sharp=sharp)
    machine = Machine(cost, noise=0.05)
    budget = begun(machine, *sizes)
    auto(budget, machine, there[:60])  # learns the machine
    run = auto(budget, machine, there[60:])
    plain, highest = fixed(None, there[60:], cost).rate, best(there[60:], cost)
    # Where plain rounds are best, looks at drafting cost what they may.
    assert run.rate >= (0.95 if plain == highest else 0.98) * highest, (run.rate, highest, run.nodes)


@pytest.mark.parametrize("most", [1, 2, 14])
def test_a_low_limit_is_kept(most: int) -> None:
    machine = Machine(eager, noise=0.05)
    run = auto(begun(machine, most=most), machine, places(250, seed=4, sharp=4.0)[:60])
    assert max(nodes for nodes in run.nodes if nodes is not None) == most, run.nodes


def test_a_clock_that_stands_still_at_first_teaches_nothing() -> None:
    there = places(250, seed=4, sharp=4.0)
    machine = Machine(lambda nodes, context: 0.0)
    budget = begun(machine)
    run = auto(budget, machine, there[:10])
    assert not budget.costs and {*run.nodes} == {15}, run.nodes
    machine.cost = eager
    run = auto(budget, machine, there[10:200])
    assert run.rate >= 0.9 * best(there[10:200], eager)


def test_what_a_size_has_paid_for_is_used_to_the_last_node() -> None:
    machine = Machine(stairs, noise=0.01)
    budget = begun(machine, *SIZES)
    run = auto(budget, machine, places(250, seed=4, sharp=4.0)[:120])
    drafted = [nodes for nodes in run.nodes if nodes is not None]
    assert {*drafted[4:]} <= {0, 15, 31, 63} and len({*drafted}) > 1


def test_a_hopeless_drafter_is_left_alone_within_a_few_rounds() -> None:
    there = places(250, sharp=6.0, shift=-30.0)
    for cost, sizes in ((eager, ()), (stairs, SIZES)):
        machine = Machine(cost, noise=0.05)
        budget = begun(machine, *sizes)
        run = auto(budget, machine, there)
        assert sum(nodes is not None for nodes in run.nodes[:20]) <= 12, run.nodes[:20]
        looks = [i for i, nodes in enumerate(run.nodes) if nodes is not None and i > 20]
        gaps = [b - a for a, b in pairwise(looks)]
        assert max(gaps) > 20 and min(gaps[-4:]) >= 15, looks
        plain = fixed(None, there, cost)
        assert run.rate > 0.93 * plain.rate, "with all that had to be learnt"
        assert auto(budget, machine, there).rate > 0.97 * plain.rate


def test_a_drafter_that_recovers_is_taken_up_again() -> None:
    lost, found = places(250, sharp=6.0, shift=-30.0), places(200, seed=1, sharp=6.0)
    for cost, sizes in ((eager, ()), (stairs, SIZES)):
        machine = Machine(cost, noise=0.05)
        budget = begun(machine, *sizes)
        auto(budget, machine, found[:40])
        away = auto(budget, machine, lost[:100])
        assert away.nodes[-10:].count(None) >= 9
        back = auto(budget, machine, found)
        assert next(i for i, nodes in enumerate(back.nodes) if nodes is not None) <= 60
        assert sum(nodes is None for nodes in back.nodes[80:]) < 10, back.nodes
        budget.begin(budget.owner)  # type: ignore[attr-defined]
        auto(budget, machine, lost[:100])
        budget.begin(budget.owner)  # type: ignore[attr-defined]
        again = auto(budget, machine, found[:20]).nodes
        assert again[0] is not None and again.count(None) < 8, again


@pytest.mark.parametrize("most", [1, 4, 200])
def test_no_round_drafts_more_than_it_may(most: int) -> None:
    machine = Machine(free, noise=0.05)
    run = auto(begun(machine, most=most), machine, places(250, seed=4, sharp=4.0)[:60])
    assert max(nodes or 0 for nodes in run.nodes) == min(most, MOST)
