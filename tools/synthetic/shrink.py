"""A published config with fewer layers or smaller sizes, consistent in itself."""

import copy
from collections.abc import Mapping
from typing import Any

from ddtree import DFlashConfig, drafters
from qwen_gdn import ModelConfig


def is_drafter(raw: Mapping[str, Any]) -> bool:
    return raw.get("architectures") in [[name] for name in drafters.ARCHITECTURES]


def read(raw: Mapping[str, Any]) -> ModelConfig | DFlashConfig:
    """The config as it is read; ValueError if it is none."""
    return drafters.from_dict(raw) if is_drafter(raw) else ModelConfig.from_dict(raw)


def shrunk(
    raw: Mapping[str, Any], layers: int | None, target_layers: int | None, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """The config with its first `layers` and other sizes.

    Args:
        target_layers: depth of the target that a drafter reads; its ids become the first ones.
        sizes: values of keys that the config has.

    Raises:
        ValueError: the config is not one that is read here, has not a key, or the option is for the other kind.
    """
    read(raw)
    made: dict[str, Any] = copy.deepcopy(dict(raw))
    text: dict[str, Any] = made.get("text_config", made)
    drafter = is_drafter(raw)
    if target_layers is not None and not drafter:
        raise ValueError("--target-layers is for a drafter's config, and this is a target's; use --layers")
    for key, value in sizes.items():
        if key not in text:
            raise ValueError(f"--set {key}={value}: the config has no {key}, so nothing would change; correct the key")
        text[key] = value
    if layers is not None:
        _keep_layers(text, layers)
    if target_layers is not None:
        _read_first(made, target_layers)
    _inside_vocabulary(made, text, drafter)
    return made


def _keep_layers(text: dict[str, Any], layers: int) -> None:
    types = text.get("layer_types")
    if not isinstance(types, list) or layers > len(types):
        raise ValueError(f"--layers {layers}: the config has {len(types or [])} layer_types; ask for no more")
    text |= {"layer_types": types[:layers], "num_hidden_layers": layers}
    if "max_window_layers" in text:
        text["max_window_layers"] = min(text["max_window_layers"], layers)


def _read_first(made: dict[str, Any], target_layers: int) -> None:
    """The last layer's output is never read, so as many ids as there are, but one."""
    holder = made.get("dflash_config") or made
    count = len(holder["target_layer_ids"])
    holder["target_layer_ids"] = list(range(min(count, target_layers - 1)))
    made["num_target_layers"] = target_layers


def _inside_vocabulary(made: dict[str, Any], text: dict[str, Any], drafter: bool) -> None:
    """Moves token ids beyond the vocabulary to its end: a mask's last but one, others' last."""
    size = text["vocab_size"]
    for table in (made, text, made.get("dflash_config") or {}):
        for key, value in table.items():
            if key.endswith("_token_id") and isinstance(value, int) and value >= size:
                table[key] = size - 2 if key == "mask_token_id" else size - 1
            elif key.endswith("_token_id") and isinstance(value, list):
                table[key] = sorted({min(token, size - 1) for token in value})
