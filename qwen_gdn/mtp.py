"""The multi-token-prediction module that Qwen3.5/3.6/3.8 checkpoints carry beside the model, as `mtp.*`.

It reads the model's state after a token, and the token that follows, and predicts the one after that. It owns
neither embedding nor head: those are the model's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .fp8 import check_state
from .lanes import AttentionLane, Pass, Step
from .model import DecoderLayer
from .norms import RMSNorm
from .rope import rotation
from .stated import Stated


class MTPConfig(ModelConfig):
    """A target's config, if it says that the checkpoint has an MTP module of the kind implemented here."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Reads a target's parsed config.

        Raises:
            ValueError: it is no target's, it states no MTP module, or one of another kind.
        """
        _check(raw)
        return super().from_dict(raw)


class MTP(nn.Module):
    """One step of multi-token prediction; parameters carry the checkpoint's names below `mtp.`.

    Row i combines the embedding of token i + 1 with a state after token i, and predicts token i + 2. The state is the
    model's own, after its final norm, or an earlier row's output where the model has not been so far.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(width, eps)
        self.pre_fc_norm_hidden = RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, "full_attention")])
        self.norm = RMSNorm(width, eps)
        self.register_load_state_dict_pre_hook(check_state)  # type: ignore[no-untyped-call]

    def forward(self, embedded: Tensor, hidden: Tensor, view: Pass[AttentionLane]) -> Tensor:
        """Embeddings and states, both [B, T, D], to what the head reads, [B, T, D]; `view` has one lane."""
        c = self.config
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1))
        step = Step(rotation(view.positions, c.rotary_dim, c.rope_theta, x.dtype), view.mask, view.causal)
        for layer, lane in zip(self.layers, view.lanes, strict=True):
            x = layer(x, lane, step)
        out: Tensor = self.norm(x)
        return out


def _check(raw: Mapping[str, Any]) -> None:
    """Refuses a config without an MTP module, or with one that is not of one layer and without embedding."""
    root = Stated("config", raw)
    text = root.inner("text_config") if "text_config" in raw else root
    count = text.maybe("mtp_num_hidden_layers", int)
    if not count:
        raise text.error(
            "mtp_num_hidden_layers is missing or 0, so this checkpoint has no MTP module; use a release "
            "that has one, or another drafter"
        )
    if count != 1:
        raise text.error(f"mtp_num_hidden_layers {count} is not supported; an MTP module read here has 1 layer")
    if text.maybe("mtp_use_dedicated_embeddings", bool):
        raise text.error("mtp_use_dedicated_embeddings true is not supported; an MTP module here reads the target's")
