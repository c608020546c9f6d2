"""The command line of `bench`: what each measurement reads, and nothing that it would ignore."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ddtree.arguments import device, source, whole
from tools.arguments import ToolParser, file, wholes

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEFAULTS: dict[str, Any] = {
    "target": "bundled",
    "drafter": "bundled",
    "budgets": [4, 8, 15, 31, 63],
    "rounds": 5,
    "max_new_tokens": 64,
    "threads": 2,
    "device": torch.device("cpu"),
    "sizes": [16, 32, 64, 128, 256],
    "prefixes": [512, 2048, 8192, 32768],
    "chunks": [],
}
_PAIR = ("target", "drafter", "prompts", "limit", "budgets", "max_new_tokens", "threads", "device", "dtype")
_GPU = ("target_config", "drafter_config", "layers", "sizes", "prefixes", "threads", "keep")
USED = {
    "speed": (*_PAIR, "rounds"),
    "acceptance": _PAIR,
    "batch": (*_PAIR, "rounds"),
    "builder": ("threads",),
    "gpu": (*_GPU, "rounds", "chunks", "device", "dtype"),
    "simulated": (*_GPU, "device", "dtype"),
    "fidelity": ("target_config", "layers", "threads", "device", "dtype"),
    "forwards": ("target_config", "layers", "sizes", "prefixes", "threads", "keep", "rounds", "device", "dtype"),
}
"""The options that each measurement reads; any other is refused rather than ignored."""


def parse(
    about: str, measurements: Sequence[Callable[..., object]], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Options whose `measure` is one of the measurements, each asked for by its name; the first is the default.

    Raises:
        SystemExit: the command line is wrong, or help was asked for.
    """
    parser = ToolParser(prog="bench", description=about, allow_abbrev=False)
    default, *others = measurements
    what = parser.add_mutually_exclusive_group()
    for function in others:
        what.add_argument(f"--{function.__name__}", dest="measure", action="store_const", const=function)
    parser.set_defaults(measure=default)
    _add_pair(parser)
    _add_gpu(parser)
    options = parser.parse_args(arguments)
    _check_used(parser, options)
    options.__dict__ |= {name: value for name, value in DEFAULTS.items() if getattr(options, name) is None}
    return options


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """What a measurement used, for its JSON object."""
    names = ("target", "drafter", "dtype", "threads", "budgets", "max_new_tokens", "rounds")
    names += ("sizes", "prefixes", "chunks")
    used = USED[options.measure.__name__]
    where = {"device": str(options.device)} if "device" in used else {}
    where |= {"first_layers": options.layers} if "layers" in used else {}
    return {name: getattr(options, name) for name in names if name in used} | where | {"torch": torch.__version__}


def _add_pair(parser: ToolParser) -> None:
    add = parser.add_argument
    add("--target", type=source, help="folder, hub id, or 'bundled' (default: bundled)")
    add("--drafter", type=source, help="the drafter of that target, likewise (default: bundled)")
    add("--prompts", nargs="+", type=file, metavar="FILE", help="default: those of the bundled pair")
    add("--limit", type=whole(1), help="prompts of each set that are used")
    add("--budgets", type=_budgets, help=f"comma-separated (default: {_listed('budgets')})")
    add("--rounds", type=whole(1), help="alternations of a speed measurement (default: 5)")
    add("--max-new-tokens", type=whole(2), help="default: 64")
    add("--threads", type=whole(1), help="of torch (default: 2)")
    add("--device", type=device, help="cpu, cuda or cuda:N (default: cpu)")
    add(
        "--dtype",
        choices=DTYPES,
        help="default: float32 on a CPU, the checkpoint's on CUDA, where there is none bfloat16, as with --fidelity",
    )


def _add_gpu(parser: ToolParser) -> None:
    add = parser.add_argument_group("with --gpu, --simulated, --forwards or --fidelity").add_argument
    add("--target-config", nargs="+", type=file, metavar="FILE", help="a target's config.json; with --forwards several")
    add("--drafter-config", type=file, metavar="FILE", help="a drafter's config.json")
    add("--layers", type=whole(1), help="only the target's first layers")
    add("--sizes", type=lambda text: sorted(set(wholes(2)(text))), help=f"tree sizes (default: {_listed('sizes')})")
    add("--chunks", type=_budgets, default=None, help="token counts of programs that read prompts (default: none)")
    add("--keep", type=Path, metavar="FILE", help="rewritten with every figure so far, for a run that is cut short")
    add("--prefixes", type=_budgets, help=f"committed tokens (default: {_listed('prefixes')})")


def _check_used(parser: ToolParser, options: argparse.Namespace) -> None:
    """Refuses options that the measurement does not read, and asks for those that it cannot do without."""
    name = options.measure.__name__
    for option, value in vars(options).items():
        if value is not None and option != "measure" and option not in USED[name]:
            parser.error(f"--{option.replace('_', '-')} is not used when {name} is measured; leave it out")
    if name in ("gpu", "simulated") and None in (options.target_config, options.drafter_config):
        parser.error(f"--{name} needs --target-config and --drafter-config, files such as a checkpoint's config.json")
    if name in ("forwards", "fidelity") and options.target_config is None:
        parser.error(f"--{name} needs --target-config, a file such as a checkpoint's config.json")
    if name in ("gpu", "simulated", "fidelity") and len(options.target_config) > 1:
        parser.error(
            f"--{name} measures one --target-config, not {len(options.target_config)}; give several to --forwards"
        )


def _listed(name: str) -> str:
    return ",".join(map(str, DEFAULTS[name]))


def _budgets(text: str) -> list[int]:
    return sorted(set(wholes(1)(text)))
