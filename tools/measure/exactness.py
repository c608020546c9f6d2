"""Whether two outputs of one model are the same, and if not, whether rounding explains it.

At the first difference both outputs share their context, so the same weights in float64 tell how far apart the two
tokens really are. Kernels of different shapes round differently; only a near-tie may go either way.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qwen_gdn import QwenGDN
from tools.measure.sampled import GREEDY, Sampling

# The widest gap, as a share of the logit scale, that rounding may decide. A bfloat16 logit is rounded to 1/256 of
# itself, and what the layers before it add is a small multiple of that.
TIES = {torch.float64: 0.0, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class NearTie(NamedTuple):
    """A first difference that rounding explains.

    gap: |difference of the two tokens' float64 logits| / max |logit|; None for draws.
    """

    place: int
    tokens: tuple[int, int]
    gap: float | None


class DifferentOutputError(ValueError):
    """Two outputs that should be equal differ by more than rounding."""


class Referee:
    """Judges outputs of one model. The float64 copy that this takes is made at the first difference."""

    def __init__(self, model: QwenGDN) -> None:
        self._model = model
        self._exact: QwenGDN | None = None

    def judge(
        self,
        what: str,
        prompt: Sequence[int],
        ours: Sequence[int],
        plain: Sequence[int],
        sampling: Sampling = GREEDY,
    ) -> NearTie | None:
        """None for equal outputs, else the near-tie at which they part.

        Args:
            what: how to call this output in an error.
            sampling: how both were drawn.

        Raises:
            DifferentOutputError: the two tokens are further apart than rounding reaches, or an output ended early.
        """
        place = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)
        if place is None and len(ours) == len(plain):
            return None
        if place is None:
            raise DifferentOutputError(f"{what}: wrote {len(ours)} tokens where plain decoding writes {len(plain)}")
        tokens, limit = (ours[place], plain[place]), TIES[self._model.dtype]
        logits = self._logits([*prompt, *plain[:place]])
        scale = float(logits.abs().max())
        parted = f"{what}: token {place} is {tokens[0]}, plain decoding writes {tokens[1]}"
        if sampling.temperature:
            if not sampling.near(logits, place, limit * scale) >= {*tokens}:
                raise DifferentOutputError(
                    f"{parted}; in float64 they are not both drawn by numbers that differ from those of this place by "
                    f"as much as logits off by {limit:.0e} of their scale explain"
                )
            return NearTie(place, tokens, None)
        gap = float((logits[tokens[0]] - logits[tokens[1]]).abs()) / scale
        if gap > limit:
            raise DifferentOutputError(
                f"{parted}; their float64 gap is {gap:.1e} of the logit scale and {limit:.0e} is the most that "
                "rounding explains"
            )
        return NearTie(place, tokens, gap)

    @torch.no_grad()
    def _logits(self, context: list[int]) -> Tensor:
        """The logits [vocab] after these tokens, in float64."""
        if self._exact is None:
            self._exact = copy.deepcopy(self._model).double()
        return self._exact.logits(self._exact(torch.tensor([context])).final[0, -1])
