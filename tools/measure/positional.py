"""Sampling by numbers that belong to the places of a text, so that every mode writes the same text.

The library's sampler takes its numbers in the order of its draws: a tree draws at every node, so the same seed writes
other texts through other trees, all of the same law. Times of different texts say little of the modes. Here the token
at a place is drawn by numbers that the seed gives to that place, whatever node stands there. No two nodes of a path
share a place, so along any path draws are independent, and the text has the target's law as before.
"""

import torch
from torch import Tensor

from ddtree.sampling import draw, tempered
from qwen_gdn import Context, ContextSampler

SHIFTS = 33  # along each of the two numbers of a place, where it is asked what lies near them


class Positional(ContextSampler):
    """Draws from softmax(logits / temperature), the same token from the same logits at the same place.

    Args:
        temperature: above 0.
        seed: of the numbers.
        places: the most tokens that a generation emits.
    """

    def __init__(self, temperature: float, seed: int, places: int) -> None:
        self.temperature = temperature
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.numbers = torch.rand(places, 2, dtype=torch.float64, generator=generator)

    def __call__(self, logits: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None
        emitted = len(context.history.tokens) - context.history.prompt_length
        numbers = self.numbers[emitted + context.topology.depths]
        return draw(tempered(logits, self.temperature), numbers.to(logits.device)).cpu()

    def near(self, logits: Tensor, place: int, error: float) -> set[int]:
        """What could be drawn at a place if every logit, [vocab], were off by at most `error`.

        Then a share of the whole is off by at most error / (2 · temperature), for its derivative by the scaled logits
        is at most 1/4 each way; so the numbers are moved by that much.
        """
        reach = error / (2 * self.temperature)
        shifts = torch.linspace(-reach, reach, SHIFTS, dtype=torch.float64)
        numbers = (self.numbers[place] + torch.cartesian_prod(shifts, shifts)).clamp(0, 1 - 1e-12)
        weights = tempered(logits[None].cpu(), self.temperature)
        return set(draw(weights.expand(len(numbers), -1), numbers).tolist())
