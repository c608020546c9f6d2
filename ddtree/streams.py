"""Standard error that may be closed, full or read by nobody: text on standard output must not be lost for that."""

import io
import os
import sys


class _Lost(io.TextIOBase):
    """Stands for a standard error that failed, and drops everything."""

    def write(self, text: str) -> int:
        return len(text)


def open_closed_stderr() -> None:
    """A standard error that was closed before the start is one that nobody wants to see: it goes to the null device."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (it stays open to the end)


def say(*lines: str) -> None:
    """Writes lines to standard error. If it cannot take them, they and all later ones are dropped."""
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = _Lost()


def lost() -> bool:
    """Whether standard error could not take something."""
    return isinstance(sys.stderr, _Lost)
