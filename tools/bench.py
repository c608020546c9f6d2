"""Measures a pair of target and drafter: speed side by side with plain decoding, accepted length, and single parts.

    python tools/bench.py                  tokens a second: plain, chain, tree at each budget, alternating
    python tools/bench.py --acceptance     accepted length in use and teacher-forced, no timing
    python tools/bench.py --batch          prompts of different lengths together against one after another
    python tools/bench.py --builder        the tree builder alone, at the published vocabulary
    python tools/bench.py --gpu --target-config FILE --drafter-config FILE
                                           the graph engine over random weights of that shape, beside the read floor;
                                           in eight bits where the target's config says that they are stored so
    python tools/bench.py --simulated --target-config FILE --drafter-config FILE
                                           the same, with acceptance simulated from stated profiles: fixed budgets and
                                           an automatic one at each context
    python tools/bench.py --forwards --target-config FILE FILE ...
                                           the plain step and verifies of several targets in one run, each beside its
                                           read floor and the first target
    python tools/bench.py --fidelity --target-config FILE
                                           how far a target in eight bits is from its expanded weights, layer by layer

Speed and acceptance run greedily and without stop ids, so that all modes write the same tokens. They are compared:
outputs that differ by more than rounding are refused, with the place and the float64 gap. Accepted length (tau) is
the mean of accepted + 1 over all rounds but the first; a budget counts drafted nodes, the root not counted.

A table for people comes first; the last line of stdout is one JSON object. Exit code 0; 1 for a failure, different
outputs, or a tree that holds the chain and accepts less; 2 for bad use.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qwen_gdn.stated import read_object
from tools.measure import tables
from tools.measure.acceptance import in_use, teacher_forced
from tools.measure.batch import measure as measure_batch
from tools.measure.fidelity import measure as measure_fidelity
from tools.measure.forwards import measure as measure_forwards
from tools.measure.gpu import Setting, Shape
from tools.measure.gpu import measure as measure_gpu
from tools.measure.options import DTYPES, circumstances, parse
from tools.measure.pairs import encoder, load_pair
from tools.measure.parts import builder_times, window_bytes
from tools.measure.prompts import PromptSet, read_prompts
from tools.measure.runs import PLAIN, Mode, Pair
from tools.measure.simulated import measure as measure_simulated
from tools.measure.speed import measure, modes_of

BUNDLED_PROMPTS = Path(__file__).resolve().parents[1] / "weights" / "bundled" / "prompts"
SPEED_PROMPTS = 10
BATCH_ROWS = 8


class Result(NamedTuple):
    """What a measurement found: lines for people, an object for programs, and whether it is as it must be."""

    lines: list[str]
    figures: dict[str, Any]
    sound: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(
        (__doc__ or "").split("\n\n")[0],
        (speed, acceptance, batch, builder, gpu, simulated, forwards, fidelity),
        arguments,
    )
    torch.set_num_threads(options.threads)
    try:
        result = options.measure(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print("\n".join(result.lines))
    print(json.dumps({"measured": options.measure.__name__} | circumstances(options) | result.figures))
    return 0 if result.sound else 1


def speed(options: argparse.Namespace) -> Result:
    """Tokens a second of every mode on each prompt set, and the bytes of a window."""
    pair, depth = _load(options)
    window = window_bytes(pair.target, max(options.budgets) + 1)
    lines, figures = list(tables.window(window)), []
    for prompts in _prompt_sets(options, SPEED_PROMPTS, only_first=True):
        outcome = measure(
            pair,
            prompts.prompts,
            budgets=options.budgets,
            depth=depth,
            alternations=options.rounds,
            count=options.max_new_tokens,
        )
        lines += ["", *tables.heading(prompts), *tables.speed(outcome)]
        figures.append(prompts.about() | outcome.as_json() | _ties(outcome.ties))
    return Result(lines, {"sets": figures, "window": window._asdict(), "dtype": str(pair.target.dtype)})


def acceptance(options: argparse.Namespace) -> Result:
    """Accepted length on each prompt set."""
    pair, depth = _load(options)
    modes = [mode for mode in modes_of(options.budgets, depth) if mode.budget]
    modes += [Mode("spine", mode.budget) for mode in modes if mode.kind == "tree"]
    lines, figures, sound = [], [], True
    for prompts in _prompt_sets(options, None, only_first=False):
        used = in_use(pair, prompts.prompts, modes, options.max_new_tokens)
        forced = teacher_forced(pair, prompts.prompts, options.budgets, options.max_new_tokens)
        sound = sound and not any(each.spine_below for each in forced)
        lines += [*tables.heading(prompts), *tables.acceptance(used, forced), ""]
        figures.append(
            prompts.about()
            | {"looping": used.looping, "in_use": [_named(each.mode, each._asdict()) for each in used.modes]}
            | {"teacher_forced": [each._asdict() for each in forced]}
            | _ties(used.ties)
        )
    return Result(lines, {"sets": figures, "dtype": str(pair.target.dtype)}, sound)


def batch(options: argparse.Namespace) -> Result:
    """Tokens a second of a ragged batch, its prompts of each set ever shorter, against one row after another."""
    pair, _ = _load(options)
    modes = [PLAIN, *(Mode("tree", budget) for budget in options.budgets)]
    lines, figures = [], []
    for prompts in _prompt_sets(options, BATCH_ROWS, only_first=True):
        rows = len(prompts.prompts)
        ragged = [prompt[len(prompt) * row // (2 * rows) :] for row, prompt in enumerate(prompts.prompts)]
        found, ties = measure_batch(pair, ragged, modes, alternations=options.rounds, count=options.max_new_tokens)
        prompts = prompts._replace(prompts=ragged)
        lines += [*tables.heading(prompts), *tables.batch(found, ties), ""]
        figures.append(prompts.about() | {"modes": [each.as_json() for each in found]} | _ties(ties))
    return Result(lines, {"sets": figures, "dtype": str(pair.target.dtype)})


def builder(options: argparse.Namespace) -> Result:
    """The tree builder's time."""
    times = builder_times()
    return Result(list(tables.builder(times)), {"builder": times._asdict()})


