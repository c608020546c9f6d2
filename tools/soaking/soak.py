"""One seed: operations at random, each followed by a comparison, and the bytes alive at certain marks."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tiny import memory_of, same_bits

from qwen_gdn import QwenGDN

from .faults import Fault, is_injected, random_fault
from .held import Held, Plan, require
from .live import live_bytes
from .operations import OPERATIONS, Operation
from .runners import new_runner
from .world import World

MARK = 500  # operations between two counts of what is alive
SWEEP = 25  # operations between two comparisons of all caches
LAST = 12  # operations that a failure shows
FAULTS = 0.4  # of the operations have a failure planted


class Failure(NamedTuple):
    """The operation that failed, counted from 1, and the last ones with it."""

    seed: int
    operation: int
    message: str
    last: list[str]


class Outcome(NamedTuple):
    """What one seed came to.

    worst: the largest gap, max|a − b| / max|b|.
    done: operations by kind; `failures` are planted ones that hit.
    live: operation -> bytes alive.
    """

    seed: int
    operations: int
    worst: float
    done: dict[str, int]
    live: dict[int, int]
    failure: Failure | None


def soak(
    seed: int, count: int, kind: str, model: QwenGDN, oracle: QwenGDN, every: int, on_operation: Callable[[], object]
) -> Outcome:
    """Runs `count` operations, comparing after each `every`-th; what depends on the seed depends on nothing else."""
    runner = new_runner(kind, model)
    live = {0: live_bytes(runner)}
    world, last = World(seed, runner, oracle), deque[str](maxlen=LAST)
    failure, number = None, 0
    try:
        for number in range(1, count + 1):
            _turn(world, kind, model, last, number, number % every == 0)
            on_operation()
            if number % MARK == 0 or number == count:
                live[number] = _count(world, live[0])
    except Exception as error:  # whatever the product raises unasked is a finding
        failure = Failure(seed, number, f"{type(error).__name__}: {error}", list(last))
    return Outcome(seed, number, world.worst, dict(sorted(world.done.items())), live, failure)


def _turn(world: World, kind: str, model: QwenGDN, last: deque[str], number: int, thorough: bool) -> None:
    """One operation on one cache, perhaps with a failure, and the comparison."""
    dice = world.dice
    if not world.held:
        world.new()
    held = dice.choice(world.held)
    ready = [operation for operation in OPERATIONS if operation.ready(world, held)]
    operation: Operation = dice.choices(ready, [operation.weight for operation in ready])[0]
    plan = operation.plan(world, held)
    fault = random_fault(dice, model, kind) if operation.breakable and dice.random() < FAULTS else None
    last.append(f"{number}: {held.name} {plan.text}{f', {fault.text}' if fault else ''}")
    held.rows, held.emitted = None, []
    before, bits = list(held.tokens), memory_of(held.cache)
    if _ran(plan, held, fault):
        world.done[operation.name] += 1
    else:
        world.done["failures"] += 1
        last[-1] += " (hit)"
    world.glance()
    if held.tokens == before:
        require(same_bits(memory_of(held.cache), bits), f"{held.name}'s memory was changed, and no token committed")
    if thorough:
        for one in (
            world.held if number % SWEEP == 0 else [one for one in world.held if one is held or not one.compared]
        ):
            world.compare(one)


def _ran(plan: Plan, held: Held, fault: Fault | None) -> bool:
    """Whether the plan was run, and not broken off by the planted failure."""
    if fault is None:
        plan.run()
        return True
    try:
        with fault.planted:
            plan.run()
    except BaseException as error:
        if not is_injected(error):
            raise
        held.failed(fault.loose)
        return False
    return True


def _count(world: World, begin: int) -> int:
    """Counts what caches hold beside what they say, then drops them and counts what is left.

    Raises:
        DivergenceError: either is not what it should be.
    """
    world.close_windows()
    if isinstance(world.model, QwenGDN):  # an engine's caches share memory with those to come
        said, found = sum(held.cache.nbytes for held in world.held), live_bytes(world.model) - begin
        require(found == said, f"caches hold {found} bytes and say {said}")
    world.held.clear()
    now = live_bytes(world.model)
    require(now == begin, f"{now} bytes are alive with nothing held, {begin} were at the beginning")
    return now
