"""The published 27B's layer shapes on a GPU: against transformers on the same device, and against ourselves.

Every check takes a `Case` and a device, so that the same code runs at toy size on a CPU (test_tools.py). With
`pytest -s` each comparison prints one line. Float32 is held to 2e-5 of a tensor's largest value. Bfloat16 cannot be
held to a number, since two correct programs round differently; its yardstick is transformers' own bfloat16 against
its float32 run of the same weights (all weights are bfloat16 numbers). Of the logits, ours may err a quarter more in
the root mean square and twice as much at the worst element of any layer, and the argmax may agree three standard
deviations of a share less often.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from proposers import Random, Scattered
from tiny import gap, memory_of, oracle, random_tokens, random_topology, seeded, worst_gap
from torch import Tensor

from ddtree import build_chain, build_tree, generate
from qwen_gdn import Topology, decode
from qwen_gdn.conv import chain_conv, tree_conv
from tools.measure.exactness import Referee
from tools.parity import theirs
from tools.parity.report import compare, rows
from tools.parity.shapes import published_27b, random_model, tiny
from tools.parity.trace import Trace, run_ours, run_theirs

FLOAT32 = 2e-5
DEPTH = 15


class Case(NamedTuple):
    """A model, and how much it is fed.

    sigma: spread of its matrices. prompt: tokens of a prefill. chunk: of a piece of it. steps: tokens decoded one by
    one. nodes: of a tree.
    """

    name: str
    raw: dict[str, Any]
    sigma: float
    prompt: int
    chunk: int
    steps: int
    nodes: int

    @property
    def vocab(self) -> int:
        size: int = self.raw["vocab_size"]
        return size


def published(layers: int) -> Case:
    return Case(f"27B, {layers} layers", published_27b(layers), 0.02, prompt=600, chunk=256, steps=64, nodes=64)


TOY = Case("toy", tiny(4), 0.05, prompt=70, chunk=30, steps=5, nodes=24)


class Way(NamedTuple):
    """How tokens are fed through the cache, and the first row that is compared."""

    name: str
    pieces: list[int]
    first: int = 0


def ways(case: Case) -> Iterator[Way]:
    yield Way(f"prefill {case.prompt}", [case.prompt])
    chunks = [case.chunk] * (case.prompt // case.chunk) + [case.prompt % case.chunk]
    yield Way(f"prefill by {case.chunk}", [size for size in chunks if size])
    yield Way(f"{case.steps} decode steps", [case.prompt] + [1] * case.steps, first=case.prompt)


def say(case: Case, dtype: str, what: str, figures: str) -> None:
    print(f"{case.name:<15} {dtype:<9} {what:<22} {figures}")


def text(case: Case, length: int, seed: int = 1) -> Tensor:
    return random_tokens(seeded(seed), length, vocab=case.vocab)


def fed(run: Callable[[Any, Tensor, list[int]], Trace], model: Any, case: Case, way: Way) -> Trace:
    """What a model puts out if fed that way, the rows that are compared."""
    return rows(run(model, text(case, sum(way.pieces)), way.pieces), way.first)


def check_float32(case: Case, device: str) -> None:
    """Every layer's output and the logits, relative to transformers' largest value."""
    oracle("transformers")
    ours = random_model(case.raw, case.sigma, device=device)
    model = theirs.twin(ours, case.raw)
    for way in ways(case):
        found = compare(fed(run_ours, ours, case, way), fed(run_theirs, model, case, way))
        logits = found.errors["logits"]
        say(case, "float32", way.name, f"worst {found.worst:.1e}  logits {logits:.1e}  top-1 {found.top1:.2%}")
        assert found.worst <= FLOAT32, (way.name, found.fault(FLOAT32))
        # One row in a few hundred may be a tie at rounding level.
        assert found.top1 >= 1 - 1.5 / (sum(way.pieces) - way.first), way.name


def check_bfloat16(case: Case, device: str) -> None:
    """Ours and transformers' bfloat16 against transformers' float32, and against each other."""
    oracle("transformers")
    ours = random_model(case.raw, case.sigma, device=device)
    exact = theirs.twin(ours, case.raw)
    wanted = {way.name: fed(run_theirs, exact, case, way) for way in ways(case)}
    ours = ours.to(torch.bfloat16)
    model = theirs.twin(ours, case.raw, torch.bfloat16)
    for way in ways(case):
        mine, other = fed(run_ours, ours, case, way), fed(run_theirs, model, case, way)
        own, found = compare(other, wanted[way.name]), compare(mine, wanted[way.name])
        between = compare(mine, other)
        say(
            case,
            "bfloat16",
            way.name,
            f"to float32: ours {found.worst:.1e} rms {rms(mine, wanted[way.name]):.1e} top-1 {found.top1:.2%}, "
            f"theirs {own.worst:.1e} rms {rms(other, wanted[way.name]):.1e} top-1 {own.top1:.2%}; "
            f"ours to theirs {between.worst:.1e} top-1 {between.top1:.2%}",
        )
        least = own.top1 - margin(own.top1, len(mine["logits"]))
        assert rms(mine, wanted[way.name]) <= 1.25 * rms(other, wanted[way.name]), way.name
        assert found.worst <= 2 * own.worst, way.name
        assert found.top1 >= least and between.top1 >= least, way.name


def rms(trace: Trace, wanted: Trace) -> float:
    """Root mean square of the logits' error over that of the logits."""
    difference = trace["logits"].double() - wanted["logits"].double()
    return float(difference.norm() / wanted["logits"].double().norm())


