"""One run as the command line asks for it, with all that can be checked before a checkpoint is looked at."""

import argparse
import re
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from qwen_gdn.decode import HybridModel, OnStage, Sampler
from qwen_gdn.fp8 import is_in_eight_bits
from qwen_gdn.history import ContextSampler
from weights.eight_bits import EightBits

from .arguments import AUTO, BUNDLED, DTYPE_NAMES, MTP, UsageError, default, parser
from .auto import AutoBudget
from .mtp import MTPDrafter
from .sampling import make_sampler
from .streaming import Drafting
from .tree import build_chain, build_spine, build_tree

Mode = Literal["tree", "chain", "plain"]
EngineKind = Literal["eager", "graph"]

CUTS = ("top_k", "top_p", "min_p")
SAMPLING = ("temperature", *CUTS, "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")


@dataclass(frozen=True)
class Options:
    """One run.

    Attributes:
        prompt: the text itself, whether it came as an argument or on standard input; None only if `interactive`.
        drafter: its source, or the word for the target's own MTP module; None just where `mode` is plain.
        mtp_depth: tokens that an MTP module drafts ahead.
        budget: nodes drafted a round, the root not counted, or the word for an `AutoBudget`; 0 where `mode` is plain.
        max_budget: the most that one gives.
        spine: whether a tree holds the likeliest chain; False unless `mode` is tree.
        sampling: whose defaults the sampling settings have; `settled` puts those of a checkpoint in place.
        debug_numerics: whether models are watched, which programs cannot be.
        explicit: sampling settings that were given.
        seed: of the sampler, drawn if none was given; None if none was given and nothing is drawn at random.
        dtype: None leaves it to the loader.
        eight_bits: what becomes of weights stored so.
        trace: files to write a trace to.
        notes: what the user should know about how options were taken.
    """

    prompt: str | None
    interactive: bool
    target: str
    drafter: str | None
    mtp_depth: int
    mode: Mode
    budget: int | Literal["auto"]
    max_budget: int
    spine: bool
    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    sampling: Literal["library", "checkpoint"]
    explicit: frozenset[str]
    seed: int | None
    chat: bool
    system: str | None
    thinking: bool
    device: torch.device
    engine: EngineKind
    debug_numerics: bool
    dtype: torch.dtype | None
    eight_bits: EightBits
    json: bool
    echo: bool
    trace: tuple[Path, ...]
    notes: tuple[str, ...]

    def sampler(self) -> Sampler:
        """A new sampler, at the start of its seed's stream."""
        return make_sampler(seed=self.seed, **{name: getattr(self, name) for name in SAMPLING})

    def check_vocabulary(self, vocab: int) -> None:
        """UsageError if the sampler names a token beyond the vocabulary."""
        sampler = self.sampler()
        if isinstance(sampler, ContextSampler):
            with _own_names():
                sampler.check(vocab)

    def drafting(self, on_stage: OnStage) -> Drafting:
        """How rounds go about their work, with a new sampler."""
        build = build_chain if self.mode == "chain" else build_spine if self.spine else build_tree
        budget = AutoBudget(most=self.max_budget) if self.budget == AUTO else self.budget
        return {"budget": budget, "sampler": self.sampler(), "build": build, "on_stage": on_stage}

    def settings(self, target: HybridModel) -> dict[str, Any]:
        """What shapes the text, the prompt and the seed aside, and what the target came to."""
        names = ("target", "drafter", "mode", "budget", "max_budget", "spine", "max_new_tokens", *SAMPLING)
        told = {name: getattr(self, name) for name in (*names, "stop", "chat", "system", "thinking", "engine")}
        where = {"device": str(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
        own = where | {"in_eight_bits": is_in_eight_bits(target)}
        return (told if self.budget == AUTO else told | {"max_budget": None}) | own


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from arguments (None: those of the process).

    Reads the prompt from standard input if it is `-`. Sampling is `settled` unless a checkpoint must be read for it.

    Raises:
        UsageError: a value or a combination of options is wrong.
        SystemExit: help was asked for, and has been printed.
    """
    asked = parser().parse_args(argv)
    _check_combination(asked)
    sampling = _given_sampling(asked)
    drafter = asked.drafter or (BUNDLED if asked.target == BUNDLED else None)
    mode: Mode = asked.mode if drafter else "plain"
    nodes: int | Literal["auto"] = AUTO if asked.budget is None else asked.budget
    device = asked.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = ("target", "eight_bits", "max_new_tokens", "sampling", "seed", "chat", "json", "echo", "interactive")
    options = Options(
        **{name: getattr(asked, name) for name in (*kept, "debug_numerics")},
        **{name: default(make_sampler, name) for name in SAMPLING} | sampling,
        explicit=frozenset(sampling),
        device=device,
        engine=_engine(asked, device),
        dtype=DTYPE_NAMES.get(asked.dtype),
        drafter=None if mode == "plain" else drafter,
        mtp_depth=default(MTPDrafter, "depth") if asked.mtp_depth is None else asked.mtp_depth,
        mode=mode,
        budget=0 if mode == "plain" else nodes,
        max_budget=asked.max_budget or default(AutoBudget, "most"),
        spine=asked.spine and mode == "tree",
        thinking=not asked.no_thinking,
        trace=tuple(asked.trace),
        notes=tuple(_notes(asked, mode)),
        system=None if asked.system is None else _text("--system", asked.system),
        prompt=None if asked.prompt is None else _prompt(asked.prompt),
        stop=tuple(_text("--stop", text) for text in asked.stop),
    )
    return options if options.sampling == "checkpoint" else settled(options, {})


def _engine(asked: argparse.Namespace, device: torch.device) -> EngineKind:
    if asked.engine != "auto":
        kind: EngineKind = asked.engine
        return kind
    return "graph" if device.type == "cuda" and not asked.debug_numerics else "eager"


def settled(options: Options, defaults: Mapping[str, Any]) -> Options:
    """The options with these defaults for sampling settings that were not given, and a seed if one is needed."""
    options = replace(options, **{name: value for name, value in defaults.items() if name not in options.explicit})
    random = options.temperature > 0 and options.top_k != 1
    seed = secrets.randbits(32) if options.seed is None and random else options.seed
    return replace(options, seed=seed, notes=(*options.notes, *_without_effect(options)))


def _check_combination(asked: argparse.Namespace) -> None:
    for flag, given in (("--system", asked.system is not None), ("--no-thinking", asked.no_thinking)):
        if given and not asked.chat:
            raise UsageError(f"{flag} belongs to a conversation; add --chat or leave it out")
    if asked.mtp_depth is not None and asked.drafter != MTP:
        raise UsageError(f"--mtp-depth belongs to the target's MTP module; add --drafter {MTP} or leave it out")
    if asked.max_budget is not None and asked.budget not in (None, AUTO):
        raise UsageError(f"--max-budget belongs to --budget {AUTO}; leave it out, or leave out --budget {asked.budget}")
    if asked.debug_numerics and asked.engine == "graph":
        raise UsageError("--debug-numerics looks into layers, which programs do not run; leave out --engine graph")
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
    if asked.trace:
        raise UsageError("--trace records one text; leave it out with --interactive")
    if asked.echo:
        raise UsageError("--echo writes a prompt before its continuation; leave it out with --interactive")


def _given_sampling(asked: argparse.Namespace) -> dict[str, Any]:
    """Sampling settings that were given, each in its range; the bias as a mapping."""
    given = {name: getattr(asked, name) for name in SAMPLING if hasattr(asked, name)}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    with _own_names():
        make_sampler(seed=asked.seed, **given)
    return given


def _bias(given: Sequence[tuple[int, float]]) -> dict[int, float]:
    twice = [token for token, count in Counter(token for token, _ in given).items() if count > 1]
    if twice:
        raise UsageError(f"--logit-bias: token id {twice[0]} is given more than once; give it one value")
    return dict(given)


@contextmanager
def _own_names() -> Iterator[None]:
    """Errors of the library, which names its own arguments, as errors that name the options."""
    try:
        yield
    except ValueError as error:
        named = re.sub(r"sampler: (\w+)", lambda found: "--" + found[1].replace("_", "-"), str(error))
        raise UsageError(named) from None


def _notes(asked: argparse.Namespace, mode: Mode) -> Iterator[str]:
    if mode != asked.mode:
        yield "no --drafter is given for this target, so it decodes plainly"
    given = [name for name in ("drafter", "mtp_depth", "budget", "max_budget") if getattr(asked, name) is not None]
    unused = ["--" + name.replace("_", "-") for name in given] + ["--spine"] * asked.spine
    if mode == "chain" and asked.spine:
        yield "a chain is its own spine, so --spine changes nothing"
    if mode == "plain" and unused:
        yield f"plain decoding does not use {' and '.join(unused)}"


def _without_effect(options: Options) -> Iterator[str]:
    """Notes on given sampling settings that change nothing."""
    cut = any(getattr(options, name) != default(make_sampler, name) for name in options.explicit.intersection(CUTS))
    if options.temperature == 0 and (cut or options.seed is not None):
        yield "at --temperature 0 nothing is drawn at random; --top-k, --top-p, --min-p and --seed change nothing"
    elif options.temperature > 0 and options.top_k == 1:
        yield "with --top-k 1 nothing is drawn at random; --temperature, --top-p and --seed change nothing, nor --min-p"


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
