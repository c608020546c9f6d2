"""How long a stage runs, and how fast it learns meanwhile."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Position(NamedTuple):
    """How far a run is: steps done, and seconds counted."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """A budget of seconds (compilation not counted) or of steps, and the learning rate over it.

    The rate rises linearly over `warmup` steps, stays, and falls linearly to zero over the last `decay` of the
    budget.

    Raises:
        ValueError: not exactly one of `seconds` and `steps` is given, or a number is not above 0, or not finite.
    """

    seconds: float | None = None
    steps: int | None = None
    warmup: int = 100
    decay: float = 0.25
    evaluations: int = 5
    checkpoint_every: float = 60.0  # seconds

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ValueError(f"schedule: give seconds or steps, one of them; got {self.seconds} and {self.steps}")
        for name in ("seconds", "steps", "warmup", "decay"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"schedule: {name} must be finite and above 0, got {value}")

    @property
    def budget(self) -> str:
        """The budget in words."""
        return f"{self.steps} steps" if self.seconds is None else f"{float(self.seconds)} s"

    def spent(self, at: Position) -> float:
        """The fraction of the budget that is used up; 1 or more ends the run."""
        return at.step / (self.steps or 1) if self.seconds is None else at.seconds / self.seconds

    def rate(self, step: int, spent: float) -> float:
        """The factor on the peak learning rates."""
        return min(1.0, (step + 1) / self.warmup, (1.0 - spent) / self.decay)

    def evaluates(self, before: float, now: float) -> bool:
        """Whether an evaluation is due between two fractions of the budget."""
        return int(now * self.evaluations) > int(before * self.evaluations)
