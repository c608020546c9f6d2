"""Qwen3.5/3.6/3.8 hybrid models (Gated DeltaNet + gated attention) in pure PyTorch, and their exact cache."""

from .cache import Branch, HybridCache
from .checked import NonFiniteError
from .config import ModelConfig
from .decode import Sampler, decode, greedy, prefill
from .delta_rule import Factors, delta_chunked, delta_commit, delta_recurrent, delta_tree
from .history import Context, ContextSampler, History, PlacedSampler
from .layer_cache import DeltaCache, KVCache
from .model import Hidden, QwenGDN
from .mtp import MTP
from .ragged import RaggedBranch, RaggedCache
from .topology import Topology
from .watched import Watched

__all__ = [
    "MTP",
    "Branch",
    "Context",
    "ContextSampler",
    "DeltaCache",
    "Factors",
    "Hidden",
    "History",
    "HybridCache",
    "KVCache",
    "ModelConfig",
    "NonFiniteError",
    "PlacedSampler",
    "QwenGDN",
    "RaggedBranch",
    "RaggedCache",
    "Sampler",
    "Topology",
    "Watched",
    "decode",
    "delta_chunked",
    "delta_commit",
    "delta_recurrent",
    "delta_tree",
    "greedy",
    "prefill",
]
