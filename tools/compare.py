"""Compares ways of decoding on the same prompts: plain, chains, trees and automatic budgets of a pair.

    python tools/compare.py                    the bundled pair on code, prose, repetitive and hopeless text
    python tools/compare.py --target FOLDER --drafter FOLDER --prompts FILE
    python tools/compare.py --modes plain,chain:8,tree:16,spine:16 --sets code --temperature 0.7 --plot figure.png

Modes are `plain`, `chain:N`, `tree:N` and `spine:N` (a tree that holds the chain), N drafted nodes a round, and `auto`,
which goes on learning from text to text, those written before anything is measured included.
They alternate: every prompt is written in all of them, one after the other, each time in another order, and what is
written must be the same in all, token for token. Outputs that differ by more than rounding are refused, with the
place; so in float32 no figures are given for texts that differ (in bfloat16 and float16 near-ties part more of them,
which is told). At a temperature a seed gives each place of a text its own numbers, so that every mode must
write the same there too; greedily there is one seed.

Speed leaves out prompt and first token. On a CPU that others use too, --clock cpu --threads 1 counts the time that this
process computes, in place of the time that passes. A ratio of two modes is taken within an alternation, text by text; a
set's is the geometric mean over prompts of medians over alternations. Accepted length (tau) is the mean of accepted + 1
over all rounds but the first. Behind every figure stands its 95 % interval by a bootstrap over prompts (10,000
resamples, percentiles): how far it would move with other prompts of the kind. `best` is the fastest of the modes with a
fixed budget, plain among them, picked on these very figures, which flatters it. Sets together count alike, however many
prompts they have.

With --forced chain, tree and spine of every budget named are also held against each other from the same contexts, all
places of the plain texts: there a spine never accepts less than the chain.

Prompt sets: code, held out from the bundled pair's training; prose; repetitive text; and hopeless, code written at a
temperature of 3, where next to nothing that the bundled drafter proposes is accepted (accepted length 1.00 of chain:8,
1.04 of tree:16). Files of prompts are JSON (a list, or an object with `prompts`), JSON lines (.jsonl), or text
with a prompt a line; a prompt is a text or a list of ids.

Tables for people come first, the last line of stdout is one JSON object. Exit code 0; 1 for a failure, outputs that
differ, or a spine that accepts less than its chain; 2 for bad use.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.insert(0, str(ROOT))

from ddtree.arguments import BUNDLED, MTP, device, drafter, source, whole  # noqa: E402
from tools.arguments import amount, documented_parser, file, some_of  # noqa: E402
from tools.measure import comparison, tables  # noqa: E402
from tools.measure.acceptance import Forced, teacher_forced  # noqa: E402
from tools.measure.options import DTYPES  # noqa: E402
from tools.measure.paired import Plan, measure  # noqa: E402
from tools.measure.pairs import encoder, load_pair  # noqa: E402
from tools.measure.plot import plot  # noqa: E402
from tools.measure.prompts import Encode, PromptSet, read_prompts  # noqa: E402
from tools.measure.runs import PLAIN, Mode, Pair  # noqa: E402

HELD_OUT, OWN = ROOT / "weights" / "bundled" / "prompts", ROOT / "tools" / "prompts"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MODES = "plain,chain:4,chain:8,tree:8,tree:16,tree:32,spine:16,auto"


class Kind(NamedTuple):
    """A bundled set: the files that its prompts are taken from in turn, and the temperature that it is written at."""

    files: tuple[Path, ...]
    temperature: float = 0.0


CODE = (HELD_OUT / "heldout-192.json", HELD_OUT / "unseen-192.json")
SETS = {
    "code": Kind(CODE),
    "prose": Kind((OWN / "prose.json",)),
    "repetitive": Kind((OWN / "repetitive.json",)),
    "hopeless": Kind(CODE, temperature=3.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    try:
        return _compare(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1


def _compare(options: argparse.Namespace) -> int:
    sets = list(_prompt_sets(options, encoder(options.target)))
    named = (options.target, options.drafter, options.device, options.dtype)
    pair = load_pair(*named, engine=options.engine, clock=CLOCKS[options.clock])
    compared, forced = list[comparison.Set](), list[list[Forced]]()
    for prompts, heat in sets:
        plan = Plan(heat, options.seeds if heat else 1, options.rounds, options.max_new_tokens)
        measured = measure(pair, prompts.prompts, options.modes, plan)
        compared.append(comparison.Set(prompts, plan, measured, len(compared)))
        print("\n".join([*tables.heading(prompts), *tables.comparison(compared[-1])]), flush=True)
        if options.forced:
            forced.append(_forced(pair, compared[-1]))
            print("\n".join(tables.teacher_forced(forced[-1])))
        print()
    together = comparison.together(compared)
    print("\n".join(tables.together(together)))
    figures = {"sets": [each.as_json() for each in compared], "together": together.as_json()}
    if options.forced:
        figures["teacher_forced"] = [[each._asdict() for each in rows] for rows in forced]
    print(json.dumps(_circumstances(options, pair) | figures), flush=True)
    if options.plot:
        plot(options.plot, compared)
    return 1 if any(each.spine_below for rows in forced for each in rows) else 0


def _circumstances(options: argparse.Namespace, pair: Pair) -> dict[str, object]:
    names = ("target", "drafter", "engine", "threads", "clock", "max_new_tokens", "rounds")
    return (
        {"modes": [mode.word for mode in options.modes]}
        | {name: getattr(options, name) for name in names}
        | {"device": str(options.device), "dtype": str(pair.target.dtype), "torch": torch.__version__}
    )


def _forced(pair: Pair, found: comparison.Set) -> list[Forced]:
    """Accepted lengths at the budgets of the set's modes, from the contexts of its plain texts."""
    budgets = sorted({mode.budget for mode in found.measured.modes if mode.budget})
    return teacher_forced(pair, found.prompts.prompts, budgets, found.plan.count, found.plan.samplings)


