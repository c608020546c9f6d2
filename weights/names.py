"""From names in a checkpoint to names of parameters: a prefix and an explicit list of what is not text.

Names only. Nothing is decided by substrings, and a name that no rule covers is an error.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

# Published multimodal layout, and text-only exports.
TARGET_PREFIXES = ("model.language_model.", "model.")
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"

MTP_PREFIX = "mtp."

# What the model itself does not use: the vision tower, the multi-token-prediction module, recomputed buffers.
_TARGET_SKIPPED_PREFIXES = ("model.visual.", "visual.", MTP_PREFIX)
_SKIPPED_SUFFIX = "rotary_emb.inv_freq"
SCALES = "_scale_inv"
_QUANTISED_SUFFIXES = (SCALES, ".weight_scale", ".input_scale", ".qweight", ".qzeros", ".scales", ".g_idx")

# Kept in float32 at least, whatever dtype is asked: the decay and the gated norm are computed there.
_FLOAT32_SUFFIXES = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")

Skip = Callable[[str], str | None]


class Plan(NamedTuple):
    """How a checkpoint's tensors fill a model.

    Attributes:
        sources: parameter name -> tensor name.
        doubled: parameter name -> all tensor names, for those that several tensors would fill.
        unknown: tensors that no rule covers.
        missing: parameters that no tensor fills.
        scales: tensor name -> name of the scales that are stored beside it.
        tied_head: tensor names of a stored head and of the embedding it must equal, or None.
        skipped: rule -> number of tensors that it left out.
    """

    sources: dict[str, str]
    doubled: dict[str, list[str]]
    unknown: list[str]
    missing: list[str]
    scales: dict[str, str]
    tied_head: tuple[str, str] | None
    skipped: Counter[str]


def skip_in_target(name: str) -> str | None:
    """The rule by which a target does without this tensor, or None if it is wanted."""
    for prefix in _TARGET_SKIPPED_PREFIXES:
        if name.startswith(prefix):
            return prefix + "*"
    return skip_in_drafter(name)


def skip_in_drafter(name: str) -> str | None:
    """The same for a drafter, which ships nothing but its own layers."""
    return "*." + _SKIPPED_SUFFIX if ("." + name).endswith("." + _SKIPPED_SUFFIX) else None


def skip_in_mtp(name: str) -> str | None:
    """The same for a target's MTP module, which leaves the target itself to others."""
    return skip_in_drafter(name) if name.startswith(MTP_PREFIX) else f"all but {MTP_PREFIX}*"


def mtp_parameter(name: str) -> str | None:
    """The parameter of an MTP module that a target's tensor fills, or None if it is not the module's."""
    return name.removeprefix(MTP_PREFIX) if name.startswith(MTP_PREFIX) else None


def target_parameter(name: str) -> str | None:
    """The parameter that a target's tensor fills, or None if its name follows no known layout."""
    if name == HEAD:
        return HEAD
    for prefix in TARGET_PREFIXES:
        if name.startswith(prefix):
            parameter = name.removeprefix(prefix)
            return None if parameter == HEAD else parameter
    return None


def is_quantised(name: str) -> bool:
    """Whether the name is one that quantised checkpoints add beside or in place of a weight."""
    return name.endswith(_QUANTISED_SUFFIXES)


def needs_float32(parameter: str) -> bool:
    """Whether the parameter is kept in float32 (float64 in a float64 model) whatever dtype is asked."""
    return parameter.endswith(_FLOAT32_SUFFIXES)


def plan(stored: Iterable[str], parameters: Collection[str], skip: Skip, rename: Callable[[str], str | None]) -> Plan:
    """Assigns stored tensors to parameters; decides nothing about shapes or values."""
    skipped: Counter[str] = Counter()
    fills: dict[str, list[str]] = {}
    unknown = []
    scales: dict[str, str] = {}
    for name in stored:
        rule = skip(name)
        parameter = rename(name)
        if rule is not None:
            skipped[rule] += 1
        elif parameter is not None and parameter.removesuffix(SCALES) in parameters and name.endswith(SCALES):
            scales[name.removesuffix(SCALES)] = name
        elif parameter is not None and (parameter in parameters or parameter == HEAD):
            fills.setdefault(parameter, []).append(name)
        else:
            unknown.append(name)
    tied_head = _tied_head(fills, parameters, unknown)
    if tied_head is not None:
        skipped[f"{HEAD} of a tied model"] = 1
    return Plan(
        sources={parameter: names[0] for parameter, names in fills.items()},
        doubled={parameter: names for parameter, names in fills.items() if len(names) > 1},
        unknown=unknown,
        missing=[name for name in parameters if name not in fills],
        scales=scales,
        tied_head=tied_head,
        skipped=skipped,
    )


def _tied_head(fills: dict[str, list[str]], parameters: Collection[str], unknown: list[str]) -> tuple[str, str] | None:
    """Takes a stored head out of `fills` where the model has none of its own."""
    if HEAD in parameters or HEAD not in fills:
        return None
    head = fills.pop(HEAD)[0]
    if EMBEDDING in fills:
        return head, fills[EMBEDDING][0]
    unknown.append(head)
    return None
