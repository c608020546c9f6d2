"""Uniform random numbers of a sampler: in the order of its draws, or each at its place in a text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen_gdn.transfer import indices

ROWS = 64  # that are drawn ahead at once; a stream must be cut alike always, or it is another one


class Uniform:
    """A stream of pairs of uniform numbers of its own. A pickled or deep copy goes on where the original stands."""

    def __init__(self, seed: int | None, device: torch.device | str | None) -> None:
        self.seed = seed
        self.generator = None if device is None else self._start(device)
        self._coming: Tensor | None = None  # pairs of places that are not passed yet, [M, 2], next place first

    def __call__(self, rows: int, device: torch.device) -> Tensor:
        """Float64 [rows, 2] in [0, 1) on `device`, wherever the generator lives; pairs drawn ahead are none of them."""
        return self._draw(rows, device).to(device)

    def ahead(self, depths: Sequence[int]) -> "Ahead":
        """The pairs of places so far ahead of the next one, which stay what they are until that is passed."""
        return Ahead(self, tuple(depths))

    def at(self, depths: Sequence[int], device: torch.device) -> Tensor:
        """Those pairs, float64 [len(depths), 2] on `device`."""
        coming = self._grown(max(depths) + 1, device)
        return coming[indices(depths, coming.device)].to(device)

    def pass_by(self, places: int) -> None:
        """So many places are behind."""
        if self._coming is not None:  # or nothing was drawn at them
            self._coming = self._grown(places, self._coming.device)[places:]

    def _grown(self, places: int, device: torch.device) -> Tensor:
        coming = self._draw(0, device) if self._coming is None else self._coming
        while len(coming) < places:
            coming = torch.cat((coming, self._draw(ROWS, device)))
        self._coming = coming
        return coming

    def _draw(self, rows: int, device: torch.device) -> Tensor:
        if self.generator is None:
            self.generator = self._start(device)
        generator = self.generator
        return torch.rand(rows, 2, dtype=torch.float64, generator=generator, device=generator.device)

    def _start(self, device: torch.device | str) -> torch.Generator:
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


class Ahead:
    """Pairs of coming places of a stream, one a row."""

    def __init__(self, stream: Uniform, depths: tuple[int, ...]) -> None:
        self.seed = stream.seed
        self._stream = stream
        self._depths = depths

    def __call__(self, rows: int, device: torch.device) -> Tensor:
        """As `Uniform`; ValueError unless there is a place for every row."""
        if rows != len(self._depths):
            raise ValueError(f"sampler: {rows} rows of logits for {len(self._depths)} places")
        return self._stream.at(self._depths, device)

    def ahead(self, depths: Sequence[int]) -> "Ahead":
        return self._stream.ahead(depths)

    def pass_by(self, places: int) -> None:
        self._stream.pass_by(places)


Numbers = Uniform | Ahead
