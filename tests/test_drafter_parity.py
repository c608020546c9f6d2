"""Our drafter against the published one: PyPI `dflash` on transformers, random weights, driven as it drives itself."""

import os
from typing import Any

import pytest
import torch
from drafter_oracle import KINDS, WIDTH, StandIn, features_of, raw_config
from torch import Tensor

from ddtree.drafter import DFlashDrafter
from ddtree.drafter_config import DFlashConfig

try:
    from dflash.model import DFlashDraftModel
    from transformers import DynamicCache
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config
except ImportError:
    # In CI the comparison must run; elsewhere the package is optional.
    if os.environ.get("CI"):
        raise
    pytest.skip("PyPI dflash is not installed", allow_module_level=True)

ROUNDS = 20


class Headless(StandIn):
    """A target whose logits are the hidden states themselves, to compare those."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Published:
    """The package's drafter with its own context cache: noise rows are cropped after each call."""

    def __init__(self, raw: dict[str, Any], seed: int) -> None:
        known = {key: value for key, value in raw.items() if key != "is_causal" or value is not None}
        torch_config = Qwen3Config(**known)
        self.model = DFlashDraftModel(torch_config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)
        self.cache = DynamicCache(config=torch_config)
        self.cache.activate_past_recording()

    @torch.no_grad()
    def hidden(self, features: Tensor, block: Tensor, start: int) -> Tensor:
        """Hidden states of a block [1, Q, D] at `start`, which takes in the features of the rows before it."""
        positions = torch.arange(start - features.shape[1], start + block.shape[1])[None]
        out: Tensor = self.model(
            target_hidden=features,
            noise_embedding=block,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.crop(start - self.cache.get_seq_length())
        return out


def older_schema(raw: dict[str, Any]) -> dict[str, Any]:
    """The same config as the first drafters were published: block size and rotary base at the top."""
    flat = {key: value for key, value in raw.items() if key != "rope_parameters"}
    table = dict(raw["dflash_config"])
    size = table.pop("block_size")
    return flat | {"rope_theta": raw["rope_parameters"]["rope_theta"], "block_size": size, "dflash_config": table}


def published_config(kinds: tuple[str, ...], window: int, causal: bool | None) -> dict[str, Any]:
    listed = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    return raw_config(
        layer_types=listed,
        num_hidden_layers=len(listed),
        sliding_window=window,
        use_sliding_window="s" in kinds,
        is_causal=causal,
    )


@pytest.mark.parametrize("older", [False, True], ids=["newer", "older"])
@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("window", [4, 9, 64])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_hidden_states_equal_the_published_drafter_over_twenty_rounds(
    kinds: tuple[str, ...], window: int, causal: bool | None, older: bool
) -> None:
    raw = published_config(kinds, window, causal)
    raw = older_schema(raw) if older else raw
    published, target = Published(raw, seed=len(kinds) + window), Headless(torch.float32)
    drafter = DFlashDrafter(DFlashConfig.from_dict(raw))
    drafter.load_state_dict(published.model.state_dict())
    drafter.bind(target)
    size, generator = drafter.config.block_size, torch.Generator().manual_seed(window)
    features = features_of(13, dtype=torch.float32)
    for turn in range(ROUNDS):
        drafter.observe(features)
        start, root = drafter.context_length, 3 * turn % 40
        ours = drafter.propose(root)
        tokens = torch.tensor([[root] + [drafter.config.mask_token_id] * (size - 1)])
        theirs = published.hidden(features, target.embed(tokens).detach(), start)[0, -size + 1 :]
        assert ours.shape == theirs.shape == (size - 1, WIDTH)
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        accepted = int(torch.randint(1, size + 1, (1,), generator=generator))
        features = features_of(accepted, seed=50 + turn, dtype=torch.float32)
