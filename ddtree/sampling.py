"""Samplers: callables that draw one token from each row of logits. Greedy decoding is one of them.

A sampler knows nothing of drafts: of a tree it sees rows of logits, and, if it has penalties, the tokens before each.
That is what keeps speculative output exact: the target's tokens are drawn the same way with and without a draft tree.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from qwen_gdn.checked import as_integer, shown
from qwen_gdn.decode import Sampler, check_peaks, check_shape, greedy
from qwen_gdn.norms import at_least_float32

from .penalties import Adjusted, Penalties
from .ranking import ranked
from .uniform import Numbers, Uniform

# Logits are divided by no less and no more than these, which keeps the quotient meaningful in float32:
# below, no two distinct logits are close enough to matter; above, no two are far enough apart.
COLDEST, HOTTEST = 1e-30, 1e30
FEW = 128  # the likeliest tokens among which a nucleus is looked for before a whole vocabulary is sorted
BLOCK = 512  # the most entries that one step of a draw sums at once


def make_sampler(
    temperature: float = 0.0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> Sampler:
    """A sampler [N, vocab] -> int64 [N]; the rows of a call are drawn independently.

    In `decode` and `generate` its random numbers belong to the places of the text, so nodes at one depth, of which a
    text takes one, share theirs: a seed writes one text whatever is drafted, but for ties at rounding level.

    In this order: `logit_bias` is added; `repetition_penalty`, then `frequency_penalty` and `presence_penalty` are
    applied; what results is divided by `temperature`, cut to the `top_k` likeliest tokens, renormalised, cut to the
    `top_p` nucleus, renormalised, and cut by `min_p`. The cuts order tokens by descending probability, equal ones by
    ascending id, and keep at least one. Bias and penalties act at temperature 0 too, and with `top_k` 1.

    Penalties depend on the tokens that precede each row: those of the history and, in a tree, of the node's own path.
    A sampler that has some is a `ContextSampler`; `decode` and `generate` tell it, and called on logits alone it
    raises. The prompt is all that a generation did not emit itself: `prompt_ids` and what the cache held before
    (`earlier_ids`), answers of earlier turns included.

    Args:
        temperature: 0 takes the likeliest token (the lowest id among equals), as does `top_k` 1. Nothing is then drawn
            at random, and the other cuts, which would keep that token, and the seed change nothing.
        top_k: how many tokens to keep, exactly; 0, or any number above the vocabulary, keeps all.
        top_p: a token is kept while the mass of those before it is below this (to rounding), so what is kept
            is the shortest run of likeliest tokens whose mass reaches `top_p`; 1 keeps all.
        min_p: a token is dropped if its probability is below this share of the likeliest one's; 0 drops none.
        presence_penalty: taken once from the logit of every token that this generation has emitted.
        frequency_penalty: taken from a token's logit as often as this generation has emitted it.
        repetition_penalty: divides positive logits of tokens that the prompt or this generation holds, and
            multiplies the others of them; 1 does nothing, less than 1 favours repetition.
        logit_bias: what is added to a token's logit, by token id; -1e30 forbids a token.
        seed: of the sampler's own generator, torch's global one is never used; None asks the system for one.
        device: of that generator; None is the device of the first logits drawn from.

    Raises:
        ValueError: an argument is out of its range. The sampler itself raises it for logits that are not
            [N, vocab], for a row whose greatest logit is not finite (NaN, +inf, or nothing but -inf), and for a bias
            on a token outside the vocabulary, which `decode` and `generate` refuse at their call.
    """
    _check_cuts(temperature, top_k, top_p, min_p)
    penalties = _checked_penalties(repetition_penalty, frequency_penalty, presence_penalty)
    bias = _checked_bias(logit_bias)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64):
        raise ValueError(f"sampler: seed must be an int and lie in [-2^63, 2^64), got {shown(seed)}")
    likeliest = temperature == 0 or top_k == 1
    sampler = greedy if likeliest else Stochastic(temperature, top_k, top_p, min_p, Uniform(seed, device))
    return Adjusted(sampler, bias, penalties) if bias or penalties != Penalties() else sampler


def _check_cuts(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    if not (_is_number(temperature) and math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"sampler: temperature must be finite and at least 0, got {shown(temperature)}")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 0:
        raise ValueError(f"sampler: top_k must be an int of at least 0 (0 keeps every token), got {shown(top_k)}")
    if not (_is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"sampler: top_p must lie in (0, 1], got {shown(top_p)}")
    if not (_is_number(min_p) and 0 <= min_p <= 1):
        raise ValueError(f"sampler: min_p must lie in [0, 1], got {shown(min_p)}")


def _checked_penalties(repetition: float, frequency: float, presence: float) -> Penalties:
    if not (_is_number(repetition) and COLDEST <= repetition <= HOTTEST):
        raise ValueError(f"sampler: repetition_penalty must lie in [{COLDEST}, {HOTTEST}], got {shown(repetition)}")
    for name, penalty in (("frequency_penalty", frequency), ("presence_penalty", presence)):
        if not (_is_number(penalty) and abs(penalty) <= HOTTEST):
            raise ValueError(f"sampler: {name} must lie in [-{HOTTEST}, {HOTTEST}], got {shown(penalty)}")
    return Penalties(float(repetition), float(frequency), float(presence))


def _checked_bias(logit_bias: Mapping[int, float] | None) -> dict[int, float]:
    """The bias without entries of 0, which do nothing."""
    if not isinstance(logit_bias, Mapping | None):
        raise ValueError(f"sampler: logit_bias must map token ids to numbers, got {shown(logit_bias)}")
    for token, value in (logit_bias or {}).items():
        number = as_integer(token)
        if number is None or number < 0:
            raise ValueError(f"sampler: logit_bias must name token ids, ints of at least 0, got {shown(token)}")
        if not (_is_number(value) and abs(value) <= HOTTEST):
            raise ValueError(f"sampler: logit_bias must lie in [-{HOTTEST}, {HOTTEST}], got {shown(value)} at {token}")
    return {int(token): float(value) for token, value in (logit_bias or {}).items() if value}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class Stochastic:
    """Draws by temperature, top-k, top-p and min-p; made and documented by `make_sampler`.

    Probabilities are float32, or float64 for float64 logits. A row takes two uniform numbers a draw.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, min_p: float, uniform: Numbers) -> None:
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.min_p = min_p
        self.uniform = uniform

    def at(self, depths: Sequence[int]) -> "Stochastic":
        """See `PlacedSampler`."""
        return Stochastic(self.temperature, self.top_k, self.top_p, self.min_p, self.uniform.ahead(depths))

    def passed(self, count: int) -> None:
        """See `PlacedSampler`."""
        self.uniform.pass_by(count)

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [N, vocab] -> int64 [N] on the CPU."""
        check_shape(logits)
        values, names = logits.detach(), None
        if 0 < self.top_k < logits.shape[1]:
            values, names = ranked(values, self.top_k)
        weights = tempered(values, self.temperature)
        uniform = self.uniform(len(weights), weights.device)
        peaks = values.amax(-1, keepdim=True)
        drawn, short = self._draw(weights, names, uniform, FEW)
        # One transfer brings all, so that the host waits once; float64 holds every token id.
        tokens, tops, retry = torch.cat((drawn.double(), peaks.double(), short.double()), dim=1).cpu().unbind(1)
        check_peaks(tops.unsqueeze(1))
        if bool(retry.any()):
            tokens = self._draw(weights, names, uniform, weights.shape[1])[0].cpu().squeeze(1)
        return tokens.long()

    def _draw(self, weights: Tensor, names: Tensor | None, uniform: Tensor, few: int) -> tuple[Tensor, Tensor]:
        """Token ids [N, 1], and whether the `few` likeliest were too few to hold the nucleus, bool [N, 1]."""
        short = torch.zeros(len(weights), 1, dtype=torch.bool, device=weights.device)
        if self.top_p < 1:
            weights, places, short = nucleus(weights, self.top_p, few)
            names = places if names is None else names.gather(1, places)
        if self.min_p > 0:
            weights = likely(weights, self.min_p)
        drawn = draw(weights, uniform).unsqueeze(1)
        return drawn if names is None else names.gather(1, drawn), short

    def __repr__(self) -> str:
        settings = f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p}"
        return f"Stochastic({settings}, seed={self.uniform.seed})"


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) of each row, in float32 or the logits' float64.

    A row whose greatest logit is not finite gives no probabilities.
    """
    peaks = logits.amax(-1, keepdim=True)
    # The peak goes first: then the quotient is at most 0 and cannot overflow upwards.
    scaled = at_least_float32(logits) - at_least_float32(peaks)
    return scaled.div_(min(max(temperature, COLDEST), HOTTEST)).softmax(-1)


