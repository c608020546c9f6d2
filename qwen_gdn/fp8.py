"""Linear maps whose weights stay in eight bits: E4M3 numbers in blocks that share a scale.

The activations are put into the same form at every call, each row by itself and in pieces as wide as a block, with the
scale at which the greatest number of a piece is the greatest of the type (arXiv 2412.19437, section 3.3). Products of
the two are summed in float32 (`block_products`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block_products import (
    E4M3,
    GRAIN,
    BlockRows,
    BlockWeight,
    block_products,
    has_whole_blocks,
    is_summed,
    laid_out,
)
from .norms import at_least_float32

GREATEST = torch.finfo(E4M3).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class FP8Linear(nn.Module):
    """A linear map without bias, [..., D] to [..., F], in the dtype of its input; names are the checkpoint's.

    weight: float8_e4m3fn [F, D].
    weight_scale_inv: float32 [F / block[0], D / block[1]]; W = weight · scale. Blocks must be whole.

    Neither takes part in `.to(dtype)`: the type of its numbers says nothing of the activations' type, and another one
    would not hold them. It has no gradient: where one is asked for, it raises RuntimeError.
    """

    def __init__(self, in_features: int, out_features: int, block: tuple[int, int]) -> None:
        super().__init__()
        self.in_features, self.out_features, self.block = in_features, out_features, block
        if not has_whole_blocks((out_features, in_features), block):
            raise ValueError(
                f"a weight of {out_features} rows and {in_features} columns is not made of whole blocks of {block[0]} "
                f"by {block[1]}; use an nn.Linear of the expanded weight"
            )
        scales = (out_features // block[0], in_features // block[1])
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=E4M3), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.empty(scales, dtype=torch.float32), requires_grad=False)
        self._laid: Tensor | None = None
        self.register_load_state_dict_post_hook(_lay_out_again)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., F]; no row depends on another."""
        return self.beside(x)[0]

    def beside(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """x [..., D] by this map and by other weights [G, D], of its dtype; programs run all at the same time."""
        self._check(x)
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        padded = rows
        if rows.is_cuda and count % GRAIN and not is_summed(count):
            padded = F.pad(rows, (0, 0, 0, -count % GRAIN))
        weight = BlockWeight(self.weight, self.weight_scale_inv, self.block, self._laid)
        products = block_products(quantised(padded, self.block[1]), weight, rows, others)
        return tuple(out[:count].view(*x.shape[:-1], out.shape[1]) for out in products)

    @torch.no_grad()
    def lay_out(self) -> None:
        """Has scales ready for products in parts, which programs need; those that have changed, where they were."""
        with torch.inference_mode(False):  # what is made in that mode could not be written outside it
            laid = laid_out(self.weight_scale_inv, self.block)
            if self._laid is None or laid is None:
                self._laid = laid
            else:
                self._laid.copy_(laid)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, block={self.block}"

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.in_features or not x.is_floating_point():
            raise ValueError(
                f"a map of {self.in_features} floating-point columns was given {x.dtype} of shape {list(x.shape)}"
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                "a weight in eight bits has no gradient, but its input asks for one; expand the weights "
                '(load_target(..., eight_bits="expand")) to train, or run under torch.no_grad()'
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FP8Linear":
        def moved(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)

        before = self.weight_scale_inv.data_ptr()
        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        if self.weight_scale_inv.data_ptr() != before:
            self._laid = None
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        check_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _lay_out_again(linear: FP8Linear, keys: object) -> None:
    """Programs read the scales of parts where they were laid out."""
    if linear._laid is not None:
        linear.lay_out()


def check_state(module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *_: object) -> None:
    """Refuses a state that would cast numbers in eight bits or part them from their scales; a load's pre-hook.

    Raises:
        ValueError: the tensor and both types are named, or what is missing. Nothing has been read.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given = state_dict.get(prefix + name)
        if given is not None and (given.dtype == E4M3) != (parameter.dtype == E4M3):
            raise ValueError(
                f"{prefix}{name} is {given.dtype} and would be cast to {parameter.dtype}; give numbers and scales to a "
                "map in eight bits, and expanded weights to any other"
            )
    for name, part in module.named_modules():
        if isinstance(part, FP8Linear):
            names = [f"{prefix}{name}{'.' if name else ''}{kind}" for kind in ("weight", "weight_scale_inv")]
            found = [name for name in names if name in state_dict]
            if len(found) == 1:
                raise ValueError(f"{found[0]} is given without {(set(names) - set(found)).pop()}; give both or neither")


def keep_in_eight_bits(module: nn.Module, names: Iterable[str], block: tuple[int, int]) -> None:
    """Puts an empty `FP8Linear` in the place of each named linear map without bias, on the device where that is.

    Raises:
        ValueError: one of them is no such map, or is not made of whole blocks. Nothing is changed.
    """
    made: dict[str, FP8Linear] = {}
    for name in names:
        linear = module.get_submodule(name)
        if not isinstance(linear, nn.Linear) or linear.bias is not None:
            raise ValueError(f"{name} is no linear map without bias, but {linear}; leave it out")
        with linear.weight.device:
            made[name] = FP8Linear(linear.in_features, linear.out_features, block)
    for name, linear in made.items():
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, linear)


def is_in_eight_bits(model: object) -> bool:
    """Whether some linear map is, of a module or of the model that an engine runs."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    return isinstance(module, nn.Module) and any(isinstance(part, FP8Linear) for part in module.modules())


def quantised(rows: Tensor, width: int) -> BlockRows:
    """Rows [N, D] in eight bits, in pieces of that width. What is not finite makes its piece so."""
    pieces = at_least_float32(rows).unflatten(1, (-1, width))
    scales = (pieces.abs().amax(dim=2).float() / GREATEST).clamp_min(_LEAST_SCALE)
    return BlockRows((pieces / scales[..., None]).clamp(-GREATEST, GREATEST).to(E4M3), scales)
