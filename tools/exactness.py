"""The full grid of exactness: `generate` against `decode`, for every scripted proposer, budget and shape of tree.

    python tools/exactness.py                    a tiny random hybrid in float64 and float32, half an hour
    python tools/exactness.py --model deep       one of eight layers, an hour and a half
    python tools/exactness.py --model bundled --drafter bundled --budgets 7,31 --prompts 10

A difference is a fault in float64. In float32 it is one if the two tokens' float64 logits differ by more than 1e-5 of
the greatest; a smaller gap is a tie at rounding level, and is listed. It measures no speed.

Progress goes to stderr where that is a terminal; a table for people comes first, the last line of stdout is one JSON
object. Exit code 0; 1 for a fault or a failure; 2 for bad use.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the scripted proposers are the tests' own

from proposers import PROPOSERS, difference, emitted, small_model  # noqa: E402
from tiny import randint, random_tokens, seeded, tiny_model  # noqa: E402

from ddtree import NoDrafts, Proposer, build_chain, build_tree, generate  # noqa: E402
from ddtree.arguments import source  # noqa: E402
from ddtree.tree import Build  # noqa: E402
from qwen_gdn import QwenGDN, decode  # noqa: E402
from tools.arguments import documented_parser  # noqa: E402
from weights import load_drafter, load_target  # noqa: E402

BUDGETS = (0, 1, 2, 3, 7, 8, 15, 16, 31, 63, 64)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
MODELS: dict[str, Callable[[torch.dtype], QwenGDN]] = {
    "small": lambda dtype: small_model(dtype=dtype),
    "deep": lambda dtype: tiny_model(dtype=dtype, wild=4.0),
}
Maker = Callable[[Sequence[int], int], Proposer]
"""Makes a proposer from a whole transcript and a seed."""


class Shape(NamedTuple):
    """How drafts are laid out: `budget` nodes of a tree or of a chain."""

    kind: str
    build: Build
    budget: int


class Outcome(NamedTuple):
    """What the runs of one dtype came to. Differences carry their case, place, tokens and float64 gap."""

    runs: int
    tokens: int
    faults: list[dict[str, Any]]
    ties: list[dict[str, Any]]
    accepted: dict[str, float]  # by proposer, mean of accepted + 1 over all rounds with a budget but the first


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    begin, outcomes = time.perf_counter(), dict[str, Outcome]()
    try:
        for name in options.dtypes:
            outcomes[name] = _run_all(options, name)
            print("\n".join(_lines(name, outcomes[name])))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"exactness: {error}", file=sys.stderr)
        return 1
    report = {
        "model": options.model,
        "faults": sum(len(outcome.faults) for outcome in outcomes.values()),
        "seconds": round(time.perf_counter() - begin, 1),
        "dtypes": {name: outcome._asdict() for name, outcome in outcomes.items()},
    }
    print(json.dumps(report))
    return 1 if report["faults"] else 0


def _run_all(options: argparse.Namespace, dtype: str) -> Outcome:
    model = _model(options.model, DTYPES[dtype])
    makers = _makers(options, DTYPES[dtype])
    shapes = [Shape("tree", build_tree, budget) for budget in options.budgets]
    shapes += [Shape("chain", build_chain, budget) for budget in options.budgets]
    # Prompt by prompt, so that the oracle runs once for each.
    grid = [(prompt, name, shape) for prompt in range(options.prompts) for name in makers for shape in shapes]
    tokens, emits, rounds = 0, Counter[str](), Counter[str]()
    faults, ties = list[dict[str, Any]](), list[dict[str, Any]]()

    @lru_cache(maxsize=1)
    def text(number: int) -> tuple[list[int], list[int]]:
        prompt = _prompt(model, number)
        return prompt, list(decode(model, prompt, max_new_tokens=options.tokens))

    for number, name, (kind, build, budget) in tqdm(grid, desc=dtype, unit="run", disable=None):
        prompt, truth = text(number)
        proposer = makers[name]([*prompt, *truth], number)
        run = list(generate(model, proposer, prompt, max_new_tokens=len(truth), budget=budget, build=build))
        found = difference(model, prompt, emitted(run), truth)
        if found is not None:
            case = {"proposer": name, "shape": kind, "budget": budget, "prompt": number}
            gap = found.gap if found.gap < float("inf") else None  # None: one output ended, or float64 itself differs
            (faults if found.fault else ties).append(case | found._asdict() | {"gap": gap})
        tokens += len(emitted(run))
        if budget:
            emits[name] += sum(done.accepted + 1 for done in run[1:])
            rounds[name] += len(run) - 1
    accepted = {name: round(emits[name] / rounds[name], 2) for name in makers if rounds[name]}
    return Outcome(len(grid), tokens, faults, ties, accepted)


def _model(name: str, dtype: torch.dtype) -> QwenGDN:
    return MODELS[name](dtype) if name in MODELS else load_target(name, dtype=dtype)


def _makers(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Maker]:
    makers: dict[str, Maker] = {name: PROPOSERS[name] for name in options.proposers}
    if options.plain:
        makers["plain"] = lambda transcript, seed: NoDrafts()
    if options.drafter is not None:
        drafter = load_drafter(options.drafter, dtype=dtype)
        makers["drafter"] = lambda transcript, seed: drafter
    return makers


def _prompt(model: QwenGDN, number: int) -> list[int]:
    """1 to 24 seeded tokens."""
    draw = seeded(number)
    tokens: list[int] = random_tokens(draw, randint(draw, 1, 24), vocab=model.config.vocab_size).tolist()
    return tokens


def _lines(dtype: str, outcome: Outcome) -> list[str]:
    counts = f"{len(outcome.faults)} faults, {len(outcome.ties)} ties"
    head = f"{dtype}: {outcome.runs} runs, {outcome.tokens} tokens, {counts}"
    means = [f"  {mean:6.2f}  {name}" for name, mean in outcome.accepted.items()]
    kinds = [("fault", outcome.faults), ("tie", outcome.ties)]
    return [head, "  mean accepted length", *means, *(f"  {kind}: {case}" for kind, found in kinds for case in found)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = documented_parser("exactness", __doc__)
    add = parser.add_argument
    add(
        "--model",
        type=_model_name,
        default="small",
        help="small, deep, or a target: a folder, a hub id or `bundled` (default: small)",
    )
    add("--drafter", type=source, help="a drafter of that target, as one more proposer")
    add("--proposers", type=_choice_of(PROPOSERS), default=list(PROPOSERS), help=f"of {', '.join(PROPOSERS)}")
    add("--dtypes", type=_choice_of(DTYPES), default=list(DTYPES), help=f"of {', '.join(DTYPES)}")
    add("--budgets", type=_numbers, default=list(BUDGETS), help=f"drafted nodes a round (default: {BUDGETS})")
    add("--prompts", type=_positive, default=50, help="how many (default: 50)")
    add("--tokens", type=_positive, default=64, help="written after each prompt (default: 64)")
    add("--threads", type=_positive, default=1, help="of torch (default: 1)")
    add("--no-plain", dest="plain", action="store_false", help="leave out the loop without drafts")
    return parser.parse_args(arguments)


def _model_name(text: str) -> str:
    return text if text in MODELS else source(text)


def _choice_of(known: dict[str, Any]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}, give some of: {', '.join(known)}")
        if not chosen:
            raise argparse.ArgumentTypeError(f"give some of: {', '.join(known)}")
        return chosen

    return names


def _numbers(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"give numbers of at least 0 with commas between, got {text!r}")
    return [int(part) for part in text.split(",")]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give a number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
