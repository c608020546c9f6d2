"""Accepted length of chains and trees over prompt sets; nothing is timed.

Measured in use: every mode generates by itself, so contexts depend on the mode's own rounds. And teacher-forced: at
every position of the plain continuation the same proposal is built into a chain, a best-first tree, and a tree that
holds the chain, and each is asked how far it follows what the target writes next.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ddtree import DraftTree, Round, Scores, accept, build_chain, build_spine, build_tree
from qwen_gdn import Hidden, decode, prefill
from tools.measure.exactness import NearTie, Referee
from tools.measure.runs import Mode, Pair, accepted_length, run
from tools.measure.sampled import GREEDY, Sampling

# Tokens that the target is let write past the last context: published drafters propose 15 positions at most.
AHEAD = 16


class InUse(NamedTuple):
    """Accepted length of one mode; `steady` leaves the looping continuations out (None if all loop)."""

    mode: Mode
    tau: float
    steady: float | None
    forwards: int


class UseOfSet(NamedTuple):
    prompts: int
    looping: int
    modes: list[InUse]
    ties: list[tuple[str, NearTie]]


class Forced(NamedTuple):
    """Accepted lengths at one budget over the same contexts.

    chain, tree, spine: means of accepted + 1 for the chain, the best-first tree, and the tree that holds the chain.
    spine_below, tree_below: contexts in which that tree accepts less than the chain. The first is 0 by construction.
    """

    budget: int
    contexts: int
    chain: float
    tree: float
    spine: float
    spine_below: int
    tree_below: int


def loops(tokens: Sequence[int]) -> bool:
    """Whether a continuation of n tokens loops: its last n // 2 tokens have a period of at most n // 4.

    So what it repeats stands there at least twice in a row, up to the end.
    """
    half = list(tokens[len(tokens) - len(tokens) // 2 :])
    return any(half[period:] == half[:-period] for period in range(1, len(tokens) // 4 + 1))


def in_use(pair: Pair, prompts: Sequence[Sequence[int]], modes: Sequence[Mode], count: int) -> UseOfSet:
    """Generates `count` tokens after every prompt in every mode.

    Raises:
        DifferentOutputError: a mode wrote something else than plain decoding and rounding does not explain it.
    """
    referee = Referee(pair.model)
    ties: list[tuple[str, NearTie]] = []
    rounds: dict[Mode, list[list[Round]]] = {mode: [] for mode in modes}
    looping: list[bool] = []
    for i, prompt in enumerate(tqdm(prompts, desc="in use", disable=None, leave=False)):
        plain = list(decode(pair.target, prompt, max_new_tokens=count))
        looping.append(loops(plain))
        for mode in modes:
            sample = run(pair, mode, prompt, count)
            rounds[mode].append(sample.drafting)
            tie = referee.judge(f"prompt {i}, {mode}", prompt, sample.tokens, plain)
            ties += [(f"prompt {i}, {mode}", tie)] if tie else []
    return UseOfSet(len(prompts), sum(looping), [_in_use(mode, rounds[mode], looping) for mode in modes], ties)


def _in_use(mode: Mode, rounds: Sequence[list[Round]], looping: Sequence[bool]) -> InUse:
    every = [done for per_prompt in rounds for done in per_prompt]
    steady = [done for per_prompt, loop in zip(rounds, looping, strict=True) if not loop for done in per_prompt]
    return InUse(mode, accepted_length(every), accepted_length(steady) if steady else None, len(every))


class Context(NamedTuple):
    """A place in a plain continuation: the root there, what is proposed after it, and what the target writes."""

    root: int
    scores: Tensor | Scores
    coming: list[int]


def teacher_forced(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    count: int,
    samplings: Sequence[Sampling] = (GREEDY,),
) -> list[Forced]:
    """Accepted lengths from every one of the first `count` positions of each prompt's plain continuations.

    Args:
        samplings: one for each continuation of a prompt.
    """
    lengths: dict[int, list[tuple[int, int, int]]] = {budget: [] for budget in budgets}
    texts = [(prompt, sampling) for prompt in prompts for sampling in samplings]
    for prompt, sampling in tqdm(texts, desc="teacher-forced", disable=None, leave=False):
        for context in contexts(pair, prompt, count, sampling):
            for budget in budgets:
                trees = (
                    build(context.root, context.scores, budget) for build in (build_chain, build_tree, build_spine)
                )
                chain, tree, spine = (followed(each, context.coming) + 1 for each in trees)
                lengths[budget].append((chain, tree, spine))
    return [_forced(budget, lengths[budget]) for budget in budgets]


def _forced(budget: int, lengths: Sequence[tuple[int, int, int]]) -> Forced:
    chain, tree, spine = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
    return Forced(
        budget,
        len(lengths),
        chain,
        tree,
        spine,
        spine_below=sum(spine < chain for chain, _, spine in lengths),
        tree_below=sum(tree < chain for chain, tree, _ in lengths),
    )


@torch.no_grad()
def contexts(pair: Pair, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> Iterator[Context]:
    """The first `count` positions of the plain continuation, the drafter having seen just what precedes each."""
    target, drafter = pair.target, pair.drafter
    written = list(decode(target, prompt, max_new_tokens=count + AHEAD, sampler=sampling.sampler()))
    cache = target.new_cache(len(prompt) + count)

    def observe(hidden: Hidden) -> None:
        drafter.observe(torch.cat(hidden.captured, dim=-1) if hidden.captured else hidden.final[..., :0])

    drafter.bind(target)
    drafter.reset()
    prefill(target, torch.tensor([list(prompt)]), cache, capture=drafter.layers, on_window=observe)
    for i, root in enumerate(written[:count]):
        yield Context(root, drafter.propose(root), written[i + 1 : i + 1 + AHEAD])
        observe(target(torch.tensor([[root]]), cache, capture=drafter.layers))


def followed(tree: DraftTree, coming: Sequence[int]) -> int:
    """Drafted nodes that a walk takes if the target writes `coming` after the root."""
    # The draws at nodes off the path do not matter, so every node of a depth may have the same.
    draws = [coming[depth] if depth < len(coming) else -1 for depth in tree.topology.depths.tolist()]
    return len(accept(tree, draws).path) - 1
