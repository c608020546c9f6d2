"""Arguments of public calls, checked on their own: one ValueError that names what was given and what is needed."""

from operator import index
from typing import Any

import torch
from torch import Tensor


class NonFiniteError(ValueError):
    """A number is NaN or infinite where it must be finite; the message says where."""


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and not a page of numbers."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else text[:97] + "..."


def as_integer(value: Any) -> int | None:
    """The value as an int if it is an integer of whatever library, else None; True and False are none."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def checked_count(what: str, value: object, least: int) -> None:
    """Raises ValueError unless the value is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} must be an int of at least {least}, got {shown(value)}")


def checked_callables(**named: object) -> None:
    """Raises ValueError at the first argument that cannot be called."""
    for name, value in named.items():
        if not callable(value):
            raise ValueError(f"{name} must be callable, got {shown(value)}")


def checked_methods(what: str, value: object, *names: str) -> None:
    """Raises ValueError unless the value has methods of these names, which is what `what` is asked for."""
    missing = [name for name in names if not callable(getattr(value, name, None))]
    if missing or isinstance(value, type):
        lacks = f"which has no {missing[0]}" if missing else "a class; make one of it"
        raise ValueError(f"{what} must have the methods {', '.join(names)}, got {shown(value)}, {lacks}")


def holds_integers(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are integers; truth values are none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
