"""One run as the command line asks for it, with all that can be checked before a checkpoint is looked at."""

import argparse
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from qwen_gdn.decode import OnStage, Sampler, greedy

from .arguments import BUNDLED, DTYPE_NAMES, UsageError, default, parser
from .loop import generate
from .sampling import make_sampler
from .streaming import Drafting
from .tree import build_chain, build_tree

Mode = Literal["tree", "chain", "plain"]
EngineKind = Literal["eager", "graph"]


@dataclass(frozen=True)
class Options:
    """One run.

    Attributes:
        prompt: the text itself, whether it came as an argument or on standard input; None only if `interactive`.
        drafter: its source; None just where `mode` is plain.
        budget: nodes drafted a round, the root not counted; 0 where `mode` is plain.
        seed: of the sampler, drawn if none was given; None if none was given and nothing is drawn at random.
        dtype: None leaves it to the loader.
        notes: what the user should know about how options were taken.
    """

    prompt: str | None
    interactive: bool
    target: str
    drafter: str | None
    mode: Mode
    budget: int
    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    chat: bool
    system: str | None
    thinking: bool
    device: torch.device
    engine: EngineKind
    dtype: torch.dtype | None
    json: bool
    echo: bool
    notes: tuple[str, ...]

    def sampler(self) -> Sampler:
        """A new sampler, at the start of its seed's stream."""
        return make_sampler(self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    def drafting(self, on_stage: OnStage) -> Drafting:
        """How rounds go about their work, with a new sampler."""
        build = build_chain if self.mode == "chain" else build_tree
        return {"budget": self.budget, "sampler": self.sampler(), "build": build, "on_stage": on_stage}

    def settings(self) -> dict[str, Any]:
        """What shapes the text, the prompt and the seed aside."""
        names = ("target", "drafter", "mode", "budget", "max_new_tokens", "temperature", "top_k", "top_p")
        return {name: getattr(self, name) for name in (*names, "stop", "chat", "system", "thinking", "engine")}


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from arguments (None: those of the process).

    Reads the prompt from standard input if it is `-`, and draws a seed if one is needed and none was given.

    Raises:
        UsageError: a value or a combination of options is wrong.
        SystemExit: help was asked for, and has been printed.
    """
    asked = parser().parse_args(argv)
    _check_combination(asked)
    random = _draws_at_random(asked)
    drafter = asked.drafter or (BUNDLED if asked.target == BUNDLED else None)
    mode: Mode = asked.mode if drafter else "plain"
    nodes = default(generate, "budget") if asked.budget is None else asked.budget
    drawn = secrets.randbits(32) if asked.seed is None and random else asked.seed
    device = asked.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = ("target", "max_new_tokens", "temperature", "top_k", "top_p", "chat", "json", "echo", "interactive")
    return Options(
        **{name: getattr(asked, name) for name in kept},
        device=device,
        engine=("graph" if device.type == "cuda" else "eager") if asked.engine == "auto" else asked.engine,
        dtype=DTYPE_NAMES.get(asked.dtype),
        drafter=None if mode == "plain" else drafter,
        mode=mode,
        budget=0 if mode == "plain" else nodes,
        seed=drawn,
        thinking=not asked.no_thinking,
        notes=tuple(_notes(asked, mode)),
        system=None if asked.system is None else _text("--system", asked.system),
        prompt=None if asked.prompt is None else _prompt(asked.prompt),
        stop=tuple(_text("--stop", text) for text in asked.stop),
    )


def _check_combination(asked: argparse.Namespace) -> None:
    for flag, given in (("--system", asked.system is not None), ("--no-thinking", asked.no_thinking)):
        if given and not asked.chat:
            raise UsageError(f"{flag} belongs to a conversation; add --chat or leave it out")
    if asked.interactive:
        _check_interactive(asked)
    elif asked.prompt is None:
        raise UsageError("the following arguments are required: --prompt; --help lists the options")
    if "" in asked.stop:
        raise UsageError("--stop is empty, which every text holds; give at least one character")
    if asked.echo and asked.chat:
        raise UsageError(
            "--echo joins a text and its continuation; an answer continues no text, so leave out --echo or --chat"
        )


def _check_interactive(asked: argparse.Namespace) -> None:
    if sys.stdin is None:
        raise UsageError("--interactive reads standard input, which is closed; give it a file, a pipe or a terminal")
    if asked.prompt == "-":
        raise UsageError("--interactive reads standard input line by line already; leave out --prompt -")
    if asked.echo:
        raise UsageError("--echo writes a prompt before its continuation; leave it out with --interactive")


def _draws_at_random(asked: argparse.Namespace) -> bool:
    """Whether the sampler that is asked for draws anything at random."""
    try:
        sampler = make_sampler(asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed)
    except ValueError as error:
        # The library names its own arguments.
        named = re.sub(r"sampler: (\w+)", lambda found: "--" + found[1].replace("_", "-"), str(error))
        raise UsageError(named) from None
    return sampler is not greedy


def _notes(asked: argparse.Namespace, mode: Mode) -> Iterator[str]:
    if mode != asked.mode:
        yield "no --drafter is given for this target, so it decodes plainly"
    unused = [flag for flag, value in (("--drafter", asked.drafter), ("--budget", asked.budget)) if value is not None]
    if mode == "plain" and unused:
        yield f"plain decoding does not use {' and '.join(unused)}"
    cut = any(getattr(asked, name) != default(make_sampler, name) for name in ("top_k", "top_p"))
    if asked.temperature == 0 and (cut or asked.seed is not None):
        yield "at --temperature 0 nothing is drawn at random; --top-k, --top-p and --seed change nothing"
    elif asked.temperature > 0 and asked.top_k == 1:
        yield "with --top-k 1 nothing is drawn at random; --temperature, --top-p and --seed change nothing"


def _prompt(given: str) -> str:
    if given == "-" and sys.stdin is None:
        raise UsageError("--prompt - reads standard input, which is closed; give it a file, a pipe or a terminal")
    try:
        prompt = sys.stdin.read() if given == "-" else given
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt on standard input is no text in {error.encoding}: byte {error.start} is wrong"
        ) from None
    if not prompt:
        raise UsageError("the prompt is empty; give at least one character")
    return _text("the prompt", prompt)


def _text(what: str, text: str) -> str:
    """The text, unless it stands for bytes that are none: the system hands those over as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None
    return text
