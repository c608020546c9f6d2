"""The transformers side of a comparison: the same weights in its model, read by it or handed over by name."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qwen_gdn import QwenGDN


def transformers() -> Any:
    """The package; RuntimeError says how to get it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise RuntimeError(
            f"this comparison needs transformers ({error}); install it with pip install -e '.[test]'"
        ) from None


def read(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
    """The model of a checkpoint folder, read by transformers itself.

    Raises:
        ValueError: it found no tensor for some parameter.
    """
    model, info = transformers().Qwen3_5ForCausalLM.from_pretrained(
        str(folder), dtype=dtype, output_loading_info=True, local_files_only=True
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"transformers finds no tensor in {folder} for {missing[0]} ({len(missing)} such parameters)")
    return model.to(device).eval().requires_grad_(False)


def twin(ours: QwenGDN, raw: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
    """A transformers model with the weights of ours by name, on the same device; same storage where dtypes agree.

    Args:
        raw: the parsed config of ours, its text part flat.
        dtype: of every weight, as transformers has it; None is ours.
    """
    library, family = transformers(), "Qwen3_5" if ours.config.experts is None else "Qwen3_5Moe"
    config = getattr(library, f"{family}TextConfig")(**raw)
    with torch.device("meta"):
        model = getattr(library, f"{family}ForCausalLM")(config)
    dtype = dtype or ours.dtype
    weights = {_their_name(name): weight.detach().to(dtype) for name, weight in ours.named_parameters()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, strict=True, assign=True)
    # Built on meta it has no frequencies, and casting a model would round them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(ours.device)
    return model.eval().requires_grad_(False)


def _their_name(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"