def margin(share: float, count: int) -> float:
    """Three standard deviations of a share among `count` rows, and never less than those of one row."""
    return float(3 * (max(share * (1 - share), 1 / count) / count) ** 0.5)


def check_tree(case: Case, device: str, dtype: torch.dtype) -> None:
    """A tree verified in one forward and its path committed, against the path fed as a chain and a fresh prefill."""
    model = random_model(case.raw, case.sigma, device=device).to(dtype)
    draw = seeded(2)
    topology = random_topology(draw, case.nodes, DEPTH)
    prefix, nodes = text(case, case.prompt), text(case, case.nodes, seed=3).to(device)
    start = model.new_cache(case.prompt + DEPTH + 2)
    model(prefix, start)
    outputs, logits, states = 0.0, 0.0, 0.0
    for path in _paths(topology):
        tree, chain = start.fork(), start.fork()
        kept = nodes[path]
        verified = model(nodes, tree.branch(topology)).final[:, path]
        tree.commit(path)
        outputs = max(outputs, gap(verified, model(kept, chain).final))
        fresh = model.new_cache(case.prompt + DEPTH + 2)
        model(torch.cat((prefix.to(device), kept)), fresh)
        states = max(states, worst_gap(memory_of(tree), memory_of(fresh)))
        following = [model.logits(model(kept[:1], cache).final) for cache in (tree, fresh)]
        logits = max(logits, gap(*following))
    name = str(dtype).removeprefix("torch.")
    say(
        case,
        name,
        f"tree of {case.nodes}, commit",
        f"outputs {outputs:.1e}  memory {states:.1e}  next logits {logits:.1e}",
    )
    if dtype == torch.float32:
        assert max(outputs, states, logits) <= FLOAT32, (outputs, states, logits)


def _paths(topology: Topology) -> list[list[int]]:
    """The root alone, the deepest path, and the path to the last node."""
    deepest = int(topology.depths.argmax())
    return [[0], topology.path(deepest), topology.path(len(topology) - 1)]


def check_generate(case: Case, device: str) -> None:
    """Speculative decoding writes what plain decoding writes, but for a tie at rounding level."""
    model = random_model(case.raw, case.sigma, device=device)
    referee = Referee(model)
    prompt = text(case, case.prompt).tolist()
    plain = list(decode(model, prompt, max_new_tokens=case.steps))
    accepted, ties = 0, []
    for budget, build in ((0, build_tree), (3, build_chain), (15, build_chain), (15, build_tree), (63, build_tree)):
        for maker in (Random, Scattered):
            proposer = maker([*prompt, *plain], seed=budget)
            rounds = list(generate(model, proposer, prompt, max_new_tokens=case.steps, budget=budget, build=build))
            accepted += sum(done.accepted for done in rounds)
            written = [token for done in rounds for token in done.tokens]
            tie = referee.judge(f"{maker.__name__}, budget {budget}", prompt, written, plain)
            ties += [tie] if tie else []
    say(case, "float32", "generate is decode", f"{accepted} drafts accepted; near-ties {ties or 'none'}")
    assert accepted > 0


def check_convolution(device: str, channels: int, tokens: int) -> None:
    """The convolutions in float32 are float32: some libraries take TF32 for convolutions unasked."""
    draw = seeded(4)
    columns = torch.randn(1, tokens + 3, channels, generator=draw)
    weight = torch.randn(channels, 1, 4, generator=draw)
    exact = chain_conv(columns.double(), weight.double())
    windows = Topology.chain(tokens).windows(4).to(device)
    for name, found in (
        ("chain", chain_conv(columns.to(device), weight.to(device))),
        ("tree", tree_conv(columns.to(device), weight.to(device), windows)),
    ):
        error = gap(found.cpu(), exact)
        print(f"convolution of {channels} channels, {name:<6} float32 error {error:.1e}")
        assert error <= 1e-6, name


LAYERS = pytest.mark.parametrize("layers", [4, 8])


@pytest.mark.gpu
def test_float32_products_are_not_tf32() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_float32_convolutions_are_not_tf32() -> None:
    check_convolution("cuda", channels=10_240, tokens=64)
    check_convolution("cuda", channels=10_240, tokens=1)


@pytest.mark.gpu
@LAYERS
def test_every_layer_agrees_with_transformers_in_float32(layers: int) -> None:
    check_float32(published(layers), "cuda")


@pytest.mark.gpu
@LAYERS
def test_bfloat16_is_as_near_to_float32_as_transformers_is(layers: int) -> None:
    check_bfloat16(published(layers), "cuda")


@pytest.mark.gpu
@LAYERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_committed_path_equals_the_chain(layers: int, dtype: torch.dtype) -> None:
    check_tree(published(layers), "cuda", dtype)


@pytest.mark.gpu
def test_speculative_decoding_writes_what_plain_decoding_writes() -> None:
    check_generate(published(4), "cuda")
