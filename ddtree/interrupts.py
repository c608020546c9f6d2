"""Ctrl-C while the command is still being imported, which takes a second or two: nothing is there yet to catch it."""

import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn

STATUS = 130


def leave_at_once() -> None:
    """From here on an interrupt ends the process in one line, unless interrupts are ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interrupt_again() -> None:
    """From here on an interrupt raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, b"ddtree: interrupted\n")
    os._exit(STATUS)
