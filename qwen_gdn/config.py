"""What a checkpoint's `config.json` says about a Qwen3.5/3.6/3.8 hybrid, dense or with experts, checked and frozen.

Architecture facts have no defaults: a missing key is an error that names it, since a silent default
yields a model that runs and is wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .quantised import BlockFP8, block_fp8
from .stated import MOST_LAYERS, Stated, check_real, check_whole, read_config, shown
from .supported import check_supported

LayerType = Literal["linear_attention", "full_attention"]
OutputGate = Literal["silu", "sigmoid"]

_WHAT = "config"
_MOST_POSITIONS = 2**31 - 1
# Published names of the activation on the delta layers' z gate; absent means silu.
_OUTPUT_GATES: dict[str, OutputGate] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}

# transformers writes this flat into every config it saves; what it computes with is in rope_parameters.
_WRITTEN_UNASKED = {"partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class ExpertsConfig:
    """The feed-forward part of a mixture of experts; every layer has it.

    Args:
        num_experts_per_tok: experts that each token goes to, the shared one not counted.
        moe_intermediate_size, shared_expert_intermediate_size: inner width of an expert and of the shared one.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int

    def __post_init__(self) -> None:
        for name in _EXPERT_SIZES:
            check_whole(_WHAT, name, getattr(self, name))
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"config: num_experts_per_tok {self.num_experts_per_tok} is more than num_experts {self.num_experts}; "
                "correct one"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one hybrid text model.

    Args:
        intermediate_size: inner width of the dense feed-forward part, None if there are experts.
        experts: the mixture of experts in its place, or None.
        quantization: how the checkpoint stores its weights, if not as plain numbers.
        layer_types: mixer of each layer, `linear_attention` (Gated DeltaNet) or `full_attention`.
        rotary_dim: leading dimensions of a head that rotate (head_dim × partial_rotary_factor).
        output_gate: activation of the delta layers' z gate.
        eos_token_ids: the config's own stop ids, possibly empty (`generation_config.json` may name more).
        max_position_embeddings: the context length the checkpoint states, or None.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    layer_types: tuple[LayerType, ...]
    rms_norm_eps: float
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    output_gate: OutputGate
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    max_position_embeddings: int | None = None
    experts: ExpertsConfig | None = None
    quantization: BlockFP8 | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_whole(_WHAT, name, getattr(self, name))
        if (self.intermediate_size is None) == (self.experts is None):
            raise ValueError(
                f"config: a layer has either an MLP or experts, got intermediate_size {self.intermediate_size} and "
                f"experts {self.experts}; give one"
            )
        if self.intermediate_size is not None:
            check_whole(_WHAT, "intermediate_size", self.intermediate_size)
        check_whole(_WHAT, "num_attention_heads * head_dim", self.num_attention_heads * self.head_dim)
        check_whole(_WHAT, "linear_num_key_heads * linear_key_head_dim", self.key_dim)
        check_whole(_WHAT, "linear_num_value_heads * linear_value_head_dim", self.value_dim)
        if not self.layer_types:
            raise ValueError("config: layer_types is empty; a model has at least one layer")
        check_whole(_WHAT, "num_hidden_layers", self.num_hidden_layers, most=MOST_LAYERS)
        for kind in self.layer_types:
            if kind not in get_args(LayerType):
                raise ValueError(f"config: layer_types names {shown(kind)}; known are {', '.join(get_args(LayerType))}")
        for heads, groups in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, heads) % getattr(self, groups):
                raise ValueError(
                    f"config: {heads} {getattr(self, heads)} is no multiple of {groups} {getattr(self, groups)}"
                )
        check_real(_WHAT, "rope_theta", self.rope_theta, 1, 1e30)
        check_real(_WHAT, "rms_norm_eps", self.rms_norm_eps, 0, 1)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"config: rotary dimension {self.rotary_dim} must be even and at most head_dim {self.head_dim}"
            )
        if self.max_position_embeddings is not None:
            check_whole(_WHAT, "max_position_embeddings", self.max_position_embeddings, most=_MOST_POSITIONS)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def key_dim(self) -> int:
        """Width of all delta keys of a token (and of all its queries)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all delta values of a token."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_folder(cls, path: str | Path) -> "ModelConfig":
        """Reads `config.json` of a checkpoint folder.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a config this model implements (file and key are named).
        """
        return read_config(path, cls.from_dict)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads a parsed config, its text part nested under `text_config` or flat.

        Raises:
            ValueError: a key is missing, null, contradictory or asks for arithmetic not implemented here.
        """
        root = Stated(_WHAT, raw)
        text = root if "text_config" not in raw else Stated(_WHAT, _text_config(raw))
        sparse = check_supported(root, text, _TEXT_KEYS)
        rope = text.inner("rope_parameters")
        rope.refuse_scaled_rope()
        head_dim = text.need("head_dim", int)
        return cls(
            **{name: text.need(name, int) for name in _COPIED_SIZES},
            intermediate_size=None if sparse else text.need("intermediate_size", int),
            experts=ExpertsConfig(**{name: text.need(name, int) for name in _EXPERT_SIZES}) if sparse else None,
            layer_types=_layer_types(text),
            rms_norm_eps=text.need("rms_norm_eps", float),
            rope_theta=_rotary(text, rope, "rope_theta"),
            rotary_dim=_rotary_dim(head_dim, _rotary(text, rope, "partial_rotary_factor")),
            output_gate=_output_gate(text),
            tie_word_embeddings=_tied(root, text),
            eos_token_ids=token_ids(text.table.get("eos_token_id", raw.get("eos_token_id")), "config: eos_token_id"),
            max_position_embeddings=text.maybe("max_position_embeddings", int),
            quantization=block_fp8(root, text),
        )


