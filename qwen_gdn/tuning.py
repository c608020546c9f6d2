"""How a compiler is to choose between forms of a kernel: by what they take inside a replayed graph.

The kernels of a decoding step take a few microseconds each, which is less than their launch. Timed one launch after
another, as the compiler does by itself, all forms look alike and the choice is left to chance.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

CALLS = 16  # calls that one graph holds
REPLAYS = 8  # of which the fastest counts


@contextmanager
def tuned_in_graphs() -> Iterator[None]:
    """While open, kernels that are tuned are timed inside graphs, on a stream that can be captured."""
    benchmarker = _benchmarker()
    if benchmarker is None:
        yield
        return
    before = benchmarker.benchmark_gpu

    def measured(call: Callable[[], object], **options: Any) -> float:
        try:
            return replayed(call)
        except (RuntimeError, torch.AcceleratorError):  # what cannot be captured is timed as before
            torch.cuda.synchronize()
            return float(before(call, **options))

    benchmarker.benchmark_gpu = measured
    try:
        yield
    finally:
        benchmarker.benchmark_gpu = before  # perhaps of another that is still open


def replayed(call: Callable[[], object]) -> float:
    """Milliseconds of one call out of many in a row."""
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()  # without what `torch.cuda.graph` does first: a collection of garbage for every form
    try:
        for _ in range(CALLS):
            call()
    finally:
        graph.capture_end()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return float(min(start.elapsed_time(end) for start, end in pairwise(marks))) / CALLS


def _benchmarker() -> Any:
    """The compiler's own, if this version of it has one in the usual place."""
    from torch._inductor.runtime import triton_heuristics

    found = getattr(triton_heuristics, "benchmarker", None)
    return found if hasattr(found, "benchmark_gpu") else None
