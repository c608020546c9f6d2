"""A slow MTP module for tests: numpy, float64, no cache, row after row, from a config and a state dict alone.

It shares no code with the package. Rows are numbered from 0: row i reads state i and the embedding of token i + 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


class Oracle:
    """The module `weights` (names below `mtp.`) of a target with that embedding and head, both [vocab, D]."""

    def __init__(self, raw: Mapping[str, Any], weights: Mapping[str, Tensor], embedding: Tensor, head: Tensor) -> None:
        self.raw = raw
        self.weights: dict[str, Array] = {name: w.detach().double().numpy() for name, w in weights.items()}
        self.embedding: Array = embedding.detach().double().numpy()
        self.head: Array = head.detach().double().numpy()

    def log_probs(self, tokens: Sequence[int], states: Array, drafted: Sequence[int]) -> Array:
        """What follows `drafted`, [vocab].

        Args:
            tokens: all tokens that are given, the root last: one more than states.
            states: the target's, [T, D].
            drafted: tokens after the root, whose states are the module's own outputs.
        """
        known, inputs = list(states), []
        successors = [*tokens[1:], *drafted]
        for row, token in enumerate(successors):
            if row >= len(states):
                known.append(self._output(inputs))
            joined = np.concatenate(
                (
                    self._normed(self.embedding[token], "pre_fc_norm_embedding"),
                    self._normed(known[row], "pre_fc_norm_hidden"),
                )
            )
            inputs.append(self.weights["fc.weight"] @ joined)
        logits = self.head @ self._output(inputs)
        logits = logits - logits.max()
        out: Array = logits - np.log(np.exp(logits).sum())
        return out

    def _output(self, inputs: list[Array]) -> Array:
        """The last row's output, after the final norm."""
        x = inputs[-1] + self._attended(inputs)
        normed = self._normed(x, "layers.0.post_attention_layernorm")
        gate = self.weights["layers.0.mlp.gate_proj.weight"] @ normed
        up = self.weights["layers.0.mlp.up_proj.weight"] @ normed
        x = x + self.weights["layers.0.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return self._normed(x, "norm")

    def _attended(self, inputs: list[Array]) -> Array:
        """What the last row's attention adds, head by head."""
        size, heads = self.raw["head_dim"], self.raw["num_attention_heads"]
        group = heads // self.raw["num_key_value_heads"]
        normed = [self._normed(x, "layers.0.input_layernorm") for x in inputs]
        last, parts = len(inputs) - 1, []
        for head in range(heads):
            both = self._head("q_proj", head, 2 * size) @ normed[-1]
            query = self._turned(self._normed(both[:size], "layers.0.self_attn.q_norm"), last)
            keys = [self._head("k_proj", head // group, size) @ x for x in normed]
            keys = [self._turned(self._normed(k, "layers.0.self_attn.k_norm"), i) for i, k in enumerate(keys)]
            values = [self._head("v_proj", head // group, size) @ x for x in normed]
            scores = np.array([query @ k for k in keys]) / size**0.5
            shares = np.exp(scores - scores.max())
            read = sum(share * v for share, v in zip(shares / shares.sum(), values, strict=True))
            parts.append(read / (1 + np.exp(-both[size:])))
        mixed: Array = self.weights["layers.0.self_attn.o_proj.weight"] @ np.concatenate(parts)
        return mixed

    def _head(self, name: str, head: int, rows: int) -> Array:
        return self.weights[f"layers.0.self_attn.{name}.weight"][head * rows : (head + 1) * rows]

    def _normed(self, x: Array, name: str) -> Array:
        rms = np.sqrt((x * x).mean() + self.raw["rms_norm_eps"])
        out: Array = x / rms * (1 + self.weights[f"{name}.weight"])
        return out

    def _turned(self, x: Array, position: int) -> Array:
        """Rotary by complex numbers: dimensions i and i + half are a plane, the rest does not turn."""
        rope = self.raw["rope_parameters"]
        half = round(self.raw["head_dim"] * rope["partial_rotary_factor"]) // 2
        rates = rope["rope_theta"] ** (-np.arange(half) / half)
        planes = (x[:half] + 1j * x[half : 2 * half]) * np.exp(1j * position * rates)
        return np.concatenate((planes.real, planes.imag, x[2 * half :]))
