"""A tree that holds the chain, to compare the two: it can never accept less."""

from torch import Tensor

from ddtree import DraftTree, Scores, build_chain, build_tree
from qwen_gdn import Topology


def build_spine(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    """The chain first, then the most probable prefixes that it lacks; a `build` for `ddtree.generate`.

    Arguments and errors are those of `ddtree.build_tree`.
    """
    chain, best = build_chain(root, scores, budget), build_tree(root, scores, budget)
    tokens, parents = chain.tokens.tolist(), list(chain.topology.parents)
    known = {place: node for node, place in enumerate(zip(parents, tokens, strict=True))}
    mine = [0]  # the node here of each node of `best`, whose prefixes come before their extensions
    for parent, token in zip(best.topology.parents[1:], best.tokens.tolist()[1:], strict=True):
        place = (mine[parent], token)
        if place not in known:
            if len(tokens) > budget:
                break
            known[place] = len(tokens)
            parents.append(place[0])
            tokens.append(token)
        mine.append(known[place])
    return DraftTree(best.tokens.new_tensor(tokens), Topology(parents))
