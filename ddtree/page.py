"""Standard output while a text is written to it."""

import sys

from .streams import say


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
