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

LEAF = 16  # rows of a system that substitution solves at once when its inverse is wanted
SERIAL = 64  # rows up to which substitution, though each row waits for the one before, beats an inverse


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
        return out, _by_head(S), Factors(k, u, log_decay)
    C = min(chunk_size, T)
    # Padding is inert: with k, β and g zero a row neither writes, nor decays, nor is read by another.
    rows = _rows(_chunks(q, C), _chunks(k, C))
    parts = (_chunks(x, C) for x in (v, log_decay, beta))
    window = _Window.build(torch.ones(C, C, dtype=torch.bool, device=v.device).tril(), rows, *parts)
    # (I + X)^-1 applied to both terms of the right-hand side, so that only products depend on the state.
    V_rows, K_rows = window.solve_parts()
    starts, writes = [], []
    for c in range(V_rows.shape[1]):
        u = V_rows[:, c] - K_rows[:, c] @ S.mT
        starts.append(S)
        writes.append(u)
        S = _absorb(S, window.k[:, c], u, window.log_decay[:, c])
    u = torch.stack(writes, dim=1)
    out = window.decay * _read(torch.stack(starts, dim=1), window.q) + window.y @ u
    out, u = (_token_first(x)[:, :T] for x in (out, u))
    return out, _by_head(S), Factors(k, u, log_decay)


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
    rows = _rows(q[:, None], k[:, None])
    window = _Window.build(ancestors, rows, *(x[:, None] for x in (v, log_decay, beta))).squeeze()
    q_read, k_read = _read(S, rows[:, 0]).chunk(2, dim=-2)
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
    S = _by_key_head(state, factors.k.shape[2])
    k = factors.k.transpose(1, 2)
    u, g = (x.transpose(1, 2).unflatten(1, S.shape[1:3]) for x in (factors.u, factors.log_decay))
    return _by_head(_absorb(S, k, u, g))


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence itself for T = 1, without any N × N algebra: outputs, the next state and u."""
    heads = S.shape[1:3]
    q, k = (x[:, 0, :, None] for x in (q * q.shape[-1] ** -0.5, k))  # [B, H_k, 1, K], as all below by key head
    v, decay, beta = (x[:, 0].unflatten(1, heads) for x in (v, log_decay.exp(), beta))
    # Both reads are of the old state, so that it is gone through once: q·S' = e^g q·S + (q·k) u.
    k_read, q_read = ((S * x[..., None, :]).sum(-1) for x in (k, q))
    u = beta[..., None] * (v - decay[..., None] * k_read)
    out = decay[..., None] * q_read + (q * k).sum(-1, keepdim=True) * u
    S = torch.addcmul(S * decay[..., None, None], u[..., None], k[..., None, :])
    return out.flatten(1, 2).unsqueeze(1), S, u.flatten(1, 2).unsqueeze(1)


def _rows(q: Tensor, k: Tensor) -> Tensor:
    """Scaled q above k, heads first: of [B, C, N, H_k, K] each, [B, C, H_k, 2N, K]."""
    return torch.cat((q.transpose(2, 3) * q.shape[-1] ** -0.5, k.transpose(2, 3)), dim=-2)


def _read(S: Tensor, rows: Tensor) -> Tensor:
    """What rows [..., H_k, N, K] read of states [..., H_k, R, V, K], [..., R, N, V]; one product a key head."""
    read: Tensor = (rows @ S.flatten(-3, -2).mT).unflatten(-1, S.shape[-3:-1])
    return read.transpose(-3, -2)


def _written(u: Tensor, k: Tensor) -> Tensor:
    """The sum of u_n k_nᵀ over rows, [..., R, V, K], of u [..., R, N, V] and k [..., N, K]; one product a key head."""
    side_by_side = u.transpose(-3, -2).flatten(-2)
    written: Tensor = (side_by_side.mT @ k).unflatten(-2, (u.shape[-3], u.shape[-1]))
    return written


def _absorb(S: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """S [B, H_k, R, V, K], k [B, H_k, N, K], u [B, H_k, R, N, V], g [B, H_k, R, N] -> the state after N rows."""
    return S * g.sum(-1).exp()[..., None, None] + _written(_decayed_to_end(u, g), k)


def _decayed_to_end(rows: Tensor, g: Tensor) -> Tensor:
    """Rows [..., N, width], each by the decay from just after it to the last row; g [..., N]."""
    # summed backwards so that nothing cancels
    after = F.pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    return rows * after.exp()[..., None]


class _Window(NamedTuple):
    """C windows of N rows side by side, heads first: [B, C, H_k, R, N, ...], q and k without R."""

    q: Tensor  # [..., N, K], scaled
    k: Tensor  # [..., N, K]
    v: Tensor  # [..., R, N, V]
    log_decay: Tensor  # [..., R, N]
    beta: Tensor  # [..., R, N, 1]
    decay: Tensor  # [..., R, N, 1], e^G
    x: Tensor  # [..., R, N, N], strictly lower triangular
    y: Tensor  # [..., R, N, N], lower triangular

    @classmethod
    def build(cls, mask: Tensor, rows: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> "_Window":
        """From the ancestor-or-self mask, bool [N, N], `_rows`, and token-first parts [B, C, N, heads, ...]."""
        heads = rows.shape[2]
        q, k = rows.chunk(2, dim=-2)
        v = v.transpose(2, 3).unflatten(2, (heads, -1))
        # A decay of exactly 0 is a log of −inf, which a masked sum would turn into NaN; e^−1,000 is 0 too.
        g = log_decay.clamp_min(-1e3).transpose(2, 3).unflatten(2, (heads, -1))
        beta = beta.transpose(2, 3).unflatten(2, (heads, -1)).unsqueeze(-1)
        G = (mask * g.double()[..., None, :]).sum(-1, keepdim=True)
        between = (G - G.transpose(-1, -2)).to(g.dtype)
        weights = between.masked_fill(~mask, float("-inf")).exp()
        decay = G.to(g.dtype).exp()
        y, x = (rows @ k.mT).unsqueeze(3).chunk(2, dim=-2)
        return cls(q, k, v, g, beta, decay, x=(beta * weights * x).tril(-1), y=weights * y)

    def squeeze(self) -> "_Window":
        """The one window there is, without its C dimension."""
        return _Window(*(part.squeeze(1) for part in self))

    def solve(self, rhs: Tensor) -> Tensor:
        """(I + X)^-1 rhs; the unit diagonal is implied, never stored."""
        count = rhs.shape[-2]
        if count == 1:
            return rhs  # X is the 1 × 1 zero matrix
        return _inverse(self.x) @ rhs if count > SERIAL else _solved(self.x, rhs)

    def solve_parts(self) -> tuple[Tensor, Tensor]:
        """(I + X)^-1 diag(β) V and (I + X)^-1 diag(β e^G) K, [..., R, N, V] and [..., R, N, K]."""
        rhs = torch.cat((self.beta * self.v, self.beta * self.decay * self.k.unsqueeze(-3)), dim=-1)
        V_rows, K_rows = (_inverse(self.x) @ rhs).split((self.v.shape[-1], self.k.shape[-1]), dim=-1)
        return V_rows, K_rows


def _solved(x: Tensor, rhs: Tensor) -> Tensor:
    """(I + X)^-1 rhs by substitution; only what lies below the diagonal of x is read. `rhs` may be written over."""
    if torch.compiler.is_compiling():
        # The operation itself first copies its right-hand side, and what does not lie in rows. What is computed here
        # can be written that way at once.
        rhs = rhs.contiguous()
        _solve_in_place(x.contiguous(), rhs)
        return rhs
    out: Tensor = torch.linalg.solve_triangular(x, rhs, upper=False, unitriangular=True)
    return out


@torch.library.custom_op("qwen_gdn::solve_in_place", mutates_args=("rhs",))
def _solve_in_place(x: Tensor, rhs: Tensor) -> None:
    torch.linalg.solve_triangular(x, rhs, upper=False, unitriangular=True, out=rhs)


@_solve_in_place.register_fake
def _nothing_returned(x: Tensor, rhs: Tensor) -> None:
    return None


def _inverse(x: Tensor) -> Tensor:
    """(I + X)^-1 of strictly lower triangular X [..., N, N].

    Substitution takes N steps, each waiting for the one before. So only diagonal blocks of `LEAF` rows are inverted
    by it, all at once, and then joined two by two: [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]].
    """
    count = x.shape[-1]
    size, width = LEAF, LEAF << max(0, -(-count // LEAF) - 1).bit_length()
    x = F.pad(x, (0, width - count, 0, width - count))
    eye = torch.eye(size, dtype=x.dtype, device=x.device)
    inverse = _solved(_diagonal(x, size), eye.expand(*x.shape[:-2], width // size, size, size))
    while size < width:
        below = _diagonal(x, 2 * size)[..., size:, :size]
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        joined = -(second @ (below @ first))
        top, bottom = torch.cat((first, torch.zeros_like(first)), -1), torch.cat((joined, second), -1)
        inverse, size = torch.cat((top, bottom), -2), 2 * size
    return inverse[..., 0, :count, :count]


def _diagonal(x: Tensor, size: int) -> Tensor:
    """The square blocks along the diagonal of x [..., N, N], as [..., N // size, size, size]."""
    blocks: Tensor = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


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
    """[B, H, K, V] to [B, H_k, R, V, K], the R value heads of a key head side by side.

    States that come from here lie in memory as V rows of K, though their shape says K × V: a key head's R states are
    then one matrix, and what one token reads and writes of a row is in one place.
    """
    state = at_least_float32(state).mT
    return state.reshape(state.shape[0], key_heads, -1, *state.shape[2:])


def _by_head(S: Tensor) -> Tensor:
    """[B, H_k, R, V, K] to [B, H, K, V]."""
    return S.flatten(1, 2).mT


def _zeros(k: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
