"""Ours against transformers, layer by layer, on one checkpoint: the first difference is named.

    python tools/layer_diff.py FOLDER            a checkpoint folder, a hub id, or `bundled`
    python tools/layer_diff.py --random tiny     a random model made here (`27b`: its layer shapes, needs a GPU)

Both sides read the checkpoint by themselves and get the same tokens: in one forward, through the cache in pieces,
and as the nodes of a tree, whose root paths transformers is fed one by one. Errors are max|a - b| / max|b| over all
rows of a tensor. Exit code 0: all within the tolerance; 1: a difference, or a failure; 2: bad use.

It compares arithmetic, not speed, and not the tokenizers.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qwen_gdn import QwenGDN, Topology
from tools.parity import theirs
from tools.parity.report import Comparison, compare, lines
from tools.parity.shapes import published_27b, random_model, tiny
from tools.parity.trace import Trace, run_our_tree, run_ours, run_their_paths, run_theirs
from weights import read_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCES = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2}
RANDOM = {"tiny": (tiny, 0.05), "27b": (published_27b, 0.02)}


class Sides(NamedTuple):
    """The same weights twice."""

    ours: QwenGDN
    theirs: Any


class Case(NamedTuple):
    """One way to run ours, and what both gave."""

    name: str
    ours: Trace
    theirs: Trace


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
    if options.random:
        make, sigma = RANDOM[options.random]
        raw = make(**({"layers": options.layers} if options.layers else {}))
        ours = random_model(raw, sigma, device=options.device, seed=options.seed).to(dtype)
        return Sides(ours, theirs.twin(ours, raw))
    ours, read = read_target(options.source, device=options.device, dtype=dtype)
    return Sides(ours, theirs.read(read.folder, dtype, options.device))


def cases(sides: Sides, options: argparse.Namespace) -> Iterator[Case]:
    """Runs ours and transformers on the same random tokens; each case is run when it is asked for."""
    draw = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(sides.ours.config.vocab_size, (options.tokens,), generator=draw)
    one_shot = run_theirs(sides.theirs, tokens)
    yield Case("one shot", run_ours(sides.ours, tokens), one_shot)
    pieces = cut(options.tokens, options.cuts)
    yield Case(f"cached, {_in_words(pieces)}", run_ours(sides.ours, tokens, pieces), one_shot)
    if options.tree:
        nodes = torch.randint(sides.ours.config.vocab_size, (options.tree,), generator=draw)
        topology = random_tree(options.tree, draw)
        yield Case(
            f"a tree of {options.tree} nodes, against its paths",
            run_our_tree(sides.ours, tokens, nodes, topology),
            run_their_paths(sides.theirs, tokens, nodes, topology),
        )
    own = compare(run_theirs(sides.theirs, tokens, pieces), one_shot)
    print(f"for scale, transformers cached against itself in one shot: {own.worst:.2e}, top-1 {own.top1:.1%}")


def report(done: Iterator[Case], tolerance: float, *, parts: bool) -> int:
    """Prints the comparisons; returns 1 if any is beyond the tolerance, else 0."""
    faults: list[str] = []
    for case in done:
        found = compare(case.ours, case.theirs)
        print(f"{case.name}: {len(case.ours['logits'])} rows, top-1 agreement {found.top1:.1%}")
        for line in lines(found, tolerance, parts=parts):
            print(line)
        faults += _fault(case.name, found, tolerance)
    for fault in faults:
        print(f"DIFFERENT {fault}")
    if not faults:
        print(f"equal within {tolerance:.1e}")
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
    parser = argparse.ArgumentParser(
        prog="layer_diff", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("source", nargs="?", help="checkpoint folder, hub id, or 'bundled'")
    source.add_argument("--random", choices=RANDOM, help="a random model instead of a checkpoint")
    parser.add_argument("--layers", type=_positive, help="layers of the random model")
    parser.add_argument("--device", type=_device, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tokens", type=_positive, default=130, help="length of the text (random tokens)")
    parser.add_argument("--cuts", type=_lengths, help="cached pieces, the last length repeats; default: half, 3, 1")
    parser.add_argument("--tree", type=int, default=16, help="nodes of the tree, 0 for none")
    parser.add_argument("--tolerance", type=float, help=f"default by dtype: {TOLERANCES}")
    parser.add_argument("--parts", action="store_true", help="print norms, mixer and MLP of every layer too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.layers and not options.random:
        parser.error("--layers is for --random: a checkpoint has the layers it has")
    if options.tree < 0:
        parser.error(f"--tree must be 0 or more, got {options.tree}")
    if options.cuts is None:
        options.cuts = [max(1, options.tokens // 2), 3, 1]
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.dtype]
    return options


def _device(text: str) -> str:
    """A device that is there, so that a random model is not half built before one finds out."""
    try:
        torch.empty(0, device=text)
    except (AssertionError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {str(error).splitlines()[0]}") from None
    return text


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _lengths(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
