"""The command line's conversation: every line of standard input is a turn of one session.

An interrupt ends a turn and keeps what it wrote; the end of the input ends the conversation.
"""

import sys
from collections.abc import Iterator

from qwen_gdn.decode import HybridModel
from weights import Tokenizer
from weights.chat import Message
from weights.files import one_line

from .options import Options
from .page import Outcome, Page, as_json, write
from .prepare import Job
from .proposer import Proposer
from .report import Figures, Meter
from .session import Session
from .streaming import Stream
from .streams import say


def converse(options: Options, job: Job, target: HybridModel, drafter: Proposer, meter: Meter) -> int:
    """Answers the lines of standard input, after `options.prompt` if there is one, and returns the exit status.

    A line that cannot be answered is said to be, and the conversation stands as it was before.
    """
    session = Session(target, drafter, job.tokenizer, enable_thinking=None if options.thinking else False)
    talk = _Chat(options.system) if options.chat else _Text(job.tokenizer)
    drafting = options.drafting(meter.stage)
    for line in _lines(options.prompt):
        meter.restart()
        try:
            events = session.turn(
                talk.asked(line),
                max_new_tokens=options.max_new_tokens,
                stop_ids=job.stop_ids,
                stop=options.stop,
                **drafting,
            )
            outcome = _written(events, meter)
            talk.answered(line, outcome)
            figures = meter.figures(len(session.ids) - len(outcome.ids))
            say(f"ddtree: {_summary(outcome, figures, session.reused)}")
            if options.json:
                print(as_json(options, outcome, figures, target), flush=True)
        except KeyboardInterrupt:
            say("ddtree: interrupted")
        except ValueError as error:
            say(f"ddtree: error: {one_line(error)}")
    return 0


def _written(events: Stream, meter: Meter) -> Outcome:
    page = Page()
    try:
        return write(page, events, meter.events)
    finally:
        page.end_line(always=True)


class _Text:
    """A text that grows by the lines and what is written after them; a line begins on a line of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    def asked(self, line: str) -> list[int]:
        ends = not self._ids or self._tokenizer.decode(self._ids[-8:]).endswith("\n")
        return [*self._ids, *self._tokenizer.encode(line if ends else "\n" + line)]

    def answered(self, line: str, outcome: Outcome) -> None:
        self._ids = [*self.asked(line), *outcome.ids]


class _Chat:
    """Messages for the chat template; answers are kept as the template shows them, without their stop token."""

    def __init__(self, system: str | None) -> None:
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def asked(self, line: str) -> list[Message]:
        return [*self._messages, {"role": "user", "content": line}]

    def answered(self, line: str, outcome: Outcome) -> None:
        answer = {"role": "assistant", "content": outcome.text}
        self._messages = [*self._messages, {"role": "user", "content": line}, answer]


def _lines(first: str | None) -> Iterator[str]:
    """The first line if there is one, then those of standard input that are not blank; an interrupt drops a line."""
    if first is not None:
        yield first
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            say("")
            continue
        if not line:
            return
        if line.strip():
            yield line.removesuffix("\n")


def _summary(outcome: Outcome, figures: Figures, reused: int) -> str:
    """How a turn went, on one line."""
    speed = "" if figures.tokens_per_second is None else f", {figures.tokens_per_second:.1f} tokens/s"
    length = "" if figures.mean_accepted_length is None else f", accepted length {figures.mean_accepted_length:.2f}"
    read = f"{figures.prompt_tokens - reused} of {figures.prompt_tokens} tokens read"
    return f"{outcome.finish_reason}; {figures.tokens} tokens{speed}{length}; {read}"
