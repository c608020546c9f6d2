"""What a round takes of a proposer's scores and of a builder's tree: no more than it can use, and nothing else."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen_gdn.checked import shown
from qwen_gdn.topology import Topology

from .scores import Prefix, Scores, check_scores
from .tree import DraftTree, ScoredTree


class _Shallow:
    """Path-dependent scores, with their depth limited."""

    def __init__(self, scores: Scores, depth: int) -> None:
        self._scores = scores
        self.depth = min(scores.depth, depth)

    def children(self, path: Prefix, /) -> tuple[Sequence[int] | Tensor, Sequence[float] | Tensor]:
        return self._scores.children(path)


def limited(scores: Tensor | Scores, depth: int) -> Tensor | Scores:
    """The scores of the first `depth` positions; ValueError if a proposer returned no scores at all."""
    check_scores(scores)
    return scores[:depth] if isinstance(scores, Tensor) else _Shallow(scores, depth)


def checked_tree(tree: DraftTree, root: int, budget: int, vocab: int) -> DraftTree:
    """The tree, if it is one for this round: another root would change what is written, without any error.

    Raises:
        ValueError: it is no `DraftTree`, has another root or too many nodes, or tokens that the target lacks.
    """
    if not isinstance(tree, DraftTree) or not isinstance(tree.topology, Topology):
        raise ValueError(f"build: expected a DraftTree(tokens, topology), got {_kind(tree)}")
    tokens, nodes = tree.tokens, len(tree.topology)
    if not (isinstance(tokens, Tensor) and tokens.dtype == torch.int64 and tokens.dim() == 1 and tokens.is_cpu):
        raise ValueError(f"build: expected tokens as an int64 tensor [N] on the CPU, got {_kind(tokens)}")
    listed: list[int] = tokens.tolist()
    if len(listed) != nodes or listed[0] != root or nodes - 1 > budget:
        raise ValueError(
            f"build: expected a tree rooted at token {root} with at most {budget} nodes below, got root "
            f"{listed[0] if listed else 'none'} with {nodes - 1} nodes below, and {len(listed)} tokens"
        )
    if min(listed) < 0 or max(listed) >= vocab:
        wrong = next(token for token in listed if not 0 <= token < vocab)
        raise ValueError(f"build: drafted token {wrong} is outside the target's vocabulary [0, {vocab})")
    return tree


def pruned(tree: DraftTree, depth: int) -> DraftTree:
    """The tree without its nodes below `depth`, which could not be emitted and may not fit the cache."""
    shape = tree.topology
    if shape.max_depth <= depth:
        return tree
    kept = [node for node, level in enumerate(shape.depths.tolist()) if level <= depth]
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    return _of(tree, kept, [place[shape.parents[node]] for node in kept])


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """The first `count` nodes of a tree, which are a tree, since parents come before children; all if it has fewer."""
    if count >= len(tree.topology):
        return tree
    return _of(tree, range(count), tree.topology.parents[:count])


def _of(tree: DraftTree, kept: Sequence[int], parents: Sequence[int]) -> DraftTree:
    """Some nodes of a tree, whose parents are now these."""
    tokens, shape = tree.tokens[list(kept)], Topology(parents)
    if isinstance(tree, ScoredTree):
        return ScoredTree(tokens, shape, [tree.log_probs[node] for node in kept])
    return DraftTree(tokens, shape)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype} on {value.device}"
    if isinstance(value, DraftTree):
        return f"a DraftTree whose topology is {shown(value.topology)}"
    return f"{type(value).__name__} {shown(value)}"
