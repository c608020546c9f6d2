"""Functions over fixed addresses, recorded once as a CUDA graph and replayed; elsewhere they are simply called."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .precision import full_float32
from .transfer import pinned
from .tuning import tuned_in_graphs

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
    """Functions without arguments whose tensors never move; what they return is written over by the next call.

    Args:
        runs: each launches the same work on fixed addresses of its own. Running one that is called more than once
            must do no harm: it is run to warm up. All are recorded when the first is called.
        pool: memory to share with other recordings (`torch.cuda.graph_pool_handle`); a run may then overwrite what
            any of the others has returned.
    """

    def __init__(
        self,
        name: str,
        runs: Sequence[Callable[[], T]],
        device: torch.device,
        announce: Announce,
        *,
        pool: Any = None,
    ) -> None:
        self._name = name
        self._runs = runs
        self._device = device.type
        self._records = device.type == "cuda"
        self._announce = announce
        self._pool = pool
        self._graphs: list[tuple[torch.cuda.CUDAGraph, T]] = []
        self._ready = False

    def __call__(self, which: int = 0) -> T:
        if self._graphs:
            graph, result = self._graphs[which]
            graph.replay()
            return result
        with program_settings(self._device):
            if self._ready:
                return self._runs[which]()
            with self._announce(self._name):
                return self._first(which)

    def _first(self, which: int) -> T:
        """Compiles, and on CUDA records; nothing is half-recorded if it fails."""
        if self._records:
            self._graphs = self._record(self._runs[which])
        result = self(which) if self._graphs else self._runs[which]()
        self._ready = True
        return result

    def _record(self, run: Callable[[], T]) -> list[tuple[torch.cuda.CUDAGraph, T]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), tuned_in_graphs():
            run()  # compiles, tunes, and lets libraries set themselves up, none of which can be recorded
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graphs = []
        for one in self._runs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                graphs.append((graph, one()))
        return graphs


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for exactly the shapes it meets."""
    options: dict[str, Any] = {}
    if torch.cuda.is_available():
        # From Hopper on a kernel may start while the one before it ends, which hides most of a launch inside a graph.
        options = {"triton.enable_pdl": torch.cuda.get_device_capability() >= (9, 0)}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


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
