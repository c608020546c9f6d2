"""The gated delta rule over tokens, chunks and trees: pure functions, no module, no cache.

Per value head, with log-decay g <= 0, write strength β, l2-normalised k and q (q scaled by K^-1/2 here) and
parent p(i), the recurrence is (Gated Delta Networks, arXiv 2412.06464, equation 10)

    S_i = e^{g_i} S_p(i) + k_i u_i^T,   u_i = β_i (v_i − e^{g_i} S_p(i)^T k_i),   o_i = S_i^T q_i.

With G_i the sum of g along root..i and S_0 the state at the root's parent, all nodes follow at once:

    (I + X) U = diag(β)(V − diag(e^G) K S_0)     X_ij = β_i e^{G_i−G_j} k_i·k_j   for strict ancestors j of i
    O = diag(e^G) Q S_0 + Y U                     Y_ij = e^{G_i−G_j} q_i·k_j       for ancestors-or-self j

so a chain is the tree whose mask is full lower-triangular, and one token is N = 1. Nothing else per node is
needed to reach the state of any node later: S_a = e^{G_a} S_0 + Σ_j e^{G_a−G_j} k_j u_j^T over its path.

G_i − G_j is a difference of two sums, which cancels under strong decay: it is taken in float64, where that leaves
1e-10, and masked to −inf before exp.

Shapes: q, k [B, T, H_k, K]; v [B, T, H, V]; log_decay, beta [B, T, H]; state [B, H, K, V]; value head h pairs
with key head h // (H / H_k). All arithmetic is float32, or float64 if v is. `state=None` means zeros.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .norms import at_least_float32
from .precision import exact_products
from .topology import Path, Topology


class Factors(NamedTuple):
    """What is kept of each node: its state is a sum of these along its path.

    k [B, N, H_k, K] (per key head), u [B, N, H, V] (what the node wrote), log_decay [B, N, H] (its own g).
    """

    k: Tensor
    u: Tensor
    log_decay: Tensor

    def take(self, nodes: Tensor | slice) -> "Factors":
        """Factors of some nodes, in the order given."""
        return Factors(self.k[:, nodes], self.u[:, nodes], self.log_decay[:, nodes])


def delta_recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: slow, and the oracle of everything else in this file.

    Returns:
        outputs [B, T, H, V] and the final state [B, H, K, V].
    """
    q, k, v, log_decay, beta = map(at_least_float32, (q, k, v, log_decay, beta))
    group = v.shape[2] // k.shape[2]
    q = q.repeat_interleave(group, dim=2) * q.shape[-1] ** -0.5
    k = k.repeat_interleave(group, dim=2)
    S = _zeros(k, v) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        S = S * log_decay[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        u = (v[:, t] - read) * beta[:, t, :, None]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1), S


def delta_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """`delta_recurrent` chunk by chunk, the state carried across chunks (and, by the caller, across calls)."""
    outputs, final, _ = delta_chain(q, k, v, log_decay=log_decay, beta=beta, state=state, chunk_size=chunk_size)
    return outputs, final


@exact_products
def delta_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Factors]:
    """`delta_chunked` that also returns the factors of every token, from which any state between follows."""
    q, k, v, log_decay, beta = map(at_least_float32, (q, k, v, log_decay, beta))
    T = v.shape[1]
    if T < 1 or chunk_size < 1:
        raise ValueError(f"delta rule: needs at least one token and chunks of at least one, got {T} and {chunk_size}")
    S = _by_key_head(_zeros(k, v) if state is None else state, k.shape[2])
    if T == 1:
        out, S, u = _one_token(q, k, v, log_decay, beta, S)
        return out, S.flatten(1, 2), Factors(k, u, log_decay)
    C = min(chunk_size, T)
    # Padding is inert: with k, β and g zero a row neither writes, nor decays, nor is read by another.
    parts = (_chunks(x, C) for x in (q, k, v, log_decay, beta))
    window = _Window.build(torch.ones(C, C, dtype=torch.bool, device=v.device).tril(), *parts)
    # (I + X)^-1 applied to both terms of the right-hand side, so that only products depend on the state.
    V_rows, K_rows = window.solve_parts()
    starts = _chunk_starts(S, window, V_rows, K_rows)
    u = V_rows - K_rows @ starts
    outputs = window.decay * (window.q @ starts) + window.y @ u
    S = _absorb(starts[:, -1], window.k[:, -1], u[:, -1], window.log_decay[:, -1])
    out, writes = (_token_first(x)[:, :T] for x in (outputs, u))
    return out, S.flatten(1, 2), Factors(k, writes, log_decay)


