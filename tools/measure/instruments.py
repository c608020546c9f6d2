"""What figures are taken with: clocks, counts of waits and kernels, peak memory, and models of random weights."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from qwen_gdn import QwenGDN
from qwen_gdn.block_products import E4M3
from tools.measure.eight_bits import draw_eight_bits, put_in_eight_bits

PROFILED = 3  # calls whose kernels are listed


class Clock:
    """Milliseconds of calls on a device, each a median over `repeats` calls after two that do not count."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def each(self, call: Callable[[], object]) -> float:
        for _ in range(2):
            call()
        if self.device.type != "cuda":
            return median(self.once(call) for _ in range(self.repeats))
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        torch.cuda.synchronize(self.device)
        for start, end in marks:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return median(start.elapsed_time(end) for start, end in marks)

    def host(self, call: Callable[[], object]) -> float:
        """By the host's clock, the device idle before and after."""
        call()
        return median(self.once(call) for _ in range(self.repeats))

    def once(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def read_bandwidth(clock: Clock) -> float:
    """Bytes a second that a sum over 4 GiB (on a CPU, 256 MiB) reads."""
    count = 2**30 if clock.device.type == "cuda" else 2**26
    data = torch.ones(count, device=clock.device)
    return 1e3 * data.nbytes / clock.each(lambda: data.sum())


def kernels(call: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels of a call by name, those that take most of it first: launches and microseconds a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return [
        {"kernel": r.key[:90], "launches": r.count / PROFILED, "microseconds": r.device_time_total / PROFILED}
        for r in rows
    ]


@contextmanager
def synchronisations(device: torch.device) -> Iterator[list[Any]]:
    """Collects one entry for each time that the host waits for the device."""
    seen: list[Any] = []
    if device.type != "cuda":
        yield seen
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
    seen += [one for one in caught if "called a synchronizing" in str(one.message)]


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Makes what tells the most bytes reserved meanwhile, all that recorded graphs keep for themselves among them."""
    if device.type != "cuda":
        yield lambda: 0
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_reserved(device)


def random_weights(kind: Any, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A module with matrices of spread 0.02, neutral norms and moderate decays, made on the device.

    Where a target's config says that linear maps are stored in eight bits, they are so here.
    """
    with torch.device("meta"):
        model = kind(config).to(dtype)
        put_in_eight_bits(model)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 2)
            elif parameter.dim() == 1:
                parameter.zero_() if kind is QwenGDN and not name.endswith(
                    "linear_attn.norm.weight"
                ) else parameter.fill_(1)
            elif parameter.dtype != E4M3:
                parameter.normal_(0, 0.3 if name.endswith("conv1d.weight") else 0.02)
    draw_eight_bits(model)
    return model.eval().requires_grad_(False)
