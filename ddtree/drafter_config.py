"""What a DFlash drafter's `config.json` says, checked and frozen. First-generation DFlash only: DFlash 2 extends it
in `dflash2_config`, and other designs that grew out of it (DSpark) are refused by name.

Two published schemas are read: older configs keep block size and rotary base at the top level, newer ones
under `dflash_config` and `rope_parameters`. Nothing that shapes the drafts has a default: a wrong one costs
acceptance without any error.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from qwen_gdn.stated import MOST_LAYERS, Stated, check_real, check_whole, read_config, shown

AttentionType = Literal["sliding_attention", "full_attention"]

_WHAT = "drafter config"
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", *_HEADS)
_COPIED = (*_SIZES, "block_size", "mask_token_id")
_MOST_ROWS = 1 << 10  # of a block: the head's output for one takes a gigabyte
_MOST_WINDOW = 2**31 - 1
# Keys that would change the arithmetic if set to anything else, in configs that do not read them.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "model_type": ("qwen3", None),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "partial_rotary_factor": (1, None),
    "projector_type": ("dflash", None),
    "speculators_model_type": (None,),
    "markov_rank": (None,),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "conv_kernel_size": (None,),
    "conv_group_size": (None,),
    "output_multiplier": (1, None),
    "input_embedding_scale": (1, None),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
}


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

    architecture: ClassVar[str] = "DFlashDraftModel"
    kinds: ClassVar[Mapping[str, type]] = dict.fromkeys(_COPIED, int) | {"target_layer_ids": list}
    """Keys that may stand in either place, with their types."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_whole(_WHAT, name, getattr(self, name))
        check_whole(_WHAT, "num_attention_heads * head_dim", self.num_attention_heads * self.head_dim)
        check_whole(_WHAT, "target_layer_ids * hidden_size", max(1, len(self.target_layer_ids)) * self.hidden_size)
        if self.num_attention_heads % self.num_key_value_heads:
            raise _error(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise _error(f"head_dim must be even, for rotary pairs, got {self.head_dim}")
        check_real(_WHAT, "rope_theta", self.rope_theta, 1, 1e30)
        check_real(_WHAT, "rms_norm_eps", self.rms_norm_eps, 1e-30, 1)
        check_whole(_WHAT, "block_size", self.block_size, 2, _MOST_ROWS)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise _error(f"mask_token_id {shown(self.mask_token_id)} is outside the vocabulary of {self.vocab_size}")
        _check_layer_types(self.layer_types, self.sliding_window)
        if self.num_target_layers is not None:
            check_whole(_WHAT, "num_target_layers", self.num_target_layers, most=MOST_LAYERS)
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
            ValueError: it is not a config this drafter implements (file and key are named).
        """
        return read_config(path, cls.from_dict)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DFlashConfig":
        """Reads a parsed config; what `dflash_config` states wins over the top level.

        Raises:
            ValueError: a key is missing, null, contradictory or asks for arithmetic not implemented here.
        """
        root = Stated(_WHAT, raw)
        nested = root.inner("dflash_config")
        for part in (root, nested):
            _check_supported(part, cls.architecture, cls.kinds)
            # What loses must be well-formed all the same.
            for name, kind in cls.kinds.items():
                part.maybe(name, kind)
        table = Stated(_WHAT, dict(raw) | dict(nested.table))
        types = _layer_types(table)
        return cls(
            **{name: table.need(name, int) for name in _COPIED},
            rms_norm_eps=table.need("rms_norm_eps", float),
            rope_theta=_rope_theta(table),
            layer_types=types,
            sliding_window=table.need("sliding_window", int) if "sliding_attention" in types else None,
            is_causal=table.maybe("is_causal", bool),
            target_layer_ids=_layer_ids(table),
            num_target_layers=table.maybe("num_target_layers", int),
            **cls._further(table),
        )

    @classmethod
    def _further(cls, table: Stated) -> dict[str, Any]:
        """What a generation of drafters states beyond the first."""
        return {}


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
            raise _error(f"target_layer_ids names layer {shown(i)}; layers count from 0")
        if i in ids[:place]:
            raise _error(f"target_layer_ids names layer {i} twice in {list(ids)}")
        if count is not None and i >= count:
            raise _error(f"target_layer_ids names layer {shown(i)}, but the target has {count} layers")
        if count is not None and i == count - 1:
            raise _error(
                f"target_layer_ids names layer {i}, the last of the target's {count}: transformers' "
                f"hidden state there is post-norm, so what it means is ambiguous; name layers below {i}"
            )


def _error(message: str) -> ValueError:
    return ValueError(f"{_WHAT}: {message}")


def _check_layer_types(types: tuple[AttentionType, ...], window: int | None) -> None:
    if not types:
        raise _error("layer_types is empty; a drafter has at least one layer")
    check_whole(_WHAT, "num_hidden_layers", len(types), most=MOST_LAYERS)
    for kind in types:
        if kind not in get_args(AttentionType):
            raise _error(f"layer_types names {shown(kind)}; known are {', '.join(get_args(AttentionType))}")
    if "sliding_attention" in types:
        check_whole(_WHAT, "sliding_window", window, most=_MOST_WINDOW)


def _check_supported(table: Stated, architecture: str, read: Collection[str]) -> None:
    names = table.maybe("architectures", list) or [architecture]
    if names != [architecture]:
        raise _error(f"architectures {shown(names)} is not supported; supported is {architecture}")
    table.refuse_quantised()
    table.refuse_others({key: values for key, values in _NEUTRAL.items() if key not in read})


def _rope_theta(table: Stated) -> float:
    """The rotary base: what `rope_parameters` states wins over flat `rope_theta`. Neither place may scale."""
    nested = table.inner("rope_parameters")
    for part in (nested, table.inner("rope_scaling")):
        part.refuse_scaled_rope()
        part.refuse_others(_NEUTRAL)
    table.maybe("rope_theta", float)  # what loses must be a number all the same
    return Stated(_WHAT, dict(table.table) | dict(nested.table)).need("rope_theta", float)


def _layer_types(table: Stated) -> tuple[AttentionType, ...]:
    count = table.need("num_hidden_layers", int)
    check_whole(_WHAT, "num_hidden_layers", count, most=MOST_LAYERS)
    types, slides = table.maybe("layer_types", list), table.maybe("use_sliding_window", bool)
    if types is None and slides:
        raise _error("use_sliding_window is true but layer_types is missing; state the type of every layer")
    if types is None:
        types = ["full_attention"] * count
    if len(types) != count:
        raise _error(f"layer_types must list num_hidden_layers = {count} types, got {len(types)}; correct one")
    if "sliding_attention" in types and slides is False:
        raise _error("layer_types names sliding_attention but use_sliding_window is false; correct one")
    return tuple(types)


def _layer_ids(table: Stated) -> tuple[int, ...]:
    ids = table.maybe("target_layer_ids", list)
    if ids is None:
        raise _error("target_layer_ids is missing or null; it cannot be inferred, so state it in config.json")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise _error(f"target_layer_ids must be a list of integers, got {shown(ids)}")
    return tuple(ids)