_COPIED_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_SIZES = (*_COPIED_SIZES, "rotary_dim")
_EXPERT_SIZES = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


# What belongs to the text part, and must not be contradicted where the root states it too.
_TEXT_KEYS = (
    *_COPIED_SIZES,
    *_EXPERT_SIZES,
    "intermediate_size",
    "num_hidden_layers",
    "layer_types",
    "full_attention_interval",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "output_gate_type",
    "max_position_embeddings",
)


def token_ids(value: object, what: str) -> tuple[int, ...]:
    """Token ids stated as one int, a list of ints, or null; ValueError begins with `what` they are."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool):
            raise ValueError(f"{what} must be an integer, a list of integers or null, got {shown(value)}")
    return tuple(ids)


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    text = raw["text_config"]
    if not isinstance(text, Mapping):
        raise ValueError(f"config: text_config must be an object, got {type(text).__name__}")
    return text


def _rotary(text: Stated, rope: Stated, key: str) -> float:
    """A rotary parameter, stated in `rope_parameters`, flat beside it, or with one value in both places."""
    nested, flat = rope.maybe(key, float), text.maybe(key, float)
    if nested is not None and flat not in (None, nested, _WRITTEN_UNASKED.get(key)):
        raise text.error(f"{key} is {flat!r}, but {nested!r} in rope_parameters; state it there alone")
    return text.need(key, float) if nested is None else nested


def _rotary_dim(head_dim: int, factor: float) -> int:
    check_whole(_WHAT, "head_dim", head_dim)
    exact = head_dim * factor
    whole = round(exact) if math.isfinite(exact) else 0
    if not (2 <= whole <= head_dim and whole % 2 == 0 and math.isclose(exact, whole, rel_tol=1e-9)):
        raise ValueError(
            f"config: rotary dimension {exact:g}, which is partial_rotary_factor {factor!r} of head_dim {head_dim}, "
            f"must be an even integer from 2 to {head_dim}; correct one"
        )
    return whole


def _layer_types(text: Stated) -> tuple[LayerType, ...]:
    count = text.need("num_hidden_layers", int)
    check_whole(_WHAT, "num_hidden_layers", count, most=MOST_LAYERS)
    types = text.need("layer_types", list)
    if len(types) != count:
        raise text.error(f"layer_types has {len(types)} entries, num_hidden_layers says {count}; correct one")
    interval = text.maybe("full_attention_interval", int)
    if interval is not None:
        check_whole(_WHAT, "full_attention_interval", interval)
        for i, kind in enumerate(types):
            if (kind == "full_attention") != ((i + 1) % interval == 0):
                raise text.error(
                    f"layer_types[{i}] {shown(kind)} contradicts full_attention_interval {interval}; "
                    "correct one, or drop the interval"
                )
    return tuple(types)


def _output_gate(text: Stated) -> OutputGate:
    name = text.maybe("output_gate_type", str)
    if name is None:
        return "silu"
    if name not in _OUTPUT_GATES:
        raise text.error(f"output_gate_type {shown(name)} is not supported; known are {', '.join(_OUTPUT_GATES)}")
    return _OUTPUT_GATES[name]


def _tied(root: Stated, text: Stated) -> bool:
    """The tie flag stands at the root, in the text part, or in both; both must agree."""
    key = "tie_word_embeddings"
    outer, inner = root.maybe(key, bool), text.maybe(key, bool)
    if outer is not None and inner is not None and outer != inner:
        raise root.error(f"{key} is {outer} at the root, but {inner} in text_config; state one value")
    return root.need(key, bool) if inner is None else inner
