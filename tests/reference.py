"""The whole hybrid again, in float64 numpy, one token at a time with plain loops, from the published formulas.

It shares no code with the package and knows no chunk, no window and no tensor library: it is what the package's
float64 model is measured against. Weights are a dictionary of arrays by parameter name; the config is the parsed
`config.json`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class DeltaMemory(NamedTuple):
    """state [H, K, V] and the pre-convolution columns of the last W − 1 tokens, [W − 1, C], oldest first."""

    state: Array
    columns: Array


class AttentionMemory(NamedTuple):
    """keys (normed and rotated) and values, each [H_kv, T, head_dim]."""

    keys: Array
    values: Array


class Run(NamedTuple):
    """logits [T, vocab], final [T, D], outputs of every layer [T, D], memory of every layer after the last token."""

    logits: Array
    final: Array
    layers: list[Array]
    memory: list[DeltaMemory | AttentionMemory]


def run(raw: dict[str, Any], weights: dict[str, Array], tokens: list[int]) -> Run:
    """The model over one sequence, from nothing."""
    eps = raw["rms_norm_eps"]
    mixers = [
        (_Delta if kind == "linear_attention" else _Attention)(raw, _below(weights, f"layers.{i}."))
        for i, kind in enumerate(raw["layer_types"])
    ]
    outputs: list[list[Array]] = [[] for _ in mixers]
    final, logits = [], []
    head = weights["embed_tokens.weight"] if raw["tie_word_embeddings"] else weights["lm_head.weight"]
    for token in tokens:
        x = weights["embed_tokens.weight"][token].copy()
        for i, mixer in enumerate(mixers):
            w = _below(weights, f"layers.{i}.")
            x = x + mixer.step(_centred_norm(x, w["input_layernorm.weight"], eps))
            y = _centred_norm(x, w["post_attention_layernorm.weight"], eps)
            up = _silu(w["mlp.gate_proj.weight"] @ y) * (w["mlp.up_proj.weight"] @ y)
            x = x + w["mlp.down_proj.weight"] @ up
            outputs[i].append(x)
        final.append(_centred_norm(x, weights["norm.weight"], eps))
        logits.append(head @ final[-1])
    layers = [np.stack(rows) for rows in outputs]
    return Run(np.stack(logits), np.stack(final), layers, [mixer.memory() for mixer in mixers])


class _Delta:
    """Gated DeltaNet: one vector of q | k | v a token, a short filter over time, then a matrix memory a head."""

    def __init__(self, raw: dict[str, Any], weights: dict[str, Array]) -> None:
        self.w = _below(weights, "linear_attn.")
        self.key_heads, self.heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
        self.K, self.V = raw["linear_key_head_dim"], raw["linear_value_head_dim"]
        self.taps = self.w["conv1d.weight"][:, 0, :]  # [C, W]
        self.gate = _sigmoid if raw.get("output_gate_type") == "sigmoid" else _silu
        self.eps = raw["rms_norm_eps"]
        self.state = np.zeros((self.heads, self.K, self.V))
        self.columns = np.zeros((self.taps.shape[1] - 1, self.taps.shape[0]))

    def step(self, x: Array) -> Array:
        window = np.concatenate((self.columns, (self.w["in_proj_qkv.weight"] @ x)[None]))
        self.columns = window[1:]
        mixed = np.zeros(window.shape[1])
        for age in range(len(window)):
            mixed = mixed + self.taps[:, age] * window[age]
        mixed = _silu(mixed)
        width = self.key_heads * self.K
        q, k, v = mixed[:width], mixed[width : 2 * width], mixed[2 * width :]
        beta = _sigmoid(self.w["in_proj_b.weight"] @ x)
        dt = np.logaddexp(0.0, self.w["in_proj_a.weight"] @ x + self.w["dt_bias"])
        decay = np.exp(-np.exp(self.w["A_log"]) * dt)
        z = self.w["in_proj_z.weight"] @ x
        out = []
        for h in range(self.heads):
            pair = h // (self.heads // self.key_heads)
            q_h = _unit(q[pair * self.K : (pair + 1) * self.K]) / math.sqrt(self.K)
            k_h = _unit(k[pair * self.K : (pair + 1) * self.K])
            v_h = v[h * self.V : (h + 1) * self.V]
            faded = decay[h] * self.state[h]
            self.state[h] = faded + np.outer(k_h, beta[h] * (v_h - faded.T @ k_h))
            read = self.state[h].T @ q_h
            normed = read / math.sqrt(float(np.mean(read**2)) + self.eps) * self.w["norm.weight"]
            out.append(normed * self.gate(z[h * self.V : (h + 1) * self.V]))
        projected: Array = self.w["out_proj.weight"] @ np.concatenate(out)
        return projected

    def memory(self) -> DeltaMemory:
        return DeltaMemory(self.state, self.columns)


class _Attention:
    """Softmax attention over all tokens so far, heads sharing keys in groups, output gated per element."""

    def __init__(self, raw: dict[str, Any], weights: dict[str, Array]) -> None:
        self.w = _below(weights, "self_attn.")
        self.heads, self.groups, self.width = (
            raw[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        rope = raw["rope_parameters"]
        self.theta, self.turning = rope["rope_theta"], int(self.width * rope["partial_rotary_factor"])
        self.eps = raw["rms_norm_eps"]
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def step(self, x: Array) -> Array:
        position = len(self.keys)
        k = (self.w["k_proj.weight"] @ x).reshape(self.groups, self.width)
        self.keys.append(
            np.stack([self._turn(_centred_norm(h, self.w["k_norm.weight"], self.eps), position) for h in k])
        )
        self.values.append((self.w["v_proj.weight"] @ x).reshape(self.groups, self.width))
        both = (self.w["q_proj.weight"] @ x).reshape(self.heads, 2 * self.width)
        out = []
        for h in range(self.heads):
            group = h // (self.heads // self.groups)
            q = self._turn(_centred_norm(both[h, : self.width], self.w["q_norm.weight"], self.eps), position)
            scores = np.array([q @ keys[group] for keys in self.keys]) / math.sqrt(self.width)
            shares = np.exp(scores - scores.max())
            shares = shares / shares.sum()
            read = np.zeros(self.width)
            for share, values in zip(shares, self.values, strict=True):
                read = read + share * values[group]
            out.append(read * _sigmoid(both[h, self.width :]))
        projected: Array = self.w["o_proj.weight"] @ np.concatenate(out)
        return projected

    def _turn(self, head: Array, position: int) -> Array:
        """Dimensions i and i + turning/2 form a plane that rotates by position · θ^(−2i/turning)."""
        turned = head.copy()
        half = self.turning // 2
        for i in range(half):
            plane = complex(head[i], head[half + i])
            plane *= complex(math.cos(a := position * self.theta ** (-2 * i / self.turning)), math.sin(a))
            turned[i], turned[half + i] = plane.real, plane.imag
        return turned

    def memory(self) -> AttentionMemory:
        return AttentionMemory(np.stack(self.keys, axis=1), np.stack(self.values, axis=1))


def _below(weights: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _centred_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale 1 + weight: the stored weight is centred on zero."""
    return x / math.sqrt(float(np.mean(x**2)) + eps) * (1.0 + weight)


def _unit(x: Array) -> Array:
    return x / math.sqrt(float(np.sum(x**2)) + 1e-6)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)
