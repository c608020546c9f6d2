"""A spelling for tiny models, and what a stopped text should be, worked out character by character. No tests."""

from collections.abc import Collection, Sequence


class Letters:
    """Id i is spelt by a few letters; some ids have no text, some a part of a character that takes two of them."""

    strip = 0
    _SPELT = ("a", "b", "c", "ab", "ba", "cab", "bcb", "", " ", "\n")
    _PARTS = (b"\xc3", b"\xa9")

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        kind = token % 12
        return self._SPELT[kind].encode() if kind < 10 else self._PARTS[kind - 10]

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self.piece(i) for i in ids).decode(errors="replace")

    def settled(self, ids: Sequence[int]) -> str:
        """Without an unfinished character at the end."""
        data = b"".join(self.piece(i) for i in ids)
        return data[:-1].decode(errors="replace") if data.endswith(b"\xc3") else data.decode(errors="replace")


def stopped(text: str, stop: Collection[str]) -> tuple[str, str | None]:
    """The text up to what ends it, and that: the longest stop string at the first place where any is complete."""
    for end in range(1, len(text) + 1):
        here = [s for s in stop if text[:end].endswith(s)]
        if here:
            longest = max(here, key=len)
            return text[: end - len(longest)], longest
    return text, None


def last_token(spelling: Letters, ids: Sequence[int], stop: Collection[str]) -> int | None:
    """How many ids there are up to the one that completes a stop string, or None."""
    counts = range(1, len(ids) + 1)
    return next((n for n in counts if stopped(spelling.settled(ids[:n]), stop)[1]), None)
