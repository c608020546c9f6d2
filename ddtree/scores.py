"""What a drafter says of continuations: the tokens that may follow a drafted path, and how likely each is.

`Scores` is the one interface. Logits of independent positions are `Marginals`; drafters whose scores depend on the
path bring their own (`PairScores` of DFlash 2, the beam of an MTP module). `ddtree/scoring.py` changes scores.
"""

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from qwen_gdn.checked import as_integer, holds_integers, shown

from .ranking import leading, ranked

ROUNDING = 1e-3  # how far above 0 a proposer's log-probability may lie before it is taken for a raw score

Prefix = tuple[int, ...]


class Siblings(NamedTuple):
    """Possible children of one node, best first, none with probability zero."""

    tokens: list[int]
    log_probs: list[float]

    def possible(self) -> "Siblings":
        """Those ranked before the ones of probability zero."""
        count = len(self.log_probs) - self.log_probs.count(-inf)
        return Siblings(self.tokens[:count], self.log_probs[:count])


NO_CHILDREN = Siblings([], [])


class Scores(Protocol):
    """Draft log-probabilities that depend on the path; the children of a path come in any order."""

    @property
    def depth(self) -> int:
        """The longest path that can be drafted, in tokens."""

    def children(self, path: Prefix, /) -> tuple[Sequence[int] | Tensor, Sequence[float] | Tensor]:
        """Distinct tokens that may follow the drafted `path` (root's child first), with log-probabilities.

        `Siblings` are taken as they stand; any other pair is checked and ranked, which takes longer than the search.
        """


class Marginals:
    """`Scores` of independent positions: what may follow a path depends on its length alone.

    One transfer brings everything to the host, when children are first asked for.

    Args:
        logits: [L, vocab].
        width: the most children that are asked for.
    """

    def __init__(self, logits: Tensor, width: int) -> None:
        self._logits, self._width = logits, width
        self.depth = logits.shape[0] if logits.numel() else 0

    def children(self, path: Prefix, /) -> Siblings:
        """The likeliest tokens of the position after a path; ValueError as `rank` raises it."""
        return self._positions[len(path)]

    @cached_property
    def _positions(self) -> list[Siblings]:
        return rank(self._logits, self._width)


def as_scores(proposal: Tensor | Scores, depth: int, width: int) -> Scores:
    """What a proposer returned as `Scores`: logits of the first `depth` positions as `Marginals`, others as they are.

    Raises:
        ValueError: it is neither logits [L, vocab] nor `Scores`.
    """
    check_scores(proposal)
    return Marginals(proposal[:depth], width) if isinstance(proposal, Tensor) else proposal


def rank(logits: Tensor, k: int) -> list[Siblings]:
    """The k likeliest tokens of each row of logits [L, vocab] with their float32 log-probabilities.

    Log-probabilities are bit for bit those of `torch.log_softmax(row.float(), -1)`. Of the whole tensor only
    the answer leaves the device, in one transfer.

    Raises:
        ValueError: a row holds NaN or +inf, or nothing finite, so that it has no log-softmax.
    """
    values, tokens = ranked(logits.detach().float().log_softmax(-1), k)
    # float64 holds both parts exactly: float32 values, and token ids below 2^53
    found, names = torch.stack((values.double(), tokens.double())).cpu().numpy()
    broken = np.isnan(found).any(axis=1)
    if broken.any():
        raise ValueError(f"draft tree: logits row {broken.argmax()} needs a finite logit, no NaN and no +inf")
    return [Siblings(t, v).possible() for v, t in zip(found.tolist(), names.astype(int).tolist(), strict=True)]


def check_scores(scores: Tensor | Scores) -> None:
    """Raises ValueError unless these are draft logits [L, vocab] or path-dependent `Scores`."""
    if isinstance(scores, Tensor):
        if scores.dim() != 2:
            raise ValueError(f"draft tree: draft logits must be [L, vocab], got {list(scores.shape)}")
        if scores.is_complex():
            raise ValueError(f"draft tree: draft logits must be real numbers, got {scores.dtype}")
        return
    depth = as_integer(getattr(scores, "depth", None))
    if depth is None or depth < 0 or not callable(getattr(scores, "children", None)):
        raise ValueError(
            "draft tree: needs draft logits, a tensor [L, vocab], or Scores, whose depth is an int of at least 0 and "
            f"whose children can be asked for, got {type(scores).__name__} {shown(scores)}"
        )


def children(scores: Scores, prefix: Prefix, width: int) -> Siblings:
    """The best `width` children of a path, checked and ranked, or more of them if they come as `Siblings`.

    None where the path is as long as the scores are deep.

    Raises:
        ValueError: the scores answered with something else than they may.
    """
    if len(prefix) >= scores.depth:
        return NO_CHILDREN
    answer = scores.children(prefix)
    if isinstance(answer, Siblings):
        return answer
    where = f"draft tree: children of {prefix}"
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise ValueError(f"{where}: needs a pair of tokens and log-probabilities, got {shown(answer)}")
    tokens = tensor_of(answer[0], f"{where}: tokens").detach().cpu()
    log_probs = tensor_of(answer[1], f"{where}: log-probabilities").detach().cpu()
    if (tokens.numel() and not holds_integers(tokens)) or log_probs.is_complex():
        kinds = f"{tokens.dtype} and {log_probs.dtype}"
        raise ValueError(f"{where}: needs integer tokens with real log-probabilities, got {kinds}")
    tokens, log_probs = tokens.long(), log_probs.float()
    if tokens.dim() != 1 or tokens.shape != log_probs.shape:
        shapes = f"{list(tokens.shape)} and {list(log_probs.shape)}"
        raise ValueError(f"{where}: tokens and log-probabilities must be 1-D of one length, got {shapes}")
    if not bool((log_probs <= ROUNDING).all()):
        worst = float(log_probs[~(log_probs <= ROUNDING)][0])
        raise ValueError(f"{where}: log-probabilities must be at most 0, got {worst}; apply log_softmax")
    places = leading(log_probs, min(width, len(tokens)), tokens)
    best: list[int] = tokens[places].tolist()
    if len(set(best)) < len(best) or min(best, default=0) < 0:
        raise ValueError(f"{where}: tokens must be distinct and at least 0, got {best}")
    return Siblings(best, log_probs[places].tolist()).possible()


def tensor_of(values: Sequence[float] | Tensor, what: str) -> Tensor:
    """The values as a tensor; ValueError, which says what they should have been, if they are none."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{what} must be a 1-D tensor or a list of numbers, got {shown(values)}") from None
