"""What the command lines of `train_*.py` share: parsing, the form of single values, and how a script ends.

Exit status: 0 success, 1 failure, 2 bad use, 130 interrupted. All but success say why in one line on stderr.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import wraps
from pathlib import Path
from typing import NoReturn

FAILURE, BAD_USE, INTERRUPTED = 1, 2, 130

_MOST_SEED = 2**32 - 1
_EXPLAINED = (ValueError, OSError, FloatingPointError, MemoryError, BrokenProcessPool)
# by name, since processes that only read files do without torch
_EXPLAINED_BY_TORCH = ("OutOfMemoryError", "AcceleratorError")


class UsageError(ValueError):
    """What is asked for cannot be; the message is one line."""


class Parser(argparse.ArgumentParser):
    """A parser with the script's own text as its help, whose errors are `UsageError`s without the usage before them."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the options")


def seconds(text: str) -> float:
    """A time budget; anything but a finite number above 0 is refused."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a finite number of seconds above 0, got {text!r}")
    return value


def seed(text: str) -> int:
    """A seed of random draws."""
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) > _MOST_SEED:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {_MOST_SEED}, got {text!r}")
    return int(text)


def folder(text: str) -> Path:
    """A path that is no file; an empty word, which would mean the current folder, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("must name a folder, got an empty word")
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def device(text: str) -> str:
    """The name of a device that is there."""
    named = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", text)
    if named is None:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    if text != "cpu":
        import torch  # not at the top: processes that only read files do without it

        if int(named[1] or 0) >= torch.cuda.device_count():
            raise argparse.ArgumentTypeError(
                f"{text} is not there (CUDA devices found: {torch.cuda.device_count()}); use cpu"
            )
    return text


def fail_in_one_line(main: Callable[[], None]) -> Callable[[], None]:
    """Makes bad use, failures and interrupts of a script one line on stderr and its exit status.

    Other errors are faults of the script and keep their traceback.
    """

    @wraps(main)
    def guarded() -> None:
        try:
            main()
        except KeyboardInterrupt as interrupt:
            _leave(f"interrupted; {str(interrupt) or 'the same call continues'}", INTERRUPTED)
        except UsageError as error:
            _leave(error, BAD_USE)
        except Exception as error:
            if not isinstance(error, _EXPLAINED) and type(error).__name__ not in _EXPLAINED_BY_TORCH:
                raise
            _leave(str(error) or type(error).__name__, FAILURE)

    return guarded


def _leave(why: object, status: int) -> NoReturn:
    # a terminal may show an unfinished progress line
    erase = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{erase}{Path(sys.argv[0]).name}: {' '.join(str(why).split())}", file=sys.stderr, flush=True)
    raise SystemExit(status) from None
