"""Watches a generation from outside, by what the loop tells of its rounds.

It keeps what lies on the host already: it neither reads a device nor waits for one. Times are those of a `Meter`, which
on CUDA waits for the device at both ends of every stage, as it says.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from weights.files import one_line
from weights.stream import Spelling, TextStream

from ..loop import Round
from ..report import Meter
from ..rows import Verified
from ..streaming import End, Event, Step, Stream
from ..tree import ScoredTree
from .records import EndRecord, Reason, RunRecord, Trace
from .rounds import Origin, RoundRecord
from .totals import spine_of, totals

_DIGITS = 6  # of log-probabilities and seconds


class Recorder:
    """Records one generation: pass `on_round` to it, and what it yields through `events` or `rounds`.

    Args:
        tokenizer: spells the ids.
        prompt_ids: what the generation is given, [T].
        meter: times the generation, which is passed its `stage`; nothing else may pass what is yielded through it.
        settings: how the generation was set up, for people.
    """

    def __init__(
        self,
        tokenizer: Spelling,
        prompt_ids: Sequence[int] | Tensor,
        meter: Meter,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        prompt = [int(token) for token in prompt_ids]
        voice = TextStream(tokenizer, skip_special=False)
        self._run = RunRecord(len(prompt), voice.push(prompt) + voice.finish(), dict(settings or {}))
        self._tokenizer, self._meter = tokenizer, meter
        self._voice = TextStream(tokenizer, skip_special=False)
        self._told: Verified | None = None  # of a round that was not yielded yet
        self._stream: Stream | None = None
        self._rounds: list[RoundRecord] = []
        self._clock: Mapping[str, float] = {}
        self._finish_reason: Reason = "interrupted"

    def on_round(self, verified: Verified) -> None:
        """Takes note of a round, for the one that is yielded next."""
        self._told = verified

    def events(self, stream: Stream) -> Iterator[Event]:
        """The same events, timed."""
        self._stream = stream
        for event in self._meter.events(stream):
            if isinstance(event, Step):
                self._record(event.round.tokens)
            elif isinstance(event, End):
                self._finish_reason = event.finish_reason
            yield event

    def rounds(self, generated: Iterator[Round]) -> Iterator[Round]:
        """The same rounds, timed."""
        for done in self._meter.rounds(generated):
            self._record(done.tokens)
            yield done

    def trace(self, error: BaseException | None = None) -> Trace:
        """What there is up to now.

        Args:
            error: what ended the generation, if it failed.
        """
        self._take_unseen()
        rounds = list(self._rounds)
        figures = self._meter.figures(self._run.prompt_tokens)
        end = EndRecord(
            self._finish_reason if error is None else "failed",
            None if error is None else f"{type(error).__name__}: {one_line(error)}".removesuffix(": "),
            self._rest(),
            figures,
            totals(rounds, figures.target_forwards),
        )
        return Trace(self._run, rounds, self._pieces(rounds), end)

    def _record(self, tokens: Sequence[int]) -> None:
        self._rounds.append(self._recorded(tokens))
        self._told = None

    def _take_unseen(self) -> None:
        """Records a round that the stream has taken in, but was kept from giving out."""
        seen = sum(len(each.tokens) for each in self._rounds)
        tokens = self._stream.ids[seen:] if self._stream else []
        if tokens:
            self._record(tokens)

    def _rest(self) -> str:
        """What the text of all ids has beyond that of the rounds."""
        voice = TextStream(self._tokenizer, skip_special=False)
        whole = voice.push(token for each in self._rounds for token in each.tokens) + voice.finish()
        return whole[sum(len(text) for each in self._rounds for text in each.texts) :]

    def _recorded(self, tokens: Sequence[int]) -> RoundRecord:
        told = self._told
        if told is None and self._rounds:
            raise RuntimeError("recorder: a round was not told of; pass on_round=recorder.on_round to the generation")
        tree = told.tree if told else None
        log_probs = [round(each, _DIGITS) for each in tree.log_probs] if isinstance(tree, ScoredTree) else None
        before, self._clock = self._clock, self._meter.stage_seconds | {"": self._meter.seconds}
        spent = {name: round(now - before.get(name, 0.0), _DIGITS) for name, now in self._clock.items()}
        return RoundRecord(
            index=len(self._rounds),
            length=told.length if told else None,
            tokens=list(tokens),
            texts=[self._voice.push([token]) for token in tokens],
            origins=_origins(told, len(tokens)),
            budget=told.budget if told else 0,
            nodes=tree.tokens.tolist() if tree else [],
            parents=list(tree.topology.parents) if tree else [],
            log_probs=log_probs,
            draws=list(told.draws) if told else [],
            path=list(told.path) if told else [],
            expected=None if log_probs is None else sum(math.exp(each) for each in log_probs[1:]),
            accepted=len(told.path) - 1 if told else 0,
            seconds=spent.pop(""),
            stages={name: seconds for name, seconds in spent.items() if seconds},
        )

    def _pieces(self, rounds: Sequence[RoundRecord]) -> dict[int, str]:
        used = {token for each in rounds for ids in (each.tokens, each.nodes, each.draws) for token in ids}
        spelt = {token: self._tokenizer.piece(token, skip_special=False) for token in sorted(used)}
        return {token: piece.decode(errors="backslashreplace") for token, piece in spelt.items()}


def _origins(told: Verified | None, count: int) -> list[Origin]:
    """Where the first tokens of a round came from, as many as it emitted."""
    if told is None or len(told.tree.topology) == 1:
        return ["plain"] * count
    spine = spine_of(told.tree.topology.parents)
    accepted: list[Origin] = ["spine" if node in spine else "branch" for node in told.path[1:]]
    return [*accepted, "bonus"][:count]
