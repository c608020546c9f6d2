"""The command line of `ddtree.run`: its options, their help, and the form of each value on its own.

Defaults are those of the library calls that the options go to. How options fit together is not judged here.
"""

import argparse
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args

import torch

from weights import load_target
from weights.eight_bits import EightBits
from weights.fill import DTYPES

from .auto import AutoBudget
from .mtp import MTPDrafter
from .sampling import make_sampler

BUNDLED = "bundled"
AUTO: Final = "auto"  # as a budget: decided from round to round
MTP = "mtp"  # as a drafter: the target's own module; a folder of that name is ./mtp
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
MOST_NODES = 1024  # of a tree: a verify makes nodes × nodes masks and products for every head
_MOST_DEPTH = 64  # of an MTP module's drafts, far beyond what is ever accepted
_MOST = 2**31 - 1  # tokens: more fit into no memory, and sizes of tensors do not overflow below

_DESCRIPTION = """\
Continues a text with a Qwen3.5/3.6/3.8 hybrid, by DDTree speculative decoding:
a drafter proposes a tree of continuations, one forward of the target verifies
it, and what the target itself writes is kept.

The text goes to standard output as it is decided: exactly the decoding of the
new tokens, without the token or the --stop text that ends it. Figures, notes
and errors go to standard error."""

_EPILOG = """\
examples:
  python -m ddtree.run --prompt 'def fibonacci(n):' --echo
  python -m ddtree.run --prompt 'class Stack:' --mode plain --max-new-tokens 64
  python -m ddtree.run --prompt - --temperature 0.8 --top-p 0.95 --seed 7 < a.py
  python -m ddtree.run --target Qwen/Qwen3.5-4B --drafter z-lab/Qwen3.5-4B-DFlash \\
      --chat --no-thinking --prompt 'What is a monoid?'
  python -m ddtree.run --target Qwen/Qwen3.5-4B --chat --interactive
  python -m ddtree.run --prompt 'import ' --json 2>/dev/null | tail -n 1

prompts:
  A prompt is plain text: names of control tokens in it, such as <|im_end|>, are
  ordinary characters. With --chat, control tokens come from the checkpoint's
  template alone. (Tokens that a vocabulary adds without marking them special,
  such as <think>, are recognised everywhere.) Nothing is put before or after a
  prompt, and a final newline on standard input is kept. A prompt that begins
  with a dash is given as --prompt=-TEXT.

figures:
  tokens/s leaves out the prompt and the first token, and waiting for whoever
  reads the output. The mean accepted length is accepted drafts + 1, over all
  rounds but the prefill's. On CUDA the device is synchronised at both ends of
  every stage, so that the split of time is true; that costs some speed.

exit status:
  0 success; 1 failure (a checkpoint that is damaged or of a kind not read here,
  no answer from the hub, out of memory, output that cannot be written); 2 bad
  use (an option or a source that is wrong); 130 interrupted (what was written
  stays); 141 nobody reads the output any more."""


class UsageError(Exception):
    """The command line asks for something that cannot be; the message is one line."""


def default(function: Callable[..., object], name: str) -> Any:
    """The default of a function's parameter."""
    return inspect.signature(function).parameters[name].default


def parser() -> argparse.ArgumentParser:
    """A parser that raises `UsageError` where argparse would print its usage and exit."""
    built = Parser(
        prog="python -m ddtree.run",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_text(built.add_argument_group("text"))
    _add_models(built.add_argument_group("models"))
    _add_decoding(built.add_argument_group("decoding"))
    return built


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print its usage and exit, and fails where help cannot be written."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{' '.join(message.split())}; --help lists the options")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)


def _add_text(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    group.add_argument(
        "--interactive",
        action="store_true",
        help="continue line after line of standard input, each after all that was said before; Ctrl-C ends a turn, "
        "Ctrl-D the conversation (--prompt is its first line)",
    )
    group.add_argument("--echo", action="store_true", help="write the prompt before its continuation")
    group.add_argument("--chat", action="store_true", help="put the prompt into the chat template, as a user's message")
    group.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    group.add_argument("--no-thinking", action="store_true", help="with --chat: ask the template for no reasoning")
    group.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write what every round drafted and what became of it: FILE.html is a page to look at, FILE.jsonl the "
        "same as JSON lines; may be given for both. It is written however the run ends, in place of what was there",
    )
    group.add_argument(
        "--json", action="store_true", help="add a last line to the output: one object with text, ids and figures"
    )


