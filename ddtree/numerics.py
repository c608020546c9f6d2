"""Generation that names the layer or stage where numbers stop being finite, for whoever hunts NaN and infinity."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from qwen_gdn.model import QwenGDN
from qwen_gdn.watched import Watched, watch

from .mtp import MTPDrafter
from .proposer import Proposer


@contextmanager
def debug_numerics(target: QwenGDN, drafter: Proposer) -> Iterator[Watched]:
    """While open, the target that it gives and the drafter raise `NonFiniteError` at the first number not finite.

    Give the watched target to `generate`, `stream`, `decode` or a `Session` in the target's place, and the drafter as
    it is. The error, a `ValueError`, names stage and module: `prefill of 9 tokens: model: layers.3.mlp.down_proj`,
    `drafter: layers.0.self_attn.k_proj`, or the layer of the cache that holds the number. Of a proposer that is no
    network of this package just what it puts out is looked at, when a tree is built of it.

    Outside of it target and drafter are as they were, and nothing is looked at.

    Raises:
        ValueError: the target is no `QwenGDN`; programs of an `Engine` cannot be watched.
    """
    watched, network = Watched(target), _network(drafter)
    with watch(network, "drafter") if network else nullcontext():
        yield watched


def _network(drafter: Proposer) -> nn.Module | None:
    if isinstance(drafter, MTPDrafter):
        return drafter.mtp
    return drafter if isinstance(drafter, nn.Module) else None
