"""Memory over long runs: a session of many turns against fresh prefills, and many bfloat16 rounds against float64.

    python tools/long_runs.py turns     40 turns of the bundled pair, each held against a fresh run of the transcript
    python tools/long_runs.py rounds    2,000 bfloat16 rounds, the committed state against a float64 replay

`turns`: after every turn the session's tokens must be those of plain decoding after a fresh prefill of the whole
transcript, but for ties at rounding level, and its memory that of the prefill. The time of a turn is told beside the
time that the fresh prefill takes. Every turn reads and writes as many tokens as the others.

`rounds`: a generation in bfloat16, sampled so that it does not loop. A float64 model of the same weights reads what was
committed, and its recurrent states are compared at equal distances. The error must not grow: its mean over the last
third may be no more than 1.5 times that over the first.

A table for people comes first, the last line of stdout is one JSON object. Exit code 0; 1 if memory or tokens differ or
an error grows; 2 for bad use.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import NamedTuple, TypeVar

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # how memory is compared is the tests' own

from tiny import memory_of, worst_gap  # noqa: E402

from ddtree import Session, generate, make_sampler  # noqa: E402
from ddtree.arguments import whole  # noqa: E402
from qwen_gdn import DeltaCache, HybridCache, decode, prefill  # noqa: E402
from tools.arguments import documented_parser  # noqa: E402
from tools.measure.exactness import DifferentOutputError, Referee  # noqa: E402
from weights import load_drafter, load_target, load_tokenizer  # noqa: E402

STATE_LIMIT = 1e-4  # of a tensor's greatest number, in float32
GROWTH = 1.5
T = TypeVar("T")


class Turn(NamedTuple):
    """One turn: its transcript's length, how much of that it read, how it compares, and the seconds of both ways."""

    length: int
    read: int
    gap: float
    tie: bool
    seconds: float
    fresh_seconds: float


def turns(count: int, new: int) -> tuple[list[str], dict[str, object], bool]:
    """A session of that many turns, each of which appends `new` tokens and lets as many be written."""
    target, tokenizer = load_target("bundled"), load_tokenizer("bundled")
    session = Session(target, load_drafter("bundled"), tokenizer, capacity=2 * new * (count + 1))
    text = tokenizer.encode((ROOT / "qwen_gdn" / "cache.py").read_text() * (1 + new * count // 3000))
    referee, found = Referee(target), list[Turn]()
    for number in range(count):
        conversation = [*session.ids, *text[number * new : (number + 1) * new]]
        begin = time.perf_counter()
        turn = session.turn(conversation, max_new_tokens=new)
        list(turn)
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        fresh = target.new_cache(session.length)
        prefill(target, torch.tensor([session.ids[: session.length]]), fresh)
        fresh_seconds = time.perf_counter() - begin
        plain = list(decode(target, conversation, max_new_tokens=new))
        tie = referee.judge(f"turn {number}", conversation, turn.ids, plain)
        read = len(conversation) - session.reused
        gap = worst_gap(memory_of(session._cache), memory_of(fresh))
        found.append(Turn(len(session.ids), read, gap, tie is not None, seconds, fresh_seconds))
    lines = [
        f"turn {i:3}: transcript {t.length:5}, read {t.read:3}, worst gap {t.gap:.1e}{', a tie' if t.tie else ''}, "
        f"{t.seconds:.3f} s; a fresh prefill alone {t.fresh_seconds:.3f} s"
        for i, t in enumerate(found, 1)
    ]
    summary = {
        "turns": count,
        "worst_gap": max(t.gap for t in found),
        "ties": sum(t.tie for t in found),
        "seconds_of_first_and_last_five": [round(mean([t.seconds for t in part]), 4) for part in ends(found, 5)],
        "prefill_of_first_and_last_five": [round(mean([t.fresh_seconds for t in part]), 4) for part in ends(found, 5)],
    }
    return lines, summary, all(t.gap <= STATE_LIMIT and t.read <= new + 1 for t in found)


def rounds(count: int, every: int, seed: int) -> tuple[list[str], dict[str, object], bool]:
    """That many bfloat16 rounds, compared after each `every` of them."""
    target = load_target("bundled", dtype=torch.bfloat16)
    exact = copy.deepcopy(target).double()
    prompt = load_tokenizer("bundled").encode("import os\n\n\nclass Stack:\n")
    capacity = len(prompt) + 9 * count
    cache, replay = target.new_cache(capacity), exact.new_cache(capacity)
    run = generate(
        target,
        load_drafter("bundled"),
        prompt,
        max_new_tokens=8 * count,
        sampler=make_sampler(0.8, seed=seed),
        cache=cache,
    )
    ids, errors = list(prompt), list[float]()
    lengths = list[int]()
    for number, done in zip(range(count + 1), run, strict=False):
        ids += done.tokens
        if number and number % every == 0:
            prefill(exact, torch.tensor([ids[replay.length : cache.length]]), replay)
            errors.append(state_error(cache, replay))
            lengths.append(cache.length)
    first, last = (mean(part) for part in ends(errors, max(1, len(errors) // 3)))
    lines = [
        f"round {(i + 1) * every:5}, {length:5} tokens: error of the state {error:.2e}"
        for i, (length, error) in enumerate(zip(lengths, errors, strict=True))
    ]
    summary = {"rounds": count, "seed": seed, "tokens": cache.length, "first_third": first, "last_third": last}
    return lines, summary, last <= GROWTH * first


def state_error(low: HybridCache, exact: HybridCache) -> float:
    """The root of the mean, over the delta layers, of |a − b|² / |b|² of their states."""
    pairs = [(a.state.double(), b.state) for a, b in zip(low, exact, strict=True) if isinstance(a, DeltaCache)]
    return mean([float((a - b).square().sum() / b.square().sum()) for a, b in pairs]) ** 0.5


def ends(values: Sequence[T], count: int) -> tuple[Sequence[T], Sequence[T]]:
    """The first and the last of them."""
    return values[:count], values[-count:]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    try:
        if options.what == "turns":
            lines, summary, holds = turns(options.count or 40, options.step or 24)
        else:
            lines, summary, holds = rounds(options.count or 2000, options.step or 100, options.seed)
    except DifferentOutputError as error:
        print(f"long_runs: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    print(json.dumps(summary | {"holds": holds}))
    return 0 if holds else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = documented_parser("long_runs", __doc__)
    add = parser.add_argument
    add("what", choices=("turns", "rounds"))
    add("--count", type=whole(1), metavar="N", help="of turns or rounds (default: 40 or 2000)")
    add(
        "--step",
        type=whole(1),
        metavar="N",
        help="tokens that a turn reads, and writes, or rounds from one comparison to the next (default: 24 or 100)",
    )
    add("--seed", type=whole(0), default=3, help="of what `rounds` writes (default: 3)")
    add("--threads", type=whole(1), default=1, help="of torch (default: 1)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
