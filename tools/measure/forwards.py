"""The plain step and verifies of several targets, one after another in one run: what a layout or a dtype gains."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qwen_gdn import ModelConfig, QwenGDN, Topology, prefill
from qwen_gdn.engine import Engine
from qwen_gdn.recorded import Announce
from tools.measure.floor import Floor
from tools.measure.gpu import Shape, shown, spined, stepping, used_by, verifying
from tools.measure.instruments import Clock, random_weights, read_bandwidth


def measure(
    shapes: dict[str, Shape],
    device: torch.device,
    dtype: torch.dtype,
    announce: Announce,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Every target by its name, and each time's ratio to that of the first; `keep` is given all found so far."""
    found: dict[str, Any] = {"targets": {}}
    for name, shape in shapes.items():
        clock = Clock(device, shape.repeats)
        bandwidth = read_bandwidth(clock)
        model = random_weights(QwenGDN, ModelConfig.from_dict(shape.target), device, dtype)
        floor = Floor.of(model, bandwidth)
        say(f"{name}: {sum(p.nbytes for p in model.parameters()) / 2**30:.2f} GiB at {bandwidth / 1e12:.2f} TB/s")
        engine = Engine(model, sizes=shape.sizes, announce=announce)
        own: dict[str, Any] = floor._asdict() | {"prefixes": {}}
        found["targets"][name] = own
        first = next(iter(found["targets"].values()))
        for prefix, forward, one in _each(engine, shape, clock, floor):
            own["prefixes"].setdefault(prefix, {})[forward] = one
            one["ratio"] = one["ms"] / first["prefixes"][prefix][forward]["ms"]
            taken = shown(one["ms"], floor, one["experts"])
            say(f"  prefix {prefix}, {forward}: {taken}, {one['ratio']:.3f} x the first's")
            keep(found)
        del engine, model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _each(engine: Engine, shape: Shape, clock: Clock, floor: Floor) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Milliseconds of each forward at each prefix, the bytes that it reads and its ratio to their floor."""
    cache = engine.new_cache(max(shape.prefixes) + 2 + clock.repeats + max(shape.sizes))
    draw = torch.Generator().manual_seed(0)
    for prefix in shape.prefixes:
        cache.crop(0)
        prompt = torch.randint(0, engine.config.vocab_size, (1, prefix), generator=draw)
        prefill(engine.model, prompt, cache)
        forwards = {"plain": (stepping(engine, cache), torch.tensor([7]), Topology.chain(1))}
        for size in shape.sizes:
            tokens = torch.arange(1, size + 1)
            forwards[f"verify {size}"] = (verifying(engine, cache, size, ()), tokens, spined(size))
        for name, (run, tokens, topology) in forwards.items():
            taken = clock.each(run)
            experts = used_by(engine, cache, tokens, topology)
            floors = taken / floor.milliseconds(experts)
            yield (
                prefix,
                name,
                {
                    "ms": taken,
                    "experts": experts,
                    "bytes": floor.bytes_read(experts),
                    "floors": floors,
                },
            )
