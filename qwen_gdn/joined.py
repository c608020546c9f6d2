"""Linear maps of one input run as one product: a step of decoding is bound by reads and launches, not arithmetic."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fp8 import FP8Linear, block_linear
from .products import LinearMap, choose_forms, product

Linear = nn.Linear | FP8Linear


class Joint(NamedTuple):
    """The weights of some linear maps in one, [sum of widths, D]; in eight bits with scales and the size of a block."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    weight: Tensor
    scales: Tensor | None
    block: tuple[int, int] | None

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., D] to each linear map's output."""
        if self.scales is None or self.block is None:
            joint = product(x, self.weight)
        else:
            joint = block_linear(x, self.weight, self.scales, self.block)
        parts: tuple[Tensor, ...] = joint.split(self.widths, dim=-1)
        return parts


class ReadsOnce(nn.Module):
    """A module with linear maps that read the same input; `join` lays their weights side by side, those of one type.

    The parameters stay, under their names, as views of the joined weights. Moving or replacing them undoes the join.
    """

    reads: tuple[str, ...]
    """Names of the linear maps without bias that `read` applies, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._joined: tuple[Joint, ...] | None = None

    def read(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., D] to each linear map's output."""
        joined = self._joined
        # A trace cannot compare addresses; who compiles has joined before and moves nothing after.
        if joined is None or torch.is_grad_enabled() or not (torch.compiler.is_compiling() or self._is_joined()):
            return tuple(getattr(self, name)(x) for name in self.reads)
        found = {name: part for joint in joined for name, part in zip(joint.names, joint.parts(x), strict=True)}
        return tuple(found[name] for name in self.reads)

    @property
    def joints(self) -> tuple[Joint, ...]:
        """The joined weights; none before `join`."""
        return self._joined or ()

    @torch.no_grad()
    def join(self) -> None:
        """Copies the weights into one of each type, one group at a time; costs no memory but during the copy."""
        if self._is_joined():
            return  # recorded programs may be reading them where they are
        alike: dict[Any, dict[str, Linear]] = {}
        for name in self.reads:
            linear = getattr(self, name)
            alike.setdefault(linear.block if isinstance(linear, FP8Linear) else None, {})[name] = linear
        self._joined = tuple(_joint(linears, block) for block, linears in alike.items())

    def _is_joined(self) -> bool:
        """Whether the weights lie in the joined ones, in order and whole."""
        return self._joined is not None and all(
            _tiles(whole, [getattr(getattr(self, name), kind) for name in joint.names])
            for joint in self._joined
            for kind, whole in (("weight", joint.weight), ("weight_scale_inv", joint.scales))
            if whole is not None
        )

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


def choose_products(module: nn.Module, device: torch.device, rows: int) -> None:
    """Has the forms of all large products below `module` compared for so many rows, as `choose_forms` does it."""
    if device.type == "cuda":
        choose_forms(_large_weights(module), rows)


def _large_weights(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        if isinstance(part, LinearMap):
            yield part.weight
        elif isinstance(part, ReadsOnce):
            yield from (joint.weight for joint in part.joints if joint.scales is None)


def _joint(linears: dict[str, Linear], block: tuple[int, int] | None) -> Joint:
    weight = _laid_in_one([linear.weight for linear in linears.values()])
    scales = None if block is None else _laid_in_one([linear.weight_scale_inv for linear in linears.values()])
    return Joint(tuple(linears), tuple(linear.out_features for linear in linears.values()), weight, scales, block)


def _laid_in_one(parameters: list[Any]) -> Tensor:
    """The parameters' rows one after another; they become views of them."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return whole


def _tiles(whole: Tensor, parts: list[Tensor]) -> bool:
    """Whether the parts lie in the whole, in order and without gaps."""
    address = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != address:
            return False
        address += part.nbytes
    return True
