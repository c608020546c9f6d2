"""Times of one decoding round and of its parts, over random weights of any published shape, beside the read floor.

A step of decoding cannot be faster than reading every weight of a linear map once; the floor is those bytes over the
bandwidth that a plain sum reaches in the same run. On CUDA times are medians of events around each call, on a CPU of
the host's clock. The whole round runs through `generate`, with draws bent so that a wanted number of tokens is
accepted; all that costs time is done as always.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree import DraftTree, Scores, accept, build_tree, drafters, generate
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn import HybridCache, ModelConfig, QwenGDN, Topology, greedy, prefill
from qwen_gdn.decode import HybridModel
from qwen_gdn.engine import Engine
from qwen_gdn.fp8 import E4M3
from qwen_gdn.model import LayerId
from qwen_gdn.recorded import Announce
from tools.measure.eight_bits import draw_eight_bits, is_in_eight_bits, put_in_eight_bits
from tools.measure.floor import Floor, experts_used
from tools.parity.theirs import twin

MOST = 14  # kernels that are listed of a forward
PROFILED = 3  # calls whose kernels are listed
SPARE = 2048  # rows that the measurements at one prefix may add


class Shape(NamedTuple):
    """What is measured: parsed configs, tree sizes with the root, committed lengths, accepted lengths, chunks."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    sizes: Sequence[int]
    prefixes: Sequence[int]
    accepted: Sequence[int]
    chunks: Sequence[int]
    repeats: int