def gpu(options: argparse.Namespace) -> Result:
    """Times of the graph engine, as ratios to the read floor."""
    return _on_device(options, measure_gpu)


def simulated(options: argparse.Namespace) -> Result:
    """What budgets make of the graph engine where acceptance is simulated."""
    return _on_device(options, measure_simulated)


def forwards(options: argparse.Namespace) -> Result:
    """Times of plain steps and verifies of several targets."""
    files = options.target_config
    names = [f"{file.resolve().parent.name}/{file.stem}" for file in files]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two of the configs go by one name, {min(doubled)}; leave one out, or rename its file")
    run = _Run(options)
    targets = {name: run.shape(file, None) for name, file in zip(names, files, strict=True)}
    return run.result(measure_forwards(targets, options.device, run.dtype, run.announce, run.say, run.keep))


def fidelity(options: argparse.Namespace) -> Result:
    """Errors of a target in eight bits, and whether its likeliest tokens change."""
    run = _Run(options, usual=torch.bfloat16)
    raw = run.shape(options.target_config[0], None).target
    return run.result(measure_fidelity(raw, options.device, run.dtype, run.say))


def _on_device(options: argparse.Namespace, measured: Callable[..., dict[str, Any]]) -> Result:
    """Figures of random weights of the configs' shapes."""
    run = _Run(options)
    shape = run.shape(options.target_config[0], options.drafter_config)
    setting = Setting.of(shape, options.device, run.dtype, run.announce, run.say)
    return run.result(measured(setting, shape, run.keep))


class _Run:
    """A long measurement on a device: it says what it finds as it goes, and keeps it."""

    def __init__(self, options: argparse.Namespace, usual: torch.dtype | None = None) -> None:
        """`usual` is the dtype if none is asked for; None for that of the device."""
        self._options = options
        self._lines: list[str] = []
        usual = usual or (torch.bfloat16 if options.device.type == "cuda" else torch.float32)
        self.dtype = DTYPES[options.dtype] if options.dtype else usual

    def shape(self, target: Path, drafter: Path | None) -> Shape:
        options = self._options
        return Shape(
            target=_parsed(target, options.layers),
            drafter=_parsed(drafter, None) if drafter else {},
            sizes=options.sizes,
            prefixes=options.prefixes,
            accepted=(1, 4, 8, 16),
            chunks=options.chunks,
            repeats=max(options.rounds, 2),
        )

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._lines.append(line)

    @contextmanager
    def announce(self, program: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        print(f"prepared {program} in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

    def keep(self, found: dict[str, Any]) -> None:
        if self._options.keep:
            self._options.keep.write_text(json.dumps(found))

    def result(self, figures: dict[str, Any]) -> Result:
        device = {"device_name": _device_name(self._options.device), "compute_dtype": str(self.dtype)}
        return Result(self._lines, figures | device)


def _parsed(file: Path, layers: int | None) -> dict[str, Any]:
    """A config file, its text part cut to the first layers where that is asked for."""
    raw = read_object(file)
    text = raw.get("text_config", raw)
    if layers is not None and isinstance(text, dict) and isinstance(text.get("layer_types"), list):
        text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    return raw


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _load(options: argparse.Namespace) -> tuple[Pair, int]:
    """The pair, and how many positions its drafter proposes."""
    pair = load_pair(options.target, options.drafter, options.device, options.dtype)
    return pair, pair.drafter.config.block_size - 1


def _prompt_sets(options: argparse.Namespace, limit: int | None, *, only_first: bool) -> Iterator[PromptSet]:
    """The given files, or the bundled ones: all, or the first in order of prompt length."""

    encode = encoder(options.target)
    limit = options.limit or limit
    if options.prompts:
        yield from (read_prompts(file, encode, limit) for file in options.prompts)
        return
    files = sorted(BUNDLED_PROMPTS.glob("*.json"))
    if not files:
        raise ValueError(f"no prompts in {BUNDLED_PROMPTS}; name a prompt file with --prompts")
    sets = (read_prompts(file, encode, limit) for file in files)
    ordered = sorted(sets, key=lambda each: (max(map(len, each.prompts)), each.name))
    yield from ordered[: 1 if only_first else None]


def _ties(ties: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {"near_ties": [{"where": where} | tie._asdict() for where, tie in ties]}


def _named(mode: Mode, table: dict[str, Any]) -> dict[str, Any]:
    return table | {"mode": str(mode)}


if __name__ == "__main__":
    sys.exit(main())
