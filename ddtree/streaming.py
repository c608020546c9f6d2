"""Text as it is decided: the rounds of a generation with what they say, and why it ended.

It adds stop strings and the limit of the context to the loop, and nothing to how tokens are drawn.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, TypedDict, Unpack

from torch import Tensor

from qwen_gdn.cache import HybridCache
from qwen_gdn.checked import checked_methods
from qwen_gdn.decode import HybridModel, OnStage, Sampler, checked_prompt, checked_stops, fitting_cache
from weights.stops import StoppedText, checked_stop_strings
from weights.stream import Spelling

from .budget import Budget
from .loop import Round, generate, never
from .proposer import Proposer
from .rows import Verified
from .tree import Build

FinishReason = Literal["stop", "stop_string", "length", "context"]


class Step(NamedTuple):
    """One round, and the text that it settled, perhaps none."""

    text: str
    round: Round


class End(NamedTuple):
    """The end of a generation, and the text that was held back until then.

    finish_reason: `stop`, a stop id was emitted; `stop_string`, one is complete; `length`, `max_new_tokens` are
        emitted; `context`, the model's context or the cache is full before that.
    """

    text: str
    finish_reason: FinishReason


Event = Step | End


class Drafting(TypedDict, total=False):
    """How `generate` goes about its rounds; see there for meanings and defaults."""

    budget: int | Budget
    sampler: Sampler
    build: Build
    prefill_window: int
    on_stage: OnStage
    on_round: Callable[[Verified], None]


def stream(
    target: HybridModel,
    drafter: Proposer,
    tokenizer: Spelling,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    stop: Collection[str] = (),
    cache: HybridCache | None = None,
    earlier_ids: Sequence[int] | Tensor = (),
    **drafting: Unpack[Drafting],
) -> "Stream":
    """Generates as `generate` does and yields a `Step` for every round, and an `End`.

    The text ends before the first stop string (the one that is complete first; of several at one character the
    longest), which may span tokens and rounds; it is never given out in part. The last id is the token that completes
    the stop string, whatever else that token spells: as with a stop id, what ends the text is among the ids and not
    in the text. So the ids for n tokens are always the first n at most of those for more.

    Close it, or leave it as a context manager, to end early. Then, and if a round raises, an interrupt included, the
    cache is where the last round left it: it holds all prompt and emitted ids but the last.

    Args:
        tokenizer: spells the ids.
        stop: the stop strings, looked for in the new text alone.
        cache, earlier_ids: as for `generate`.

    Raises:
        ValueError: at the call, before any forward: an argument does not fit, or the prompt leaves no room in the
            context for a token.
    """
    length = checked_prompt(target, prompt_ids, max_new_tokens).shape[1]
    end = ending(tokenizer, stop_ids, stop)
    if cache is not None:
        fitting_cache(target, cache, 0)
    count = min(max_new_tokens, _room(target, cache, length, max_new_tokens))
    rounds = generate(
        target,
        drafter,
        prompt_ids,
        max_new_tokens=count,
        stop_ids=end.stop_ids,
        until=end.until(),
        cache=cache,
        earlier_ids=earlier_ids,
        **drafting,
    )
    return Stream(rounds, end, "context" if count < max_new_tokens else "length")


class Ending(NamedTuple):
    """What ends a text, and how its ids are spelt; made by `ending`."""

    tokenizer: Spelling
    stop_ids: frozenset[int]
    stop: tuple[str, ...]

    def voice(self) -> StoppedText:
        """A new text."""
        return StoppedText(self.tokenizer, self.stop)

    def until(self) -> Callable[[int], bool]:
        """Whether a token, the next one of a new text, completes a stop string."""
        return _Completes(self.voice()) if self.stop else never

    def spoken(self, ids: Sequence[int]) -> Sequence[int]:
        """Ids that are text: without a stop token at the end, whatever its name is."""
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids


def ending(tokenizer: Spelling, stop_ids: Collection[int], stop: Collection[str]) -> Ending:
    """What ends a text; ValueError if ids or strings are none."""
    checked_methods("a tokenizer", tokenizer, "piece")
    return Ending(tokenizer, checked_stops(stop_ids), checked_stop_strings(stop))


class Stream(Iterator[Event]):
    """The events of one generation; made by `stream`.

    Args:
        rounds: of `generate`, which end as `end` says.
        full: why it ended if nothing stopped it.
    """

    def __init__(
        self,
        rounds: Generator[Round, None, None],
        end: Ending,
        full: FinishReason,
    ) -> None:
        self._rounds = rounds
        self._ending = end
        self._full = full
        self._voice = end.voice()
        self._ids: list[int] = []
        self._given: list[str] = []
        self._over = False

    @property
    def ids(self) -> list[int]:
        """What was emitted so far, a stop token and a stop string's tokens included."""
        return list(self._ids)

    @property
    def text(self) -> str:
        """What was given out so far."""
        return "".join(self._given)

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        self._over = True  # should this raise
        done = next(self._rounds, None)
        if done is None:
            return self._rest()
        self._ids += done.tokens
        self._given.append(self._voice.push(self._ending.spoken(done.tokens)))
        self._over = False
        return Step(self._given[-1], done)

    def close(self) -> str:
        """Ends it here, also after it raised, and returns the text of its rounds that was held back until now."""
        self._over = True
        self._rounds.close()
        return self._rest().text

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _rest(self) -> End:
        """What the text of all ids has beyond what was given out. An interrupt cannot have left those half read."""
        voice = self._ending.voice()
        text = voice.push(self._ending.spoken(self._ids)) + voice.finish()
        rest = text[len(self.text) :]
        self._given.append(rest)
        stopped = len(self._ending.spoken(self._ids)) < len(self._ids)
        return End(rest, "stop" if stopped else "stop_string" if voice.found else self._full)


class _Completes:
    def __init__(self, voice: StoppedText) -> None:
        self._voice = voice

    def __call__(self, token: int) -> bool:
        self._voice.push((token,))
        return self._voice.found is not None


def _room(target: HybridModel, cache: HybridCache | None, prompt: int, wanted: int) -> int:
    """How many tokens can follow the prompt; the last of them need not fit the cache.

    Raises:
        ValueError: not one can, though one is wanted.
    """
    held = 0 if cache is None else cache.length
    limits = [wanted + held + prompt]
    if target.config.max_position_embeddings is not None:
        limits.append(target.config.max_position_embeddings)
    if cache is not None:
        limits.append(cache.capacity + 1)
    room = min(limits) - held - prompt
    if room < min(wanted, 1):
        raise ValueError(
            f"the prompt of {prompt} tokens after {held} in the cache leaves no room in a context of {min(limits)} "
            "tokens; shorten the conversation"
        )
    return room
