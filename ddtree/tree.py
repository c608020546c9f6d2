"""Draft trees: which continuations a round puts before the target, and which of them it takes.

The builder is the best-first search of DDTree (arXiv 2604.12989) over draft log-probabilities. Nothing here
runs a model, draws a token or touches a cache.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qwen_gdn.checked import as_integer, checked_count, holds_integers, shown
from qwen_gdn.topology import Topology

BLOCK = 128  # columns that one maximum stands for when a wide row is searched for its greatest values
ROUNDING = 1e-3  # how far above 0 a proposer's log-probability may lie before it is taken for a raw score

Prefix = tuple[int, ...]


class DraftTree(NamedTuple):
    """A root and its drafted continuations. Siblings carry distinct tokens; parents come before children."""

    tokens: Tensor  # int64 [N] on the CPU; node 0 is the last emitted token, not yet in the cache
    topology: Topology


class Acceptance(NamedTuple):
    """What the target's draws took of a tree: `path` is a root path to commit, `bonus` the token after it."""

    path: list[int]  # node indices, root first; `len(path) - 1` drafted tokens were accepted
    bonus: int


class Ranked(NamedTuple):
    """The k greatest entries of each row, best first, equal ones by ascending column."""

    values: Tensor  # [rows, k]
    columns: Tensor  # int64 [rows, k]


class Siblings(NamedTuple):
    """Possible children of one node, best first, none with probability zero."""

    tokens: list[int]
    log_probs: list[float]  # float32 values


class Scores(Protocol):
    """Draft log-probabilities that depend on the path; the children of a path come in any order."""

    @property
    def depth(self) -> int:
        """The longest path that can be drafted, in tokens."""

    def children(self, path: Prefix, /) -> tuple[Sequence[int] | Tensor, Sequence[float] | Tensor]:
        """Distinct tokens that may follow the drafted `path` (root's child first), with log-probabilities.

        `Siblings` are taken as they stand; any other pair is checked and ranked, which takes longer than the search.
        """


