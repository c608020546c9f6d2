"""Random rows for the gated delta rule, and its recurrence along a tree, head by head and node by node."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Rows(NamedTuple):
    """q, k [B, T, H_k, K], v [B, T, H, V], gates [B, T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor

    def cast(self, dtype: torch.dtype) -> "Rows":
        return Rows(*(x.to(dtype) for x in self))

    def rows(self, which: slice | list[int]) -> "Rows":
        return Rows(*(x[:, which] for x in self))


def draw_rows(
    draw: torch.Generator,
    T: int,
    *,
    sizes: tuple[int, int, int, int] = (2, 4, 8, 6),
    decay: float = 0.9,
    alike: float = 0,
) -> tuple[Rows, Tensor]:
    """Rows of a batch of 2 and a state; decays scatter around `decay`; `alike` near 1 makes keys nearly equal."""
    H_k, H, K, V = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=draw, dtype=torch.float64)

    def unit(x: Tensor) -> Tensor:
        return cast(Tensor, x / x.norm(dim=-1, keepdim=True))

    k = unit((1 - alike) * normal(T, H_k, K) + alike * normal(1, H_k, K))
    spread = torch.rand(2, T, H, generator=draw, dtype=torch.float64) + 0.5
    log_decay = torch.log(torch.tensor(decay, dtype=torch.float64)) * spread
    beta = torch.rand(2, T, H, generator=draw, dtype=torch.float64)
    return Rows(unit(normal(T, H_k, K)), k, normal(T, H, V), log_decay, beta), normal(H, K, V)


def by_hand(rows: Rows, state: Tensor, parents: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Outputs [B, N, H, V] and the state after each node [B, N, H, K, V], head by head, node by node."""
    B, N, H, V = rows.v.shape
    H_k, K = rows.k.shape[2:]
    parents = list(range(-1, N - 1)) if parents is None else parents
    outputs, states = torch.zeros(B, N, H, V).to(rows.v), torch.zeros(B, N, H, K, V).to(rows.v)
    for i, parent in enumerate(parents):
        for h in range(H):
            k, q = rows.k[:, i, h * H_k // H], rows.q[:, i, h * H_k // H]
            S = (state if parent < 0 else states[:, parent])[:, h] * rows.log_decay[:, i, h].exp()[:, None, None]
            write = rows.beta[:, i, h, None] * (rows.v[:, i, h] - (S * k[:, :, None]).sum(1))
            states[:, i, h] = S + k[:, :, None] * write[:, None, :]
            outputs[:, i, h] = (states[:, i, h] * q[:, :, None]).sum(1) / K**0.5
    return outputs, states


def gates(rows: Rows) -> dict[str, Any]:
    """The keyword arguments that every form of the rule takes."""
    return {"log_decay": rows.log_decay, "beta": rows.beta}
