"""One run: where its files are, at which size and on which device it works, and which stages are finished."""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.training.machine import read_json, write_json
from tools.training.shapes import BUNDLED, TOY, Shape

_RESULT = "result.json"
_COMMANDS = "commands.txt"


@dataclass(frozen=True)
class Run:
    """A run's folder and settings.

    Args:
        out: holds everything the run makes; the pair itself is in `out/pair`.
        device: `cpu` or `cuda`.
        eager: whether to do without torch.compile, which a CPU run always does.
    """

    out: Path
    shape: Shape
    device: str
    seed: int
    eager: bool

    @property
    def corpus(self) -> Path:
        return self.out / "corpus"

    @property
    def tokens(self) -> Path:
        return self.out / "tokens"

    @property
    def prompts(self) -> Path:
        return self.out / "prompts"

    @property
    def generated(self) -> Path:
        return self.out / "generated"

    @property
    def pair(self) -> Path:
        return self.out / "pair"

    @property
    def compiles(self) -> bool:
        return self.device != "cpu" and not self.eager

    def finished(self, stage: str) -> Any:
        """What a finished stage noted, or None."""
        file = self.out / stage / _RESULT
        return read_json(file) if file.is_file() else None

    def require(self, stage: str) -> None:
        """Raises ValueError unless a stage is finished."""
        if not self.finished(stage):
            raise ValueError(f"{self.out} has no finished {stage}; run the stage before this one, or train_pair.py")

    def note_command(self, words: Sequence[str]) -> None:
        """Keeps a command line for the card."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / _COMMANDS).open("a", encoding="utf-8") as stream:
            stream.write(shlex.join(["python", *words]) + "\n")

    @property
    def commands(self) -> list[str]:
        """The command lines kept so far, repeats left out."""
        file = self.out / _COMMANDS
        return list(dict.fromkeys(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else []

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Times a stage; what it puts into the yielded dict marks it finished, unless it fails."""
        print(f"== {name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        notes: dict[str, Any] = {}
        yield notes
        notes["wall_seconds"] = round(time.monotonic() - start, 1)
        write_json(self.out / name / _RESULT, notes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every stage has."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; a later call continues it")
    parser.add_argument("--toy", action="store_true", help="a size that takes seconds on a CPU and learns nothing")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")


def run_of(arguments: argparse.Namespace) -> Run:
    """The run that parsed options describe."""
    device = arguments.device
    if device is None:
        import torch  # not at the top: processes that only read files do without it

        device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = TOY if arguments.toy else BUNDLED
    return Run(arguments.out, shape, device, arguments.seed, arguments.eager)
