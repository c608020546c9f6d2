"""What is left in memory once nothing is held.

Live bytes are those of the distinct storages behind all tensors that the garbage collector knows, but for those from
before the soak, which would only make it slow. Between two points
of a soak they differ by what is held at each, so they are taken when nothing is: every cache is dropped, and an engine,
which keeps memories for later caches and programs for each, is brought to one state by opening as many caches as it
keeps memories for, and running every program of each. What then is more than before has leaked.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from proposers import Reading
from torch import Tensor

from qwen_gdn import HybridCache, Topology
from qwen_gdn.decode import HybridModel
from qwen_gdn.engine import IDLE, Engine
from qwen_gdn.layer_cache import storage_bytes
from qwen_gdn.model import LayerId

from .runners import CHUNKS, SIZES
from .world import CAPACITY

CAPTURES: tuple[Sequence[LayerId], ...] = ((), Reading.layers)  # what operations read of a forward


@contextmanager
def counting() -> Iterator[None]:
    """While open, the collector leaves alone what was there before, and `live_bytes` does not see it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes(model: HybridModel) -> int:
    """Bytes of all tensors alive, with an engine settled. No cache may be held."""
    gc.collect()
    if isinstance(model, Engine):
        _settle(model)
        gc.collect()
    return storage_bytes(t for t in gc.get_objects() if issubclass(type(t), Tensor))


def _settle(engine: Engine) -> None:
    caches = [engine.new_cache(CAPACITY) for _ in range(IDLE)]  # takes all that are idle
    for cache in caches:
        for capture in CAPTURES:
            for _ in range(2):  # the programs of either bank
                _run_all(engine, cache, capture)


def _run_all(engine: Engine, cache: HybridCache, capture: Sequence[LayerId]) -> None:
    """Every program once; an odd number of commits, so that the next round begins at the other bank."""
    cache.crop(0)
    for count in (1, *CHUNKS):
        engine(torch.zeros(1, count, dtype=torch.int64), cache, capture=capture)
    for size in SIZES:
        for kept in (1, size):
            engine(torch.zeros(1, size, dtype=torch.int64), cache.branch(Topology.chain(size)), capture=capture)
            cache.commit(range(kept))
