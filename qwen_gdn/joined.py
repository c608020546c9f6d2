"""Linear maps of one input run as one product: a step of decoding is bound by reads and launches, not arithmetic."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fp8 import FP8Linear
from .products import LinearMap, choose_forms

Linear = nn.Linear | FP8Linear


class Joint(NamedTuple):
    """Some linear maps and one whose weight [sum of widths, D] is theirs in order, whose rows they are views of."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    linear: LinearMap | FP8Linear


class ReadsOnce(nn.Module):
    """A module with linear maps that read the same input; `join` lays their weights side by side, those of one type.

    The parameters stay, under their names, as views of the joined weights. Moving or replacing them undoes the join.
    """

    reads: tuple[str, ...]
    """Names of the linear maps without bias that `read` applies, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._joined: tuple[Joint, ...] | None = None
        self.register_load_state_dict_post_hook(_lay_out_again)  # type: ignore[no-untyped-call]

    def read(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., D] to each linear map's output."""
        joined = self._joined
        # A trace cannot compare addresses; who compiles has joined before and moves nothing after.
        if joined is None or torch.is_grad_enabled() or not (torch.compiler.is_compiling() or self._is_joined()):
            return tuple(getattr(self, name)(x) for name in self.reads)
        found: dict[str, Tensor] = {}
        for joint, whole in zip(joined, _products(x, [joint.linear for joint in joined]), strict=True):
            found.update(zip(joint.names, whole.split(joint.widths, dim=-1), strict=True))
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
        joints = (_joint(linears, block) for block, linears in alike.items())
        self._joined = tuple(sorted(joints, key=lambda joint: isinstance(joint.linear, LinearMap)))

    def _is_joined(self) -> bool:
        """Whether the weights lie in the joined ones, in order and whole."""
        return self._joined is not None and all(
            _tiles(whole, [getattr(getattr(self, name), kind) for name in joint.names])
            for joint in self._joined
            for kind, whole in joint.linear.named_parameters()
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ReadsOnce":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self._is_joined():
            self._joined = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copied module is not joined."""
        return self.__dict__ | {"_joined": None}


def _lay_out_again(module: ReadsOnce, keys: object) -> None:
    """The joined maps of a module are none of its submodules, which do so by themselves."""
    for joint in module.joints:
        if isinstance(joint.linear, FP8Linear):
            joint.linear.lay_out()


def join_projections(module: nn.Module) -> None:
    """Joins every group of linear maps below `module` that reads one input, and readies those in eight bits."""
    for part in module.modules():
        if isinstance(part, ReadsOnce):
            part.join()
    for linear in _applied(module):
        if isinstance(linear, FP8Linear):
            linear.lay_out()


def choose_products(module: nn.Module, device: torch.device, rows: int) -> None:
    """Has the forms of all large products below `module` compared for so many rows, as `choose_forms` does it."""
    if device.type == "cuda":
        choose_forms((linear.weight for linear in _applied(module) if isinstance(linear, LinearMap)), rows)


def _applied(module: nn.Module) -> Iterator[LinearMap | FP8Linear]:
    """The linear maps that programs apply, joined ones in place of those that they join."""
    members: set[nn.Module] = set()
    for part in module.modules():  # a group comes before its members
        if isinstance(part, ReadsOnce):
            members.update(getattr(part, name) for joint in part.joints for name in joint.names)
            yield from (joint.linear for joint in part.joints)
        elif isinstance(part, LinearMap | FP8Linear) and part not in members:
            yield part


def _products(x: Tensor, linears: Sequence[LinearMap | FP8Linear]) -> Sequence[Tensor]:
    """x by each of the maps, those in eight bits first."""
    first, *rest = linears
    if not isinstance(first, FP8Linear):
        return [linear(x) for linear in linears]
    own, *beside = first.beside(x, *(linear.weight for linear in rest if isinstance(linear, LinearMap)))
    return [own, *(linear(x) for linear in rest if isinstance(linear, FP8Linear)), *beside]


def _joint(linears: dict[str, Linear], block: tuple[int, int] | None) -> Joint:
    widths = tuple(linear.out_features for linear in linears.values())
    inputs = next(iter(linears.values())).in_features
    with torch.device("meta"):
        whole = LinearMap(inputs, sum(widths)) if block is None else FP8Linear(inputs, sum(widths), block)
    for kind, _ in list(whole.named_parameters()):
        laid = _laid_in_one([getattr(linear, kind) for linear in linears.values()])
        setattr(whole, kind, nn.Parameter(laid, requires_grad=False))
    return Joint(tuple(linears), widths, whole)


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
