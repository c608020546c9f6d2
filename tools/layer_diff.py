"""Ours against transformers, layer by layer, on one checkpoint: the first difference is named.

    python tools/layer_diff.py FOLDER            a checkpoint folder, a hub id, or `bundled`
    python tools/layer_diff.py --random tiny     a random model made here (`27b`: its layer shapes, needs a GPU)

Both sides read the checkpoint by themselves and get the same tokens: in one forward, through the cache in pieces,
and as the nodes of a tree, whose root paths transformers is fed one by one. In float32 the two are held against each
other; errors are max|a - b| / max|b| over all rows of a tensor. In bfloat16 and float16 two correct programs round
differently, by how much depends on the model; so there both are held against transformers' float32 run of the same
weights, from which ours may be four times as far as transformers' own run in that dtype. These errors are root mean
squares, since which of two programs has the largest single error is chance; what is smaller shows in float32 alone.

Exit code 0: all within the tolerance; 1: a difference, or a failure; 2: bad use.

It compares arithmetic, not speed, and not the tokenizers. Weights in eight bits are expanded on our side.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddtree.arguments import device, source, whole
from qwen_gdn import QwenGDN, Topology
from tools.arguments import ToolParser, amount, wholes
from tools.parity import theirs
from tools.parity.report import Comparison, compare, lines, rms_error
from tools.parity.shapes import published_27b, random_model, tiny
from tools.parity.trace import Trace, run_our_tree, run_ours, run_their_paths, run_theirs
from weights import read_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT32 = 2e-5
FACTOR = (
    4.0  # how much further from float32 than transformers' own run in a dtype ours may be; rounding alone came to 2.9
)
RANDOM = {"tiny": (tiny, 0.05), "27b": (published_27b, 0.02)}


class Sides(NamedTuple):
    """The same weights twice; a third time in float32 where that is the yardstick."""

    ours: QwenGDN
    theirs: Any
    exact: Any | None


class Case(NamedTuple):
    """One way to run ours, and what both gave; `exact` is what transformers gives in float32, if that is measured."""

    name: str
    ours: Trace
    theirs: Trace
    exact: Trace | None


class Verdict(NamedTuple):
    """Errors of ours, and the largest that counts as equal."""

    found: Comparison
    tolerance: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        sides = load(options)
        return report(cases(sides, options), options.tolerance, parts=options.parts)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"layer_diff: {error}", file=sys.stderr)
        return 1


def load(options: argparse.Namespace) -> Sides:
    """Both models. Transformers reads a checkpoint by itself; of a random one it gets the weights by name."""
    dtype = DTYPES[options.dtype]
    by_float32 = options.tolerance is None and dtype != torch.float32
    if options.random:
        make, sigma = RANDOM[options.random]
        raw = make(**({"layers": options.layers} if options.layers else {}))
        ours = random_model(raw, sigma, device=options.device, seed=options.seed).to(dtype)
        return Sides(ours, theirs.twin(ours, raw), theirs.twin(ours, raw, torch.float32) if by_float32 else None)
    ours, read = read_target(options.source, device=options.device, dtype=dtype, eight_bits="expand")
    exact = theirs.read(read.folder, torch.float32, options.device) if by_float32 else None
    return Sides(ours, theirs.read(read.folder, dtype, options.device), exact)


def cases(sides: Sides, options: argparse.Namespace) -> Iterator[Case]:
    """Runs ours and transformers on the same random tokens; each case is run when it is asked for."""
    draw = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(sides.ours.config.vocab_size, (options.tokens,), generator=draw)
    one_shot = run_theirs(sides.theirs, tokens)
    exact = None if sides.exact is None else run_theirs(sides.exact, tokens)
    yield Case("one shot", run_ours(sides.ours, tokens), one_shot, exact)
    pieces = cut(options.tokens, options.cuts)
    yield Case(f"cached, {_in_words(pieces)}", run_ours(sides.ours, tokens, pieces), one_shot, exact)
    if options.tree:
        nodes = torch.randint(sides.ours.config.vocab_size, (options.tree,), generator=draw)
        topology = random_tree(options.tree, draw)
        yield Case(
            f"a tree of {options.tree} nodes, against its paths",
            run_our_tree(sides.ours, tokens, nodes, topology),
            run_their_paths(sides.theirs, tokens, nodes, topology),
            None if sides.exact is None else run_their_paths(sides.exact, tokens, nodes, topology),
        )
    own = compare(run_theirs(sides.theirs, tokens, pieces), one_shot)
    print(f"for scale, transformers cached against itself in one shot: {own.worst:.2e}, top-1 {own.top1:.1%}")


def judge(case: Case, tolerance: float | None) -> Verdict:
    """Ours against transformers, or both of them against its float32 run."""
    if case.exact is None:
        return Verdict(compare(case.ours, case.theirs), FLOAT32 if tolerance is None else tolerance)
    own = compare(case.theirs, case.exact, rms_error)
    return Verdict(compare(case.ours, case.exact, rms_error), FACTOR * own.worst)


def report(done: Iterator[Case], tolerance: float | None, *, parts: bool) -> int:
    """Prints the comparisons; returns 1 if any is beyond the tolerance, else 0."""
    faults: list[str] = []
    for case in done:
        found, allowed = judge(case, tolerance)
        against = "errors to transformers" if case.exact is None else "rms errors to float32"
        rows = f"{len(case.ours['logits'])} rows, top-1 agreement {found.top1:.1%}"
        print(f"{case.name}: {rows}; {against}, tolerance {allowed:.1e}")
        for line in lines(found, allowed, parts=parts):
            print(line)
        faults += _fault(case.name, found, allowed)
    for fault in faults:
        print(f"DIFFERENT {fault}")
    if not faults:
        print("equal within the tolerance")
    return 1 if faults else 0


def _fault(name: str, found: Comparison, tolerance: float) -> list[str]:
    where = found.fault(tolerance)
    return [f"{name}: first in {where}; worst error {found.worst:.2e}, tolerance {tolerance:.1e}"] if where else []


def cut(total: int, lengths: Sequence[int]) -> list[int]:
    """Those lengths, the last one repeated, until they sum to the total exactly."""
    pieces: list[int] = []
    while sum(pieces) < total:
        wanted = lengths[min(len(pieces), len(lengths) - 1)]
        pieces.append(min(wanted, total - sum(pieces)))
    return pieces


def random_tree(nodes: int, draw: torch.Generator) -> Topology:
    """A tree of that many nodes, each below one of the four before it."""
    far = torch.randint(1, 5, (nodes,), generator=draw).tolist()
    return Topology([-1] + [max(0, i - far[i]) for i in range(1, nodes)])


def _in_words(pieces: Sequence[int]) -> str:
    shown = " + ".join(map(str, pieces[:4]))
    return f"{shown} + … ({len(pieces)} pieces)" if len(pieces) > 4 else shown


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "\n\n".join((__doc__ or "").split("\n\n")[:3:2])
    parser = ToolParser(prog="layer_diff", description=about, allow_abbrev=False)
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("source", nargs="?", type=source, help="checkpoint folder, hub id, or 'bundled'")
    of.add_argument("--random", choices=RANDOM, help="a random model instead of a checkpoint")
    parser.add_argument("--layers", type=whole(1), help="layers of the random model")
    parser.add_argument("--device", type=device, default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tokens", type=whole(1), default=130, help="length of the text (random tokens)")
    parser.add_argument("--cuts", type=wholes(1), help="cached pieces, the last length repeats; default: half, 3, 1")
    parser.add_argument("--tree", type=whole(), default=16, help="nodes of the tree, 0 for none")
    parser.add_argument(
        "--tolerance",
        type=amount,
        help="largest max|a - b| / max|b| between ours and transformers, of any layer's output, that counts as equal; "
        f"default: {FLOAT32:g} in float32, else {FACTOR:g} times the rms error of transformers' own run in that dtype, "
        "both to its float32 run of the same weights, which is held in memory too",
    )
    parser.add_argument("--parts", action="store_true", help="print norms, mixer and MLP of every layer too")
    parser.add_argument("--seed", type=whole(), default=0)
    options = parser.parse_args(arguments)
    if options.layers and not options.random:
        parser.error("--layers is for --random: a checkpoint has the layers it has")
    if options.cuts is None:
        options.cuts = [max(1, options.tokens // 2), 3, 1]
    return options


if __name__ == "__main__":
    sys.exit(main())
