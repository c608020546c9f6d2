"""Our DFlash 2 drafter against the published one: PyPI `dflash` on transformers, random weights, round by round."""

import os
from typing import Any

import pytest
import torch
from drafter_oracle import StandIn, bound_drafter, features_of, raw_config2
from torch import Tensor

from ddtree import DFlash2Config, build_chain
from ddtree.dflash2 import PairScores

try:
    from dflash.model import DFlash2DraftModel
    from transformers import DynamicCache
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config
except ImportError:
    # In CI the comparison must run; elsewhere the package is optional.
    if os.environ.get("CI"):
        raise
    pytest.skip("PyPI dflash is not installed", allow_module_level=True)

ROUNDS = 20
CONFIGS: dict[str, dict[str, Any]] = {
    "as published": {},
    "a short window": {"sliding_window": 3},
    "causal, a full layer": {"is_causal": None, "layer_types": ["sliding_attention", "full_attention"]},
    "three taps": {"dflash": {"conv_kernel_size": 3, "conv_group_size": 4}},
    "factors": {"output_multiplier": 0.7, "final_logit_softcapping": 9.0, "dflash": {"input_embedding_scale": 1.7}},
}


class Published:
    """The package's drafter with its own context cache, over the head and embedding of a stand-in."""

    def __init__(self, raw: dict[str, Any], state: dict[str, Tensor], target: StandIn) -> None:
        config = Qwen3Config(**{key: value for key, value in raw.items() if value is not None})
        self.model = DFlash2DraftModel(config).eval()
        named = {name + ".weight" if name.endswith("codebook") else name: value for name, value in state.items()}
        self.model.load_state_dict(named)
        self.scale = raw["dflash_config"].get("input_embedding_scale", 1.0)
        self.target = target
        self.cache = DynamicCache(config=config)
        self.cache.activate_past_recording()

    @torch.no_grad()
    def hidden(self, features: Tensor, tokens: Tensor, start: int) -> Tensor:
        """States [1, Q − 1, D] of the masked rows of a block at `start`, which takes in the features before it."""
        positions = torch.arange(start - features.shape[1], start + tokens.shape[1])[None]
        block = self.target.embed(tokens) * self.scale
        out: Tensor = self.model(
            target_hidden=features,
            noise_embedding=block,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.crop(start - self.cache.get_seq_length())
        return out[:, 1:]

    @torch.no_grad()
    def walk(self, hidden: Tensor, root: int, temperature: float) -> tuple[list[int], Tensor, Tensor | None]:
        """A path, the candidates of each position [L, k] and, if it is drawn, their probabilities along it."""
        path, candidates, law = self.model.propose(hidden, torch.tensor([root]), self.target.logits, temperature)
        return path[0].tolist(), candidates[0], None if law is None else law[0]


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_states_scores_and_walks_equal_the_published_drafter_over_twenty_rounds(changes: dict[str, Any]) -> None:
    raw = raw_config2(**changes)
    drafter, target = bound_drafter(DFlash2Config.from_dict(raw), torch.float32)
    published = Published(raw, drafter.state_dict(), target)
    size, generator = drafter.config.block_size, torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    states: list[Tensor] = []
    drafter.norm.register_forward_hook(lambda module, args, out: states.append(out[:, 1:]))
    features, bent = features_of(13, dtype=torch.float32), 0
    for turn in range(ROUNDS):
        drafter.observe(features)
        start, root = drafter.context_length, 3 * turn % 40
        scores = drafter.propose(root)
        assert isinstance(scores, PairScores) and scores.depth == size - 1
        tokens = torch.tensor([[root] + [drafter.config.mask_token_id] * (size - 1)])
        hidden = published.hidden(features, tokens, start)
        assert (states[-1] - hidden).abs().max() <= 1e-5 * hidden.abs().max()

        greedy, candidates, _ = published.walk(hidden, root, 0.0)
        assert build_chain(root, scores, size).tokens.tolist() == [root, *greedy]
        bent += greedy != target.logits(hidden)[0].argmax(-1).tolist()

        drawn, candidates, law = published.walk(hidden, root, 1.0)
        assert law is not None
        for depth in range(size - 1):
            ours = dict(zip(*scores.children(tuple(drawn[:depth])), strict=True))
            assert ours.keys() == set(candidates[depth].tolist())
            wanted = law[depth].log()
            assert (torch.tensor([ours[c] for c in candidates[depth].tolist()]) - wanted).abs().max() <= 1e-5 * max(
                1.0, float(wanted.abs().max())
            )
        accepted = int(torch.randint(1, size + 1, (1,), generator=generator))
        features = features_of(accepted, seed=50 + turn, dtype=torch.float32)
    assert bent > ROUNDS // 2  # else the pairs would decide nothing
