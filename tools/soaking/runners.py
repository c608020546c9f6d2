"""The models under test and the one they are held against, all of the same seeded weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from tiny import EXPERTS, PATTERN, tiny_model

import qwen_gdn.program_set
from qwen_gdn import QwenGDN
from qwen_gdn.decode import HybridModel
from qwen_gdn.engine import Engine

KINDS = ("eager", "programs", "compiled")
"""The model itself; an `Engine` whose programs are called as they stand; an `Engine` that compiles them."""

MODELS: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SIZES, CHUNKS = (8, 32), (4, 24)  # of an engine's programs


def new_model(name: str, dtype: str) -> QwenGDN:
    """Three delta layers and one of attention; the weights are always the same."""
    return tiny_model(dtype=DTYPES[dtype], wild=2.0, layer_types=list(PATTERN), **MODELS[name])


def new_runner(kind: str, model: QwenGDN) -> HybridModel:
    """What runs the operations."""
    return model if kind == "eager" else Engine(model, sizes=SIZES, chunks=CHUNKS)


@contextmanager
def compiling(kind: str) -> Iterator[None]:
    """While open, programs are compiled only if the kind says so."""
    if kind == "compiled":
        yield
        return
    with patch.object(qwen_gdn.program_set, "compiled", lambda function: function):
        yield
