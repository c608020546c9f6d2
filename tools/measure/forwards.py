"""The plain step and verifies of several targets in one run: what a layout or a dtype gains.

All targets are in memory at once and take turns at every forward, so that what a device does in the course of a run
(it warms up, others use it) is the same for all.
"""

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qwen_gdn import HybridCache, ModelConfig, QwenGDN, Topology, prefill
from qwen_gdn.engine import Engine
from qwen_gdn.recorded import Announce
from tools.measure.floor import Floor
from tools.measure.gpu import Shape, shown, spined, stepping, used_by, verifying
from tools.measure.instruments import Clock, random_weights, read_bandwidth

TURNS = 5  # of every target at every forward


class _Target(NamedTuple):
    engine: Engine
    cache: HybridCache
    floor: Floor


class _Forward(NamedTuple):
    """What is timed, and the tree that it is."""

    run: Callable[[], object]
    tokens: Tensor
    topology: Topology


def measure(
    shapes: Mapping[str, Shape],
    device: torch.device,
    dtype: torch.dtype,
    announce: Announce,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Every target by its name, and each time's ratio to that of the first; `keep` is given all found so far.

    Args:
        shapes: alike but for the targets.
    """
    like = next(iter(shapes.values()))
    clock = Clock(device, like.repeats)
    bandwidth = read_bandwidth(clock)
    targets, found = dict[str, _Target](), dict[str, Any](targets={})
    for name, shape in shapes.items():
        targets[name] = target = _target(shape, bandwidth, device, dtype, announce)
        held = sum(p.nbytes for p in target.engine.model.parameters())
        say(f"{name}: {held / 2**30:.2f} GiB at {bandwidth / 1e12:.2f} TB/s")
        found["targets"][name] = target.floor._asdict() | {"prefixes": {prefix: {} for prefix in like.prefixes}}
    for prefix in like.prefixes:
        for target in targets.values():
            _read(target, prefix)
        forwards = {name: _forwards(target, like) for name, target in targets.items()}
        for forward in next(iter(forwards.values())):
            each = {name: forwards[name][forward] for name in targets}
            for name, one in _figures(targets, each, clock):
                found["targets"][name]["prefixes"][prefix][forward] = one
                taken = shown(one["ms"], targets[name].floor, one["experts"])
                say(f"prefix {prefix}, {forward}, {name}: {taken}, {one['ratio']:.3f} x the first's")
            keep(found)
    return found


def _target(shape: Shape, bandwidth: float, device: torch.device, dtype: torch.dtype, announce: Announce) -> _Target:
    model = random_weights(QwenGDN, ModelConfig.from_dict(shape.target), device, dtype)
    engine = Engine(model, sizes=shape.sizes, announce=announce)
    cache = engine.new_cache(max(shape.prefixes) + TURNS * (2 + shape.repeats) + max(shape.sizes))
    return _Target(engine, cache, Floor.of(model, bandwidth))


def _read(target: _Target, prefix: int) -> None:
    target.cache.crop(0)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, target.engine.config.vocab_size, (1, prefix), generator=draw)
    prefill(target.engine.model, prompt, target.cache)


def _forwards(target: _Target, shape: Shape) -> dict[str, _Forward]:
    engine, cache, _ = target
    forwards = {"plain": _Forward(stepping(engine, cache), torch.tensor([7]), Topology.chain(1))}
    for size in shape.sizes:
        tokens = torch.arange(1, size + 1)
        forwards[f"verify {size}"] = _Forward(verifying(engine, cache, size, ()), tokens, spined(size))
    return forwards


def _figures(
    targets: Mapping[str, _Target], forwards: Mapping[str, _Forward], clock: Clock
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of one forward: each target's milliseconds, the bytes that it reads, and their ratio to floor and first."""
    turns: dict[str, list[float]] = {name: [] for name in targets}
    for turn in range(TURNS):
        for name in reversed(targets) if turn % 2 else targets:
            turns[name].append(clock.each(forwards[name].run))
    taken = {name: median(own) for name, own in turns.items()}
    first = next(iter(taken.values()))
    for name, (engine, cache, floor) in targets.items():
        _, tokens, topology = forwards[name]
        experts = used_by(engine, cache, tokens, topology)
        yield (
            name,
            {
                "ms": taken[name],
                "turns": turns[name],
                "experts": experts,
                "bytes": floor.bytes_read(experts),
                "floors": taken[name] / floor.milliseconds(experts),
                "ratio": taken[name] / first,
            },
        )
