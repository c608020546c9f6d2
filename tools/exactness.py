"""The full grid of exactness: `generate` against `decode`, for every scripted proposer, budget and shape of tree.

    python tools/exactness.py                    a tiny random hybrid in float64 and float32, half an hour
    python tools/exactness.py --model deep       one of eight layers, an hour and a half
    python tools/exactness.py --model bundled --drafter bundled --budgets 7,31 --prompts 10
    python tools/exactness.py --batches 200      random batches of rows instead, each row against its own run

A difference is a fault in float64. In float32 it is one if the two tokens' float64 logits differ by more than 1e-5 of
the greatest; a smaller gap is a tie at rounding level, and is listed. It measures no speed.

`--batches`: `generate_batch` against `generate`, round by round. Of each batch all is drawn at random: 1 to 6 rows, of
which two may be the same, their prompts, counts, budgets, proposers and samplers, stop ids, the window that reads
prompts, and how trees are built. Where a row is sampled, any difference is a fault.

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

from proposers import PROPOSERS, Difference, difference, emitted, small_model  # noqa: E402
from tiny import EXPERTS, SMALL, randint, random_tokens, seeded, tiny_model  # noqa: E402

from ddtree import (  # noqa: E402
    NoDrafts,
    Proposer,
    Round,
    build_chain,
    build_spine,
    build_tree,
    generate,
    generate_batch,
    make_sampler,
)
from ddtree.arguments import source  # noqa: E402
from ddtree.tree import Build  # noqa: E402
from qwen_gdn import QwenGDN, Sampler, decode, greedy  # noqa: E402
from tools.arguments import documented_parser  # noqa: E402
from weights import load_drafter, load_target  # noqa: E402

BUDGETS = (0, 1, 2, 3, 7, 8, 15, 16, 31, 63, 64)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
MODELS: dict[str, Callable[[torch.dtype], QwenGDN]] = {
    "small": lambda dtype: small_model(dtype=dtype),
    "deep": lambda dtype: tiny_model(dtype=dtype, wild=4.0),
    "experts": lambda dtype: tiny_model(dtype=dtype, wild=4.0, layer_types=list(SMALL), **EXPERTS),
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
            outcomes[name] = _run_batches(options, name) if options.batches else _run_all(options, name)
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
            (faults if found.fault else ties).append(case | _told(found))
        tokens += len(emitted(run))
        if budget:
            emits[name] += sum(done.accepted + 1 for done in run[1:])
            rounds[name] += len(run) - 1
    accepted = {name: round(emits[name] / rounds[name], 2) for name in makers if rounds[name]}
    return Outcome(len(grid), tokens, faults, ties, accepted)


def _told(found: Difference | None) -> dict[str, Any]:
    """A gap of None: one output ended, or float64 itself differs. Nothing at all: the rounds differ and no token."""
    return {} if found is None else found._asdict() | {"gap": found.gap if found.gap < float("inf") else None}


class Row(NamedTuple):
    """One row of a batch; `make` and `sampler` make its proposer and sampler anew."""

    prompt: list[int]
    count: int
    budget: int
    make: Callable[[], Proposer]
    sampler: Callable[[], Sampler]


def _run_batches(options: argparse.Namespace, dtype: str) -> Outcome:
    model, makers = _model(options.model, DTYPES[dtype]), _makers(options, DTYPES[dtype])
    faults, ties, runs, tokens = list[dict[str, Any]](), list[dict[str, Any]](), 0, 0
    for number in tqdm(range(options.batches), desc=dtype, unit="batch", disable=None):
        draw = seeded(number)
        rows = [_row(model, makers, draw, options.tokens) for _ in range(randint(draw, 1, 5))]
        rows += rows[:1] * randint(draw, 0, 1)
        first = list(decode(model, rows[0].prompt, max_new_tokens=options.tokens))
        build = (build_tree, build_chain, build_spine)[randint(draw, 0, 2)]
        how: dict[str, Any] = {"build": build, "prefill_window": randint(draw, 1, 30)}
        how["stop_ids"] = {first[randint(draw, 0, len(first) - 1)] for _ in range(randint(draw, -2, 2))}
        for place, (row, ours) in enumerate(zip(rows, _together(model, rows, how), strict=True)):
            alone = {"max_new_tokens": row.count, "budget": row.budget, "sampler": row.sampler()}
            theirs = list(generate(model, row.make(), row.prompt, **alone, **how))
            runs, tokens = runs + 1, tokens + len(emitted(ours))
            if ours != theirs:
                found = difference(model, row.prompt, emitted(ours), emitted(theirs))
                case: dict[str, Any] = {"batch": number, "row": place, "sampled": row.sampler() is not greedy}
                tie = found is not None and not found.fault and not case["sampled"]
                (ties if tie else faults).append(case | _told(found))
    return Outcome(runs, tokens, faults, ties, {})


def _row(model: QwenGDN, makers: dict[str, Maker], draw: torch.Generator, most: int) -> Row:
    prompt = _prompt(model, randint(draw, 0, 10**9))
    # Proposers that read layers would have to be those of all rows.
    names = [name for name in makers if name not in ("reading layers", "drafter", "plain")]
    name, seed = names[randint(draw, 0, len(names) - 1)], randint(draw, 0, 10**9)
    transcript = [*prompt, *decode(model, prompt, max_new_tokens=most + 16)]
    settings = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": seed}
    sampled = randint(draw, 0, 3) == 0
    return Row(
        prompt,
        randint(draw, 0, most),
        randint(draw, 0, 16),
        lambda: makers[name](transcript, seed),
        lambda: make_sampler(**settings) if sampled else greedy,
    )


def _together(model: QwenGDN, rows: Sequence[Row], how: dict[str, Any]) -> list[list[Round]]:
    """The rounds of each row of one batch, without those after its end."""
    steps = generate_batch(
        model,
        [row.make() for row in rows],
        [row.prompt for row in rows],
        max_new_tokens=[row.count for row in rows],
        budget=[row.budget for row in rows],
        sampler=[row.sampler() for row in rows],
        **how,
    )
    columns = list(zip(*steps, strict=True)) or [()] * len(rows)
    return [[done for done in column if done.tokens] for column in columns]


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
        help="small, deep, experts, or a target: a folder, a hub id or `bundled` (default: small)",
    )
    add("--drafter", type=source, help="a drafter of that target, as one more proposer")
    add("--proposers", type=_choice_of(PROPOSERS), default=list(PROPOSERS), help=f"of {', '.join(PROPOSERS)}")
    add("--dtypes", type=_choice_of(DTYPES), default=list(DTYPES), help=f"of {', '.join(DTYPES)}")
    add("--budgets", type=_numbers, default=list(BUDGETS), help=f"drafted nodes a round (default: {BUDGETS})")
    add("--batches", type=_positive, metavar="N", help="compare so many random batches with their rows alone")
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