def nucleus(probabilities: Tensor, top_p: float, few: int) -> tuple[Tensor, Tensor, Tensor]:
    """The shortest run of likeliest entries whose mass reaches `top_p`, at least one.

    Args:
        probabilities: [N, width], each row of sum 1.
        few: how many of the likeliest entries to look at; all of them are sorted if that is the whole width.

    Returns:
        Weights [N, M] in descending order, 0 beyond the run, their columns [N, M], and whether the run is longer
        than what was looked at, bool [N, 1].
    """
    # Rounding must not decide a mass that equals top_p on paper (0.5 + 0.3 against 0.8): it counts as reached.
    enough = top_p - 8 * torch.finfo(probabilities.dtype).eps
    if few < probabilities.shape[1]:
        weights, columns = ranked(probabilities, few)
        short = weights.sum(-1, dtype=torch.float64, keepdim=True) < enough
    else:
        weights, columns = probabilities.sort(dim=-1, descending=True, stable=True)
        short = torch.zeros_like(weights[:, :1], dtype=torch.bool)
    cut = weights.cumsum(-1, dtype=torch.float64) - weights >= enough
    cut[:, 0] = False
    return weights.masked_fill(cut, 0), columns, short


def likely(weights: Tensor, min_p: float) -> Tensor:
    """The weights [N, width], 0 where they are below `min_p` of the row's greatest (to rounding)."""
    least = weights.amax(-1, keepdim=True) * (min_p * (1 - 8 * torch.finfo(weights.dtype).eps))
    return weights.masked_fill(weights < least, 0)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One column of each row, with probability proportional to its weight; int64 [N].

    Args:
        weights: [N, width], at least 0, a positive one in each row; they need not sum to 1.
        uniform: float64 [N, 2] in [0, 1).
    """
    # First a block of columns, then one of its columns: no running sum over a whole vocabulary.
    rows, width = weights.shape
    step = math.gcd(width, BLOCK)
    blocks = weights.reshape(rows, width // step, step)
    block = _invert(blocks.sum(-1), uniform[:, :1])
    inside = blocks[torch.arange(rows, device=block.device), block]
    return block * step + _invert(inside, uniform[:, 1:])


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first column whose cumulative weight exceeds the share `uniform` [N, 1] of the total."""
    total = weights.cumsum(-1, dtype=torch.float64)
    # A parallel scan may round equal sums apart. So a column of weight 0 is ruled out by name, and the share is
    # taken a little smaller, which keeps it below the sum at the last positive weight.
    exceeds = (total > uniform * (1 - 1e-12) * total[:, -1:]) & (weights > 0)
    return exceeds.byte().argmax(-1)