def _add_models(group: argparse._ArgumentGroup) -> None:
    sources = "a folder, a hub id owner/name, or bundled"
    group.add_argument("--target", type=source, default=BUNDLED, metavar="SOURCE", help=f"{sources} (the default)")
    group.add_argument(
        "--drafter",
        type=drafter,
        metavar="SOURCE",
        help=f"{sources}, or {MTP} for the MTP module in the target's own checkpoint; default: the bundled one for the "
        "bundled target, none for others, which then decode plainly",
    )
    group.add_argument(
        "--mtp-depth",
        type=whole(1, _MOST_DEPTH),
        metavar="N",
        help=f"with --drafter {MTP}: tokens drafted ahead, one forward of the module each (default: "
        f"{default(MTPDrafter, 'depth')})",
    )
    group.add_argument(
        "--device", type=device, metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if there is one)"
    )
    group.add_argument(
        "--engine",
        choices=("auto", "eager", "graph"),
        default="auto",
        help="graph compiles the short forwards, and on CUDA replays them as graphs: minutes to prepare, then many "
        "times faster there; auto takes graph on CUDA, eager elsewhere (default: %(default)s)",
    )
    group.add_argument(
        "--debug-numerics",
        action="store_true",
        help="look at every number that target and drafter compute, and fail naming stage and layer at the first that "
        "is not finite; slow, and without programs, so --engine graph does not go with it",
    )
    group.add_argument(
        "--dtype", choices=DTYPE_NAMES, help="of the weights (default: float32 on a CPU, the checkpoint's on CUDA)"
    )
    group.add_argument(
        "--eight-bits",
        choices=get_args(EightBits),
        default=default(load_target, "eight_bits"),
        help="what becomes of weights stored in eight bits (FP8): auto keeps them where the device multiplies them by "
        "itself, for bfloat16, and puts activations into eight bits too; elsewhere it expands them. keep keeps them on "
        "any device, expand on none, which is the most exact (default: %(default)s)",
    )


def _add_decoding(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode",
        choices=("tree", "chain", "plain"),
        default="tree",
        help="draft a tree, its likeliest chain alone, or nothing (default: %(default)s)",
    )
    group.add_argument(
        "--budget",
        type=budget,
        metavar="N",
        help=f"drafted tokens a round, the root not counted (default: {AUTO}); at most {MOST_NODES}. {AUTO} drafts as "
        "many as are worth their time by their chances of being accepted, both measured while it writes, and none "
        "where plain decoding is faster",
    )
    group.add_argument(
        "--max-budget",
        type=whole(1, MOST_NODES),
        metavar="N",
        help=f"with --budget {AUTO}: the most drafted tokens of a round (default: {default(AutoBudget, 'most')})",
    )
    group.add_argument(
        "--spine",
        action="store_true",
        help="draft the chain that --mode chain would, and branches with what the budget leaves: never accepts less "
        "than that chain",
    )
    group.add_argument(
        "--max-new-tokens", type=whole(), default=128, metavar="N", help="stop after N tokens (default: %(default)s)"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text, were it to be written; may be given several times",
    )
    _add_sampling(group)
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of the sampler (default: drawn, and reported); with the same options it gives the same text on one "
        "machine, whatever is drafted, but for ties at rounding level",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    settings: tuple[tuple[str, str, Callable[[str], float], str], ...] = (
        ("temperature", "T", float, "0 takes the likeliest token"),
        ("top_k", "K", int, "draw from this many likeliest tokens, 0 for all"),
        ("top_p", "P", float, "draw from the likeliest tokens that hold this mass"),
        ("min_p", "P", float, "draw from tokens at least this share as likely as the likeliest"),
        ("presence_penalty", "X", float, "taken from the logits of tokens written before"),
        ("frequency_penalty", "X", float, "taken from a token's logit for each time it was written"),
        ("repetition_penalty", "X", float, "above 1 makes tokens of the prompt and the text less likely"),
    )
    # Values that are not given stay away, so that they can be told from those that are.
    for name, letter, kind, meaning in settings:
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=argparse.SUPPRESS,
            metavar=letter,
            help=f"{meaning} (default: {default(make_sampler, name)})",
        )
    group.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        default=argparse.SUPPRESS,
        metavar="ID=VALUE",
        help="add this to the logit of a token id; may be given for several, -1e30 forbids one (default: none)",
    )
    group.add_argument(
        "--sampling",
        choices=("library", "checkpoint"),
        default="library",
        help="whose defaults these options have: those named above, or what the target's generation_config.json states "
        "(default: %(default)s)",
    )


def whole(least: int = 0, most: int = _MOST) -> Callable[[str], int]:
    """A type of argument: an integer in [least, most]."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} to {most}, got {text!r}")
        return int(text)

    return read


def budget(text: str) -> int | Literal["auto"]:
    """A type of argument: nodes of a round, or the word that leaves them to be decided."""
    if text == AUTO:
        return AUTO
    try:
        return whole(most=MOST_NODES)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor is that {AUTO}") from None


def bias(text: str) -> tuple[int, float]:
    """A type of argument: a token id and what is added to its logit."""
    token, _, value = text.partition("=")
    try:
        return whole()(token), float(value)
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be ID=VALUE, as 220=-1.5, got {text!r}") from None


def source(text: str) -> str:
    """A type of argument: a word that can name a checkpoint. Whether a hub id is known to the hub shows later."""
    path = os.path.expanduser(text)
    if os.path.exists(path) and not os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text} is a file; give the folder that holds config.json and the weights")
    if text != BUNDLED and not os.path.isdir(path) and not _HUB_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no existing folder, no hub id owner/name, and not {BUNDLED!r}")
    return text


def drafter(text: str) -> str:
    """A type of argument: a source as above, or the word for the target's own MTP module."""
    return text if text == MTP else source(text)


def device(text: str) -> torch.device:
    """A type of argument: a device that is there."""
    named = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", text, re.ASCII)
    if named is None:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    if text != "cpu" and int(named[1] or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise argparse.ArgumentTypeError(f"{text} is not there (CUDA devices found: {found}); use cpu")
    return torch.device(text)
