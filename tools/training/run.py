"""One run: where its files are, at which size and on which device it works, and which stages are finished."""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.training import command
from tools.training.command import UsageError
from tools.training.machine import damaged, read_json, write_json
from tools.training.settings import Settings, check, digest, file_digest
from tools.training.shapes import BUNDLED, TOY, Shape

_RESULT = "result.json"
_BEGUN = "settings.json"
_COMMANDS = "commands.txt"


@dataclass(frozen=True)
class Run:
    """A run's folder and settings.

    Args:
        out: holds everything the run makes; the pair itself is in `out/pair`.
        device: `cpu`, `cuda` or `cuda:N`.
        eager: whether to do without torch.compile, which a CPU run always does.
        words: the command line, which is kept for the card once it does something.
    """

    out: Path
    shape: Shape
    device: str
    seed: int
    eager: bool
    words: Sequence[str] = ()

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

    def settings(self, **more: object) -> dict[str, Any]:
        """What shapes every stage after the corpus, and what shapes one of them."""
        corpus = self.finished("corpus")
        common = {"shape": f"{self.shape.name} ({digest(asdict(self.shape))})", "seed": self.seed}
        return common | ({"corpus": digest(corpus["settings"])} if corpus else {}) | more

    def on_device(self, **more: object) -> dict[str, Any]:
        """Settings of a stage that draws on the device, whose kinds draw different numbers."""
        return self.settings(device=self.device.partition(":")[0], **more)

    def finished(self, stage: str, wanted: Settings | None = None) -> dict[str, Any] | None:
        """What a finished stage noted, or None.

        Raises:
            UsageError: it was made with settings other than those wanted.
            ValueError: the note is damaged.
        """
        file = self.out / stage / _RESULT
        if not file.is_file():
            return None
        notes = read_json(file, delete=file)
        if not isinstance(notes.get("settings"), dict):
            raise damaged(file, "it names no settings", delete=file)
        check(notes["settings"], wanted or {}, where=self.out / stage, delete=self.out)
        return notes

    def require(self, stage: str, wanted: Settings) -> dict[str, Any]:
        """What a finished stage noted; UsageError if it is not finished, or was made with other settings."""
        notes = self.finished(stage, wanted)
        if notes is None:
            raise UsageError(f"{self.out} has no finished {stage}; run the stage before this one, or train_pair.py")
        return notes

    def weights(self, part: str) -> str:
        """The digest of a trained model's file of weights.

        Raises:
            UsageError: the model is not trained, or with other settings.
            ValueError: the file is not the one that its stage wrote.
        """
        notes = self.require(part, self.settings())
        file = self.pair / part / "model.safetensors"
        found = file_digest(file) if file.is_file() else "absent"
        if found != notes.get("weights"):
            raise damaged(file, "its stage wrote another one", delete=self.out / part / _RESULT)
        return found

    def claim(self, stage: str, settings: Settings) -> None:
        """Marks a stage that keeps what it finds as begun; UsageError if it was begun with other settings."""
        file = self.out / stage / _BEGUN
        if file.is_file():
            check(read_json(file), settings, where=self.out / stage, delete=self.out / stage)
        else:
            write_json(file, settings)

    def _note_command(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if self.words:
                with (self.out / _COMMANDS).open("a", encoding="utf-8") as stream:
                    stream.write(shlex.join(["python", *self.words]) + "\n")
        except OSError as error:
            raise UsageError(f"--out {self.out} cannot be written to: {error}") from None

    @property
    def commands(self) -> list[str]:
        """The command lines kept so far, repeats left out."""
        file = self.out / _COMMANDS
        return list(dict.fromkeys(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else []

    @contextmanager
    def stage(self, name: str, settings: Settings) -> Iterator[dict[str, Any]]:
        """Times a stage; what it puts into the yielded dict marks it finished, unless it fails.

        Raises:
            UsageError: the run's folder cannot be written to.
        """
        self._note_command()
        print(f"== {name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        notes: dict[str, Any] = {"settings": dict(settings)}
        yield notes
        notes["wall_seconds"] = round(time.monotonic() - start, 1)
        write_json(self.out / name / _RESULT, notes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every stage has."""
    parser.add_argument(
        "--out", type=command.folder, required=True, help="folder of the run; the same call continues it"
    )
    parser.add_argument("--toy", action="store_true", help="a size that takes seconds on a CPU and learns nothing")
    parser.add_argument("--device", type=command.device, help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--seed", type=command.seed, default=0, help="of all random draws (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")


def run_of(arguments: argparse.Namespace) -> Run:
    """The run that parsed options describe."""
    device = arguments.device
    if device is None:
        import torch  # not at the top: processes that only read files do without it

        device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = TOY if arguments.toy else BUNDLED
    return Run(arguments.out, shape, device, arguments.seed, arguments.eager, sys.argv)
