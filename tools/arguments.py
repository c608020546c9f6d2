"""What the command lines of the tools share: bad use ends in one line with status 2, and some forms of values."""

import argparse
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from ddtree.arguments import Parser, UsageError, whole


class ToolParser(Parser):
    """Ends the process with one line and status 2 where the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except UsageError as error:
            self.exit(2, f"{self.prog}: error: {error}\n")


def documented_parser(prog: str, documentation: str | None) -> ToolParser:
    """The parser of a tool whose help begins and ends with its documentation, the rest of it as it stands."""
    about, _, rest = (documentation or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    return ToolParser(prog=prog, description=about, epilog=rest, formatter_class=formatter, allow_abbrev=False)


def wholes(least: int) -> Callable[[str], list[int]]:
    """A type of argument: integers of at least `least` with commas between them."""
    return lambda text: [whole(least)(part.strip()) for part in text.split(",")]


def some_of(what: str, names: Collection[str]) -> Callable[[str], list[str]]:
    """A type of argument: names, of those there are, with commas between them."""

    def read(text: str) -> list[str]:
        asked = [name.strip() for name in text.split(",")]
        for name in asked:
            if name not in names:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}; there are {', '.join(names)}")
        return asked

    return read


def amount(text: str) -> float:
    """A type of argument: a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text!r}")
    return value


def file(text: str) -> Path:
    """A type of argument: a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    return Path(text)
