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

from tools.training.machine import Progress, write_whole
from tools.training.optim import Optimiser
from tools.training.schedule import Position, Schedule

_CHECKPOINT = "checkpoint.pt"
_LOG = "log.jsonl"
# Steps of a process whose time is not counted: they compile.
_UNCOUNTED = 3
# The host runs ahead of the device by at most this many steps, so that its clock tells the device's progress.
_WAIT_EVERY = 16


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


def fit(job: Job, schedule: Schedule, folder: Path) -> dict[str, float]:
    """Trains until the budget is used up, continuing from the folder's checkpoint if there is one.

    Returns:
        the last evaluation's figures, and `steps` and `seconds`.

    Raises:
        FloatingPointError: the loss is no longer finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    at = resume(job, folder)
    first, clock, progress = at.step, _Clock(at.seconds), Progress(job.name)
    saved = time.monotonic()
    while (spent := schedule.spent(at)) < 1.0:
        loss = job.loss(at.step)
        loss.backward()
        job.optimiser.step(schedule.rate(at.step, spent))
        at = Position(at.step + 1, clock.seconds)
        if at.step == first + _UNCOUNTED:
            _wait(loss)
            clock.start()
        elif at.step % _WAIT_EVERY == 0:
            value = _wait(loss)
            progress.show(spent, 1.0, f"step {at.step}  loss {value:.3f}  {clock.rate(at.step - first):.1f} steps/s")
        now = schedule.spent(at)
        if now < 1.0 and schedule.evaluates(spent, now):
            figures = job.evaluate()
            _log(folder, at, _wait(loss), figures)
            progress.say(describe(figures))
        if time.monotonic() - saved >= schedule.checkpoint_every:
            save(job, at, folder)
            saved = time.monotonic()
    figures = dict(job.evaluate())
    save(job, at, folder)
    progress.show(1.0, 1.0, f"step {at.step}  " + describe(figures))
    return figures | {"steps": at.step, "seconds": at.seconds}


def _wait(loss: Tensor) -> float:
    """The loss as a number, which waits for the device."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value}; lower the learning rate")
    return value


def _log(folder: Path, at: Position, loss: float, figures: Mapping[str, float]) -> None:
    entry = {"step": at.step, "seconds": round(at.seconds, 2), "loss": loss, **figures}
    with (folder / _LOG).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def describe(figures: Mapping[str, float]) -> str:
    """Figures in one line."""
    return "  ".join(f"{name} {value:.3f}" for name, value in figures.items())


def save(job: Job, at: Position, folder: Path) -> None:
    """Writes the checkpoint, whole or not at all."""
    record = {"optimiser": job.optimiser.state(), "step": at.step, "seconds": at.seconds}
    write_whole(folder / _CHECKPOINT, lambda part: torch.save(record, part))


def resume(job: Job, folder: Path) -> Position:
    """Puts the job where its folder's checkpoint stands; the start if there is none."""
    file = folder / _CHECKPOINT
    if not file.is_file():
        return Position(0, 0.0)
    record = torch.load(file, map_location="cpu", weights_only=True)
    job.optimiser.load(record["optimiser"])
    return Position(record["step"], record["seconds"])
