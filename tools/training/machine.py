"""What every stage needs of the machine: files written whole or not at all, processes, interrupts, progress lines."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TypeVar

A = TypeVar("A")
R = TypeVar("R")


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file in one step, so that a file that exists is complete."""
    write_whole(path, lambda part: part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8"))


def read_json(path: Path, delete: Path | None = None) -> dict[str, Any]:
    """The object in a JSON file; ValueError, as of `damaged`, if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        raise damaged(path, error, delete) from None
    return value


def damaged(path: Path, error: object, delete: Path | None = None) -> ValueError:
    """The error for a file of a run that cannot be read.

    Args:
        delete: without it, the same call makes the file anew; the file's folder if nothing else is said.
    """
    return ValueError(
        f"{path} is damaged ({' '.join(str(error).split())[:160]}); "
        f"delete {path.parent if delete is None else delete} and repeat the call"
    )


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` fill a file beside `path`, then moves it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


def parallel(work: Callable[[A], R], tasks: Sequence[A], what: str) -> Iterator[R]:
    """Results of `work` in the order of the tasks, one process a core; in this process if one task or core is all.

    Processes are spawned, not forked, so nothing that this process has started (threads, a device) reaches them.
    """
    progress = Progress(what)
    workers = min(len(os.sched_getaffinity(0)), len(tasks))
    if workers <= 1:
        for i, task in enumerate(tasks):
            yield work(task)
            progress.show(i + 1, len(tasks))
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_without_threads)
    try:
        for i, result in enumerate(_started(pool, work, tasks)):
            yield result
            progress.show(i + 1, len(tasks))
    except BaseException:
        for process in active_children():  # what they work at is wanted no more
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _started(pool: ProcessPoolExecutor, work: Callable[[A], R], tasks: Sequence[A]) -> Iterator[R]:
    """The pool's results. Its processes inherit that interrupts are blocked: a terminal sends one to all of them,
    but this process alone answers it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.map(work, tasks)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds an interrupt back until the block is through, so that what it changes together stays together."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *what: came.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(*came[0])


def _without_threads() -> None:
    """The tokenizer's own threads are of no use beside a process for every core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Progress:
    """Progress lines on stderr: one that is rewritten in a terminal, else a new one every few seconds."""

    EVERY_SECONDS = 10.0

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, done: float, total: float, note: str = "") -> None:
        """Says how far it is; at the end always, before that only if the last line is old enough."""
        now = time.monotonic()
        last = done >= total
        if not last and now - self._last < (0.2 if self._terminal else self.EVERY_SECONDS):
            return
        self._last = now
        line = f"{self._what}  {100 * done / total:3.0f} %  {now - self._start:5.1f} s  {note}".rstrip()
        if self._terminal:
            print(f"\r\033[K{line}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """A line of its own."""
        print(f"\r\033[K{line}" if self._terminal else f"{self._what}  {line}", file=sys.stderr, flush=True)
