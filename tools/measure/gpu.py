"""Times of one decoding round and of its parts, over random weights of any published shape, beside the read floor.

A step of decoding cannot be faster than reading every weight of a linear map once; the floor is those bytes over the
bandwidth that a plain sum reaches in the same run. On CUDA times are medians of events around each call, on a CPU of
the host's clock. The whole round runs through `generate`, with draws bent so that a wanted number of tokens is
accepted; all that costs time is done as always.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree import DraftTree, Round, Scores, accept, build_tree, drafters, generate
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn import Branch, HybridCache, ModelConfig, QwenGDN, Topology, greedy, prefill
from qwen_gdn.decode import HybridModel
from qwen_gdn.engine import Engine
from qwen_gdn.fp8 import is_in_eight_bits
from qwen_gdn.model import LayerId
from qwen_gdn.recorded import Announce
from tools.measure.floor import Floor, experts_used
from tools.measure.instruments import (
    PROFILED,
    Clock,
    kernels,
    peak_memory,
    random_weights,
    read_bandwidth,
    synchronisations,
)
from tools.parity.theirs import twin

MOST = 14  # kernels that are listed of a forward
WATCHED = 3  # rounds whose waits are counted
COMMITTED = 8  # nodes of the path that a commit is timed with


class Shape(NamedTuple):
    """What is measured: parsed configs, tree sizes with the root, committed lengths, accepted lengths, chunks."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    sizes: Sequence[int]
    prefixes: Sequence[int]
    accepted: Sequence[int]
    chunks: Sequence[int]
    repeats: int


class Setting(NamedTuple):
    """Random weights of a shape on a device, ready to run; `say` is told what has just been found."""

    engine: Engine
    drafter: RecordedDrafter
    clock: Clock
    floor: Floor
    say: Callable[[str], None]

    @classmethod
    def of(
        cls, shape: Shape, device: torch.device, dtype: torch.dtype, announce: Announce, say: Callable[[str], None]
    ) -> "Setting":
        clock = Clock(device, shape.repeats)
        bandwidth = read_bandwidth(clock)
        target = random_weights(QwenGDN, ModelConfig.from_dict(shape.target), device, dtype)
        floor = Floor.of(target, bandwidth)
        beside = " and what it reads of experts" if floor.expert else ""
        say(f"floor {floor.milliseconds():.3f} ms: {floor.always / 1e9:.2f} GB{beside} at {bandwidth / 1e12:.2f} TB/s")
        engine = Engine(target, sizes=shape.sizes, chunks=shape.chunks, announce=announce)
        plain = random_weights(drafters.build, drafters.from_dict(shape.drafter), device, dtype)
        drafter = RecordedDrafter(plain, announce=announce)
        drafter.bind(engine)
        return cls(engine, drafter, clock, floor, say)


