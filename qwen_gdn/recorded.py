"""Functions over fixed addresses, recorded once as a CUDA graph and replayed; elsewhere they are simply called."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .precision import full_float32
from .transfer import pinned

T = TypeVar("T")

Announce = Callable[[str], AbstractContextManager[object]]
"""Makes the context in which a program of that name is compiled and recorded, which takes seconds to minutes."""


@contextmanager
def program_settings(device: str) -> Iterator[None]:
    """The same modes for every run, whatever the caller's: those of a cached forward of the model.

    One compiled function serves every size and kind of layer, each with code of its own, hence the limits.
    """
    limits = torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device, enabled=False),
        full_float32(),
        limits,
    ):
        yield


class Recorded(Generic[T]):
    """A function without arguments whose tensors never move; what it returns is written over by the next call.

    Args:
        run: launches work on fixed addresses. Running it more than once must do no harm: it is run to warm up.
        record: whether it is worth a graph; if not, it is called each time, and what it returns is the caller's.
    """

    def __init__(
        self, name: str, run: Callable[[], T], device: torch.device, announce: Announce, *, record: bool = True
    ) -> None:
        self._name = name
        self._run = run
        self._device = device.type
        self._records = record and device.type == "cuda"
        self._announce = announce
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T
        self._ready = False

    def __call__(self) -> T:
        if self._graph is not None:
            self._graph.replay()
            return self._result
        with program_settings(self._device):
            if self._ready:
                return self._run()
            with self._announce(self._name):
                return self._first()

    def _first(self) -> T:
        """Compiles, and on CUDA records; nothing is half-recorded if it fails."""
        if self._records:
            self._record()
        result = self._run() if self._graph is None else self()
        self._ready = True
        return result

    def _record(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()  # compiles, tunes, and lets libraries set themselves up, none of which can be recorded
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._run()
        self._result, self._graph = result, graph


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for exactly the shapes it meets."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def applied(module: nn.Module, x: Tensor) -> Tensor:
    """The module's output; a function, so that it can be compiled."""
    out: Tensor = module(x)
    return out


class Inputs:
    """Small integers that a program reads, at one fixed address: one transfer fills all of them, without a wait.

    Args:
        counts: numbers in each part.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self._flat = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        self.parts: tuple[Tensor, ...] = self._flat.split(list(counts))

    def fill(self, parts: Sequence[Tensor]) -> None:
        """Sends the parts, int64 on the CPU, in order."""
        flat = torch.cat(list(parts))
        send(flat, self._flat)


def send(source: Tensor, target: Tensor) -> None:
    """Copies a CPU tensor to a fixed address; the host does not wait."""
    target.copy_(pinned(source, target.device), non_blocking=True)


def unannounced(name: str) -> AbstractContextManager[Any]:
    return nullcontext()
