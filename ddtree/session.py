"""Conversations of many turns on one memory: each turn reads only what is new.

A turn is given the whole conversation and yields a stream. What memory of it there is already is found by comparing
ids, so nothing has to be declared: a conversation that goes on, an edit, another branch and a new conversation are
the same call. Whatever is reused, the output is that of a fresh run over the same ids.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Unpack, cast

from torch import Tensor

from qwen_gdn.checked import checked_count, checked_methods, shown
from qwen_gdn.decode import HybridModel, checked_prompt
from weights.chat import Message
from weights.tokenizer import Tokenizer

from .boundaries import Boundaries, Boundary
from .contexts import Rewindable
from .loop import Round, generate
from .proposer import NoDrafts, Proposer, checked_proposer
from .streaming import Drafting, Stream, ending

_FIRST = 256  # tokens that memory is made for to begin with, if no capacity is stated

Conversation = str | Sequence[int] | Tensor | Sequence[Message]


class Session:
    """The memory of one conversation, with the ends of earlier turns to go back to.

    At the end of a turn, whatever ended it, the cache holds `ids[:length]`: all prompt and emitted ids but the last
    one; if it failed before its first round, just the ids that were reused, or none if it failed on its way to them.

    The next turn finds the longest beginning of its ids, their last one left aside, among these: what the cache holds,
    if the ids go on from there or `rollback` allows to crop it to where they differ; the ends of earlier turns,
    which are kept when a turn begins, as far as `store_bytes` go; nothing. The rest it reads. The proposer's context
    goes with the cache. A proposer that cannot be put back (see `Rewindable`) reads the whole conversation again, with
    the target, unless it goes on from what the cache holds and no turn has failed.

    Args:
        drafter: it must serve nothing else while the session lives, or acceptance falls; its `replica()` is another
            one of the same weights.
        tokenizer: spells ids, and encodes conversations that are given as text or messages.
        capacity: the most tokens of a conversation, for which memory is then made at once. None takes what the
            model's config states, if it does, and makes memory for a turn and all it may write when it begins.
        rollback: how many of the last tokens can be cropped.
        store_bytes: of the ends of earlier turns, both models' memory counted.
        enable_thinking: for the chat template; None leaves it to that.

    Raises:
        ValueError: the drafter is not this target's, or a number does not fit.
    """

    def __init__(
        self,
        target: HybridModel,
        drafter: Proposer,
        tokenizer: Tokenizer,
        *,
        capacity: int | None = None,
        rollback: int = 0,
        store_bytes: int = 1 << 30,
        enable_thinking: bool | None = None,
    ) -> None:
        checked_count("store_bytes", store_bytes, 0)
        checked_methods("session: a target", target, "new_cache", "embed", "logits")
        checked_proposer("session: a drafter", drafter)
        checked_methods("session: a tokenizer", tokenizer, "piece")
        self.capacity = _capacity(capacity, target.config.max_position_embeddings)
        drafter.bind(target)
        self._target, self._drafter, self._tokenizer = target, drafter, tokenizer
        self._thinking = enable_thinking
        self._cache = target.new_cache(capacity or min(_FIRST, self.capacity or _FIRST), rollback=rollback)
        self._store = Boundaries(store_bytes)
        self._ids: list[int] = []
        self._reused = 0
        self._turns = 0
        self._in_step = True

    @property
    def ids(self) -> list[int]:
        """The conversation so far, a stop token included; one that goes on from them reuses all that there is."""
        return list(self._ids)

    @property
    def length(self) -> int:
        """How many of `ids` the cache holds."""
        return len(self._held())

    @property
    def reused(self) -> int:
        """How many ids of the last turn's conversation were not read again."""
        return self._reused

    @property
    def nbytes(self) -> int:
        """Bytes of the cache and of the ends of earlier turns."""
        return self._cache.nbytes + self._store.nbytes

    def turn(
        self,
        conversation: Conversation,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        stop: Collection[str] = (),
        **drafting: Unpack[Drafting],
    ) -> Stream:
        """The stream of what follows a whole conversation; see `stream` for its events and how it ends.

        Nothing happens before its first event is asked for. It is over when another turn begins.

        Args:
            conversation: ids, a text, or messages for the chat template.

        Raises:
            ValueError: at the call, with nothing changed: an argument does not fit, the conversation is empty, or it
                leaves no room for a token in the capacity.
            RuntimeError: from the stream: another turn has begun since.
        """
        ids = self._encoded(conversation, max_new_tokens)
        end = ending(self._tokenizer, stop_ids, stop)
        room = max_new_tokens if self.capacity is None else self.capacity - len(ids)
        if room < min(max_new_tokens, 1):
            raise ValueError(
                f"the conversation of {len(ids)} tokens leaves no room in a context of {self.capacity}; shorten it"
            )
        # Checks them. Which tokens come before does not matter to that, their number does.
        before = [0] * self._cache.length
        generate(self._target, NoDrafts(), ids[:1], max_new_tokens=0, cache=self._cache, earlier_ids=before, **drafting)
        count = min(max_new_tokens, room)
        rounds = self._rounds(ids, count, end.stop_ids, end.until(), drafting)
        return Stream(rounds, end, "context" if count < max_new_tokens else "length")

    def _encoded(self, conversation: Conversation, max_new_tokens: int) -> list[int]:
        if isinstance(conversation, Mapping) or not hasattr(conversation, "__len__"):
            raise ValueError(f"conversation: needs token ids, a text, or a list of messages, got {shown(conversation)}")
        if isinstance(conversation, str):
            ids: Sequence[int] | Tensor = self._tokenizer.encode(conversation)
        elif not isinstance(conversation, Tensor) and len(conversation) and isinstance(conversation[0], Mapping):
            messages = cast(Sequence[Message], conversation)
            ids = self._tokenizer.encode_chat(messages, enable_thinking=self._thinking)
        else:
            ids = cast(Sequence[int] | Tensor, conversation)
        encoded: list[int] = checked_prompt(self._target, ids, max_new_tokens)[0].tolist()
        return encoded

    def _rounds(
        self, ids: list[int], count: int, stop_ids: frozenset[int], until: Callable[[int], bool], drafting: Drafting
    ) -> Generator[Round, None, None]:
        self._turns += 1
        turn = self._turns
        self._settle()
        kept = self._store.longest(ids[:-1])  # before what is kept now can take its place
        self._keep()
        self._recall(ids, kept)
        self._grow(len(ids) + count)
        self._in_step = False  # unless a round says so
        rounds = generate(
            self._target,
            self._drafter,
            ids[self._reused :],
            max_new_tokens=count,
            stop_ids=stop_ids,
            until=until,
            cache=self._cache,
            earlier_ids=ids[: self._reused],
            **drafting,
        )
        known = ids
        for done in rounds:
            known = [*known, *done.tokens]
            self._ids, self._in_step = known, True
            yield done
            if turn != self._turns:
                raise RuntimeError("this turn is over: another one of its session has begun")
            self._in_step = False
        self._ids, self._in_step = known, True

    def _held(self) -> list[int]:
        """What the cache holds; nothing if it was interrupted where its ids could not be noted any more."""
        return self._ids[: self._cache.length] if self._cache.length <= len(self._ids) else []

    def _settle(self) -> None:
        """Puts the proposer in step with the cache after a failure, which can have left it ahead."""
        length, drafter = len(self._held()), self._drafter
        if not isinstance(drafter, Rewindable):
            return
        if not self._in_step and drafter.crop_floor <= length <= drafter.context_length:
            drafter.crop(length)
        self._in_step = drafter.context_length == length

    def _keep(self) -> None:
        """Keeps what the last turn ended with, for those who come back to it."""
        held, drafter = tuple(self._held()), self._drafter
        if not held or not self._in_step or not self._store.most or not isinstance(drafter, Rewindable):
            return
        if not self._store.used(held):
            self._store.put(held, Boundary(self._cache.snapshot(), drafter.snapshot()))

    def _recall(self, ids: list[int], kept: tuple[int, Boundary] | None) -> None:
        """Leaves in cache and proposer the longest beginning of the ids that can be had; the last id is never of it."""
        held, most = self._held() if self._in_step else [], ids[:-1]
        shared = _shared(held, most)
        if shared < len(held) and not self._can_crop(shared):
            shared = 0
        drafter = self._drafter
        self._ids, self._in_step = [], False  # should this be interrupted
        if kept is not None and kept[0] > shared and isinstance(drafter, Rewindable):
            shared = kept[0]
            self._cache.restore(kept[1].cache)
            drafter.restore(kept[1].context)
        elif shared < self._cache.length:
            self._cache.crop(shared)
            if shared and isinstance(drafter, Rewindable):
                drafter.crop(shared)  # of an empty cache the loop resets it
        self._ids, self._in_step, self._reused = ids[:shared], True, shared

    def _can_crop(self, length: int) -> bool:
        drafter = self._drafter
        return isinstance(drafter, Rewindable) and max(drafter.crop_floor, self._cache.crop_floor) <= length

    def _grow(self, tokens: int) -> None:
        """Moves to a larger cache, twice as large at least, if these do not fit."""
        if tokens > self._cache.capacity and self._cache.capacity != self.capacity:
            most = max(tokens, 2 * self._cache.capacity)
            larger = self._target.new_cache(min(most, self.capacity or most), rollback=self._cache.rollback)
            larger.restore(self._cache)
            self._cache = larger


def _capacity(stated: int | None, context: int | None) -> int | None:
    if stated is None:
        return context
    checked_count("capacity", stated, 1)
    if context is not None and stated > context:
        raise ValueError(f"capacity {stated} exceeds the model's context of {context}; lower it")
    return stated


def _shared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
