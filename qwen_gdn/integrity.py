"""Whether the layer caches of one hybrid cache belong together. It reads, and repairs nothing."""

from collections.abc import Iterable, Sequence

import torch

from .checked import NonFiniteError
from .layer_cache import DeltaCache, KVCache, LayerCache
from .norms import at_least_float32


def check_layers(layers: Sequence[LayerCache], capacity: int, lengths: Sequence[int], logged: int) -> None:
    """Raises ValueError at the first layer that is out of step or holds numbers that are not finite.

    Args:
        lengths: number of committed tokens of each row of the batch, and so of rows of keys and values that count.
        logged: number of tokens that every rollback log must hold.
    """
    check_agreement(layers, capacity, logged)
    deltas = [(i, layer) for i, layer in enumerate(layers) if isinstance(layer, DeltaCache)]
    kv = [(i, t) for i, layer in enumerate(layers) if isinstance(layer, KVCache) for t in layer.tensors()]
    exact = [(i, t) for i, layer in deltas for t in layer.exact_held()]
    columns = [(i, t) for i, layer in deltas for t in layer.columns_held()]
    rows = [(i, t[b, :, :length]) for i, t in kv for b, length in enumerate(lengths)]
    for what, held in (("state or factors", exact), ("convolution columns", columns), ("keys or values", rows)):
        for i, t in held:
            if not bool(t.isfinite().all()):
                raise NonFiniteError(
                    f"cache: the {what} of layer {i} are not finite; crop(0) and feed the tokens again"
                )


def check_agreement(layers: Sequence[LayerCache], capacity: int, logged: int) -> None:
    """Raises ValueError at the first layer that is out of step; it names the layer and both values. Reads no number."""
    every = [(i, t) for i, layer in enumerate(layers) for t in layer.tensors()]
    kv = [(i, t) for i, layer in enumerate(layers) if isinstance(layer, KVCache) for t in layer.tensors()]
    deltas = [(i, layer) for i, layer in enumerate(layers) if isinstance(layer, DeltaCache)]
    columns = [(i, t) for i, layer in deltas for t in layer.columns_held()]
    exact = [(i, t) for i, layer in deltas for t in layer.exact_held()]
    dtype = (kv + columns)[0][1].dtype
    _agree("batch", ((i, t.shape[0]) for i, t in every), every[0][1].shape[0])
    _agree("device", ((i, t.device) for i, t in every), every[0][1].device)
    _agree("capacity", ((i, t.shape[2]) for i, t in kv), capacity)
    _agree("dtype", ((i, t.dtype) for i, t in kv + columns), dtype)
    _agree("dtype of the state", ((i, t.dtype) for i, t in exact), at_least_float32(torch.empty(0, dtype=dtype)).dtype)
    _agree("length", ((i, layer.log.since.columns.shape[1]) for i, layer in deltas if layer.log), logged)


def _agree(what: str, values: Iterable[tuple[int, object]], wanted: object) -> None:
    for i, value in values:
        if value != wanted:
            raise ValueError(f"cache: layers disagree in {what}: layer {i} has {value}, it should be {wanted}")
