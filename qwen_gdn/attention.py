"""Gated full attention of the hybrid: grouped queries, normed q and k, partial rotary, sigmoid output gate."""

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .joined import ReadsOnce
from .lanes import AttentionLane, Step
from .norms import RMSNorm
from .products import LinearMap
from .rope import rotate


class GatedAttention(ReadsOnce):
    """o_proj(softmax(q k^T / sqrt(head_dim)) v · sigmoid(gate)); names are the checkpoint's."""

    reads = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        # per head: the query, then its gate
        self.q_proj = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = LinearMap(width, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, lane: AttentionLane, step: Step) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        queries, keys, values = self.read(x)
        q, gate = queries.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k = keys.unflatten(-1, (-1, self.head_dim))
        v = values.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), step.rope)
        k = rotate(self.k_norm(k).transpose(1, 2), step.rope)
        out = lane.attend(q, k, v, step).transpose(1, 2)
        gated: Tensor = self.o_proj((out * torch.sigmoid(gate)).flatten(2))
        return gated
