"""How a text is drawn: greedily, or at a temperature by the numbers that a seed gives to its places.

A seed's numbers belong to places of a text and not to the nodes of trees, so that every mode draws the same text by
them, but for rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ddtree import make_sampler
from ddtree.sampling import Stochastic, draw, tempered
from qwen_gdn.decode import Sampler

SHIFTS = 33  # along each of the two numbers of a place, where it is asked what lies near them


class Sampling(NamedTuple):
    """Temperature 0 is greedy, and has no use for a seed."""

    temperature: float = 0.0
    seed: int = 0

    def sampler(self) -> Sampler:
        """A new one, at the beginning of a text."""
        return make_sampler(self.temperature, seed=self.seed)

    def near(self, logits: Tensor, place: int, error: float) -> set[int]:
        """What could be drawn at a place of the text if every logit, [vocab], were off by at most `error`.

        Then a share of the whole is off by at most error / (2 · temperature): its derivatives by the scaled logits sum
        to at most 1/2 in magnitude. So the numbers are moved by that much.
        """
        sampler = self.sampler()
        assert isinstance(sampler, Stochastic), "greedy texts are compared by their logits"
        reach = error / (2 * self.temperature)
        shifts = torch.linspace(-reach, reach, SHIFTS, dtype=torch.float64)
        numbers = sampler.uniform.ahead([place])(1, logits.device).cpu()
        numbers = (numbers + torch.cartesian_prod(shifts, shifts)).clamp(0, 1 - 1e-12)
        weights = tempered(logits[None].cpu(), self.temperature)
        return set(draw(weights.expand(len(numbers), -1), numbers).tolist())


GREEDY = Sampling()
