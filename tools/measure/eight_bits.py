"""Models with random weights in eight bits, made without ever holding them in more."""

import torch
from torch import nn

from qwen_gdn import QwenGDN
from qwen_gdn.block_products import has_whole_blocks
from qwen_gdn.fp8 import GREATEST, FP8Linear, keep_in_eight_bits
from qwen_gdn.quantised import PROJECTIONS
from weights.names import target_parameter

_STRIPE = 1024  # rows of a weight that are drawn at once
_SPREAD = 100.0  # of the numbers; their greatest is 448
_SCALES = (1e-4, 3e-4)  # so that a weight's spread is about 0.02


def put_in_eight_bits(model: nn.Module) -> None:
    """Makes those linear maps `FP8Linear`s, still empty, that a model's config says are stored so.

    Experts and what is not made of whole blocks stay, as a loader expands them.
    """
    form = model.config.quantization if isinstance(model, QwenGDN) else None
    if form is None:
        return
    excluded = {target_parameter(f"{name}.weight") for name in form.excluded}
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    whole = [name for name, linear in linears.items() if has_whole_blocks(tuple(linear.weight.shape), form.block)]
    names = [n for n in whole if n.rpartition(".")[2] in PROJECTIONS and f"{n}.weight" not in excluded]
    keep_in_eight_bits(model, names, form.block)


@torch.no_grad()
def draw_eight_bits(model: nn.Module) -> None:
    """Fills the model's `FP8Linear`s with random numbers and scales."""
    for part in model.modules():
        if isinstance(part, FP8Linear):
            for rows in part.weight.split(_STRIPE):
                drawn = torch.randn(rows.shape, device=rows.device) * _SPREAD
                rows.copy_(drawn.clamp_(-GREATEST, GREATEST))
            part.weight_scale_inv.uniform_(*_SCALES)