def _prompt_sets(options: argparse.Namespace, encode: Encode) -> Iterator[tuple[PromptSet, float]]:
    """The given files, or bundled sets, cut to the limit, each with the temperature that it is written at."""
    if options.prompts:
        sets = [(read_prompts(each, encode, options.limit), 0.0) for each in options.prompts]
    else:
        sets = [(_bundled(name, encode, options.limit), SETS[name].temperature) for name in options.sets]
    for prompts, heat in sets:
        if len(prompts.prompts) < 2:
            raise ValueError(f"{prompts.name} has one prompt; an interval over prompts needs at least 2")
        yield prompts, heat if options.temperature is None else options.temperature


def _bundled(name: str, encode: Encode, limit: int) -> PromptSet:
    """The first prompts of a bundled set; where it has several files, of each in turn."""
    parts = [read_prompts(each, encode, limit) for each in SETS[name].files]
    mixed = [prompt for row in zip(*(part.prompts for part in parts), strict=False) for prompt in row]
    licences = sorted({licence for part in parts for licence in part.licence.split(", ")})
    return PromptSet(name, ", ".join(licences), tuple(mixed[:limit]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = documented_parser("compare", __doc__)
    add = parser.add_argument
    add("--target", type=source, default=BUNDLED, help="folder, hub id, or 'bundled' (default: bundled)")
    add("--drafter", type=drafter, help=f"its drafter, likewise, or {MTP} (default: bundled for the bundled target)")
    add(
        "--modes", type=_modes, default=_modes(MODES), help=f"comma-separated, plain is always added (default: {MODES})"
    )
    add("--sets", type=some_of("set", SETS), help=f"of {', '.join(SETS)} (default: all)")
    add("--prompts", nargs="+", type=file, metavar="FILE", help="prompt files, in place of the bundled sets")
    add("--limit", type=whole(2), default=10, help="prompts of each set that are used (default: 10)")
    add("--temperature", type=amount, help="in place of the sets' own (greedy, but 3 for hopeless)")
    add("--seeds", type=whole(1), default=3, help="texts of a prompt where it is not greedy (default: 3)")
    add("--rounds", type=whole(1), default=3, help="alternations that are measured (default: 3)")
    add("--max-new-tokens", type=whole(2), default=64, help="default: 64")
    add("--threads", type=whole(1), default=2, help="of torch (default: 2)")
    add("--device", type=device, default=torch.device("cpu"), help="cpu, cuda or cuda:N (default: cpu)")
    add("--dtype", choices=DTYPES, help="default: float32 on a CPU, the checkpoint's on CUDA")
    add("--engine", choices=("auto", "eager", "graph"), default="auto", help="as ddtree.run takes it (default: auto)")
    add("--clock", choices=CLOCKS, default="wall", help="cpu counts what this process gets of it (default: wall)")
    add("--forced", action="store_true", help="also compare chain, tree and spine from the same contexts")
    add("--plot", type=Path, metavar="FILE", help="a figure, in the format of the file's ending; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.drafter is None and options.target != BUNDLED:
        parser.error("--target needs the --drafter that is to be compared with plain decoding")
    if options.prompts and options.sets:
        parser.error("--sets names bundled prompts and --prompts replaces them; leave out one of them")
    if options.clock == "cpu" and options.device.type != "cpu":
        parser.error("--clock cpu does not see what a device does; leave it out")
    if options.forced and not any(mode.budget for mode in options.modes):
        parser.error("--forced compares drafts of a budget; name a mode that has one in --modes")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; pip install 'ddtree[tools]', or leave it out")
    options.drafter, options.sets = options.drafter or BUNDLED, options.sets or list(SETS)
    if options.engine == "auto":
        options.engine = "graph" if options.device.type == "cuda" else "eager"
    return options


def _modes(text: str) -> list[Mode]:
    """A type of argument: modes with commas between them; plain comes first, and none comes twice."""
    try:
        return list(dict.fromkeys([PLAIN, *(Mode.read(word.strip()) for word in text.split(","))]))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
