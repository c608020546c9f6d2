"""The speculative loop: propose, build, verify, sample, commit. It neither prints, times, nor decodes text.

The root of a round is the last emitted token, not yet in the cache. The target verifies a whole draft tree in one
forward over a branch, the sampler draws the target's own token at every node, and the walk follows the draws while
the tree has them. So every emitted token is the target's own draw, whatever was proposed, and the output has the
law of plain decoding; greedily it is plain decoding's output.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qwen_gdn.cache import HybridCache
from qwen_gdn.checked import checked_callables, checked_count
from qwen_gdn.decode import (
    PREFILL_WINDOW,
    HybridModel,
    OnStage,
    Sampler,
    checked_prompt,
    checked_sampler,
    checked_stops,
    fitting_cache,
    greedy,
)
from qwen_gdn.model import Hidden
from qwen_gdn.transfer import indices

from .budget import Budget, checked_budget
from .drafts import checked_tree, first_nodes, limited, pruned
from .proposer import Proposer, bound_layers
from .rows import Alone, Forwards, Row, Verified, ignored
from .tree import Build, DraftTree, alone, build_tree, follow


class Round(NamedTuple):
    """What one round emitted.

    tokens: the emitted ids; `len(tokens) == accepted + 1` unless the last one ended the generation.
    drafted: nodes put before the target, the root not counted.
    accepted: drafted nodes that the target's draws followed, before any cut.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int


NOTHING = Round((), 0, 0)
"""The round of a row that has ended before the others of its batch."""


def never(token: int) -> bool:
    """No token is the last one for what it says."""
    return False


def generate(
    target: HybridModel,
    drafter: Proposer,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    budget: int | Budget = 15,
    stop_ids: Collection[int] = (),
    sampler: Sampler = greedy,
    cache: HybridCache | None = None,
    earlier_ids: Sequence[int] | Tensor = (),
    build: Build = build_tree,
    prefill_window: int = PREFILL_WINDOW,
    on_stage: OnStage = nullcontext,
    until: Callable[[int], bool] = never,
    on_round: Callable[[Verified], None] = ignored,
) -> Generator[Round, None, None]:
    """Generates round by round; the first round is the prefill's own token, with nothing drafted.

    After every round, however the generation ends, the cache holds all prompt and emitted tokens but the last. A
    round that raises, the prompt's too, leaves the cache where it was before; the drafter may then hold rows that the
    cache gave back, which costs acceptance until its `reset`, never correctness.

    Args:
        drafter: a proposer; it is bound to the target here.
        prompt_ids: ids, a sequence or a tensor [T] or [1, T], of at least one token.
        budget: the most drafted nodes of a round, the root not counted; 0 is plain decoding. An `AutoBudget` decides on
            them from round to round.
        stop_ids: the first of these that is emitted ends the generation, wherever in a round it stands.
        cache: memory to continue from; the prompt follows what it holds, and the drafter is taken to have observed
            just those rows. With None or an empty cache the drafter is reset.
        earlier_ids: the tokens that the cache holds already, for samplers that depend on them, as `decode` takes them.
        build: makes a tree of at most `budget` nodes from a root and scores: `build_tree`, `build_chain` or your own.
            Nodes too deep to be emitted any more are dropped.
        prefill_window: tokens of the prompt per forward.
        on_stage: entered with the name of each stage: prefill, draft, build, verify, sample, commit.
        until: asked once of every token that is to be emitted, in their order and before any of its round is
            committed; the first that it says true of is the last one. A stop id is not put to it.
        on_round: told of every round but the prefill's as it is committed, before it is yielded; one that raises undoes
            the round.

    Raises:
        ValueError: at the call, before any forward: the prompt, a number, a stop id, the cache or the drafter does
            not fit. Later, from a round: `sampler`, `build` or the drafter returned something else than it may.
    """
    prompt = checked_prompt(target, prompt_ids, max_new_tokens)
    nodes = checked_budget(budget)
    checked_count("prefill_window", prefill_window, 1)
    stops = checked_stops(stop_ids)
    checked_callables(sampler=sampler, build=build, on_stage=on_stage, until=until, on_round=on_round)
    cache = fitting_cache(target, cache, prompt.shape[1] + max_new_tokens - 1)
    draws = checked_sampler(target, sampler, prompt, cache.length, earlier_ids)
    layers = bound_layers(drafter, target)
    if cache.length == 0:
        drafter.reset()

    def ends(token: int) -> bool:
        return token in stops or until(token)

    row = Row(drafter, draws, ends, max_new_tokens, nodes, length=cache.length + prompt.shape[1], on_round=on_round)
    loop = Loop(target, Alone(target, cache, layers, on_stage), [row], build, on_stage)
    return _only(loop.run([prompt], prefill_window))


def _only(rounds: Generator[tuple[Round, ...], None, None]) -> Generator[Round, None, None]:
    """The rounds of a generation of one row."""
    with closing(rounds):
        for (done,) in rounds:
            yield done


