"""Functions over fixed addresses, recorded once as a CUDA graph and replayed; elsewhere they are simply called."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from .precision import full_float32
from .tuning import tuned_in_graphs

T = TypeVar("T")

Announce = Callable[[str], AbstractContextManager[object]]
"""Makes the context in which a program of that name is compiled and recorded, which takes seconds to minutes."""

Pool = Any
"""Memory that recordings share, `torch.cuda.graph_pool_handle`, or None without recordings."""


def new_pool(device: torch.device) -> Pool:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


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
        pool: memory to share with other recordings; a run may then overwrite what any of the others has returned.
    """

    def __init__(
        self,
        name: str,
        runs: Sequence[Callable[[], T]],
        device: torch.device,
        announce: Announce,
        *,
        pool: Pool = None,
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
        # One stream for all: libraries keep a workspace for every stream that they were called on.
        stream = _stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), tuned_in_graphs():
            run()  # compiles, tunes, and lets libraries set themselves up, none of which can be recorded
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graphs = []
        for one in self._runs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                graphs.append((graph, one()))
        return graphs


class _Place:
    """An address that tensors can be made of without owning it."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def lent(tensor: Tensor) -> Tensor:
    """The tensor or, in a recording, one of the same place that does not hold it.

    Other recordings of the same pool may then use the place too. The tensor itself must live until nothing more is
    recorded that could be put there before it is read.
    """
    if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return tensor
    storage = tensor.untyped_storage()
    place = torch.as_tensor(_Place(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alike.set_(place.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Where the programs of a device are prepared."""
    return torch.cuda.Stream(device)


@cache
def compiled(function: Callable[..., Any], *, searched: bool = False) -> Callable[..., Any]:
    """The function, compiled for exactly the shapes it meets.

    Args:
        searched: on CUDA, sizes of kernels' tiles are also tried beside the few that the compiler tries by itself,
            which takes about two seconds for each kernel.
    """
    options: dict[str, Any] = {}
    if torch.cuda.is_available():
        options["coordinate_descent_tuning"] = searched
        # From Hopper on a kernel may start while the one before it ends, which hides most of a launch inside a graph.
        options["triton.enable_pdl"] = torch.cuda.get_device_capability() >= (9, 0)
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def applied(module: nn.Module, x: Tensor) -> Tensor:
    """The module's output; a function, so that it can be compiled."""
    out: Tensor = module(x)
    return out


class Inputs:
    """What a program reads of the host, at one fixed address: one transfer fills all of it, without a wait.

    Everything is laid out by numpy, for which such small parts take a tenth of the time that torch takes.

    parts: on the device, shaped like the padding.

    Args:
        padding: CPU tensors of what the parts hold beyond what is sent, int64 ones before bool ones.
    """

    def __init__(self, padding: Sequence[Tensor], device: torch.device) -> None:
        empty = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in padding])
        self._empty = empty.numpy()
        self._flat = empty.to(device, copy=True)
        bounds = pairwise(accumulate((part.nbytes for part in padding), initial=0))
        self._places = [(*bound, part.numpy().dtype, part.shape) for bound, part in zip(bounds, padding, strict=True)]
        flat = zip(self._flat.split([part.nbytes for part in padding]), padding, strict=True)
        self.parts = [own.view(part.dtype).view(part.shape) for own, part in flat]

    def fill(self, *values: Tensor | int | Sequence[int]) -> None:
        """Sends a value for each part: one number for all of it, or what may be smaller in any dimension."""
        staged = torch.empty(len(self._empty), dtype=torch.uint8, pin_memory=self._flat.is_cuda)
        flat = staged.numpy()
        flat[:] = self._empty
        for (start, end, dtype, shape), value in zip(self._places, values, strict=True):
            given = np.asarray(value)
            part = flat[start:end].view(dtype).reshape(shape)
            part[tuple(map(slice, given.shape))] = given
        self._flat.copy_(staged, non_blocking=True)


def unannounced(name: str) -> AbstractContextManager[Any]:
    return nullcontext()
