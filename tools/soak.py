"""Random operations on caches, each held against a model that replays the committed tokens from scratch.

    python tools/soak.py                                          20 seeds of 1,000 operations, the model itself
    python tools/soak.py --engine programs --model experts --seeds 5
    python tools/soak.py --engine compiled --seeds 1              the engine's programs compiled

Prefill in pieces, steps, trees of any shape, chains, commits, discards, crops, forks, `decode` and `generate` closed
midway, things that must be refused, over several caches at once; into a fifth of the operations a failure is planted:
a call somewhere below raises, or an interrupt hits some line. The reference of a cache is the list of its tokens. After
an operation the cache must hold, to rounding, what one forward over these from nothing leaves, and predict the same; if
no token came or went its memory is the same bit by bit. At the first operation, every 500th and the last, all caches
are dropped, and no more bytes of tensors may be alive than at the first (`tools/soaking/live.py` says how they are
counted). It measures no speed.

Progress goes to stderr where that is a terminal; a table for people comes first, the last line of stdout is one JSON
object. A seed ends at its first divergence, which is shown with the operations before it and the command that repeats
it. Exit code 0; 1 for a divergence; 2 for bad use.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the tiny models and the scripted proposers are the tests' own

from ddtree.arguments import whole  # noqa: E402
from tools.arguments import documented_parser  # noqa: E402
from tools.soaking.live import counting  # noqa: E402
from tools.soaking.runners import DTYPES, KINDS, MODELS, compiling, new_model  # noqa: E402
from tools.soaking.soak import Failure, Outcome, soak  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    begin, outcomes = time.perf_counter(), list[Outcome]()
    model, oracle = (new_model(options.model, options.dtype) for _ in range(2))
    seeds = range(options.seed, options.seed + options.seeds)
    total = options.operations * options.seeds
    with compiling(options.engine), counting(), tqdm(total=total, unit="operation", disable=None) as progress:
        for seed in seeds:
            outcome = soak(
                seed, options.operations, options.engine, model, oracle, options.compare_every, progress.update
            )
            outcomes.append(outcome)
            print("\n".join(_lines(options, outcome)), flush=True)
    failures = [outcome.failure._asdict() for outcome in outcomes if outcome.failure]
    report = {
        "model": options.model,
        "engine": options.engine,
        "dtype": options.dtype,
        "divergences": len(failures),
        "operations": sum(outcome.operations for outcome in outcomes),
        "worst": max(outcome.worst for outcome in outcomes),
        "seconds": round(time.perf_counter() - begin, 1),
        "failures": failures,
        "seeds": [outcome._asdict() | {"failure": outcome.failure is not None} for outcome in outcomes],
    }
    print(json.dumps(report))
    return 1 if failures else 0


def _lines(options: argparse.Namespace, outcome: Outcome) -> list[str]:
    done, live = outcome.done, list(outcome.live.values())
    planted = done.get("failures", 0)
    head = f"seed {outcome.seed}: {outcome.operations} operations, {planted} broken off, worst gap {outcome.worst:.1e}"
    head += f", {live[0]} bytes alive at first, {live[-1]} at last"
    return [head, *(_told(options, outcome.failure) if outcome.failure else [])]


def _told(options: argparse.Namespace, failure: Failure) -> list[str]:
    command = f"python tools/soak.py --engine {options.engine} --model {options.model} --dtype {options.dtype}"
    command += f" --compare-every {options.compare_every}"
    command += f" --seed {failure.seed} --seeds 1 --operations {failure.operation}"
    head = f"  DIVERGENCE of seed {failure.seed} at operation {failure.operation}: {failure.message}"
    return [head, *(f"    {line}" for line in failure.last), f"  again: {command}"]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = documented_parser("soak", __doc__)
    add = parser.add_argument
    add("--operations", type=whole(1), default=1000, help="of each seed (default: 1000)")
    add("--seeds", type=whole(1), default=20, help="how many (default: 20)")
    add("--seed", type=whole(0), default=0, help="the first (default: 0)")
    add("--model", choices=MODELS, default="dense", help="(default: dense)")
    add("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    add(
        "--engine",
        choices=KINDS,
        default="eager",
        help="the model itself, an Engine whose programs are called as they stand, or one that compiles them, into "
        "which fewer kinds of failures can be planted (default: eager)",
    )
    add("--compare-every", type=whole(1), default=1, metavar="N", help="operations between replays (default: 1)")
    add("--threads", type=whole(1), default=1, help="of torch (default: 1)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