def measure(setting: Setting, shape: Shape, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Everything, as one object; `keep` is given all that has been found so far."""
    engine, drafter, clock, floor, say = setting
    target, device = engine.model, engine.device
    found: dict[str, Any] = floor._asdict() | {"floor_ms": floor.milliseconds(), "chunks": list(shape.chunks)}
    found["weights_bytes"] = sum(p.nbytes for model in (target, drafter.drafter) for p in model.parameters())
    say(f"weights of both {found['weights_bytes'] / 2**30:.2f} GiB")
    found["prefixes"] = []
    cache = engine.new_cache(max(shape.prefixes) + spare(shape))
    for at_prefix in engine_figures(shape, engine, drafter, cache, clock, floor, say):
        found["prefixes"].append(at_prefix)
        keep(found)
    gc.collect()
    with peak_memory(device) as most:
        found["prefill_tokens_per_second"] = prefill_figures(shape, engine, drafter, cache, clock, say)
    found["prefill_peak_bytes"] = most()
    keep(found)
    say(f"most memory while prompts are read {gibibytes(most())}")
    gc.collect()
    if is_in_eight_bits(target):
        say("transformers is not measured: its products of weights in eight bits are a download of their own")
    else:
        found["transformers"] = transformers_figures(shape, target, clock, floor, say)
    keep(found)
    # Last of all: once a profiler has been at work, graphs take longer to launch, 1.5 ms for 64 layers.
    found["profiled"] = profiled_figures(shape, engine, drafter, cache, say)
    return found


def engine_figures(
    shape: Shape,
    engine: Engine,
    drafter: RecordedDrafter,
    cache: HybridCache,
    clock: Clock,
    floor: Floor,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """The engine at each prefix, one after another on one cache."""
    target = engine.model
    draw = torch.Generator().manual_seed(0)
    for prefix in shape.prefixes:
        cache.crop(0)
        drafter.reset()
        feed(target, drafter, torch.randint(0, target.config.vocab_size, (1, prefix), generator=draw), cache)
        found: dict[str, Any] = {"prefix": prefix, "cache_bytes": cache.nbytes}

        found["plain_ms"] = clock.each(stepping(engine, cache))
        found["plain_experts"] = used_by(engine, cache, torch.tensor([7]), Topology.chain(1))
        say(f"prefix {prefix}: plain step {shown(found['plain_ms'], floor, found['plain_experts'])}")
        found["trees"] = {size: tree_figures(engine, cache, size, clock, drafter.layers) for size in shape.sizes}
        for size, one in found["trees"].items():
            say(
                f"  {size} nodes: verify {shown(one['verify_ms'], floor, one['experts'])}, "
                f"commit {one['commit_ms']:.3f} ms, "
                f"window {one['window_bytes'] / 2**20:.1f} MiB"
            )
        found["drafter"] = drafter_figures(drafter, max(shape.sizes), clock)
        say("  " + ", ".join(f"{name} {value:.3f}" for name, value in found["drafter"].items()))
        with peak_memory(engine.device) as most:
            found["rounds"] = list(round_figures(shape, engine, drafter, cache, clock))
        found["peak_bytes"] = most()
        for one in found["rounds"]:
            say(
                f"  round of {one['nodes']} {one['kind']} nodes, {one['accepted']} accepted: "
                f"{shown(one['ms'], floor)}, {one['synchronisations']} synchronisations"
            )
        say(f"  most memory during these {gibibytes(most())}, of it the cache {gibibytes(found['cache_bytes'])}")
        yield found


def spare(shape: Shape) -> int:
    """Rows that the measurements at one prefix add at most."""
    commits = len(shape.sizes) * COMMITTED * (shape.repeats + 1)
    rounds = (len(shape.sizes) + 1) * sum(length * (shape.repeats + WATCHED + 2) + 1 for length in shape.accepted)
    return commits + rounds + 2 * max(shape.sizes)


def feed(engine: HybridModel, drafter: RecordedDrafter, prompt: Tensor, cache: HybridCache) -> None:
    prefill(
        engine,
        prompt,
        cache,
        capture=drafter.layers,
        on_window=lambda h: drafter.observe(torch.cat(h.captured, dim=-1)),
    )


def prefill_figures(
    shape: Shape,
    engine: Engine,
    drafter: RecordedDrafter,
    cache: HybridCache,
    clock: Clock,
    say: Callable[[str], None],
) -> dict[int, float]:
    """Tokens a second of reading a prompt of each length, the drafter's context included, after one that compiles."""
    found = {}
    for length in shape.prefixes:
        prompt = torch.full((1, length), 7)
        for _ in range(2):
            cache.crop(0)
            drafter.reset()
            found[length] = 1e3 * length / clock.once(lambda prompt=prompt: feed(engine, drafter, prompt, cache))
        say(f"prefill of {length}: {found[length]:,.0f} tokens/s")
    return found


def tree_figures(
    engine: Engine, cache: HybridCache, size: int, clock: Clock, layers: Sequence[LayerId]
) -> dict[str, Any]:
    """A verify that leaves what a drafter reads, as in a round, and a commit."""
    topology, verify = spined(size), verifying(engine, cache, size, layers)
    verified = clock.each(verify)
    held = verify().nbytes

    def commit() -> None:
        cache.commit(topology.path(min(size, COMMITTED) - 1))

    commits: list[float] = []
    while len(commits) <= clock.repeats:
        verify()
        commits.append(clock.once(commit))
    return {
        "verify_ms": verified,
        "experts": used_by(engine, cache, torch.arange(1, size + 1), topology),
        "commit_ms": median(commits[1:]),
        "window_bytes": held,
    }


def stepping(engine: Engine, cache: HybridCache) -> Callable[[], Tensor]:
    """One token of plain decoding."""
    return lambda: engine.logits(engine(torch.tensor([7]), cache).final)


def verifying(engine: Engine, cache: HybridCache, size: int, layers: Sequence[LayerId]) -> Callable[[], Branch]:
    """A verify of so many nodes, which leaves its window open."""
    topology, tokens = spined(size), torch.arange(1, size + 1)

    def verify() -> Branch:
        cache.discard()
        window = cache.branch(topology)
        engine.logits(engine(tokens, window, capture=layers).final)
        return window

    return verify


def used_by(engine: Engine, cache: HybridCache, tokens: Tensor, topology: Topology) -> int:
    """The experts of all layers that a tree's tokens go to; 0 without experts. It closes an open window."""
    cache.discard()
    used = experts_used(engine.model, lambda: engine.model(tokens[None].to(engine.device), cache.branch(topology)))
    cache.discard()
    return used


def drafter_figures(drafter: RecordedDrafter, size: int, clock: Clock) -> dict[str, float]:
    """Milliseconds of a block that takes 8 rows into the context, and of the host's work on a tree and a walk."""
    scores, like = drafter.propose(3), drafter.drafter.fc.weight
    features = torch.randn(1, 8, like.shape[1], device=like.device, dtype=like.dtype)
    drawn = torch.zeros(size, dtype=torch.int64)
    tree = build_tree(3, scores, size - 1)

    def draft() -> None:
        drafter.observe(features)
        drafter.propose(3)

    return {
        "draft_ms": clock.each(draft),
        "build_ms": clock.host(lambda: build_tree(3, scores, size - 1)),
        "walk_ms": clock.host(lambda: accept(tree, drawn[: len(tree.topology)])),
    }


def round_figures(
    shape: Shape, engine: Engine, drafter: RecordedDrafter, cache: HybridCache, clock: Clock
) -> Iterator[dict[str, Any]]:
    depth = drafter.drafter.config.block_size
    for size in shape.sizes:
        for length in shape.accepted:
            if length <= depth:
                yield round_figure(engine, drafter, cache, spined(size, depth), "tree", length, clock)
    for length in shape.accepted:
        if length <= depth:
            yield round_figure(engine, drafter, cache, Topology.chain(depth), "chain", length, clock)


def round_figure(
    engine: Engine,
    drafter: RecordedDrafter,
    cache: HybridCache,
    topology: Topology,
    kind: str,
    length: int,
    clock: Clock,
) -> dict[str, Any]:
    """Milliseconds of a round, by the host's clock, and how often the host waits in it."""
    before = cache.length
    rounds = forced_rounds(engine, drafter, cache, topology, length, clock.repeats + WATCHED)
    taken = []
    for _ in range(clock.repeats):
        start = time.perf_counter()
        done = next(rounds)
        taken.append(1e3 * (time.perf_counter() - start))
        assert len(done.tokens) == length, (len(done.tokens), length)
    with synchronisations(engine.device) as seen:
        for _ in range(WATCHED):
            next(rounds)
    assert (cache.length - before - 1) % length == 0
    return {
        "nodes": len(topology),
        "kind": kind,
        "accepted": length,
        "ms": median(taken),
        "synchronisations": len(seen) / WATCHED,
    }


def forced_rounds(
    engine: Engine, drafter: RecordedDrafter, cache: HybridCache, topology: Topology, length: int, count: int
) -> Iterator[Round]:
    """`count` rounds of `generate`, whose draws follow the first path for `length − 1` nodes below the root.

    One more has been before, in which programs are prepared.
    """
    nodes = len(topology)
    tokens = torch.arange(1, nodes + 1)
    path = topology.path(length - 1)
    forced = torch.full((nodes,), -1)
    forced[path[:-1]] = tokens[path[1:]]
    forced[path[-1]] = 0

    def build(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
        build_tree(root, scores, budget)  # for its time; random drafts would make a tree without a deep path
        return DraftTree(torch.cat((torch.tensor([root]), tokens[1:])), topology)

    def sampler(logits: Tensor) -> Tensor:
        drawn = greedy(logits)
        return drawn if len(drawn) != nodes else torch.where(forced < 0, drawn, forced)

    rounds = generate(
        engine,
        drafter,
        [7],
        max_new_tokens=length * (count + 1) + 2 * nodes,
        budget=nodes - 1,
        cache=cache,
        build=build,
        sampler=sampler,
    )
    next(rounds), next(rounds)
    return rounds


def profiled_figures(
    shape: Shape, engine: Engine, drafter: RecordedDrafter, cache: HybridCache, say: Callable[[str], None]
) -> dict[str, Any]:
    """At the shortest prefix the kernels of a step and of verifies, and the milliseconds of all kernels of rounds."""
    if engine.device.type != "cuda":
        return {}
    prefix, depth = min(shape.prefixes), drafter.drafter.config.block_size
    cache.discard()
    cache.crop(0)
    drafter.reset()
    feed(engine.model, drafter, torch.full((1, prefix), 7), cache)
    shapes = {f"tree of {size}": spined(size, depth) for size in shape.sizes} | {"chain": Topology.chain(depth)}
    busy = {}
    for name, topology in shapes.items():
        rounds = forced_rounds(engine, drafter, cache, topology, min(depth, 8), PROFILED)
        busy[name] = sum(one["microseconds"] for one in kernels(lambda rounds=rounds: next(rounds))) / 1e3
    verifies = {size: verifying(engine, cache, size, drafter.layers) for size in shape.sizes}
    found = {
        "prefix": prefix,
        "plain_kernels": kernels(stepping(engine, cache))[:MOST],
        "verify_kernels": {size: kernels(verify)[:MOST] for size, verify in verifies.items()},
        "round_kernels_ms": busy,
    }
    say(f"kernels of rounds at {prefix}: " + ", ".join(f"{name} {value:.3f} ms" for name, value in busy.items()))
    return found


def spined(size: int, depth: int = 16) -> Topology:
    """A tree whose first `depth` nodes are a chain; the others hang below them in turn."""
    spine = min(size, depth)
    return Topology([*range(-1, spine - 1), *((i - spine) % spine for i in range(spine, size))])


def transformers_figures(
    shape: Shape, target: QwenGDN, clock: Clock, floor: Floor, say: Callable[[str], None]
) -> dict[str, Any]:
    """Prefill and one token of transformers, eager, on the same weights."""
    raw = shape.target.get("text_config", shape.target)
    model = twin(target, raw)
    found: dict[str, Any] = {"prefill_tokens_per_second": {}}
    with torch.no_grad():
        for length in (n for n in shape.prefixes if n <= 8192):
            tokens = torch.full((1, length), 7, device=target.device)
            run = lambda tokens=tokens: model(tokens, use_cache=True, logits_to_keep=1)  # noqa: E731
            run()
            found["prefill_tokens_per_second"][length] = 1e3 * length / clock.once(run)
        cache = model(torch.full((1, min(shape.prefixes)), 7, device=target.device), use_cache=True).past_key_values
        token = torch.full((1, 1), 7, device=target.device)
        found["plain_ms"] = clock.each(lambda: model(token, past_key_values=cache, use_cache=True))
    prefills = ", ".join(f"{n}: {rate:,.0f}" for n, rate in found["prefill_tokens_per_second"].items())
    say(f"transformers, eager: one token {shown(found['plain_ms'], floor)}, prefill tokens/s {prefills}")
    return found


def shown(milliseconds: float, floor: Floor, experts: int = 0) -> str:
    read = f" of {floor.bytes_read(experts) / 1e9:.2f} GB with {experts} experts" if experts else ""
    return f"{milliseconds:.3f} ms ({milliseconds / floor.milliseconds(experts):.2f} x the floor{read})"


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
