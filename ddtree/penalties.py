"""Logits changed before a sampler draws from them: a bias on some tokens, penalties on those that came before."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qwen_gdn.decode import Sampler, check_shape
from qwen_gdn.history import Context, ContextSampler, PlacedSampler
from qwen_gdn.transfer import together

NO_IDS = torch.empty(0, dtype=torch.int64)


class Penalties(NamedTuple):
    """How much less likely a token gets by having come before; documented by `make_sampler`."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    def applied(self, logits: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        """Changed logits, all of one shape [N, M]: `seen` holds where a token came before, `counts` how often emitted.

        The formulas are those of CTRL (arXiv 1909.05858, for logits of either sign) and of the OpenAI API.
        """
        scaled = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        return torch.where(seen, scaled, logits) - self.frequency * counts - self.presence * counts.clamp(max=1)


class Tally(NamedTuple):
    """Tokens before each of N rows, on the CPU.

    ids: the M tokens that precede any row, once each.
    common: for each of them how often it was emitted before every row.
    whole: how many of `ids`, the first ones, precede every row.
    steps: row · M + column, for each token of each row's own path.
    """

    ids: Tensor
    common: Tensor
    whole: int
    steps: Tensor


def tally(context: Context) -> Tally:
    """The tokens that precede each row; the root is part of the history."""
    history, tokens, topology = context
    fresh, places = history.locate(tokens[1:].tolist())
    ids = torch.cat((history.ids, torch.tensor(fresh, dtype=torch.int64)))
    common = torch.cat((history.counts, history.counts.new_zeros(len(fresh))))
    rows, nodes = topology.ancestors[:, 1:].nonzero().unbind(1)
    steps = rows * len(ids) + torch.tensor(places, dtype=torch.int64)[nodes]
    return Tally(ids, common, len(history.ids), steps)


class Adjusted(ContextSampler):
    """Adds a bias to logits, applies penalties, and hands them to another sampler, which sees logits only.

    Only the entries of named and preceding tokens are changed, in one copy of the logits; what that takes of the host
    is one transfer to the device a call.
    """

    def __init__(self, sampler: Sampler, bias: Mapping[int, float], penalties: Penalties) -> None:
        self.sampler = sampler
        self.bias = dict(bias)
        self.penalties = penalties

    @property
    def reads_history(self) -> bool:
        return self.penalties != Penalties()

    def check(self, vocab: int) -> None:
        """ValueError if the bias names a token beyond the vocabulary."""
        if self.bias and max(self.bias) >= vocab:
            raise ValueError(f"sampler: logit_bias: token id {max(self.bias)} is outside the vocabulary [0, {vocab})")

    def __call__(self, logits: Tensor, context: Context | None = None) -> Tensor:
        """Logits [N, vocab] -> int64 [N].

        Raises:
            ValueError: penalties have no context to go by, it is not of N rows, or a token is outside the vocabulary.
        """
        return self.sampler(self.adjusted(logits, context))

    def at(self, depths: Sequence[int]) -> "Adjusted":
        """See `PlacedSampler`."""
        if not isinstance(self.sampler, PlacedSampler):
            return self
        return Adjusted(self.sampler.at(depths), self.bias, self.penalties)

    def passed(self, count: int) -> None:
        """See `PlacedSampler`."""
        if isinstance(self.sampler, PlacedSampler):
            self.sampler.passed(count)

    def adjusted(self, logits: Tensor, context: Context | None) -> Tensor:
        """What the other sampler sees: a copy [N, vocab] in float32, or in the logits' float64."""
        check_shape(logits)
        self.check(logits.shape[1])
        seen = self._tally(logits, context)
        bias = torch.tensor([*self.bias, *self.bias.values()], dtype=torch.float64).view(2, -1)
        named, biases, ids, common, steps = together((*bias, seen.ids, seen.common, seen.steps), logits.device)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        values = logits.detach().to(wide, copy=True)
        if len(named):
            values.index_add_(1, named.long(), biases.to(wide).expand(len(values), -1))
        if len(ids):
            counts = common.to(wide).repeat(len(values), 1)
            counts.view(-1).index_add_(0, steps.long(), torch.ones_like(steps, dtype=wide))
            came = counts > 0
            came[:, : seen.whole] = True
            columns = ids.long()
            values.index_copy_(1, columns, self.penalties.applied(values[:, columns], came, counts))
        return values

    def _tally(self, logits: Tensor, context: Context | None) -> Tally:
        if not self.reads_history:
            return Tally(NO_IDS, NO_IDS, 0, NO_IDS)
        if context is None:
            raise ValueError("sampler: penalties depend on the tokens before each row; give a Context too")
        nodes, (rows, vocab) = len(context.topology), logits.shape
        if nodes != rows or len(context.tokens) != rows:
            found = f"{nodes} nodes with {len(context.tokens)} tokens"
            raise ValueError(f"sampler: the context must have a node for each of {rows} rows of logits, got {found}")
        seen = tally(context)
        if len(seen.ids) and not 0 <= int(seen.ids.min()) <= int(seen.ids.max()) < vocab:
            wrong = seen.ids[(seen.ids < 0) | (seen.ids >= vocab)]
            raise ValueError(f"sampler: token id {int(wrong[0])} of the context is outside the vocabulary [0, {vocab})")
        return seen

    def __repr__(self) -> str:
        return f"Adjusted({self.sampler!r}, logit_bias={self.bias}, {self.penalties})"
