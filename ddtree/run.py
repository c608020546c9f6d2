"""The command line: `python -m ddtree.run --prompt ...` writes a text and says how it went.

Text goes to standard output, everything else to standard error. It adds nothing to how tokens are decided.
"""

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NoReturn

from .interrupts import STATUS as INTERRUPTED
from .interrupts import interrupt_again, leave_at_once

if __name__ == "__main__":
    leave_at_once()  # what follows takes a second or two, before `main` can catch anything

import torch
from tqdm import tqdm

from qwen_gdn.decode import PREFILL_WINDOW, HybridModel, OnStage
from qwen_gdn.fp8 import is_in_eight_bits
from weights import load_drafter, load_mtp, load_target
from weights.files import one_line

from .arguments import MTP, UsageError
from .checkpoint_sampling import checkpoint_sampling
from .drafter import DFlashDrafter
from .interactive import converse
from .mtp import MTPDrafter
from .numerics import debug_numerics
from .options import Options, parse, settled
from .page import Outcome, Page, as_json, write
from .prepare import Job, prepare
from .proposer import NoDrafts, Proposer
from .recording import opened, recorder_for, recording
from .report import Figures, Meter, lines
from .sources import check_source
from .streaming import stream
from .streams import lost, open_closed_stderr, say
from .trace import Recorder
from .trace.files import TraceFiles

FAILURE, BAD_USE, BROKEN_PIPE = 1, 2, 141

_NO_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


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
    with opened(options) as files:
        return _run_with(options, files)


def _run_with(options: Options, files: TraceFiles) -> int:
    check_source(options.target, "target")
    if options.drafter not in (None, MTP):
        check_source(options.drafter, "drafter")
    if options.sampling == "checkpoint":
        options = settled(options, checkpoint_sampling(options.target))
    job = prepare(options)
    for note in (*options.notes, *job.notes):
        _say(f"note: {note}")
    meter = Meter(options.device)
    with _models(options, meter) as models:
        if options.interactive:
            return converse(options, job, *models, meter)
        recorder = recorder_for(options, job, models[0], meter)
        with recording(recorder, files):
            outcome = _written(options, job, models, meter, recorder)
    figures = meter.figures(len(job.prompt_ids))
    _report(options, outcome, figures)
    if options.json:
        print(as_json(options, outcome, figures, models[0]), flush=True)
    return INTERRUPTED if outcome.finish_reason == "interrupted" else 0


def _written(
    options: Options, job: Job, models: tuple[HybridModel, Proposer], meter: Meter, recorder: Recorder | None
) -> Outcome:
    """Generates and writes the text."""
    page = Page(options.prompt or "" if options.echo else "")
    with _prefill_progress(meter.stage, len(job.prompt_ids)) as on_stage:
        drafting = options.drafting(on_stage)
        if recorder is not None:
            drafting["on_round"] = recorder.on_round
        events = stream(
            *models,
            job.tokenizer,
            job.prompt_ids,
            max_new_tokens=options.max_new_tokens,
            stop_ids=job.stop_ids,
            stop=options.stop,
            **drafting,
        )
        try:
            return write(page, events, recorder.events if recorder else meter.events)
        finally:
            page.end_line(always=options.json)


@contextmanager
def _models(options: Options, meter: Meter) -> Iterator[tuple[HybridModel, Proposer]]:
    """The target and what proposes to it, as models, watched while this is open if so asked, or as their programs."""
    drafter = _drafter(options)  # first, for it is small: what is wrong with it shows before a target is read
    target = load_target(options.target, device=options.device, dtype=options.dtype, eight_bits=options.eight_bits)
    if is_in_eight_bits(target):
        _say("note: weights in eight bits stay so, and activations become so; --eight-bits expand is more exact")
    if options.engine == "eager":
        with debug_numerics(target, drafter) if options.debug_numerics else nullcontext(target) as watched:
            yield watched, drafter
        return
    # Not at the top, for these bring in a compiler, which takes as long as all else there.
    from qwen_gdn.engine import Engine

    from .recorded_drafter import RecordedDrafter

    @contextmanager
    def announce(program: str) -> Iterator[None]:
        if sys.stderr.isatty():
            _say(f"compiling the program of {program}")
        with meter.preparing():
            yield

    engine = Engine(target, announce=announce)
    recorded = RecordedDrafter(drafter, announce=announce) if isinstance(drafter, DFlashDrafter) else drafter
    yield engine, recorded


def _drafter(options: Options) -> Proposer:
    if options.drafter is None:
        return NoDrafts()
    if options.drafter == MTP:
        mtp = load_mtp(options.target, device=options.device, dtype=options.dtype, eight_bits=options.eight_bits)
        return MTPDrafter(mtp, depth=options.mtp_depth)
    return load_drafter(options.drafter, device=options.device, dtype=options.dtype)


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
    for output in (sys.stdout, sys.stderr):
        try:
            if output is not None:
                output.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    sys.exit(status)


if __name__ == "__main__":
    interrupt_again()
    _leave(main())
