"""Token files as tensors, and the order in which training sees them."""

from pathlib import Path

import torch
from torch import Tensor

from tools.training.command import UsageError


def read_tokens(folder: Path, split: str, device: torch.device) -> Tensor:
    """All ids of a split, int16 [tokens] (ids are below 2^15)."""
    files = sorted(folder.glob(f"{split}*.bin"))
    parts = [torch.from_file(str(f), size=f.stat().st_size // 2, dtype=torch.int16) for f in files if f.stat().st_size]
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int16, device=device)


def generator(device: torch.device, *seeds: int) -> torch.Generator:
    """A generator whose draws are a function of the seeds alone, in order."""
    seed = 0
    for part in seeds:
        seed = (seed * 1_000_003 + part + 1) % 2**62
    return torch.Generator(device).manual_seed(seed)


class Windows:
    """Windows of `length` + 1 ids (inputs, and the id after each) from a stream, in random order.

    Every epoch cuts the stream at a new offset into windows that overlap by one id and goes through them in a
    new order, so that between two visits of a token lies about an epoch. A batch is a function of the seed and
    the step alone, which is all that resuming needs.
    """

    def __init__(self, stream: Tensor, length: int, batch: int, seed: int) -> None:
        """Raises UsageError if the stream has no `batch` windows at every offset."""
        self._per_epoch = (len(stream) - length) // length // batch
        if self._per_epoch < 1:
            raise UsageError(f"{len(stream)} tokens make no batch of {batch} windows of {length}; add text")
        self._stream = stream
        self._length = length
        self._batch = batch
        self._seed = seed
        self._epoch = -1
        self._starts: Tensor

    def batch(self, step: int) -> Tensor:
        """int64 [batch, length + 1]."""
        epoch, within = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._order(epoch)
        starts = self._starts[within * self._batch : (within + 1) * self._batch]
        return take(self._stream, starts, self._length + 1)

    def _order(self, epoch: int) -> Tensor:
        device = self._stream.device
        draws = generator(device, self._seed, epoch)
        count = (len(self._stream) - self._length) // self._length
        shift = torch.randint(self._length, (), generator=draws, device=device)
        order = torch.randperm(count, generator=draws, device=device)
        return shift + order * self._length


def take(stream: Tensor, starts: Tensor, count: int) -> Tensor:
    """int64 [len(starts), count]: the ids from each start on."""
    return stream[starts[:, None] + torch.arange(count, device=stream.device)].long()