def measure(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    announce: Announce,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Everything, as one object; `say` is told what has just been found, `keep` all that has been found so far."""
    clock = Clock(device, shape.repeats)
    bandwidth = read_bandwidth(clock)
    target = random_weights(QwenGDN, ModelConfig.from_dict(shape.target), device, dtype)
    floor = Floor.of(target, bandwidth)
    found: dict[str, Any] = floor._asdict() | {"floor_ms": floor.milliseconds(), "chunks": list(shape.chunks)}
    beside = " and what it reads of experts" if floor.expert else ""
    say(f"floor {floor.milliseconds():.3f} ms: {floor.always / 1e9:.2f} GB{beside} at {bandwidth / 1e12:.2f} TB/s")
    engine = Engine(target, sizes=shape.sizes, chunks=shape.chunks, announce=announce)
    plain = random_weights(drafters.build, drafters.from_dict(shape.drafter), device, dtype)
    drafter = RecordedDrafter(plain, announce=announce)
    drafter.bind(engine)
    found["weights_bytes"] = sum(p.nbytes for model in (target, plain) for p in model.parameters())
    say(f"weights of both {found['weights_bytes'] / 2**30:.2f} GiB")
    found["prefixes"] = []
    for at_prefix in engine_figures(shape, engine, drafter, clock, floor, say):
        found["prefixes"].append(at_prefix)
        keep(found)
    gc.collect()
    with peak_memory(device) as most:
        found["prefill_tokens_per_second"] = prefill_figures(shape, engine, drafter, clock, say)
    found["prefill_peak_bytes"] = most()
    keep(found)
    say(f"most memory while prompts are read {gibibytes(most())}")
    gc.collect()
    if is_in_eight_bits(target):
        say("transformers is not measured: its products of weights in eight bits are a download of their own")
    else:
        found["transformers"] = transformers_figures(shape, target, clock, floor, say)
    return found


def engine_figures(
    shape: Shape,
    engine: Engine,
    drafter: RecordedDrafter,
    clock: "Clock",
    floor: Floor,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """The engine at each prefix, one after another on one growing cache."""
    target = engine.model
    cache = engine.new_cache(max(shape.prefixes) + SPARE * len(shape.prefixes))
    draw = torch.Generator().manual_seed(0)
    for prefix in shape.prefixes:
        fed = max(prefix - cache.length, 0)
        prompt = torch.randint(0, target.config.vocab_size, (1, fed), generator=draw)
        feed(target, drafter, prompt, cache)
        found: dict[str, Any] = {"prefix": prefix, "cache_bytes": cache.nbytes}

        def step() -> Tensor:
            return engine.logits(engine(torch.tensor([7]), cache).final)

        found["plain_ms"] = clock.each(step)
        found["plain_experts"] = used_by(engine, cache, torch.tensor([7]), Topology.chain(1))
        found["plain_kernels"] = kernels(step, engine.device)[:MOST]
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
                f"{shown(one['ms'], floor)}, kernels {one['busy_ms']:.3f} ms, "
                f"{one['synchronisations']} synchronisations"
            )
        say(f"  most memory during these {gibibytes(most())}, of it the cache {gibibytes(found['cache_bytes'])}")
        yield found


def feed(engine: HybridModel, drafter: RecordedDrafter, prompt: Tensor, cache: HybridCache) -> None:
    prefill(
        engine,
        prompt,
        cache,
        capture=drafter.layers,
        on_window=lambda h: drafter.observe(torch.cat(h.captured, dim=-1)),
    )


def prefill_figures(
    shape: Shape, engine: Engine, drafter: RecordedDrafter, clock: "Clock", say: Callable[[str], None]
) -> dict[int, float]:
    """Tokens a second of reading a prompt of each length, the drafter's context included, after one that compiles."""
    found = {}
    cache = engine.new_cache(max(shape.prefixes))
    for length in shape.prefixes:
        prompt = torch.full((1, length), 7)
        for _ in range(2):
            cache.crop(0)
            drafter.reset()
            found[length] = 1e3 * length / clock.once(lambda prompt=prompt: feed(engine, drafter, prompt, cache))
        say(f"prefill of {length}: {found[length]:,.0f} tokens/s")
    return found


def tree_figures(
    engine: Engine, cache: HybridCache, size: int, clock: "Clock", layers: Sequence[LayerId]
) -> dict[str, Any]:
    """A verify that leaves what a drafter reads, as in a round, and a commit."""
    topology = spined(size)
    tokens = torch.arange(1, size + 1)
    held = 0

    def verify() -> None:
        nonlocal held
        cache.discard()
        window = cache.branch(topology)
        engine.logits(engine(tokens, window, capture=layers).final)
        held = window.nbytes

    verified = clock.each(verify)

    def commit() -> None:
        cache.commit(topology.path(min(size, 8) - 1))

    commits: list[float] = []
    while len(commits) <= clock.repeats:
        verify()
        commits.append(clock.once(commit))
    found = kernels(verify, engine.device)[:MOST]
    cache.discard()
    return {
        "verify_ms": verified,
        "experts": used_by(engine, cache, tokens, topology),
        "commit_ms": median(commits[1:]),
        "window_bytes": held,
        "kernels": found,
    }


def used_by(engine: Engine, cache: HybridCache, tokens: Tensor, topology: Topology) -> int:
    """The experts of all layers that a tree's tokens go to; 0 without experts."""
    used = experts_used(engine.model, lambda: engine.model(tokens[None].to(engine.device), cache.branch(topology)))
    cache.discard()
    return used


def kernels(call: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """The kernels of a call by name, those that take most of it first: launches and microseconds a call."""
    if device.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize(device)
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return [
        {"kernel": r.key[:90], "launches": r.count / PROFILED, "microseconds": r.device_time_total / PROFILED}
        for r in rows
    ]


def drafter_figures(drafter: RecordedDrafter, size: int, clock: "Clock") -> dict[str, float]:
    """Milliseconds of a block, of the context update of 8 rows, and of the host's work on a tree and a walk."""
    scores, like = drafter.propose(3), drafter.drafter.fc.weight
    features = torch.randn(1, 8, like.shape[1], device=like.device, dtype=like.dtype)
    drawn = torch.zeros(size, dtype=torch.int64)
    tree = build_tree(3, scores, size - 1)
    return {
        "draft_ms": clock.each(lambda: drafter.propose(3)),
        "observe_ms": clock.each(lambda: drafter.observe(features)),
        "build_ms": clock.host(lambda: build_tree(3, scores, size - 1)),
        "walk_ms": clock.host(lambda: accept(tree, drawn[: len(tree.topology)])),
    }


def round_figures(
    shape: Shape, engine: Engine, drafter: RecordedDrafter, cache: HybridCache, clock: "Clock"
) -> Iterator[dict[str, Any]]:
    depth = drafter.drafter.config.block_size
    for size in shape.sizes:
        for length in shape.accepted:
            if length <= depth:
                yield forced_rounds(engine, drafter, cache, spined(size, depth), "tree", length, clock)
    for length in shape.accepted:
        if length <= depth:
            yield forced_rounds(engine, drafter, cache, Topology.chain(depth), "chain", length, clock)


def forced_rounds(
    engine: Engine,
    drafter: RecordedDrafter,
    cache: HybridCache,
    topology: Topology,
    kind: str,
    length: int,
    clock: "Clock",
) -> dict[str, Any]:
    """Rounds through `generate` whose draws follow the first path for `length − 1` nodes below the root."""
    count = len(topology)
    tokens = torch.arange(1, count + 1)
    path = topology.path(length - 1)

    def build(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
        build_tree(root, scores, budget)  # for its time; random drafts would make a tree without a deep path
        return DraftTree(torch.cat((torch.tensor([root]), tokens[1:])), topology)

    def sampler(logits: Tensor) -> Tensor:
        drawn = greedy(logits)
        if len(drawn) == count:
            drawn[path[:-1]] = tokens[path[1:]]
            drawn[path[-1]] = 0
        return drawn

    before = cache.length
    rounds = generate(
        engine,
        drafter,
        [7],
        max_new_tokens=length * (clock.repeats + 4 + PROFILED) + 2 * count,
        budget=count - 1,
        cache=cache,
        build=build,
        sampler=sampler,
    )
    next(rounds), next(rounds)
    taken = []
    for _ in range(clock.repeats):
        start = time.perf_counter()
        done = next(rounds)
        taken.append(1e3 * (time.perf_counter() - start))
        assert len(done.tokens) == length, (len(done.tokens), length)
    with synchronisations(engine.device) as seen:
        for _ in range(3):
            next(rounds)
    busy = sum(kernel["microseconds"] for kernel in kernels(lambda: next(rounds), engine.device)) / 1e3
    assert (cache.length - before - 1) % length == 0
    return {
        "nodes": count,
        "kind": kind,
        "accepted": length,
        "ms": median(taken),
        "busy_ms": busy,
        "synchronisations": len(seen) / 3,
    }


def spined(size: int, depth: int = 16) -> Topology:
    """A tree whose first `depth` nodes are a chain; the others hang below them in turn."""
    spine = min(size, depth)
    return Topology([*range(-1, spine - 1), *((i - spine) % spine for i in range(spine, size))])


@contextmanager
def synchronisations(device: torch.device) -> Iterator[list[Any]]:
    """Collects one entry for each time that the host waits for the device."""
    seen: list[Any] = []
    if device.type != "cuda":
        yield seen
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
    seen += [one for one in caught if "called a synchronizing" in str(one.message)]


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Makes what tells the most bytes reserved meanwhile, all that recorded graphs keep for themselves among them."""
    if device.type != "cuda":
        yield lambda: 0
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_reserved(device)


def transformers_figures(
    shape: Shape, target: QwenGDN, clock: "Clock", floor: Floor, say: Callable[[str], None]
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


def read_bandwidth(clock: "Clock") -> float:
    """Bytes a second that a sum over 4 GiB (on a CPU, 256 MiB) reads."""
    count = 2**30 if clock.device.type == "cuda" else 2**26
    data = torch.ones(count, device=clock.device)
    return 1e3 * data.nbytes / clock.each(lambda: data.sum())


def random_weights(kind: Any, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A module with matrices of spread 0.02, neutral norms and moderate decays, made on the device.

    Where a target's config says that linear maps are stored in eight bits, they are so here.
    """
    with torch.device("meta"):
        model = kind(config).to(dtype)
        put_in_eight_bits(model)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 2)
            elif parameter.dim() == 1:
                parameter.zero_() if kind is QwenGDN and not name.endswith(
                    "linear_attn.norm.weight"
                ) else parameter.fill_(1)
            elif parameter.dtype != E4M3:
                parameter.normal_(0, 0.3 if name.endswith("conv1d.weight") else 0.02)
    draw_eight_bits(model)
    return model.eval().requires_grad_(False)


class Clock:
    """Milliseconds of calls on a device, each a median over `repeats` calls after two that do not count."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def each(self, call: Callable[[], object]) -> float:
        for _ in range(2):
            call()
        if self.device.type != "cuda":
            return median(self.once(call) for _ in range(self.repeats))
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        torch.cuda.synchronize(self.device)
        for start, end in marks:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return median(start.elapsed_time(end) for start, end in marks)

    def host(self, call: Callable[[], object]) -> float:
        """By the host's clock, the device idle before and after."""
        call()
        return median(self.once(call) for _ in range(self.repeats))

    def once(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def shown(milliseconds: float, floor: Floor, experts: int = 0) -> str:
    read = f" of {floor.bytes_read(experts) / 1e9:.2f} GB with {experts} experts" if experts else ""
    return f"{milliseconds:.3f} ms ({milliseconds / floor.milliseconds(experts):.2f} x the floor{read})"


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
