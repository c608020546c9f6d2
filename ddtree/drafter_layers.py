"""The layers of a DFlash drafter: Qwen3 blocks whose attention also reads context rows. They keep no state.

Context rows are keys and values projected from the target's hidden states, without the input norm that the
block's own rows pass.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_gdn.mlp import MLP
from qwen_gdn.norms import PlainRMSNorm
from qwen_gdn.rope import Rotation, rotate

from .drafter_config import AttentionType, DFlashConfig


class Rows(NamedTuple):
    """One layer's keys, normed and rotated, and its values, each [B, H_kv, T, head_dim]."""

    keys: Tensor
    values: Tensor


class DrafterAttention(nn.Module):
    """Attention of a block's rows to context rows and to each other, query heads in groups per key head."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = PlainRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = PlainRMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, by: Rotation) -> Rows:
        """Keys and values of the rows x [B, T, D]."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return Rows(rotate(keys.transpose(1, 2), by), values.transpose(1, 2))

    def forward(self, x: Tensor, context: Rows, by: Rotation, mask: Tensor | None) -> Tensor:
        """Block rows x [B, Q, D] -> [B, Q, D]; `mask` is bool, its rows those of `fold_mask`."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        own = self.project(x, by)
        # A key head's query heads lie one after another along the length: no kernel then needs to know groups.
        folded = rotate(q, by).reshape(x.shape[0], -1, self.groups * x.shape[1], self.head_dim)
        keys = torch.cat((context.keys, own.keys), dim=2)
        values = torch.cat((context.values, own.values), dim=2)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        heads = out.unflatten(2, (self.groups, -1)).permute(0, 3, 1, 2, 4)
        mixed: Tensor = self.o_proj(heads.flatten(2))
        return mixed


class DrafterLayer(nn.Module):
    """Pre-norm residual block: attention, then SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = PlainRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = PlainRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Rows, by: Rotation, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, by, mask)
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
