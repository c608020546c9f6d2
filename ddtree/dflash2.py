"""The DFlash 2 drafter: a DFlash drafter with convolutions along the block, and a selector that scores pairs.

Around both sublayers of a layer the rows of the block are convolved causally; context rows are not. The selector
takes the target head's likeliest tokens of each position and scores each one after each of those before it, so a
draft token's probability depends on its parent in the tree.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qwen_gdn.norms import at_least_float32
from qwen_gdn.rope import Rotation

from .dflash2_config import DFlash2Config
from .drafter import DFlashDrafter
from .drafter_layers import Context, DrafterLayer
from .ranking import ranked
from .scores import Prefix, Siblings


class DynamicConv(nn.Module):
    """Causal convolutions of a sublayer's input and of its output along one block, zero before its first row.

    Channel c of row t is Σ_i (base[i, c] + dynamic[t, i, group of c]) · x[t − i, c]. The dynamic parts of both
    convolutions are one linear map of the input. Parameters begin as the convolution that changes nothing.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        taps, width = config.conv_kernel_size, config.hidden_size
        self.groups = width // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * self.groups, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """convolved(sublayer(convolved(x))) of the normed rows x of whole blocks, [B, Q, D] in and out."""
        before, after = self.kernels(x)
        return convolved(sublayer(convolved(x, before)), after)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Every row's taps for input and output, each [B, Q, taps, D], in float32 at least; the first meets the row."""
        base = at_least_float32(self.base_kernel).unflatten(-1, (self.groups, -1))
        dynamic = self.kernel_projection(x).unflatten(-1, (*base.shape[:2], self.groups, 1))
        before, after = (base + dynamic).flatten(-2).unbind(dim=2)
        return before, after


def convolved(x: Tensor, kernels: Tensor) -> Tensor:
    """Rows x [B, Q, D] by their taps [B, Q, taps, D]; summed in the taps' dtype, rounded once."""
    out = kernels[:, :, 0] * x
    for back in range(1, kernels.shape[2]):
        out[:, back:] += kernels[:, back:, back] * x[:, :-back]
    return out.to(x.dtype)


class ConvolvedLayer(DrafterLayer):
    """A drafter's layer with convolutions around attention and around SwiGLU."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def forward(self, x: Tensor, context: Context, by: Rotation) -> Tensor:
        x = x + self.attention_conv(self.input_layernorm(x), lambda rows: self.self_attn(rows, context, by))
        out: Tensor = x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)
        return out


class CandidateSelector(nn.Module):
    """Scores candidates of neighbouring positions in pairs: logit + Σ_r before[r] · projected(hidden)[r] · after[r]."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        shape = (config.vocab_size, config.selector_rank)
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, root: int, hidden: Tensor, unary: Tensor, candidates: Tensor) -> Tensor:
        """Scores [L, k, k] of L positions: [d, i, j] is candidate j after candidate i of the position before.

        Args:
            root: the token before the first position, whose rows [0, i] are all alike.
            hidden: the positions' hidden states, [L, D].
            unary: the candidates' own logits, float32 or float64 [L, k].
            candidates: their tokens, int64 [L, k].
        """
        first = self.predecessor_codebook[root].expand(1, self.top_k, -1)
        before = torch.cat((first, self.predecessor_codebook[candidates[:-1]]))
        after = self.successor_codebook[candidates]
        projected = self.hidden_projection(hidden)[:, None]
        wanted = at_least_float32(before) * at_least_float32(projected)
        pairs = wanted @ at_least_float32(after).transpose(1, 2)
        return unary[:, None] + pairs


class DFlash2Drafter(DFlashDrafter):
    """A proposer of path-dependent scores (DFlash 2); parameters are named as in published checkpoints.

    The rows given to `forward` are those of one block: its convolutions run along all of them.
    """

    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def _layer(self) -> DrafterLayer:
        return ConvolvedLayer(self.config)

    def inputs(self, embeddings: Tensor) -> Tensor:
        return super().inputs(embeddings * self.config.input_embedding_scale)

    def proposal(self, root: int, hidden: Tensor, logits: Tensor) -> "PairScores":
        selector = self.candidate_selector
        # Neither factor nor cap changes an order, so only the candidates' logits need them.
        best, candidates = ranked(logits, selector.top_k)
        unary = self._scaled(at_least_float32(best))
        scores = selector(root, hidden, unary, candidates)
        return PairScores(candidates, scores.float().log_softmax(dim=-1))

    def _scaled(self, logits: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        scaled = logits * self.config.output_multiplier
        return scaled if cap is None else cap * (scaled / cap).tanh()


class PairScores:
    """`Scores` of L positions with k candidates each, which depend on the path by its last token.

    One transfer brings everything to the host, when children are first asked for.

    Args:
        candidates: tokens, distinct in each row, int64 [L, k].
        log_probs: float32 [L, k, k]; [d, i, j] is candidate j's after candidate i of the position before. Rows
            [0, i] are alike: before the first position there is the root alone.
    """

    def __init__(self, candidates: Tensor, log_probs: Tensor) -> None:
        # float64 holds both parts exactly: float32 values, and token ids below 2^53
        self._table = torch.cat((candidates.double()[:, None], log_probs.double()), dim=1)

    @property
    def depth(self) -> int:
        return self._table.shape[0]

    def children(self, path: Prefix, /) -> Siblings:
        """The candidates after the last token of a path of candidates, best first.

        Raises:
            ValueError: the path is too long or its last token is no candidate, or scores of its position were
                none: NaN, +inf, or nothing finite in a row.
        """
        if len(path) >= self.depth:
            raise ValueError(f"draft scores: a path of {len(path)} tokens has no children; the depth is {self.depth}")
        tokens, _, rows = self._positions[len(path)]
        row = rows[self._place(path) if path else 0]
        order = sorted((j for j, value in enumerate(row) if value > -torch.inf), key=lambda j: (-row[j], tokens[j]))
        return Siblings([tokens[j] for j in order], [row[j] for j in order])

    def _place(self, path: Prefix) -> int:
        """Which candidate of its position the last token of a path is."""
        place = self._positions[len(path) - 1].places.get(path[-1])
        if place is None:
            raise ValueError(f"draft scores: token {path[-1]} is no candidate of position {len(path) - 1}")
        return place

    @cached_property
    def _positions(self) -> list["_Position"]:
        table = self._table.cpu()
        broken = table.isnan().flatten(1).any(1).nonzero()
        if len(broken):
            place = int(broken[0])
            raise ValueError(f"draft scores: position {place} needs a finite score in every row, no NaN and no +inf")
        tokens: list[list[int]] = table[:, 0].long().tolist()
        rows: list[list[list[float]]] = table[:, 1:].tolist()
        return [
            _Position(own, {token: place for place, token in enumerate(own)}, following)
            for own, following in zip(tokens, rows, strict=True)
        ]


class _Position(NamedTuple):
    """Candidates of one position: their tokens, the place of each, and their log-probabilities after each before."""

    tokens: list[int]
    places: dict[int, int]
    rows: list[list[float]]
