"""Text that ends at the first of some stop strings, whatever tokens spell it.

One rule: the text ends before the stop string that is complete first, and of several that are complete at the same
character before the longest. So what ends a text does not depend on how its characters came, token by token or many
at once. A tail that could still become a stop string is held back, and so no part of one is ever given out.
"""

from collections.abc import Collection, Iterable

from qwen_gdn.checked import shown

from .stream import Spelling, TextStream


def checked_stop_strings(stop: Collection[str]) -> tuple[str, ...]:
    """The stop strings; ValueError unless they are a collection of texts of at least one character."""
    given = list(stop) if isinstance(stop, Collection) and not isinstance(stop, str | bytes) else [None]
    texts = tuple(text for text in given if isinstance(text, str) and text)
    if len(texts) != len(given):
        raise ValueError(f"stop must be a collection of texts of at least one character, got {shown(stop)}")
    return texts


class StoppedText:
    """A `TextStream` that ends at a stop string.

    The concatenation of what `push` and `finish` return is the decoding of the ids, up to the first stop string.

    Args:
        tokenizer: whose ids these are.
        stop: the stop strings, as `checked_stop_strings` returns them.
    """

    def __init__(self, tokenizer: Spelling, stop: Collection[str] = ()) -> None:
        self._stream = TextStream(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text, or None; what comes after it is dropped."""
        return self._found

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids decide, perhaps none; ValueError if an id is negative."""
        return self._settled(self._stream.push(ids))

    def finish(self) -> str:
        """What was held back: an unfinished character, and a tail that can become no stop string any more."""
        rest = self._settled(self._stream.finish())
        rest, self._held = rest + self._held, ""
        return rest

    def _settled(self, text: str) -> str:
        if self._found is not None:
            return ""
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            _, start, self._found = min(ends)
            self._held = ""
            return text[:start]
        keep = len(text) - self._open(text)
        self._held = text[keep:]
        return text[:keep]

    def _open(self, text: str) -> int:
        """Length of the longest tail with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
