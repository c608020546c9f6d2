"""What a checkpoint's `config.json` says about a Qwen3.5/3.6/3.8 dense hybrid, checked and frozen.

Architecture facts have no defaults: a missing key is an error that names it, since a silent default
yields a model that runs and is wrong.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

LayerType = Literal["linear_attention", "full_attention"]
OutputGate = Literal["silu", "sigmoid"]

_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
# Published names of the activation on the delta layers' z gate; absent means silu.
_OUTPUT_GATES: dict[str, OutputGate] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
# Keys that would change the arithmetic if set to anything else.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attn_output_gate": (True, None),
    "attention_bias": (False, None),
    "rope_scaling": (None,),
    "num_experts": (0, None),
}

T = TypeVar("T")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one dense hybrid text model.

    Args:
        layer_types: mixer of each layer, `linear_attention` (Gated DeltaNet) or `full_attention`.
        rotary_dim: leading dimensions of a head that rotate (head_dim × partial_rotary_factor).
        output_gate: activation of the delta layers' z gate.
        eos_token_ids: the config's own stop ids, possibly empty (`generation_config.json` may name more).
        max_position_embeddings: the context length the checkpoint states, or None.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
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

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config: {name} must be a positive integer, got {value!r}")
        if not self.layer_types:
            raise ValueError("config: layer_types is empty; a model has at least one layer")
        for kind in self.layer_types:
            if kind not in get_args(LayerType):
                raise ValueError(f"config: layer_types names {kind!r}; known are {', '.join(get_args(LayerType))}")
        for heads, groups in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, heads) % getattr(self, groups):
                raise ValueError(
                    f"config: {heads} {getattr(self, heads)} is no multiple of {groups} {getattr(self, groups)}"
                )
        if not self.rope_theta > 0:
            raise ValueError(f"config: rope_theta must be positive, got {self.rope_theta!r}")
        if not self.rms_norm_eps >= 0:
            raise ValueError(f"config: rms_norm_eps must not be negative, got {self.rms_norm_eps!r}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"config: rotary dimension {self.rotary_dim} must be even and at most head_dim {self.head_dim}"
            )

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
            ValueError: it is not a config this model implements (the key is named).
        """
        return cls.from_dict(read_config(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads a parsed config, its text part nested under `text_config` or flat.

        Raises:
            ValueError: a key is missing, null, contradictory or asks for arithmetic not implemented here.
        """
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ValueError(f"config: text_config must be an object, got {type(text).__name__}")
        _check_supported(raw, text)
        rope = _rope(text)
        return cls(
            **{name: _need(text, name, int) for name in _COPIED_SIZES},
            layer_types=_layer_types(text),
            rms_norm_eps=_need(text, "rms_norm_eps", float),
            rope_theta=_need(rope, "rope_theta", float),
            rotary_dim=_rotary_dim(_need(text, "head_dim", int), _need(rope, "partial_rotary_factor", float)),
            output_gate=_output_gate(text),
            tie_word_embeddings=_tied(raw, text),
            eos_token_ids=token_ids(text.get("eos_token_id", raw.get("eos_token_id")), "eos_token_id"),
            max_position_embeddings=text.get("max_position_embeddings"),
        )


_COPIED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
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


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a folder; ValueError names the file if it is no JSON object."""
    file = Path(path) / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(raw).__name__}")
    return raw


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """Token ids that a config states as one int, a list of ints, or null."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool):
            raise ValueError(f"config: {key} must be an integer, a list of integers or null, got {value!r}")
    return tuple(ids)


def _need(table: Mapping[str, Any], key: str, kind: type[T]) -> T:
    value = table.get(key)
    if value is None:
        raise ValueError(f"config: {key} is missing or null; it has no safe default, so state it in config.json")
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"config: {key} must be of type {kind.__name__}, got {value!r}")
    return kind(value)  # type: ignore[call-arg]


def _check_supported(raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    model_type = text.get("model_type", raw.get("model_type"))
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"config: model_type {model_type!r} is not supported; supported are {', '.join(_MODEL_TYPES)}")
    for key, accepted in _REQUIRED_VALUES.items():
        if key in text and text[key] not in accepted:
            raise ValueError(f"config: {key} {text[key]!r} is not supported; this model implements {accepted[0]!r}")
    if any(table.get("quantization_config") is not None for table in (raw, text)):
        raise ValueError(
            "config: quantization_config is set; quantised checkpoints are not supported, use the BF16 one"
        )


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters: those nested under `rope_parameters` win over flat ones."""
    nested = text.get("rope_parameters") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"config: rope_parameters must be an object, got {nested!r}")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config: rope_type {kind!r} is not supported; this model implements 'default'")
    flat = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if text.get(key) is not None}
    return flat | {key: value for key, value in nested.items() if value is not None}


def _rotary_dim(head_dim: int, factor: float) -> int:
    return int(head_dim * factor)


def _layer_types(text: Mapping[str, Any]) -> tuple[LayerType, ...]:
    count = _need(text, "num_hidden_layers", int)
    types = text.get("layer_types")
    if not isinstance(types, list | tuple):
        raise ValueError("config: layer_types is missing; state the mixer of every layer in config.json")
    if len(types) != count:
        raise ValueError(f"config: layer_types has {len(types)} entries, num_hidden_layers says {count}")
    interval = text.get("full_attention_interval")
    if interval is not None:
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"config: full_attention_interval must be a positive integer, got {interval!r}")
        for i, kind in enumerate(types):
            if (kind == "full_attention") != ((i + 1) % interval == 0):
                raise ValueError(
                    f"config: layer_types[{i}] {kind!r} contradicts full_attention_interval {interval}; "
                    "correct one, or drop the interval"
                )
    return tuple(types)


def _output_gate(text: Mapping[str, Any]) -> OutputGate:
    name = text.get("output_gate_type")
    if name is None:
        return "silu"
    if name not in _OUTPUT_GATES:
        raise ValueError(f"config: output_gate_type {name!r} is not supported; known are {', '.join(_OUTPUT_GATES)}")
    return _OUTPUT_GATES[name]


def _tied(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """The tie flag stands at the root, in the text part, or in both; both must agree."""
    key = "tie_word_embeddings"
    flags = {_need(table, key, bool) for table in (raw, text) if table.get(key) is not None}
    if len(flags) != 1:
        found = "differs between the root and text_config" if flags else "is missing"
        raise ValueError(f"config: {key} {found}; state one value")
    return flags.pop()
