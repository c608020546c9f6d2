"""The training loop that target and drafter share: a budget of seconds or steps, resuming, progress, checkpoints.

It knows no model. What is trained is a `Job`; how long and how fast is a `Schedule`.
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tools.training.machine import Progress, damaged, uninterrupted, write_whole
from tools.training.optim import Optimiser
from tools.training.schedule import Position, Schedule
from tools.training.settings import Settings, check

_CHECKPOINT = "checkpoint.pt"
_LOG = "log.jsonl"
# Steps of a process whose time is not counted: they compile.
_UNCOUNTED = 3
# The host runs ahead of the device by at most this many steps, so that its clock tells the device's progress.
_WAIT_EVERY = 16
_LOWER = "lower the learning rates, MUON_RATE and ADAM_RATE in tools/training, and start with another --out"


class Job(Protocol):
    """What is trained."""

    name: str
    optimiser: Optimiser

    def loss(self, step: int) -> Tensor:
        """The loss of a step, a scalar with gradients; a function of the step number and the parameters alone."""

    def evaluate(self) -> Mapping[str, float]:
        """Figures on text that is not trained on."""


class _Clock:
    """Seconds counted in this and earlier processes of a run; stands still until started."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._start: float | None = None

    def start(self) -> None:
        self._start = time.monotonic()

    def rate(self, steps: int) -> float:
        """Counted steps a second, of `steps` in this process."""
        return 0.0 if self._start is None else (steps - _UNCOUNTED) / (time.monotonic() - self._start)

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._start is None else time.monotonic() - self._start)


def fit(job: Job, schedule: Schedule, folder: Path, settings: Settings | None = None) -> dict[str, float]:
    """Trains until the budget is used up, continuing from the folder's checkpoint if there is one.

    Args:
        settings: what shapes the run, kept with its checkpoint.

    Returns:
        the last evaluation's figures, and `steps` and `seconds`.

    Raises:
        FloatingPointError: the loss or a parameter is no longer finite. The last checkpoint stays.
        KeyboardInterrupt: it was interrupted, and a checkpoint holds all steps that were done.
        UsageError: the checkpoint was written with other settings.
        ValueError: the checkpoint is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    training = _Training(job, schedule, folder, settings or {})
    try:
        return training.run()
    except KeyboardInterrupt:
        with uninterrupted():
            training.save()
        said = f"{job.name} is saved at step {training.at.step}, and the same call continues it"
        raise KeyboardInterrupt(said) from None


class _Training:
    """One call of `fit`; `at` is always where the parameters are."""

    def __init__(self, job: Job, schedule: Schedule, folder: Path, settings: Settings) -> None:
        self.at = resume(job, folder, settings)
        self._job, self._schedule, self._folder, self._settings = job, schedule, folder, settings
        self._first, self._clock, self._progress = self.at.step, _Clock(self.at.seconds), Progress(job.name)
        self._saved = time.monotonic()

    def run(self) -> dict[str, float]:
        while (spent := self._schedule.spent(self.at)) < 1.0:
            loss = self._step(spent)
            if self.at.step == self._first + _UNCOUNTED:
                _wait(loss)
                self._clock.start()
            elif self.at.step % _WAIT_EVERY == 0:
                rate = self._clock.rate(self.at.step - self._first)
                self._progress.show(spent, 1.0, f"step {self.at.step}  loss {_wait(loss):.3f}  {rate:.1f} steps/s")
            now = self._schedule.spent(self.at)
            if now < 1.0 and self._schedule.evaluates(spent, now):
                figures = self._job.evaluate()
                _log(self._folder, self.at, _wait(loss), figures)
                self._progress.say(describe(figures))
            if time.monotonic() - self._saved >= self._schedule.checkpoint_every:
                self.save()
        figures = dict(self._job.evaluate())
        self.save()
        self._progress.show(1.0, 1.0, f"step {self.at.step}  " + describe(figures))
        return figures | {"steps": self.at.step, "seconds": self.at.seconds}

    def _step(self, spent: float) -> Tensor:
        loss = self._job.loss(self.at.step)
        loss.backward()
        with uninterrupted():
            self._job.optimiser.step(self._schedule.rate(self.at.step, spent))
            self.at = Position(self.at.step + 1, self._clock.seconds)
        return loss

    def save(self) -> None:
        save(self._job, self.at, self._folder, self._settings)
        self._saved = time.monotonic()


def _wait(loss: Tensor) -> float:
    """The loss as a number, which waits for the device."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value}; {_LOWER}")
    return value


def _log(folder: Path, at: Position, loss: float, figures: Mapping[str, float]) -> None:
    entry = {"step": at.step, "seconds": round(at.seconds, 2), "loss": loss, **figures}
    with (folder / _LOG).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def describe(figures: Mapping[str, float]) -> str:
    """Figures in one line."""
    return "  ".join(f"{name} {value:.3f}" for name, value in figures.items())


def save(job: Job, at: Position, folder: Path, settings: Settings) -> None:
    """Writes the checkpoint, whole or not at all; FloatingPointError if it would hold anything that is not finite."""
    state = job.optimiser.state()
    if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
        raise FloatingPointError(f"{job.name}: not all parameters are finite after step {at.step}; {_LOWER}")
    record = {"optimiser": state, "step": at.step, "seconds": at.seconds, "settings": dict(settings)}
    write_whole(folder / _CHECKPOINT, lambda part: torch.save(record, part))


def resume(job: Job, folder: Path, settings: Settings) -> Position:
    """Puts the job where its folder's checkpoint stands; the start if there is none.

    Raises:
        UsageError: the checkpoint was written with other settings.
        ValueError: it is damaged, or belongs to a model of other shapes.
    """
    file = folder / _CHECKPOINT
    if not file.is_file():
        return Position(0, 0.0)
    try:
        record = torch.load(file, map_location="cpu", weights_only=True)
        made, state, at = record["settings"], record["optimiser"], Position(record["step"], record["seconds"])
    except Exception as error:  # torch raises many kinds, none of them documented
        raise damaged(file, error, delete=file) from None
    check(made, settings, where=file, delete=file)
    job.optimiser.load(state)
    return at
