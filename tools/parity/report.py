"""Two traces compared: an error for every part, the first fault, and how they read."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from tools.parity.trace import PARTS, Trace


class Comparison(NamedTuple):
    """errors: relative error of every part, in the order of computation; top1: share of rows with the same argmax."""

    errors: dict[str, float]
    top1: float

    @property
    def worst(self) -> float:
        """The largest error of embedding, layers, final norm and logits; parts inside layers left out."""
        return max(error for name, error in self.errors.items() if _is_whole(name))

    def fault(self, tolerance: float) -> str | None:
        """Where the two first differ: the first layer beyond the tolerance and the first part of it that is beyond.

        Parts are looked at only inside a layer whose output is off: their own scale can be far below that of the
        residual stream, and then their relative rounding is larger without any fault.
        """
        whole = next((name for name, e in self.errors.items() if _is_whole(name) and not e <= tolerance), None)
        if whole is None or not whole.startswith("layers."):
            return whole
        inside = {part: self.errors[f"{whole}.{part}"] for part in PARTS}
        first = next((part for part, e in inside.items() if not e <= tolerance), None)
        return f"{whole}, in its {first or max(inside, key=lambda part: inside[part])}"


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """max|ours − theirs| / max|theirs| in float64; infinite where either is not finite."""
    ours, theirs = ours.double(), theirs.double()
    return _share(float((ours - theirs).abs().max()), float(theirs.abs().max()))


def rms_error(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of ours − theirs over that of theirs in float64; infinite where either is not finite."""
    ours, theirs = ours.double(), theirs.double()
    return _share(float((ours - theirs).norm()), float(theirs.norm()))


def _share(difference: float, scale: float) -> float:
    if not (difference < float("inf") and scale < float("inf")):
        return float("inf")
    return difference / scale if scale else difference


def compare(ours: Trace, theirs: Trace, error: Callable[[Tensor, Tensor], float] = relative_error) -> Comparison:
    """Errors of ours measured by theirs.

    Raises:
        ValueError: the two do not have the same parts.
    """
    if list(ours) != list(theirs):
        odd = sorted(set(ours) ^ set(theirs)) or "their order"
        raise ValueError(f"the traces differ in parts: {odd}; compare models of the same layers")
    agreeing = (ours["logits"].argmax(-1) == theirs["logits"].argmax(-1)).float().mean()
    return Comparison({name: error(ours[name], theirs[name]) for name in ours}, float(agreeing))


def rows(trace: Trace, first: int) -> Trace:
    """The rows of a trace from `first` on."""
    return {name: values[first:] for name, values in trace.items()}


def lines(comparison: Comparison, tolerance: float, *, parts: bool) -> Iterator[str]:
    """One line for embedding, every layer, norm and logits, with the errors inside layers where asked for."""
    for name, error in comparison.errors.items():
        if not _is_whole(name):
            continue
        line = f"  {name:<12} {error:9.2e}{'' if error <= tolerance else '  <-- beyond the tolerance'}"
        if parts and name.startswith("layers."):
            line += "   " + "  ".join(f"{part} {comparison.errors[f'{name}.{part}']:.1e}" for part in PARTS)
        yield line


def _is_whole(name: str) -> bool:
    return name.count(".") < 2