def _chunk_starts(S: Tensor, window: "_Window", V_rows: Tensor, K_rows: Tensor) -> Tensor:
    """The state before each chunk, [B, C, H_k, R, K, V], from the one before the first.

    What a chunk does to the state is affine in it, S' = (e^G I − Wᵀ K_rows) S + Wᵀ V_rows with W the keys decayed to
    the chunk's end. All chunks' parts come at once, so that one small product a chunk is all that waits for another.
    """
    W = _decayed_to_end(window.k, window.log_decay).transpose(-1, -2)[:, :-1]
    kept = window.log_decay.sum(-1).exp()[:, :-1, ..., None, None]
    eye = torch.eye(W.shape[-2], dtype=S.dtype, device=S.device)
    turn, added = kept * eye - W @ K_rows[:, :-1], W @ V_rows[:, :-1]
    starts = [S]
    for c in range(turn.shape[1]):
        starts.append(added[:, c] + turn[:, c] @ starts[-1])
    return torch.stack(starts, dim=1)


def delta_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    topology: Topology,
) -> tuple[Tensor, Factors]:
    """All nodes of a tree at once, from the one state at the root's parent, which is only read.

    Returns:
        outputs [B, N, H, V] and the factors that `delta_commit` needs.
    """
    return delta_window(q, k, v, log_decay=log_decay, beta=beta, state=state, ancestors=topology.ancestors.to(v.device))


@exact_products
def delta_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    ancestors: Tensor,
) -> tuple[Tensor, Factors]:
    """`delta_tree` for a tree given by its ancestor-or-self mask, bool [N, N] on the tensors' device."""
    q, k, v, log_decay, beta = map(at_least_float32, (q, k, v, log_decay, beta))
    S = _by_key_head(_zeros(k, v) if state is None else state, k.shape[2])
    window = _Window.build(ancestors, *(x[:, None] for x in (q, k, v, log_decay, beta))).squeeze()
    from_state = torch.cat((window.q, window.k), dim=-2) @ S
    q_read, k_read = from_state.chunk(2, dim=-2)
    u = window.solve(window.beta * (window.v - window.decay * k_read))
    out = window.decay * q_read + window.y @ u
    out, u = _token_first(out[:, None]), _token_first(u[:, None])
    return out, Factors(k, u, log_decay)


def delta_commit(state: Tensor, factors: Factors, path: Path) -> Tensor:
    """The state after the nodes of a root path, from the state before the root.

    Args:
        state: [B, H, K, V].
        path: node indices, root first; `[]` returns the state itself.

    Raises:
        ValueError: an index lies outside the factors.
    """
    nodes = torch.as_tensor(path, device=state.device)
    count = factors.k.shape[1]
    if nodes.numel() and (nodes.is_floating_point() or not 0 <= int(nodes.min()) <= int(nodes.max()) < count):
        raise ValueError(f"delta_commit: a path holds node indices in [0, {count}), got {nodes.tolist()}")
    return absorb(state, factors.take(nodes.long()))


