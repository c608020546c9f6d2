"""What must raise, in whichever state a cache is, and change nothing."""

from collections.abc import Callable, Iterator

import torch

from qwen_gdn import Topology

from .held import DivergenceError, Held, Plan
from .world import CAPACITY, World


def plan_refusal(world: World, held: Held) -> Plan:
    """Something that must raise and change nothing."""
    text, act, error = world.dice.choice(list(_refusals(world, held)))
    return Plan(f"refused: {text}", lambda: refused(act, error))


def _refusals(world: World, held: Held) -> Iterator[tuple[str, Callable[[], object], type[Exception]]]:
    cache, model, length = held.cache, world.model, len(held.tokens)
    one, pair = torch.tensor([[0]]), Topology([-1, 0])
    yield (
        "a crop beyond the length",
        lambda: cache.crop(length + 1),
        ValueError if held.window is None else RuntimeError,
    )
    if held.window is None:
        yield "a commit without a window", lambda: cache.commit([0]), RuntimeError
        yield "a token outside the vocabulary", lambda: model(one + 1000, cache), ValueError
        yield "tokens beyond the capacity", lambda: model(one.expand(1, CAPACITY + 1 - length), cache), ValueError
        yield "a tree too deep", lambda: cache.branch(Topology.chain(CAPACITY + 1 - length)), ValueError
        return
    branch, nodes = held.window.branch, len(held.window.tokens)
    yield "a step with a window open", lambda: model(one, cache), RuntimeError
    yield "a second window", lambda: cache.branch(pair), RuntimeError
    yield "a crop with a window open", lambda: cache.crop(0), RuntimeError
    yield "a fork with a window open", cache.fork, RuntimeError
    if held.window.final is None:
        yield "a commit before the forward", lambda: cache.commit([0]), RuntimeError
        yield "another number of nodes", lambda: model(one.expand(1, nodes + 1), branch), ValueError
    else:
        yield "a second forward", lambda: model(one.expand(1, nodes), branch), RuntimeError
        yield "a path from nowhere", lambda: cache.commit([nodes]), ValueError
        yield "a path that goes back", lambda: cache.commit([0, 0]), ValueError


def refused(act: Callable[[], object], error: type[Exception]) -> None:
    """Runs what must raise that error."""
    try:
        act()
    except error:
        return
    raise DivergenceError(f"that was not refused with a {error.__name__}")
