"""SwiGLU feed-forward (arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), [..., hidden] in and out."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
