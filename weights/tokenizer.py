"""Text to ids and back, and chats to ids, for a checkpoint's own vocabulary and template.

One rule on control tokens (turn markers, end of text): text that users write never yields them. `encode` takes
them as ordinary text unless asked to parse them, and `encode_chat` takes them from the template alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .chat import ChatTemplate, Message, read_chat_template
from .files import TOKENIZER_FILES, Source, resolve
from .stream import TextStream
from .vocabulary import Vocabulary, read_vocabulary


def load_tokenizer(source: Source) -> "Tokenizer":
    """The tokenizer of a target: of a folder, a hub id `owner/name`, or the `bundled` pair.

    Raises:
        CheckpointError: there is none, or its files are damaged or of an unsupported kind.
    """
    folder = resolve(source, "target", TOKENIZER_FILES)
    return Tokenizer(read_vocabulary(folder), read_chat_template(folder))


class Tokenizer:
    """A vocabulary and, where the checkpoint has one, a chat template.

    Args:
        vocabulary: how text and ids correspond.
        template: how a conversation is written, or None.
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate | None = None) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._control_ids = frozenset(vocabulary.control.values())
        longest_first = sorted(vocabulary.control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def vocab_size(self) -> int:
        """Number of named ids. A model's embedding may have more rows; those decode to nothing."""
        return self._vocabulary.size

    @property
    def last_id(self) -> int:
        """The greatest named id, which a model must have a row for; -1 if there is none."""
        return self._vocabulary.last_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return self._control_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def strip(self) -> int | None:
        """Number of spaces that a decoding drops at its start, None for all."""
        return self._vocabulary.strip

    def token_id(self, text: str) -> int | None:
        """The id of the one token of this name, or None."""
        return self._vocabulary.id_of(text)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of a text; nothing is added in front or behind.

        Tokens that the vocabulary adds but does not mark special (`<think>` in the published ones) are always
        recognised.

        Args:
            parse_special: turn control tokens spelt out in the text into their ids. Only for text whose every
                part is trusted.

        Raises:
            ValueError: the text is no valid Unicode (it has a lone surrogate).
        """
        _check_unicode(text)
        return self._with_control(text, {}) if parse_special else self._vocabulary.encode(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids, as a `TextStream` gives it; ids without a name stand for nothing.

        Raises:
            ValueError: an id is negative.
        """
        stream = TextStream(self, skip_special=skip_special)
        return stream.push(ids) + stream.finish()

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        """The bytes that one id adds to a decoding; a single character may spread over several ids.

        Raises:
            ValueError: the id is negative.
        """
        if token < 0:
            raise ValueError(f"token id {token} is negative")
        return b"" if skip_special and token in self._control_ids else self._vocabulary.raw(token)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as text, for reading. To get ids use `encode_chat`, which tells the template's control
        tokens from those that a message spells out.

        Args:
            messages: objects with `role` and `content`.
            enable_thinking: passed to the template; None leaves it to the template.
            add_generation_prompt: end with the start of the assistant's turn.

        Raises:
            ValueError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise ValueError("this checkpoint has no chat template; give the prompt as plain text")
        variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        return self._template.render(messages, **variables)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a conversation; control tokens come from the template, never from a message.

        Arguments and errors as for `render_chat`; moreover messages must be plain data.
        """
        stand_ins = self._stand_ins(messages)
        rendered = self.render_chat(
            self._defused(messages, stand_ins),
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )
        _check_unicode(rendered)
        return self._with_control(rendered, {ord(character): text for text, character in stand_ins.items()})

    def _with_control(self, text: str, spelt: Mapping[int, str]) -> list[int]:
        """Ids of a text with its control tokens parsed, and with characters replaced in what lies between."""
        ids: list[int] = []
        start = 0
        for found in self._control.finditer(text):
            ids += self._vocabulary.encode(text[start : found.start()].translate(spelt))
            ids.append(self._vocabulary.control[found[0]])
            start = found.end()
        return ids + self._vocabulary.encode(text[start:].translate(spelt))

    def _stand_ins(self, messages: Sequence[Message]) -> dict[str, str]:
        """For each control token a private-use character that no message holds."""
        used = {character for text in _texts(messages) for character in text}
        free = (character for character in map(chr, range(0xF0000, 0x10FFFE)) if character not in used)
        return dict(zip(self._vocabulary.control, free, strict=False))

    def _defused(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        """A copy of messages in which a stand-in takes the place of every control token spelt out in a text."""
        if isinstance(value, str):
            return self._control.sub(lambda found: stand_ins[found[0]], value)
        if isinstance(value, Mapping):
            return {key: self._defused(item, stand_ins) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._defused(item, stand_ins) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ValueError(f"messages may hold texts, numbers, lists and objects, got {type(value).__name__}")


def _texts(value: Any) -> Iterator[str]:
    """All texts in messages, however deeply nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text has a lone surrogate at index {error.start}, so it is no valid Unicode") from None
