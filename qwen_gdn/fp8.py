"""Linear maps whose weights stay in eight bits: E4M3 numbers in blocks that share a scale.

The activations are put into the same form at every call, each row by itself and in pieces as wide as a block, with the
scale at which the greatest number of a piece is the greatest of the type (arXiv 2412.19437, section 3.3). Products of
the two are summed in float32 (`block_products`).
"""

from collections.abc import Callable, Iterable
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
    would not hold them. It has no gradient.
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

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., F]; no row depends on another."""
        return self.beside(x)[0]

    def beside(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """x [..., D] by this map and by other weights [G, D], of its dtype; programs run all at the same time."""
        rows = x.flatten(0, -2)
        count = rows.shape[0]
        padded = rows
        if rows.is_cuda and count % GRAIN and not is_summed(count):
            padded = F.pad(rows, (0, 0, 0, -count % GRAIN))
        weight = BlockWeight(self.weight, self.weight_scale_inv, self.block, self._laid)
        products = block_products(quantised(padded, self.block[1]), weight, rows, others)
        return tuple(out[:count].view(*x.shape[:-1], -1) for out in products)

    @torch.no_grad()
    def lay_out(self) -> None:
        """Has scales ready for products in parts, which programs need; those that have changed, where they were."""
        laid = laid_out(self.weight_scale_inv, self.block)
        if self._laid is None or laid is None:
            self._laid = laid
        else:
            self._laid.copy_(laid)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, block={self.block}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FP8Linear":
        def moved(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)

        self._laid = None
        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.dtype != E4M3:
            raise ValueError(
                f"{prefix}weight is {given.dtype} and would be cast to {E4M3}; give numbers with their scales"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def keep_in_eight_bits(module: nn.Module, names: Iterable[str], block: tuple[int, int]) -> None:
    """Puts an empty `FP8Linear` in the place of each named linear map without bias, on the device where that is."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear) and linear.bias is None, name
        with linear.weight.device:
            setattr(module.get_submodule(parent), leaf, FP8Linear(linear.in_features, linear.out_features, block))


def is_in_eight_bits(module: nn.Module) -> bool:
    """Whether some linear map of the module is."""
    return any(isinstance(part, FP8Linear) for part in module.modules())


def quantised(rows: Tensor, width: int) -> BlockRows:
    """Rows [N, D] in eight bits, in pieces of that width. What is not finite makes its piece so."""
    pieces = at_least_float32(rows).unflatten(1, (-1, width))
    scales = (pieces.abs().amax(dim=2).float() / GREATEST).clamp_min(_LEAST_SCALE)
    return BlockRows((pieces / scales[..., None]).clamp(-GREATEST, GREATEST).to(E4M3), scales)
