"""The speculative loop: propose, build, verify, sample, commit. It neither prints, times, nor decodes text.

The root of a round is the last emitted token, not yet in the cache. The target verifies a whole draft tree in one
forward over a branch, the sampler draws the target's own token at every node, and the walk follows the draws while
the tree has them. So every emitted token is the target's own draw, whatever was proposed, and the output has the
law of plain decoding; greedily it is plain decoding's output.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qwen_gdn.cache import HybridCache
from qwen_gdn.checked import checked_callables, checked_count
from qwen_gdn.decode import (
    PREFILL_WINDOW,
    Draws,
    HybridModel,
    OnStage,
    Sampler,
    checked_prompt,
    checked_sampler,
    checked_stops,
    fitting_cache,
    greedy,
    prefill,
)
from qwen_gdn.model import Hidden, LayerId, checked_layers
from qwen_gdn.transfer import indices

from .contexts import RowCount, check_crop
from .drafts import checked_tree, limited, pruned
from .scores import Scores
from .tree import Build, DraftTree, accept, build_chain, build_tree


class Round(NamedTuple):
    """What one round emitted.

    tokens: the emitted ids; `len(tokens) == accepted + 1` unless the last one ended the generation.
    drafted: nodes put before the target, the root not counted.
    accepted: drafted nodes that the target's draws followed, before any cut.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int


class Verified(NamedTuple):
    """How a round with a verify came about; all of it lies on the host already.

    tree: what was put before the target, a `ScoredTree` if the builder knows scores; without drafts, the root alone.
    draws: the target's token at every node.
    path: the nodes that the draws followed, root first, before any cut; the draw at its last node is the bonus.
    budget: nodes that could have been drafted.
    length: tokens in the cache before the round.
    """

    tree: DraftTree
    draws: tuple[int, ...]
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int
    length: int


class Proposer(Protocol):
    """Anything that guesses what the target will write next. Bad guesses cost time, never correctness."""

    @property
    def layers(self) -> Sequence[LayerId]:
        """Target layers it reads, in the order wanted: id L is the output of layer L.

        `"embedding"` is the embedding of the token itself, `"final"` the state after the final norm.
        """

    def bind(self, target: HybridModel) -> None:
        """Meets the target, once per generation: checks the pairing and keeps what it needs of it."""

    def reset(self) -> None:
        """Forgets all rows."""

    def observe(self, features: Tensor) -> None:
        """Receives [1, T, len(layers) · D] of newly committed tokens; every committed row comes exactly once."""

    def propose(self, root: int) -> Tensor | Scores:
        """Draft logits [L, vocab] of independent positions after `root`, or `Scores`; L = 0 proposes nothing."""


class NoDrafts:
    """Proposes nothing: plain decoding as a case of the loop. Of the rows it observes it keeps their number."""

    layers: Sequence[LayerId] = ()
    context_length = 0
    crop_floor = 0

    def bind(self, target: HybridModel) -> None:
        self._nothing = torch.empty(0, target.config.vocab_size)

    def reset(self) -> None:
        self.context_length = 0

    def observe(self, features: Tensor) -> None:
        self.context_length += features.shape[1]

    def propose(self, root: int) -> Tensor:
        return self._nothing

    def crop(self, length: int) -> None:
        check_crop(length, 0, self.context_length)
        self.context_length = length

    def snapshot(self) -> RowCount:
        return RowCount(self.context_length)

    def restore(self, kept: RowCount) -> None:
        self.context_length = kept.length


def ignored(verified: Verified) -> None:
    """Nobody watches the rounds."""


def never(token: int) -> bool:
    """No token is the last one for what it says."""
    return False


