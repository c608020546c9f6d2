"""Linear maps of one input run as one product: a step of decoding is bound by reads and launches, not arithmetic."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ReadsOnce(nn.Module):
    """A module with linear maps that read the same input; `join` lays their weights side by side.

    The parameters stay, under their names, as views of the joined weight. Moving or replacing them undoes the join.
    """

    reads: tuple[str, ...]
    """Names of the `nn.Linear`s without bias that `read` applies, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._joined: Tensor | None = None

    def read(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., D] to each linear map's output."""
        linears = [getattr(self, name) for name in self.reads]
        joined = self._joined
        # A trace cannot compare addresses; who compiles has joined before and moves nothing after.
        if joined is None or torch.is_grad_enabled() or not (torch.compiler.is_compiling() or _tiles(joined, linears)):
            return tuple(linear(x) for linear in linears)
        parts: tuple[Tensor, ...] = F.linear(x, joined).split([linear.out_features for linear in linears], dim=-1)
        return parts

    @torch.no_grad()
    def join(self) -> None:
        """Copies the weights into one, one group at a time; costs no memory but during the copy."""
        linears = [getattr(self, name) for name in self.reads]
        if self._joined is not None and _tiles(self._joined, linears):
            return  # recorded programs may be reading it where it is
        joined = torch.cat([linear.weight for linear in linears])
        for linear, part in zip(linears, joined.split([linear.out_features for linear in linears]), strict=True):
            linear.weight.data = part
        self._joined = joined

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ReadsOnce":
        self._joined = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copied module is not joined."""
        return self.__dict__ | {"_joined": None}


def join_projections(module: nn.Module) -> None:
    """Joins every group of linear maps below `module` that reads one input."""
    for part in module.modules():
        if isinstance(part, ReadsOnce):
            part.join()


def _tiles(joined: Tensor, linears: Sequence[nn.Linear]) -> bool:
    """Whether the weights lie in the joined one, in order and whole."""
    address = joined.data_ptr()
    for linear in linears:
        if linear.weight.data_ptr() != address:
            return False
        address += linear.weight.nbytes
    return True
