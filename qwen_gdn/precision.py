"""Keeps reduced-precision products out of the delta rule, whatever the process has switched on.

TF32 inside the triangular system costs three digits of outputs and state. The switch is the process's own, so it
is only ever turned off around a call, and put back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

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


@contextmanager
def full_float32() -> Iterator[None]:
    """Float32 products are full float32 inside; the process's switch is put back."""
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through the newer of torch's two interfaces, which the older one will not read
        before = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before is None:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision(before)