@exact_products
def absorb(state: Tensor, factors: Factors) -> Tensor:
    """The state after a row of tokens, all of `factors` in order; the state itself if there are none."""
    if factors.k.shape[1] == 0:
        return state
    group = state.shape[1] // factors.k.shape[2]
    k = factors.k.transpose(1, 2).unsqueeze(2)
    u = factors.u.transpose(1, 2).unflatten(1, (-1, group))
    g = factors.log_decay.transpose(1, 2).unflatten(1, (-1, group))
    return _absorb(_by_key_head(state, factors.k.shape[2]), k, u, g).flatten(1, 2)


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence itself for T = 1, without any N × N algebra: outputs, the next state and u."""
    heads = S.shape[1:3]
    q, k = (x[:, 0, :, None] for x in (q * q.shape[-1] ** -0.5, k))  # [B, H_k, 1, K], as all below by key head
    v, decay, beta = (x[:, 0].unflatten(1, heads) for x in (v, log_decay.exp(), beta))
    # Both reads are of the old state, so that it is gone through once: q·S' = e^g q·S + (q·k) u.
    k_read, q_read = ((S * x[..., None]).sum(-2) for x in (k, q))
    u = beta[..., None] * (v - decay[..., None] * k_read)
    out = decay[..., None] * q_read + (q * k).sum(-1, keepdim=True) * u
    S = torch.addcmul(S * decay[..., None, None], k[..., None], u[..., None, :])
    return out.flatten(1, 2).unsqueeze(1), S, u.flatten(1, 2).unsqueeze(1)


def _absorb(S: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """S [B, H_k, R, K, V], k [B, H_k, 1, N, K], u [B, H_k, R, N, V], g [B, H_k, R, N] -> the state after N rows."""
    return S * g.sum(-1).exp()[..., None, None] + k.transpose(-1, -2) @ _decayed_to_end(u, g)


def _decayed_to_end(rows: Tensor, g: Tensor) -> Tensor:
    """Rows [..., N, width], each by the decay from just after it to the last row; g [..., N]."""
    # summed backwards so that nothing cancels
    after = F.pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    return rows * after.exp()[..., None]


class _Window(NamedTuple):
    """One window of N rows in head-first layout, with C windows side by side: [B, C, H_k, R or 1, N, ...]."""

    q: Tensor  # [..., 1, N, K], scaled
    k: Tensor  # [..., 1, N, K]
    v: Tensor  # [..., R, N, V]
    log_decay: Tensor  # [..., R, N]
    beta: Tensor  # [..., R, N, 1]
    decay: Tensor  # [..., R, N, 1], e^G
    x: Tensor  # [..., R, N, N], strictly lower triangular
    y: Tensor  # [..., R, N, N], lower triangular

    @classmethod
    def build(cls, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> "_Window":
        """From the ancestor-or-self mask, bool [N, N], and token-first parts [B, C, N, heads, ...]."""
        heads = k.shape[3]
        q = q.transpose(2, 3).unsqueeze(3) * q.shape[-1] ** -0.5
        k = k.transpose(2, 3).unsqueeze(3)
        v = v.transpose(2, 3).unflatten(2, (heads, -1))
        # A decay of exactly 0 is a log of −inf, which a masked sum would turn into NaN; e^−1,000 is 0 too.
        g = log_decay.clamp_min(-1e3).transpose(2, 3).unflatten(2, (heads, -1))
        beta = beta.transpose(2, 3).unflatten(2, (heads, -1)).unsqueeze(-1)
        G = (mask * g.double()[..., None, :]).sum(-1, keepdim=True)
        between = (G - G.transpose(-1, -2)).to(g.dtype)
        weights = between.masked_fill(~mask, float("-inf")).exp()
        decay = G.to(g.dtype).exp()
        y, x = (torch.cat((q, k), dim=-2) @ k.transpose(-1, -2)).chunk(2, dim=-2)
        return cls(q, k, v, g, beta, decay, x=(beta * weights * x).tril(-1), y=weights * y)

    def squeeze(self) -> "_Window":
        """The one window there is, without its C dimension."""
        return _Window(*(part.squeeze(1) for part in self))

    def solve(self, rhs: Tensor) -> Tensor:
        """(I + X)^-1 rhs; the unit diagonal is implied, never stored."""
        if rhs.shape[-2] == 1:
            return rhs  # X is the 1 × 1 zero matrix
        solved: Tensor = torch.linalg.solve_triangular(self.x, rhs, upper=False, unitriangular=True)
        return solved

    def solve_parts(self) -> tuple[Tensor, Tensor]:
        """(I + X)^-1 diag(β) V and (I + X)^-1 diag(β e^G) K, [..., R, N, V] and [..., R, N, K]."""
        rhs = torch.cat((self.beta * self.v, self.beta * self.decay * self.k), dim=-1)
        width = self.v.shape[-1]
        solved = self.solve(rhs)
        return solved[..., :width], solved[..., width:]


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, ...] to [B, chunks, size, ...], zero-padded at the end."""
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.view(x.shape[0], -1, size, *x.shape[2:])


def _token_first(x: Tensor) -> Tensor:
    """[B, C, H_k, R, N, V] to [B, C·N, H, V]."""
    return x.flatten(2, 3).transpose(2, 3).flatten(1, 2)


def _by_key_head(state: Tensor, key_heads: int) -> Tensor:
    """[B, H, K, V] to [B, H_k, R, K, V], the R value heads of a key head side by side."""
    state = at_least_float32(state)
    return state.view(state.shape[0], key_heads, -1, *state.shape[2:])


def _zeros(k: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