class Loop:
    """The rounds of a generation of one row or more, each of which is as it would be alone."""

    def __init__(
        self, target: HybridModel, forwards: Forwards[Any, Any], rows: Sequence[Row], build: Build, on_stage: OnStage
    ) -> None:
        self.target = target
        self.forwards = forwards
        self.rows = rows
        self.build = build
        self.on_stage = on_stage

    @torch.no_grad()
    def run(self, prompts: Sequence[Tensor], window: int) -> Generator[tuple[Round, ...], None, None]:
        """Yields a round of every row at a time, until all have ended; that of an ended row has no tokens.

        Args:
            prompts: int64 [1, T] of each row.
        """
        for row in self.rows:
            row.budget.begin(self.target)
        prompts = [prompt if row.left else prompt[:, :-1] for row, prompt in zip(self.rows, prompts, strict=True)]
        with self.forwards.transaction():
            rounds = self.begin(self.forwards.read(prompts, window, self.observe))
        while rounds:
            for number, done in rounds.items():
                self.rows[number].emit(done.tokens)
            yield tuple(rounds.get(number, NOTHING) for number in range(len(self.rows)))
            trees = {number: self.draft(row) for number, row in self.live()}
            with self.forwards.transaction():
                rounds = self.verify(trees) if trees else {}

    def live(self) -> list[tuple[int, Row]]:
        """The rows that have not ended, by their numbers."""
        return [(number, row) for number, row in enumerate(self.rows) if row.left]

    def observe(self, number: int, hidden: Hidden) -> None:
        with self.on_stage("draft"):
            self.rows[number].drafter.observe(_features(hidden))

    def begin(self, last: Tensor) -> dict[int, Round]:
        """The first round of each row: the token after its prompt, drawn from the last hidden states, [B, D]."""
        live = self.live()
        if not live:
            return {}
        with self.on_stage("sample"):
            logits = self.target.logits(last[indices([number for number, _ in live], last.device)])
            parts = zip(live, logits.split(1), strict=True)
            return {number: Round(row.cut(row.draws(part)), 0, 0) for (number, row), part in parts}

    def draft(self, row: Row) -> DraftTree:
        """The row's next tree, no deeper than what could still be emitted beside the bonus."""
        depth = row.left - 1
        room = row.given = row.budget.room(row.length, depth)
        checked_count("budget: the most nodes of a round", room, 0)
        if depth == 0 or room == 0:
            return alone(row.root)
        with self.on_stage("draft"):
            scores = limited(row.drafter.propose(row.root), depth)
        with self.on_stage("build"):
            tree = self.build(row.root, scores, room)
            tree = pruned(checked_tree(tree, row.root, room, self.target.config.vocab_size), depth)
            row.given = row.budget.choose(tree)
            checked_count("budget: the number of nodes chosen", row.given, 0)
            return first_nodes(tree, row.given + 1)

    def verify(self, trees: dict[int, DraftTree]) -> dict[int, Round]:
        """Runs the target over the trees, follows its draws, and keeps roots and the emitted tokens but the last.

        Roots alone need no window, since they are kept whatever is drawn.
        """
        sizes = [len(tree.topology) for tree in trees.values()]
        branched = max(sizes) > 1
        with self.on_stage("verify"):
            hidden = self.forwards.verify(trees, branched)
            logits = self.target.logits(_joined([states.final[0] for states in hidden], 0))
            features = [_features(states) for states in hidden]
        with self.on_stage("sample"):
            parts = zip(trees.items(), logits.split(sizes), strict=True)
            walks = {number: walk(self.rows[number], tree, part) for (number, tree), part in parts}
        with self.on_stage("commit"):
            paths = {number: [*done.path[: len(done.tokens)]] for number, done in walks.items()}
            # A device that was waiting for the walk has work at once, and does it while the commit is readied.
            for rows, (number, path) in zip(features, paths.items(), strict=True):
                if len(path) < rows.shape[1]:  # else the tree is this path, in order
                    rows = rows.index_select(1, indices(path, rows.device))
                self.rows[number].drafter.observe(rows)
            if branched:
                self.forwards.commit(paths)
        for number, done in walks.items():
            self.rows[number].budget.learn(done.tree, done.path)
            self.rows[number].on_round(done)
        return {number: _told(done) for number, done in walks.items()}


def walk(row: Row, tree: DraftTree, logits: Tensor) -> Verified:
    """What the draws from the logits of a row's tree, [N, vocab], take of it."""
    draws = row.draws(logits, *tree)
    path, bonus = follow(tree, draws)
    tokens = row.cut([*tree.tokens[path[1:]].tolist(), bonus])
    return Verified(tree, tuple(draws), tuple(path), tokens, row.given, row.length)


def _told(done: Verified) -> Round:
    return Round(done.tokens, drafted=len(done.tree.topology) - 1, accepted=len(done.path) - 1)


def _features(hidden: Hidden) -> Tensor:
    """What a proposer observes of a forward, [1, T, layers · D]."""
    return _joined(hidden.captured, -1) if hidden.captured else hidden.final[..., :0]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)
