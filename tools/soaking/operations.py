"""What can be done to a cache: when it may be, and what it does to the reference.

An operation is planned first, with all dice thrown and all of the reference's own forwards run, and then run; so a
failure planted in the run hits the product alone, and the text of the plan can be kept whatever becomes of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from tiny import random_topology, seeded

from qwen_gdn import Topology, prefill

from .generations import plan_decode, plan_generate
from .held import Held, Plan, Window
from .refusals import plan_refusal, refused
from .world import MOST, World

NODES = 40  # of a tree, at most: more than the largest program of an engine takes
DEPTH = 12


class Operation(NamedTuple):
    """One kind: how often, when it may be done, how one of it is planned, and whether failures are planted in it."""

    name: str
    weight: int
    ready: Callable[[World, Held], bool]
    plan: Callable[[World, Held], Plan]
    breakable: bool = True


def closed(world: World, held: Held) -> bool:
    return held.window is None


def has_room(world: World, held: Held) -> bool:
    return held.window is None and held.room > 0


def unfilled(world: World, held: Held) -> bool:
    return held.window is not None and held.window.final is None


def filled(world: World, held: Held) -> bool:
    return held.window is not None and held.window.final is not None


def one_of_several(world: World, held: Held) -> bool:
    return len(world.held) > 1


def room_for_another(world: World, held: Held) -> bool:
    return len(world.held) < MOST


def always(world: World, held: Held) -> bool:
    return True


def plan_prefill(world: World, held: Held) -> Plan:
    count = world.dice.randint(1, min(held.room, 40))
    tokens, window = world.ids(count), world.dice.randint(1, 30)

    def run() -> None:
        # every window is committed by itself
        with held.adding(tokens, clean=range(0, count, window)):
            last = prefill(world.model, torch.tensor([tokens]), held.cache, window=window)
        held.rows = last

    return Plan(f"prefill {count} tokens in windows of {window}", run)


def plan_step(world: World, held: Held) -> Plan:
    tokens = world.ids(1)

    def run() -> None:
        with held.adding(tokens):
            hidden = world.model(torch.tensor([tokens]), held.cache)
        held.rows = hidden.final[0]

    return Plan(f"step {tokens[0]}", run)


def plan_verify(world: World, held: Held) -> Plan:
    depth = min(DEPTH, held.room - 1)
    nodes = world.dice.randint(1, NODES if depth else 1)
    topology = random_topology(seeded(world.dice.getrandbits(31)), nodes, depth)
    tokens = world.ids(nodes)
    return Plan(f"verify {list(topology.parents)}", lambda: _verify(world, held, topology, tokens))


def plan_verify_again(world: World, held: Held) -> Plan:
    """The forward of a window whose first one failed."""
    return Plan("verify again", lambda: _fill(world, held))


def plan_commit(world: World, held: Held) -> Plan:
    assert held.window is not None
    topology = held.window.topology
    path = topology.path(world.dice.randrange(len(topology))) if world.dice.random() < 0.9 else []
    return Plan(f"commit {path}", lambda: _commit(held, path))


def plan_discard(world: World, held: Held) -> Plan:
    def run() -> None:
        held.cache.discard()
        held.window = None

    return Plan("discard", run)


def plan_chain(world: World, held: Held) -> Plan:
    count = world.dice.randint(1, min(held.room, 36))
    tokens, kept = world.ids(count), world.dice.randint(1, count)

    def run() -> None:
        _verify(world, held, Topology.chain(count), tokens)
        _commit(held, list(range(kept)))

    return Plan(f"chain of {count}, {kept} kept", run)


def plan_crop(world: World, held: Held) -> Plan:
    length, floor = len(held.tokens), held.cache.crop_floor
    wanted = world.dice.choice((0, length, world.dice.randint(0, length), world.dice.randint(floor, length)))

    def run() -> None:
        if 0 < wanted < floor:
            refused(lambda: held.cache.crop(wanted), ValueError)
        else:
            held.cache.crop(wanted)
            held.cut(wanted)

    return Plan(f"crop {length} to {wanted}, floor {floor}", run)


def plan_fork(world: World, held: Held) -> Plan:
    ways = ("the copy goes on", "the original goes on") + (("both go on",) if room_for_another(world, held) else ())
    way = world.dice.choice(ways)

    def run() -> None:
        copy = held.cache.fork()
        if way != "the original goes on":
            world.adopt(copy, held)
        if way == "the copy goes on":
            world.held.remove(held)

    return Plan(f"fork, {way}", run)


def plan_new(world: World, held: Held) -> Plan:
    return Plan("new cache", world.new)


def plan_drop(world: World, held: Held) -> Plan:
    return Plan("drop", lambda: world.held.remove(held))


# Dropping a cache calls nothing that could be broken off.
OPERATIONS = (
    Operation("prefill", 4, has_room, plan_prefill),
    Operation("step", 6, has_room, plan_step),
    Operation("verify", 8, has_room, plan_verify),
    Operation("verify again", 12, unfilled, plan_verify_again),
    Operation("commit", 16, filled, plan_commit),
    Operation("discard", 6, lambda world, held: not closed(world, held), plan_discard),
    Operation("chain round", 4, has_room, plan_chain),
    Operation("crop", 4, closed, plan_crop),
    Operation("fork", 3, closed, plan_fork),
    Operation("new", 2, room_for_another, plan_new),
    Operation("drop", 1, one_of_several, plan_drop, breakable=False),
    Operation("decode", 3, has_room, plan_decode),
    Operation("generate", 6, has_room, plan_generate),
    Operation("refusal", 3, always, plan_refusal),
)


def _verify(world: World, held: Held, topology: Topology, tokens: list[int]) -> None:
    held.opening = True
    held.window = Window(held.cache.branch(topology), topology, tokens)
    held.opening = False
    _fill(world, held)


def _fill(world: World, held: Held) -> None:
    assert held.window is not None
    held.window.final = world.model(torch.tensor([held.window.tokens]), held.window.branch).final[0]


def _commit(held: Held, path: list[int]) -> None:
    window = held.window
    assert window is not None and window.final is not None
    with held.adding([window.tokens[node] for node in path]):
        held.cache.commit(path)
    held.window, held.rows = None, window.final[path] if path else None
