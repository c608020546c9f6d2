"""Keeps reduced-precision products out of the delta rule, whatever the process has switched on.

TF32 inside the triangular system costs three digits of outputs and state. The switches are the process's own, so
they are only ever turned off around a call, and put back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def exact_products(function: Callable[P, R]) -> Callable[P, R]:
    """Runs the function with float32 products in full float32. Under torch.compile the process's switch holds."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with full_float32():
            return function(*args, **kwargs)

    return run


# Which library multiplies depends on the device; each has a switch of its own.
_SWITCHES = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_REDUCED = ("tf32", "bf16")


@contextmanager
def full_float32() -> Iterator[None]:
    """Float32 products are full float32 inside; the process's switches are put back."""
    before = [switch.fp32_precision for switch in _SWITCHES]
    if not any(precision in _REDUCED for precision in before):
        yield
        return
    older = _older_switch()
    try:
        if older is not None:
            torch.set_float32_matmul_precision("highest")
        for switch in _SWITCHES:
            if switch.fp32_precision in _REDUCED:
                switch.fp32_precision = "ieee"
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for switch, precision in zip(_SWITCHES, before, strict=True):
            _put_back(switch, precision)


def _older_switch() -> str | None:
    """What the older of torch's two interfaces says; None where the newer one was used, which it will not read."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _put_back(switch: Any, precision: str) -> None:
    """Lets the switch follow the general one again, as it may have; sets it only if that reads otherwise."""
    if switch.fp32_precision == precision:
        return
    switch.fp32_precision = "none"
    if switch.fp32_precision != precision:
        switch.fp32_precision = precision
