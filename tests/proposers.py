"""Proposers that are right or wrong on purpose, the models they draft for, and what their output is held against.

A scripted proposer is given the whole transcript in advance and counts the rows it observes, so it always knows
what the target will write next. None of it runs a drafter network, and none of it is a test.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from tiny import TOLERANCE, memory_of, seeded, tiny_model, worst_gap
from torch import Tensor

from ddtree import Round, Scores
from qwen_gdn import HybridCache, QwenGDN
from qwen_gdn.model import LayerId

LENGTH = 15
TIE = 1e-5  # of the logit scale: the widest float64 gap at which float32 may take either of two tokens


class Scripted:
    """Base: knows the transcript (prompt and what the target writes after it) and where in it the cache ends."""

    layers: Sequence[LayerId] = ()

    def __init__(self, transcript: Sequence[int], seed: int = 0, length: int = LENGTH) -> None:
        self.transcript = list(transcript)
        self.draw = seeded(seed)
        self.length = length
        self.seen = 0
        self.asked = 0

    def bind(self, target: QwenGDN) -> None:
        self.target = target
        self.vocab = target.config.vocab_size

    def reset(self) -> None:
        self.seen = 0

    def observe(self, features: Tensor) -> None:
        width = len(self.layers) * self.target.config.hidden_size
        assert features.shape == (1, features.shape[1], width), (features.shape, width)
        self.seen += features.shape[1]

    def propose(self, root: int) -> Tensor | Scores:
        self.asked += 1
        return self.draft(self.transcript[self.seen + 1 :][: self.length])

    def draft(self, coming: list[int]) -> Tensor | Scores:
        """What is proposed where `coming` is what the target will write after the root."""
        raise NotImplementedError

    def noise(self, rows: int) -> Tensor:
        return 2 * torch.randn(rows, self.vocab, generator=self.draw)

    def without(self, coming: list[int]) -> Tensor:
        """Noise in which what is coming has probability zero at every depth."""
        logits = self.noise(len(coming))
        logits[range(len(coming)), coming] = -torch.inf
        return logits

    def integer(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.draw))


class Right(Scripted):
    """Nearly all probability on what is coming, so that a tree is that spine first."""

    def draft(self, coming: list[int]) -> Tensor:
        logits = torch.zeros(len(coming), self.vocab)
        logits[range(len(coming)), coming] = 9.0
        return logits


class Wrong(Scripted):
    """What is coming has probability zero at every depth."""

    def draft(self, coming: list[int]) -> Tensor:
        return self.without(coming)


class AtRank(Scripted):
    """What is coming has rank 0, but at one depth (0 is the root's children) it has another rank."""

    def __init__(self, transcript: Sequence[int], seed: int = 0, *, rank: int = 1, depth: int = 0) -> None:
        super().__init__(transcript, seed)
        self.rank, self.depth = rank, depth

    def draft(self, coming: list[int]) -> Tensor:
        return self.ranked(coming, [self.rank if d == self.depth else 0 for d in range(len(coming))])

    def ranked(self, coming: list[int], ranks: list[int]) -> Tensor:
        """Logits that fall by 0.7 from rank to rank, with coming token d at `ranks[d]` and the rest at random."""
        order = torch.rand(len(coming), self.vocab, generator=self.draw).argsort(-1)  # tokens by rank
        places = order.argsort(-1)  # ranks by token
        rows = torch.arange(len(coming))
        places[rows, order[rows, ranks]] = places[rows, coming]
        places[rows, coming] = torch.tensor(ranks, dtype=torch.int64)
        return -0.7 * places


class Scattered(AtRank):
    """What is coming has a random rank of 0 to 2 at every depth, so an accepted path seldom is contiguous."""

    def draft(self, coming: list[int]) -> Tensor:
        return self.ranked(coming, [self.integer(3) for _ in coming])


class Moody(Scripted):
    """Right for a random number of tokens, then wrong; now and then nothing at all."""

    def draft(self, coming: list[int]) -> Tensor:
        if self.integer(5) == 0:
            return torch.empty(0, self.vocab)
        logits = self.without(coming)
        right = self.integer(len(coming) + 1)
        logits[range(right), coming[:right]] = 12.0
        return logits


class Random(Scripted):
    """Noise, whatever is coming."""

    def draft(self, coming: list[int]) -> Tensor:
        return self.noise(self.length)


class Empty(Scripted):
    """Nothing."""

    def draft(self, coming: list[int]) -> Tensor:
        return torch.empty(0, self.vocab)


class Branching(Scripted):
    """Path-dependent scores: three children a path, one of them what is coming if the path is right so far."""

    def draft(self, coming: list[int]) -> Scores:
        return _Branches(coming, self.vocab)


class _Branches:
    def __init__(self, coming: list[int], vocab: int) -> None:
        self.coming = coming
        self.vocab = vocab

    @property
    def depth(self) -> int:
        return len(self.coming)

    def children(self, path: tuple[int, ...], /) -> tuple[Sequence[int] | Tensor, Sequence[float] | Tensor]:
        mixed = sum((place + 3) * token for place, token in enumerate(path)) + len(path)
        tokens = [(mixed + 5 * i) % self.vocab for i in range(3)]
        if list(path) == self.coming[: len(path)] and self.coming[len(path)] not in tokens:
            tokens[mixed % 3] = self.coming[len(path)]
        log_probs = torch.tensor([0.5, 0.3, 0.2]).log()
        return (tokens, log_probs.tolist()) if mixed % 2 else (torch.tensor(tokens), log_probs)


class Reading(Scripted):
    """Reads layers, the normed end among them, and is right at the depths that the last row's signs name."""

    layers: Sequence[LayerId] = (1, "final", 0)

    def observe(self, features: Tensor) -> None:
        super().observe(features)
        self.last = features[0, -1]

    def draft(self, coming: list[int]) -> Tensor:
        logits = self.without(coming)
        for depth, token in enumerate(coming):
            if self.last[-1 - depth % len(self.last)] > 0:
                logits[depth, token] = 6.0
        return logits


Maker = Callable[[Sequence[int], int], Scripted]

PROPOSERS: dict[str, Maker] = {
    "right": lambda transcript, seed: Right(transcript, seed, length=70),
    "wrong": Wrong,
    "right at one rank of one depth": lambda transcript, seed: AtRank(
        transcript, seed, rank=1 + seed % 4, depth=seed % 5
    ),
    "random": Random,
    "empty": Empty,
    "path-dependent": Branching,
    "reading layers": Reading,
    "scattered": Scattered,
    "moody": Moody,
}


class Difference(NamedTuple):
    """Where two outputs part, and by how much the float64 model prefers one of the two tokens.

    gap: |difference of the two tokens' logits| / max |logit|; infinite where one output just ended.
    """

    place: int
    ours: list[int]
    theirs: list[int]
    gap: float

    @property
    def fault(self) -> bool:
        return not self.gap <= TIE


def difference(model: QwenGDN, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """The first difference of two outputs of one model for one prompt, or None.

    The gap is taken with the same weights in float64 and no cache. For a float64 model any difference is a fault.
    """
    ours, theirs = list(ours), list(theirs)
    if ours == theirs:
        return None
    common = min(len(ours), len(theirs))
    place = next((i for i in range(common) if ours[i] != theirs[i]), common)
    gap = float("inf")
    if place < common and model.dtype != torch.float64:
        exact = copy.deepcopy(model).double()
        logits = exact.logits(exact(torch.tensor([[*prompt, *theirs[:place]]])).final[0, -1])
        gap = float((logits[ours[place]] - logits[theirs[place]]).abs() / logits.abs().max())
    return Difference(place, ours[place:][:1], theirs[place:][:1], gap)


def check_same(model: QwenGDN, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
    """Fails if the outputs differ by a fault; a difference at rounding level is a warning."""
    found = difference(model, prompt, ours, theirs)
    if found is not None:
        assert not found.fault, f"{found} of {list(ours)} and {list(theirs)}"
        warnings.warn(f"a tie in {model.dtype}: {found}", stacklevel=2)


def check_holds(cache: HybridCache, model: QwenGDN, tokens: Sequence[int]) -> None:
    """Fails unless the cache is sound, no window is open, and it holds what one forward over `tokens` leaves."""
    cache.check()
    cache.fork()  # raises if a window is open
    assert cache.length == len(tokens)
    fresh = model.new_cache(max(len(tokens), 1))
    if tokens:
        model(torch.tensor([list(tokens)]), fresh)
    gap = worst_gap(memory_of(cache), memory_of(fresh))
    assert gap <= TOLERANCE[model.dtype], gap


def emitted(rounds: Iterable[Round]) -> list[int]:
    return [token for done in rounds for token in done.tokens]


def small_model(seed: int = 0, *, dtype: torch.dtype = torch.float64, wild: float = 4.0) -> QwenGDN:
    """Two layers, one of each kind, vocabulary of 37; wild enough that greedy output seldom repeats itself."""
    return tiny_model(
        seed,
        dtype=dtype,
        wild=wild,
        layer_types=["linear_attention", "full_attention"],
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=37,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    )


def table_model(table: Tensor) -> QwenGDN:
    """A float64 model whose logits after token t are `table[t]`, whatever came before; table [vocab, vocab]."""
    vocab = table.shape[0]
    shape: dict[str, Any] = {"layer_types": ["linear_attention"], "vocab_size": vocab, "hidden_size": vocab}
    model = tiny_model(0, dtype=torch.float64, rms_norm_eps=0.0, **shape)
    weights = dict(model.named_parameters())
    for name in ("layers.0.linear_attn.out_proj.weight", "layers.0.mlp.down_proj.weight", "norm.weight"):
        weights[name].zero_()
    weights["embed_tokens.weight"].copy_(torch.eye(vocab))
    weights["lm_head.weight"].copy_(table.T / vocab**0.5)  # the norm makes √vocab of a unit vector's 1
    return model
