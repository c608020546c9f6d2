"""The files that a trace is written to: opened before anything else is done, written whatever happens then."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TextIO

from .html import page
from .records import Trace, lines

WRITERS: dict[str, Callable[[Trace], str]] = {
    ".html": page,
    ".jsonl": lambda trace: "".join(f"{line}\n" for line in lines(trace)),
}
"""The form of a trace by the suffix of its file."""


class TraceFiles:
    """Files to write one trace to; what a file held before stays until then. As a context manager it closes them,
    and removes those that it made if no trace was written.

    Raises:
        ValueError: a path is named twice, has no suffix of `WRITERS`, or is something else than a file.
        OSError: a file cannot be written.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            _check(path, [other for other in paths if other.resolve() == path.resolve()])
        self._written = False
        self._files: dict[Path, TextIO] = {}
        with ExitStack() as stack:
            for path in paths:
                made = not path.exists()
                self._files[path] = stack.enter_context(path.open("a", encoding="utf-8", newline="\n"))
                if made:
                    stack.callback(self._remove, path)
            self._stack = stack.pop_all()

    def write(self, trace: Trace) -> None:
        """Writes the trace in place of whatever the files hold."""
        self._written = True
        for path, file in self._files.items():
            text = WRITERS[path.suffix](trace)
            file.truncate(0)
            file.write(text)
            file.flush()

    def __enter__(self) -> "TraceFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _remove(self, path: Path) -> None:
        if not self._written:
            path.unlink(missing_ok=True)


def _check(path: Path, same: Sequence[Path]) -> None:
    if path.suffix not in WRITERS:
        raise ValueError(f"{path}: a trace is written to a file that ends in {' or '.join(WRITERS)}")
    if len(same) > 1:
        raise ValueError(f"{path} is named twice; give one name for each form")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file that a trace can be written to; give another name")
