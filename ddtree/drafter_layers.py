"""The layers of a DFlash drafter: Qwen3 blocks whose attention also reads context rows. They keep no state.

Context rows are keys and values projected from the target's hidden states, without the input norm that the
block's own rows pass.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_gdn.joined import ReadsOnce
from qwen_gdn.mlp import MLP
from qwen_gdn.norms import PlainRMSNorm
from qwen_gdn.products import LinearMap
from qwen_gdn.rope import Rotation, rotate

from .drafter_config import AttentionType, DFlashConfig


class Rows(NamedTuple):
    """One layer's keys, normed and rotated, and its values, each [B, H_kv, T, head_dim]."""

    keys: Tensor
    values: Tensor


class Context(Protocol):
    """What one layer's block rows see beside themselves."""

    def attend(self, q: Tensor, own: Rows) -> Tensor:
        """What queries [B, H, Q, head_dim] read of the context and of the block's own rows, in q's shape."""


class SeenRows(NamedTuple):
    """Context rows, and a mask over them and the block; bool [..., Q, T + Q], or None where everything is seen."""

    rows: Rows
    mask: Tensor | None

    def attend(self, q: Tensor, own: Rows) -> Tensor:
        keys = torch.cat((self.rows.keys, own.keys), dim=2)
        values = torch.cat((self.rows.values, own.values), dim=2)
        # A key head's query heads lie one after another along the length: no kernel then needs to know groups.
        folded = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
        mask = fold_mask(self.mask, folded.shape[2] // q.shape[2])
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask).reshape(q.shape)


class DrafterAttention(ReadsOnce):
    """Attention of a block's rows to context rows and to each other, query heads in groups per key head."""

    reads = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = LinearMap(width, config.hidden_size)
        self.q_norm = PlainRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = PlainRMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, by: Rotation) -> Rows:
        """Keys and values of the rows x [B, T, D]."""
        return self._rows(self.k_proj(x), self.v_proj(x), by)

    def forward(self, x: Tensor, context: Context, by: Rotation) -> Tensor:
        """Block rows x [B, Q, D] -> [B, Q, D]; `by` is the rotation of their positions."""
        queries, keys, values = self.read(x)
        q = rotate(self.q_norm(queries.unflatten(-1, (-1, self.head_dim))).transpose(1, 2), by)
        out = context.attend(q, self._rows(keys, values, by))
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def _rows(self, keys: Tensor, values: Tensor, by: Rotation) -> Rows:
        keys = self.k_norm(keys.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return Rows(rotate(keys, by), values.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))


class DrafterLayer(nn.Module):
    """Pre-norm residual block: attention, then SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = PlainRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = PlainRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context, by: Rotation) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, by)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def fold_mask(mask: Tensor | None, groups: int) -> Tensor | None:
    """A mask [..., Q, keys] repeated for each query head of a group: [..., groups · Q, keys]."""
    if mask is None or groups == 1 or mask.shape[-2] == 1:
        return mask
    return mask.repeat(*(1,) * (mask.dim() - 2), groups, 1)


def block_mask(config: DFlashConfig, kind: AttentionType, context: int, device: torch.device) -> Tensor | None:
    """What the rows of one block see of `context` rows just before it and of the block itself.

    Row i lies `context + i − j` positions after key j. It sees keys less than a window behind and, unless it is
    causal, less than a window ahead.

    Returns:
        bool [block_size, context + block_size], or None where everything is seen.
    """
    size, window, causal = config.block_size, config.window(kind), config.causal(kind)
    if not causal and (window is None or context + size <= window):
        return None
    seen = torch.ones(size, context + size, dtype=torch.bool, device=device)
    if causal:
        seen = seen.tril(context)
    elif window is not None:
        seen = seen.tril(context + window - 1)
    return seen if window is None else seen.triu(context - window + 1)
