"""What a DFlash drafter's `config.json` says, checked and frozen. First-generation DFlash only: the designs
that grew out of it (DFlash 2, DSpark) are refused by name.

Two published schemas are read: older configs keep block size and rotary base at the top level, newer ones
under `dflash_config` and `rope_parameters`. Nothing that shapes the drafts has a default: a wrong one costs
acceptance without any error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from qwen_gdn.config import read_config

AttentionType = Literal["sliding_attention", "full_attention"]

_ARCHITECTURE = "DFlashDraftModel"
# Keys that would change the arithmetic if set to anything else.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "model_type": ("qwen3", None),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "projector_type": ("dflash", None),
    "speculators_model_type": (None,),
    "markov_rank": (None,),
    "selector_rank": (None,),
    "conv_kernel_size": (None,),
    "output_multiplier": (1, None),
    "input_embedding_scale": (1, None),
    "final_logit_softcapping": (None, 0),
    "quantization_config": (None,),
}

T = TypeVar("T")


@dataclass(frozen=True)
class DFlashConfig:
    """Architecture of one drafter; a value out of range, or at odds with another, is a ValueError naming it.

    Args:
        sliding_window: in sliding layers a row sees rows less than this far away; None if no layer slides.
        is_causal: whether a block row sees only rows up to itself, in every layer; None leaves that to the
            type of the layer (see `causal`).
        block_size: rows of a draft block, the root's included: `block_size - 1` positions are proposed.
        mask_token_id: the token that stands for a position to be predicted.
        target_layer_ids: target layers (0-based) whose outputs are read, in the order of concatenation.
        num_target_layers: layers of the target it was trained for, None if the config does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[AttentionType, ...]
    rms_norm_eps: float
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    sliding_window: int | None
    is_causal: bool | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise _error(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _error(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise _error(f"head_dim must be even, for rotary pairs, got {self.head_dim}")
        for name in ("rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0:
                raise _error(f"{name} must be positive, got {getattr(self, name)}")
        if self.block_size < 2:
            raise _error(f"block_size must be at least 2, the root and one draft, got {self.block_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise _error(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        _check_layer_types(self.layer_types, self.sliding_window)
        check_layer_ids(self.target_layer_ids, self.num_target_layers)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    def causal(self, kind: AttentionType) -> bool:
        """Whether layers of this type are causal inside the block: as stated, else just the sliding ones."""
        return kind == "sliding_attention" if self.is_causal is None else self.is_causal

    def window(self, kind: AttentionType) -> int | None:
        """The sliding window of layers of this type, None where they see everything."""
        return self.sliding_window if kind == "sliding_attention" else None

    @classmethod
    def from_folder(cls, path: str | Path) -> "DFlashConfig":
        """Reads `config.json` of a checkpoint folder.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a config this drafter implements (the key is named).
        """
        return cls.from_dict(read_config(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DFlashConfig":
        """Reads a parsed config; what `dflash_config` states wins over the top level.

        Raises:
            ValueError: a key is missing, null, contradictory or asks for arithmetic not implemented here.
        """
        table = dict(raw) | _nested(raw, "dflash_config")
        _check_supported(table)
        types = _layer_types(table)
        return cls(
            **{name: _need(table, name, int) for name in _COPIED},
            rms_norm_eps=_need(table, "rms_norm_eps", float),
            rope_theta=_rope_theta(table),
            layer_types=types,
            sliding_window=_need(table, "sliding_window", int) if "sliding_attention" in types else None,
            is_causal=_maybe(table, "is_causal", bool),
            target_layer_ids=_layer_ids(table),
            num_target_layers=_maybe(table, "num_target_layers", int),
        )


_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", *_HEADS)
_COPIED = (*_SIZES, "block_size", "mask_token_id")


def check_layer_ids(ids: tuple[int, ...], count: int | None) -> None:
    """Checks the target layers a drafter reads against a target of `count` layers (None: unknown).

    Raises:
        ValueError: the list is empty, or an id repeats, is negative, is no layer, or is the last layer, which
            has two readings: reference implementations take the state after the final norm in its place.
    """
    if not ids:
        raise _error("target_layer_ids is empty; a drafter reads at least one target layer")
    for place, i in enumerate(ids):
        if i < 0:
            raise _error(f"target_layer_ids names layer {i}; layers count from 0")
        if i in ids[:place]:
            raise _error(f"target_layer_ids names layer {i} twice in {list(ids)}")
        if count is not None and i >= count:
            raise _error(f"target_layer_ids names layer {i}, but the target has {count} layers")
        if count is not None and i == count - 1:
            raise _error(
                f"target_layer_ids names layer {i}, the last of the target's {count}: transformers' "
                f"hidden state there is post-norm, so what it means is ambiguous; name layers below {i}"
            )


def _error(message: str) -> ValueError:
    return ValueError(f"drafter config: {message}")


def _check_layer_types(types: tuple[AttentionType, ...], window: int | None) -> None:
    if not types:
        raise _error("layer_types is empty; a drafter has at least one layer")
    for kind in types:
        if kind not in get_args(AttentionType):
            raise _error(f"layer_types names {kind!r}; known are {', '.join(get_args(AttentionType))}")
    if "sliding_attention" in types and (window is None or window < 1):
        raise _error(f"sliding layers need a sliding_window of at least 1, got {window}")


def _nested(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What an optional nested object states; a null states nothing."""
    value = raw.get(key)
    if not isinstance(value, Mapping | None):
        raise _error(f"{key} must be an object, got {value!r}")
    return {name: stated for name, stated in (value or {}).items() if stated is not None}


def _need(table: Mapping[str, Any], key: str, kind: type[T]) -> T:
    value = _maybe(table, key, kind)
    if value is None:
        raise _error(f"{key} is missing or null; it has no safe default, so state it in config.json")
    return value


def _maybe(table: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    value = table.get(key)
    if value is None:
        return None
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise _error(f"{key} must be of type {kind.__name__}, got {value!r}")
    return kind(value)  # type: ignore[call-arg]


def _check_supported(table: Mapping[str, Any]) -> None:
    names = table.get("architectures") or [_ARCHITECTURE]
    if names != [_ARCHITECTURE]:
        raise _error(f"architectures {names!r} is not supported; supported is {_ARCHITECTURE}")
    for key, accepted in _NEUTRAL.items():
        if table.get(key) not in accepted:
            raise _error(f"{key} {table[key]!r} is not supported; {_ARCHITECTURE} has {accepted[0]!r} here")


def _rope_theta(table: Mapping[str, Any]) -> float:
    """The rotary base: what `rope_parameters` states wins over flat `rope_theta` and `rope_scaling`."""
    nested, flat = _nested(table, "rope_parameters"), _nested(table, "rope_scaling")
    kinds = [part[key] for part in (nested, flat) for key in ("rope_type", "type") if key in part]
    if kinds and kinds[0] != "default":
        raise _error(f"rope_type {kinds[0]!r} is not supported; this drafter implements 'default'")
    merged = dict(table) | nested
    if merged.get("partial_rotary_factor") not in (1, None):
        raise _error(f"partial_rotary_factor {merged['partial_rotary_factor']!r} is not supported; it must be 1")
    return _need(merged, "rope_theta", float)


def _layer_types(table: Mapping[str, Any]) -> tuple[AttentionType, ...]:
    count = _need(table, "num_hidden_layers", int)
    types, slides = table.get("layer_types"), _maybe(table, "use_sliding_window", bool)
    if types is None and slides:
        raise _error("use_sliding_window is true but layer_types is missing; state the type of every layer")
    if types is None:
        types = ["full_attention"] * count
    if not isinstance(types, list | tuple) or len(types) != count:
        raise _error(f"layer_types must list num_hidden_layers = {count} types, got {types!r}")
    if "sliding_attention" in types and slides is False:
        raise _error("layer_types names sliding_attention but use_sliding_window is false; correct one")
    return tuple(types)


def _layer_ids(table: Mapping[str, Any]) -> tuple[int, ...]:
    ids = table.get("target_layer_ids")
    if ids is None:
        raise _error("target_layer_ids is missing or null; it cannot be inferred, so state it in config.json")
    if not isinstance(ids, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise _error(f"target_layer_ids must be a list of integers, got {ids!r}")
    return tuple(ids)
