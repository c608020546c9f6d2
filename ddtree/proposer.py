"""What the loop asks of whatever guesses ahead of the target."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from qwen_gdn.checked import checked_methods
from qwen_gdn.decode import HybridModel
from qwen_gdn.model import LayerId, checked_layers

from .contexts import RowCount, check_crop
from .scores import Scores


class Proposer(Protocol):
    """Anything that guesses what the target will write next. Bad guesses cost time, never correctness."""

    @property
    def layers(self) -> Sequence[LayerId]:
        """Target layers it reads, in the order wanted: id L is the output of layer L.

        `"embedding"` is the embedding of the token itself, `"final"` the state after the final norm.
        """

    def bind(self, target: HybridModel) -> None:
        """Meets the target, once per generation: checks the pairing and keeps what it needs of it."""

    def reset(self) -> None:
        """Forgets all rows."""

    def observe(self, features: Tensor) -> None:
        """Receives [1, T, len(layers) · D] of newly committed tokens; every committed row comes exactly once."""

    def propose(self, root: int) -> Tensor | Scores:
        """Draft logits [L, vocab] of independent positions after `root`, or `Scores`; L = 0 proposes nothing."""


class NoDrafts:
    """Proposes nothing: plain decoding as a case of the loop. Of the rows it observes it keeps their number."""

    layers: Sequence[LayerId] = ()
    context_length = 0
    crop_floor = 0

    def bind(self, target: HybridModel) -> None:
        self._nothing = torch.empty(0, target.config.vocab_size)

    def reset(self) -> None:
        self.context_length = 0

    def observe(self, features: Tensor) -> None:
        self.context_length += features.shape[1]

    def propose(self, root: int) -> Tensor:
        return self._nothing

    def crop(self, length: int) -> None:
        check_crop(length, 0, self.context_length)
        self.context_length = length

    def snapshot(self) -> RowCount:
        return RowCount(self.context_length)

    def restore(self, kept: RowCount) -> None:
        self.context_length = kept.length


def checked_proposer(what: str, drafter: object) -> None:
    """Raises ValueError unless this has a proposer's methods."""
    checked_methods(what, drafter, "bind", "reset", "observe", "propose")


def bound_layers(drafter: Proposer, target: HybridModel) -> tuple[LayerId, ...]:
    """Binds a proposer to the target; the layers that it reads, ValueError if there are no such layers."""
    checked_proposer("drafter: a proposer", drafter)
    drafter.bind(target)
    return checked_layers(drafter.layers, target.config.num_hidden_layers, "drafter: layers")