def build_tree(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    """The `budget` most probable prefixes, best first, as a tree (DDTree, arXiv 2604.12989).

    A prefix scores the float64 sum, from the root down, of its float32 log-probabilities. Prefixes come in
    the order (-score, ranks), ranks being the places among siblings along the path; siblings rank by
    (-log-probability, token). So the tree is a function of the scores alone, ties included.

    Args:
        root: the last emitted token; it is node 0 and not counted in `budget`.
        scores: logits [L, vocab] of independent positions, or path-dependent `Scores`. A tree is at most
            `min(L, budget)` deep, and no row beyond is looked at.
        budget: the most nodes to draft. 0, or L = 0, gives the root alone. Tokens with probability zero are
            never drafted, so a tree can be smaller. A verify of N nodes makes N × N masks and products, so a
            budget beyond a few thousand costs far more than it can win.

    Raises:
        ValueError: root or budget is no int >= 0; scores are neither a real tensor [L, vocab] nor `Scores`; a row
            or a list of children holds NaN, has nothing finite in a row of logits, or a log-probability above 0;
            tokens of `Scores` are no integers, repeat, are negative, or differ in number from their
            log-probabilities.
    """
    _check(root, budget)
    return grow(root, _lookup(scores, budget, width=budget), budget)


def build_chain(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    """The likeliest token at each step down, `min(L, budget)` of them; arguments and errors of `build_tree`."""
    _check(root, budget)
    children = _lookup(scores, budget, width=1)
    tokens = [root]
    while len(tokens) <= budget:
        siblings = children(tuple(tokens[1:]))
        if not siblings.tokens:
            break
        tokens.append(siblings.tokens[0])
    return DraftTree(torch.tensor(tokens), Topology.chain(len(tokens)))


def accept(tree: DraftTree, target_tokens: Tensor | Sequence[int]) -> Acceptance:
    """Walks from the root while a child carries the token drawn at its parent.

    Every token this emits (those of the path below the root, then the bonus) is the target's own draw, so
    the output has the target's distribution whatever was drafted.

    Args:
        target_tokens: the target's draw at every node, [N].

    Raises:
        ValueError: there is not exactly one draw per node, or they are no token ids.
    """
    drawn = _tensor(target_tokens, "accept: draws")
    if drawn.shape != (len(tree.topology),):
        nodes, got = len(tree.topology), list(drawn.shape)
        raise ValueError(f"accept: needs one target token per node, shape [{nodes}], got {got}")
    draws: list[int] = drawn.tolist()
    if not holds_integers(drawn) or min(draws) < 0:
        raise ValueError(f"accept: draws must be token ids, integers of at least 0, got {drawn.dtype} {draws}")
    places = zip(tree.topology.parents, tree.tokens.tolist(), strict=True)
    child = {place: node for node, place in enumerate(places)}
    path = [0]
    while (node := child.get((path[-1], draws[path[-1]]))) is not None:
        path.append(node)
    return Acceptance(path, draws[path[-1]])


def grow(root: int, children: Callable[[Prefix], Siblings], budget: int) -> DraftTree:
    """The best-first search itself, on the host: pop the best prefix, push its next sibling and first child.

    No child scores above its parent, nor a sibling above the one before it, so prefixes leave the heap in
    the order of all prefixes. `children` ranks those of a prefix and is asked at most once per node.
    """
    tokens, parents, scores = [root], [-1], [0.0]
    prefixes: list[Prefix] = [()]
    ranks: list[tuple[int, ...]] = [()]
    families: list[Siblings] = []
    heap: list[tuple[float, tuple[int, ...], int]] = []

    def push(parent: int, rank: int) -> None:
        family = families[parent]
        if rank < len(family.tokens):
            score = scores[parent] + family.log_probs[rank]
            heapq.heappush(heap, (-score, (*ranks[parent], rank), parent))

    while len(tokens) <= budget:
        newest = len(tokens) - 1
        families.append(children(prefixes[newest]))
        push(newest, 0)
        if not heap:
            break
        cost, rank, parent = heapq.heappop(heap)
        push(parent, rank[-1] + 1)
        token = families[parent].tokens[rank[-1]]
        tokens.append(token)
        parents.append(parent)
        scores.append(-cost)
        prefixes.append((*prefixes[parent], token))
        ranks.append(rank)
    return DraftTree(torch.tensor(tokens), Topology(parents))


def rank(logits: Tensor, k: int) -> list[Siblings]:
    """The k likeliest tokens of each row of logits [L, vocab] with their float32 log-probabilities.

    Log-probabilities are bit for bit those of `torch.log_softmax(row.float(), -1)`. Of the whole tensor only
    the answer leaves the device, in one transfer.

    Raises:
        ValueError: a row holds NaN or +inf, or nothing finite, so that it has no log-softmax.
    """
    values, tokens = ranked(logits.detach().float().log_softmax(-1), k)
    # float64 holds both parts exactly: float32 values, and token ids below 2^53
    rows = torch.stack((values.double(), tokens.double())).cpu()
    broken = rows[0].isnan().any(-1).nonzero()
    if len(broken):
        raise ValueError(f"draft tree: logits row {int(broken[0])} needs a finite logit, no NaN and no +inf")
    return [_possible(t, v) for v, t in zip(rows[0].tolist(), rows[1].long().tolist(), strict=True)]


def ranked(values: Tensor, k: int) -> Ranked:
    """The min(k, width) greatest entries of each row of [rows, width], NaN counting as greatest.

    Unlike `torch.topk` it is exact among equal entries: the lower column comes first, across the k-th place
    too. It never waits for the device.
    """
    rows, width = values.shape
    k, blocks = min(k, width), width // BLOCK
    every = torch.arange(width, device=values.device)
    if blocks <= 2 * k:
        columns = _leading(values, k, every)
        return Ranked(values.gather(1, columns), columns)
    # A block with one of the k first entries has fewer than k blocks before it by (greatest value, position).
    # Ascending blocks keep places in the order of columns.
    maxima = values[:, : blocks * BLOCK].view(rows, blocks, BLOCK).amax(-1)
    chosen = _leading(maxima, k, every[:blocks]).sort(-1).values
    inside = (chosen.unsqueeze(-1) * BLOCK + every[:BLOCK]).flatten(1)
    columns = torch.cat((inside, every[blocks * BLOCK :].expand(rows, -1)), 1)
    candidates = values.gather(1, columns)
    places = _leading(candidates, k, columns)
    return Ranked(candidates.gather(1, places), columns.gather(1, places))


def _leading(values: Tensor, k: int, ids: Tensor) -> Tensor:
    """Columns of the k greatest entries of each row, best first, equal ones by ascending id (float64: column)."""
    if values.dtype == torch.float64:
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # One int64 per entry orders by value, then by id below 2^32: the bits of a float32, flipped where negative,
    # compare as the numbers do. Adding 0 makes -0 equal to 0; NaN gets the sign that sorts it first.
    bits = torch.where(values.isnan(), torch.nan, values.float() + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (order * 2**32 - ids).topk(k).indices


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


def _lookup(scores: Tensor | Scores, budget: int, width: int) -> Callable[[Prefix], Siblings]:
    """A prefix's best `width` children, whichever form the scores have."""
    check_scores(scores)
    if isinstance(scores, Tensor):
        rows = scores[:budget]
        families = rank(rows, width) if rows.numel() else []
        return lambda prefix: families[len(prefix)] if len(prefix) < len(families) else Siblings([], [])
    return lambda prefix: _ask(scores, prefix, width) if len(prefix) < scores.depth else Siblings([], [])


def _ask(scores: Scores, prefix: Prefix, width: int) -> Siblings:
    """A path-dependent proposer's children, checked and ranked."""
    where = f"draft tree: children of {prefix}"
    answer = scores.children(prefix)
    if isinstance(answer, Siblings):
        return answer
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise ValueError(f"{where}: needs a pair of tokens and log-probabilities, got {shown(answer)}")
    tokens = _tensor(answer[0], f"{where}: tokens").detach().cpu()
    log_probs = _tensor(answer[1], f"{where}: log-probabilities").detach().cpu()
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
    places = _leading(log_probs, min(width, len(tokens)), tokens)
    best: list[int] = tokens[places].tolist()
    if len(set(best)) < len(best) or min(best, default=0) < 0:
        raise ValueError(f"{where}: tokens must be distinct and at least 0, got {best}")
    return _possible(best, log_probs[places].tolist())


def _possible(tokens: list[int], log_probs: list[float]) -> Siblings:
    """Ranked tokens without those of probability zero, which come last."""
    count = len(log_probs) - log_probs.count(-torch.inf)
    return Siblings(tokens[:count], log_probs[:count])


def _tensor(values: Sequence[float] | Tensor, what: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{what} must be a 1-D tensor or a list of numbers, got {shown(values)}") from None


def _check(root: int, budget: int) -> None:
    checked_count("draft tree: root token", root, 0)
    checked_count("draft tree: budget", budget, 0)
