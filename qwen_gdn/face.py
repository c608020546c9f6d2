"""The part of a model's own face that stays the same however its forwards are run."""

import torch
from torch import Tensor

from .cache import HybridCache
from .config import ModelConfig
from .model import QwenGDN


class ModelFace:
    """Something that runs a model's forwards in its own way and is taken for the model elsewhere."""

    def __init__(self, model: QwenGDN) -> None:
        self.model = model

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [..., D] -> [..., vocab]."""
        return self.model.logits(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings: integers [...] -> [..., D]."""
        return self.model.embed(tokens)

    def new_cache(self, capacity: int, batch: int = 1, rollback: int = 0) -> HybridCache:
        """Empty memory, as `QwenGDN.new_cache` makes it."""
        return self.model.new_cache(capacity, batch, rollback)

    def check_memory(self, memory: object) -> None:
        """Raises ValueError if this is no cache or branch, or one of another architecture or dtype."""
        self.model.check_memory(memory)