def generate(
    target: HybridModel,
    drafter: Proposer,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    budget: int = 15,
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
        budget: the most drafted nodes of a round, the root not counted; 0 is plain decoding.
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
    checked_count("budget", budget, 0)
    checked_count("prefill_window", prefill_window, 1)
    stops = checked_stops(stop_ids)
    checked_callables(sampler=sampler, build=build, on_stage=on_stage, until=until, on_round=on_round)
    cache = fitting_cache(target, cache, prompt.shape[1] + max_new_tokens - 1)
    draws = checked_sampler(target, sampler, prompt, cache, earlier_ids)
    drafter.bind(target)
    layers = checked_layers(drafter.layers, target.config.num_hidden_layers, "drafter: layers")
    if cache.length == 0:
        drafter.reset()

    def ends(token: int) -> bool:
        return token in stops or until(token)

    loop = _Loop(target, drafter, layers, cache, draws, ends, on_stage, on_round)
    return loop.run(prompt, max_new_tokens, budget, build, prefill_window)


class _Loop:
    """The parts of one generation."""

    def __init__(
        self,
        target: HybridModel,
        drafter: Proposer,
        layers: Sequence[LayerId],
        cache: HybridCache,
        draws: Draws,
        ends: Callable[[int], bool],
        on_stage: OnStage,
        on_round: Callable[[Verified], None],
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.layers = layers
        self.cache = cache
        self.draws = draws
        self.ends = ends
        self.on_stage = on_stage
        self.on_round = on_round
        self.ended = False

    @torch.no_grad()
    def run(self, prompt: Tensor, count: int, budget: int, build: Build, window: int) -> Generator[Round, None, None]:
        if count == 0:
            with self.cache.transaction():
                self.prefill(prompt[:, :-1], window)
            return
        with self.cache.transaction():
            last = self.prefill(prompt, window)
            with self.on_stage("sample"):
                (root,) = self.cut(self.draws(self.target.logits(last)))
        del last  # a view, which would keep the prompt's last window alive
        self.draws.emitted([root])
        count -= 1
        yield Round((root,), 0, 0)
        while count and not self.ended:
            tree = self.draft(root, count - 1, budget, build)
            with self.cache.transaction():
                done = self.verify(tree, budget)
            self.draws.emitted(done.tokens)
            yield done
            root = done.tokens[-1]
            count -= len(done.tokens)

    def prefill(self, prompt: Tensor, window: int) -> Tensor:
        def observe(hidden: Hidden) -> None:
            with self.on_stage("draft"):
                self.drafter.observe(_features(hidden))

        return prefill(
            self.target,
            prompt,
            self.cache,
            window=window,
            capture=self.layers,
            on_window=observe,
            on_stage=self.on_stage,
        )

    def draft(self, root: int, depth: int, budget: int, build: Build) -> DraftTree:
        """The round's tree, no deeper than what could still be emitted beside the bonus."""
        if depth == 0 or budget == 0:
            return build_chain(root, torch.empty(0, 1), 0)
        with self.on_stage("draft"):
            scores = limited(self.drafter.propose(root), depth)
        with self.on_stage("build"):
            tree = checked_tree(build(root, scores, budget), root, budget, self.target.config.vocab_size)
            return pruned(tree, depth)

    def verify(self, tree: DraftTree, budget: int) -> Round:
        """Runs the target over the tree, follows its draws, and keeps the root and the emitted tokens but the last."""
        length = self.cache.length
        with self.on_stage("verify"):
            hidden = self.forward(tree)
            logits = self.target.logits(hidden.final[0])
        with self.on_stage("sample"):
            draws = self.draws(logits, *tree)
            path, bonus = accept(tree, torch.tensor(draws))
            tokens = self.cut([*tree.tokens[path[1:]].tolist(), bonus])
        with self.on_stage("commit"):
            self.keep(tree, path[: len(tokens)], hidden)
        self.on_round(Verified(tree, tuple(draws), tuple(path), tokens, budget, length))
        return Round(tokens, drafted=len(tree.topology) - 1, accepted=len(path) - 1)

    def forward(self, tree: DraftTree) -> Hidden:
        """The tree through a window; a root alone needs none, since it is kept whatever is drawn."""
        memory = self.cache if len(tree.topology) == 1 else self.cache.branch(tree.topology)
        hidden: Hidden = self.target(tree.tokens, memory, capture=self.layers)
        return hidden

    def cut(self, tokens: list[int]) -> tuple[int, ...]:
        """What is emitted of them: up to the first that ends the generation."""
        for count, token in enumerate(tokens, 1):
            if self.ends(token):
                self.ended = True
                return tuple(tokens[:count])
        return tuple(tokens)

    def keep(self, tree: DraftTree, path: list[int], hidden: Hidden) -> None:
        if len(tree.topology) > 1:
            self.cache.commit(path)
        self.drafter.observe(_features(hidden)[:, indices(path, hidden.final.device)])


def _features(hidden: Hidden) -> Tensor:
    """What a proposer observes of a forward, [1, T, layers · D]."""
    return torch.cat(hidden.captured, dim=-1) if hidden.captured else hidden.final[..., :0]
