"""The command line: `python -m ddtree.run --prompt ...` writes a text and says how it went.

Text goes to standard output, everything else to standard error. It adds nothing to how tokens are decided.
"""

import json
import os
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Literal, NamedTuple, NoReturn

from .interrupts import STATUS as INTERRUPTED
from .interrupts import interrupt_again, leave_at_once

if __name__ == "__main__":
    leave_at_once()  # what follows takes a second or two, before `main` can catch anything

import torch
from tqdm import tqdm

from qwen_gdn.decode import PREFILL_WINDOW, HybridModel, OnStage
from qwen_gdn.engine import Engine
from weights import TextStream, load_drafter, load_mtp, load_target
from weights.files import one_line

from .arguments import MTP, UsageError
from .checkpoint_sampling import checkpoint_sampling
from .drafter import DFlashDrafter
from .loop import NoDrafts, Proposer, Round, generate
from .mtp import MTPDrafter
from .options import Options, parse, settled
from .prepare import Job, prepare
from .recorded_drafter import RecordedDrafter
from .report import Figures, Meter, lines
from .sources import check_source
from .streams import lost, open_closed_stderr, say
from .tree import build_chain, build_tree

FAILURE, BAD_USE, BROKEN_PIPE = 1, 2, 141

_NO_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class Outcome(NamedTuple):
    """What was written; `text` is the decoding of `ids`, less a stop token at the end."""

    ids: list[int]
    text: str
    finish_reason: Literal["stop", "length", "interrupted"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (None: the process's own) and returns its exit status.

    Raises:
        SystemExit: after printing help.
    """
    open_closed_stderr()
    if sys.stdout is None:
        return _fail("standard output is closed, where the text goes; give it a file, a pipe or a terminal", FAILURE)
    status = _explaining(argv)
    return FAILURE if status == 0 and lost() else status


def _explaining(argv: Sequence[str] | None) -> int:
    try:
        return _run(parse(argv))
    except UsageError as error:
        return _fail(str(error), BAD_USE)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except Exception as error:
        if (message := _explained(error)) is None:
            raise
        return _fail(message, FAILURE)


def _run(options: Options) -> int:
    check_source(options.target, "target")
    if options.drafter not in (None, MTP):
        check_source(options.drafter, "drafter")
    if options.sampling == "checkpoint":
        options = settled(options, checkpoint_sampling(options.target))
    job = prepare(options)
    for note in (*options.notes, *job.notes):
        _say(f"note: {note}")
    meter = Meter(options.device)
    target, drafter = _models(options, meter)
    page = Page(options.prompt if options.echo else "")
    with _prefill_progress(meter.stage, len(job.prompt_ids)) as on_stage:
        rounds = generate(
            target,
            drafter,
            job.prompt_ids,
            max_new_tokens=options.max_new_tokens,
            budget=options.budget,
            stop_ids=job.stop_ids,
            sampler=options.sampler(),
            build=build_chain if options.mode == "chain" else build_tree,
            on_stage=on_stage,
        )
        try:
            outcome = _write(page, meter.rounds(rounds), job)
        finally:
            page.end_line(always=options.json)
    figures = meter.figures(len(job.prompt_ids))
    _report(options, outcome, figures)
    if options.json:
        print(_as_json(options, outcome, figures, target), flush=True)
    return INTERRUPTED if outcome.finish_reason == "interrupted" else 0


def _models(options: Options, meter: Meter) -> tuple[HybridModel, Proposer]:
    """The target and what proposes to it, as models or as their programs."""
    drafter = _drafter(options)  # first, for it is small: what is wrong with it shows before a target is read
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    if options.engine == "eager":
        return target, drafter

    @contextmanager
    def announce(program: str) -> Iterator[None]:
        if sys.stderr.isatty():
            _say(f"compiling the program of {program}")
        with meter.preparing():
            yield

    engine = Engine(target, announce=announce)
    recorded = RecordedDrafter(drafter, announce=announce) if isinstance(drafter, DFlashDrafter) else drafter
    return engine, recorded


def _drafter(options: Options) -> Proposer:
    if options.drafter is None:
        return NoDrafts()
    if options.drafter == MTP:
        mtp = load_mtp(options.target, device=options.device, dtype=options.dtype)
        return MTPDrafter(mtp, depth=options.mtp_depth)
    return load_drafter(options.drafter, device=options.device, dtype=options.dtype)


class Page:
    """Standard output while a text is written; each piece is out before the next is decided.

    Args:
        lead: what stands before the text.
    """

    def __init__(self, lead: str = "") -> None:
        self._lead = lead
        self._last = "\n"

    def write(self, text: str) -> None:
        """Writes a piece; characters that the output's encoding lacks become `?`."""
        text, self._lead = self._lead + text, ""
        if text:
            self._last = text[-1]
            encoding = sys.stdout.encoding or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)

    def end_line(self, *, always: bool) -> None:
        """Ends a line that the text left open: always, or where a terminal would show what follows behind it."""
        if self._last == "\n":
            return
        if always or sys.stdout.isatty():
            print(flush=True)
        elif sys.stderr.isatty():
            say("")


def _write(page: Page, rounds: Iterator[Round], job: Job) -> Outcome:
    """Writes the text of rounds as they come; an interrupt ends it, and what was decided by then is kept."""
    stream = TextStream(job.tokenizer)
    ids: list[int] = []
    shown = 0
    interrupted = False
    try:
        for done in rounds:
            ids += done.tokens
            piece = stream.push(_spoken(done.tokens, job.stop_ids))
            shown += len(piece)
            page.write(piece)
    except KeyboardInterrupt:
        interrupted = True
    text = job.tokenizer.decode(_spoken(ids, job.stop_ids))
    page.write(text[shown:])
    if interrupted:
        return Outcome(ids, text, "interrupted")
    return Outcome(ids, text, "stop" if ids and ids[-1] in job.stop_ids else "length")


def _spoken(ids: Sequence[int], stops: Collection[int]) -> Sequence[int]:
    """Ids that are text: without a stop token at the end, whatever its name is."""
    return ids[:-1] if ids and ids[-1] in stops else ids


@contextmanager
def _prefill_progress(on_stage: OnStage, tokens: int) -> Iterator[OnStage]:
    """`on_stage`, with a bar on a terminal while a prompt of more than one window is read."""
    hidden = None if tokens > PREFILL_WINDOW else True
    with tqdm(total=tokens, desc="reading the prompt", unit=" tokens", leave=False, disable=hidden) as bar:

        @contextmanager
        def stage(name: str) -> Iterator[None]:
            with on_stage(name):
                yield
            if name == "prefill":
                bar.update(min(PREFILL_WINDOW, tokens - bar.n))
            elif name == "sample":
                bar.close()

        yield stage


def _report(options: Options, outcome: Outcome, figures: Figures) -> None:
    seed = [] if options.seed is None else [f"seed {options.seed}"]
    say(f"finish reason: {outcome.finish_reason}", *lines(figures), *seed)


def _as_json(options: Options, outcome: Outcome, figures: Figures, target: HybridModel) -> str:
    """One line, in ASCII: characters at which some readers break lines are escaped."""
    numbers = asdict(figures) | {"target_forwards": figures.target_forwards}
    where = {"device": str(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
    settings = options.settings() | where
    return json.dumps(outcome._asdict() | {"seed": options.seed, "figures": numbers, "settings": settings})


def _explained(error: Exception) -> str | None:
    """The line that tells a user of a failure, or None for one that is a fault of this program."""
    message = one_line(error)
    starved = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in message for sign in _NO_MEMORY)
    )
    if starved:
        detail = textwrap.shorten(message, 160)
        return f"out of memory; shorten the prompt, or lower --max-new-tokens, --budget or --dtype ({detail})"
    if isinstance(error, ValueError | OSError | torch.AcceleratorError):
        return message
    return None


def _fail(message: str, status: int) -> int:
    _say(f"error: {message}")
    return status


def _say(message: str) -> None:
    say(f"ddtree: {message}")


def _leave(status: int) -> NoReturn:
    """Exits; output that cannot be written any more is dropped, or the interpreter would complain of it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


if __name__ == "__main__":
    interrupt_again()
    _leave(main())
