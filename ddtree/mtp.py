"""Drafting with the target's own multi-token-prediction module: no second checkpoint, one short forward a depth.

Like every proposer it knows nothing of trees that are verified or accepted, and nothing it proposes can change what
the target would write.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qwen_gdn.checked import checked_count
from qwen_gdn.decode import HybridModel
from qwen_gdn.lanes import AttentionLane, ChainAttention, Pass
from qwen_gdn.layer_cache import KVCache
from qwen_gdn.model import LayerId
from qwen_gdn.mtp import MTP
from qwen_gdn.norms import at_least_float32

from .drafter import AT_ONCE, check_sizes, with_room
from .ranking import Ranked, ranked
from .scores import Prefix

CHILDREN = 64  # tokens proposed after a path: more than a tree of a usual budget takes


class Drafted(NamedTuple):
    """Path-dependent scores whose every family of children is already known.

    families: the paths that were drafted further, each with tokens that may follow and their log-probabilities.
    """

    depth: int
    families: dict[Prefix, tuple[list[int], list[float]]]

    def children(self, path: Prefix, /) -> tuple[list[int], list[float]]:
        """The best tokens after a drafted path, none where it was not drafted further."""
        return self.families.get(path, ([], []))


class _Memory(NamedTuple):
    """What is known of the committed tokens, replaced as a whole and so never half-updated.

    A row of the module needs the token that follows, so rows of the last tokens wait until a successor is seen.

    rows: keys and values, of which the first `length` are committed and those past them scratch.
    held: [1, T, 2 · D], features of the committed tokens whose rows wait.
    """

    length: int
    rows: KVCache
    held: Tensor


class _Beam(NamedTuple):
    """K drafted paths of one length, the greedy one first.

    hidden: the module's output after each, [1, K, D].
    scores: log-probability of each, [K].
    drafted: which of the rows drafted this round each has on its way, bool [K, rows].
    """

    hidden: Tensor
    scores: Tensor
    drafted: Tensor


class _Level(NamedTuple):
    """What may follow each path of a beam.

    children: the M likeliest of each, [K, M].
    chosen: int64, which of the K · M children, path by path, the next beam consists of.
    scores: log-probabilities of the chosen ones' paths.
    """

    children: Ranked
    chosen: Tensor
    scores: Tensor


class MTPDrafter:
    """The proposer of a target's MTP module.

    It reads a committed token's state and embedding, so that the loop need not tell it any token: the successor of a
    row is the next row's embedding, and that of the last one is the root.

    Drafts are a beam: each depth is one forward over the `width` most probable paths so far, the greedy one always
    among them, which yields path-dependent scores. Logits of independent positions along the greedy path alone would
    cost as many forwards. What a forward of a few rows waits for is the head's and the module's weights, so the other
    paths' rows come almost free, and their children are scored after the path that leads to them and not after
    another one. With `width` 1 only the greedy path goes on.

    Args:
        mtp: the module of the target that it will be bound to.
        depth: tokens drafted ahead, one forward each (L). Each builds on the module's own outputs for those before, so
            that a further one is less often right.
        width: paths drafted further at each depth. Of what may follow a path the 64 likeliest tokens are proposed.

    Raises:
        ValueError: a number is below 1.
    """

    layers: Sequence[LayerId] = ("final", "embedding")

    def __init__(self, mtp: MTP, *, depth: int = 4, width: int = 4) -> None:
        checked_count("MTP drafter: depth", depth, 1)
        checked_count("MTP drafter: width", width, 1)
        self.mtp = mtp
        self.depth, self.width = depth, width
        self._target: HybridModel | None = None
        self.reset()

    @property
    def context_length(self) -> int:
        """Rows observed since the last reset."""
        return self._memory.length + self._memory.held.shape[1]

    def bind(self, target: HybridModel) -> None:
        """Borrows the embedding and head of a target; ValueError if its sizes are not the module's."""
        check_sizes(self.mtp.config, target.config)
        self._target = target

    def reset(self) -> None:
        """Forgets all rows, not the target."""
        config, like = self.mtp.config, self.mtp.fc.weight.detach()
        none = like.new_empty(1, config.num_key_value_heads, 0, config.head_dim)
        self._memory = _Memory(0, KVCache(none, none), like.new_empty(1, 0, 2 * config.hidden_size))

    def replica(self) -> "MTPDrafter":
        """Another proposer of this module, unbound, that has observed nothing."""
        return MTPDrafter(self.mtp, depth=self.depth, width=self.width)

    @torch.no_grad()
    def observe(self, features: Tensor) -> None:
        """Takes in committed tokens; if anything raises, none of them.

        Args:
            features: [1, T, 2 · D], each token's state after the final norm, then its embedding.

        Raises:
            ValueError: features have another shape.
        """
        width = 2 * self.mtp.config.hidden_size
        if features.dim() != 3 or features.shape[0] != 1 or features.shape[2] != width:
            raise ValueError(
                f"drafter: features must be [1, T, {width}], a state and an embedding of {width // 2} each, got "
                f"{list(features.shape)}"
            )
        if features.shape[1] == 0:
            return
        features, memory = features.to(self.mtp.fc.weight.dtype), self._memory
        if memory.held.shape[1] >= AT_ONCE:
            memory = self._read(memory, features[:, :1, width // 2 :])[0]
        held = torch.cat((memory.held, features), dim=1) if memory.held.shape[1] else features
        self._memory = memory._replace(held=held)

    @torch.no_grad()
    def propose(self, root: int) -> Drafted:
        """Scores of the paths that may follow `root`, the first token not yet observed; none before any is observed.

        Raises:
            RuntimeError: no target is bound.
        """
        before, bound = self._memory, self._bound
        if not self.context_length:
            return Drafted(0, {})
        embedded = self._embed(torch.full((1, 1), root, device=bound.device))
        after, out = self._read(before, embedded)
        beam = _Beam(out[:, -1:], out.new_zeros(1), out.new_empty(1, 0, dtype=torch.bool))
        levels = [self._level(beam)]
        while len(levels) < self.depth:
            beam = self._advanced(after, beam, levels[-1], after.length + len(levels) - 1)
            levels.append(self._level(beam))
        # Another token than this root may yet be committed: the last row stays scratch, and its token waits.
        self._memory = after._replace(length=after.length - 1, held=before.held[:, -1:].clone())
        return Drafted(self.depth, _families(levels))

    def _read(self, memory: _Memory, following: Tensor) -> tuple[_Memory, Tensor]:
        """The memory with the rows of all tokens held, and their outputs [1, T, D].

        Args:
            following: embedding [1, 1, D] of the token after the last one.
        """
        hidden, embedded = memory.held.chunk(2, dim=-1)
        start, count, device = memory.length, hidden.shape[1], hidden.device
        end = start + count
        # Drafted rows come behind, so that a round's forwards never move what they share.
        rows = KVCache(*(with_room(part, start, end + self.depth * self.width) for part in memory.rows.tensors()))
        seen = torch.ones(count, end, dtype=torch.bool, device=device).tril(start)
        view = _view(rows, start, torch.arange(start, end, device=device), seen)
        out = self.mtp(torch.cat((embedded[:, 1:], following), dim=1), hidden, view)
        return _Memory(end, rows, memory.held[:, :0]), out

    def _level(self, beam: _Beam) -> _Level:
        logits = self._bound.logits(beam.hidden[0].to(self._bound.dtype))
        children = ranked(at_least_float32(logits).log_softmax(-1), CHILDREN)
        scores = (beam.scores[:, None] + children.values).flatten()
        # The greedy path goes on at the first place whatever it scores, since a chain drafts nothing else.
        order = torch.cat((scores.new_full((1,), torch.inf), scores[1:]))
        chosen = ranked(order[None], self.width).columns[0]
        return _Level(children, chosen, scores[chosen])

    def _advanced(self, memory: _Memory, beam: _Beam, level: _Level, position: int) -> _Beam:
        """The beam of a level's chosen children, which all stand at that position."""
        device, count = level.chosen.device, len(level.chosen)
        parents = level.chosen // level.children.columns.shape[1]
        drafted = torch.cat((beam.drafted[parents], torch.eye(count, dtype=torch.bool, device=device)), dim=1)
        seen = torch.cat((drafted.new_ones(count, memory.length), drafted), dim=1)
        start = memory.length + beam.drafted.shape[1]
        view = _view(memory.rows, start, torch.full((count,), position, device=device), seen)
        embedded = self._embed(level.children.columns.flatten()[level.chosen][None])
        return _Beam(self.mtp(embedded, beam.hidden[:, parents], view), level.scores, drafted)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._bound.embed(tokens).to(self.mtp.fc.weight.dtype)

    @property
    def _bound(self) -> HybridModel:
        if self._target is None:
            raise RuntimeError("drafter: no target is bound; call bind(target) before propose(root)")
        return self._target


def _view(rows: KVCache, start: int, positions: Tensor, seen: Tensor) -> Pass[AttentionLane]:
    """A forward whose rows are written from `start` on and see what `seen` says, bool [T, start + T]."""
    return Pass(positions, seen, causal=False, lanes=(ChainAttention(rows, start),))


def _families(levels: Sequence[_Level]) -> dict[Prefix, tuple[list[int], list[float]]]:
    """The children of all drafted paths, brought to the host in one transfer."""
    parts = [part for level in levels for part in (*level.children, level.chosen)]
    # float64 holds both kinds exactly: log-probabilities, and token ids below 2^53
    held = torch.cat([part.double().flatten() for part in parts]).cpu().split([part.numel() for part in parts])
    families: dict[Prefix, tuple[list[int], list[float]]] = {}
    paths: list[Prefix] = [()]
    for values, columns, chosen in zip(held[::3], held[1::3], held[2::3], strict=True):
        tokens = columns.long().view(len(paths), -1).tolist()
        families |= zip(paths, zip(tokens, values.view(len(paths), -1).tolist(), strict=True), strict=True)
        places = [divmod(i, len(tokens[0])) for i in chosen.long().tolist()]
        paths = [(*paths[row], tokens[row][rank]) for row, rank in places]
    return families
