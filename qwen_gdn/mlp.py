"""SwiGLU feed-forward (arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from .joined import ReadsOnce
from .products import LinearMap


class MLP(ReadsOnce):
    """down(silu(gate(x)) · up(x)), [..., hidden] in and out."""

    reads = ("gate_proj", "up_proj")

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = LinearMap(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.read(x)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out
