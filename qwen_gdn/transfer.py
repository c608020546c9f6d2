"""Small tensors from the host to the device without making the host wait for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pinned(source: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor in memory that a transfer to `device` can read on its own."""
    return source.pin_memory() if device.type == "cuda" else source


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 on the device; the host does not wait for it."""
    return pinned(torch.tensor(values, dtype=torch.int64), device).to(device, non_blocking=True)


def together(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """CPU vectors to the device in one transfer, as float64, which holds every token id; the host does not wait."""
    packed = pinned(torch.cat([part.double() for part in parts]), device).to(device, non_blocking=True)
    sent: tuple[Tensor, ...] = packed.split([len(part) for part in parts])
    return sent
