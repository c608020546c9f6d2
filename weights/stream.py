"""Ids to text as they come: each piece of text is given out once it can no longer change.

It looks only at the ids it is given, once each: the bytes of an unfinished character (three at most) are all it
keeps.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol


class Spelling(Protocol):
    """What decoding needs of a tokenizer."""

    @property
    def strip(self) -> int | None:
        """Number of spaces that a decoding drops at its start, None for all."""

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        """The bytes that one id stands for."""


class TextStream:
    """Decodes one sequence of ids piecewise.

    The concatenation of what `push` returned, and `finish` at the end, is the decoding of all ids, however they
    were split. No piece ends within a character. Bytes that are no UTF-8 become U+FFFD, one for each maximal
    part of a character (as in the Unicode standard, section 3.9).

    Args:
        tokenizer: whose ids these are.
        skip_special: leave control tokens out.
    """

    def __init__(self, tokenizer: Spelling, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strip

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids decide, perhaps none.

        Raises:
            ValueError: an id is negative; none of these ids is taken in.
        """
        text = b"".join(self._tokenizer.piece(int(i), skip_special=self._skip_special) for i in ids)
        return self._decoder.decode(self._without_lead(text))

    def finish(self) -> str:
        """What is left of a character that never ended; afterwards the stream stands at a new beginning."""
        rest = self._decoder.decode(b"", final=True)
        self._strip = self._tokenizer.strip
        return rest

    def _without_lead(self, text: bytes) -> bytes:
        if self._strip == 0 or not text:
            return text
        count = len(text) - len(text.lstrip(b" "))
        if self._strip is not None:
            count = min(count, self._strip)
            self._strip -= count
        if count < len(text):
            self._strip = 0
        return text[count:]
