"""The speculative loop writes what plain decoding writes, and keeps in the cache and hands to the proposer exactly
what was emitted: over budgets, shapes of tree, scripted proposers and mixtures of rounds.
"""

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from proposers import (
    PROPOSERS,
    AtRank,
    Right,
    Scattered,
    Scripted,
    Wrong,
    check_holds,
    check_same,
    emitted,
    small_model,
)
from tiny import TOLERANCE, gap, memory_of, randint, random_tokens, same_bits, seeded
from torch import Tensor
from worlds import erratic

from ddtree import DraftTree, NoDrafts, Round, Scores, accept, build_chain, build_spine, build_tree, generate
from qwen_gdn import HybridCache, QwenGDN, decode
from qwen_gdn.model import LayerId
from qwen_gdn.topology import Path

TOKENS = 64
BUDGETS = (0, 1, 2, 3, 7, 8, 15, 16, 31, 63, 64)
SHAPES = [(build_tree, budget) for budget in BUDGETS] + [
    (build_chain, 7),
    (build_chain, 64),
    (build_spine, 5),
    (build_spine, 31),
    (build_tree, None),  # automatic, by times that are drawn at random
    (build_spine, None),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@lru_cache
def model_of(dtype: torch.dtype) -> QwenGDN:
    return small_model(dtype=dtype)


@lru_cache
def prompt_of(number: int) -> list[int]:
    draw = seeded(1000 + number)
    tokens: list[int] = random_tokens(draw, randint(draw, 1, 12), vocab=37).tolist()
    return tokens


@lru_cache
def plain(dtype: torch.dtype, number: int, count: int = TOKENS) -> list[int]:
    """What plain decoding writes after that prompt."""
    return list(decode(model_of(dtype), prompt_of(number), max_new_tokens=count))


def prompts_of(dtype: torch.dtype) -> range:
    """Two prompts for each shape of tree in float64; others in float32, of which some shapes have one."""
    exact = 2 * len(SHAPES)
    return range(exact) if dtype == torch.float64 else range(exact, exact + 22)


@pytest.mark.case(30)
@DTYPES
@pytest.mark.parametrize("name", list(PROPOSERS)[:7])
def test_whatever_is_drafted_the_output_is_that_of_plain_decoding(name: str, dtype: torch.dtype) -> None:
    """Both dtypes together: every proposer over 56 prompts x 64 tokens, 3 prompts or 4 for every shape of tree.

    The last two, which cost most, write half as much.
    """
    model, count = model_of(dtype), TOKENS if name in list(PROPOSERS)[:5] else TOKENS // 2
    for number in prompts_of(dtype):
        build, budget = SHAPES[number % len(SHAPES)]
        prompt, truth = prompt_of(number), plain(dtype, number)[:count]
        proposer = PROPOSERS[name]([*prompt, *truth], number)
        spent = erratic(number) if budget is None else budget
        rounds = list(generate(model, proposer, prompt, max_new_tokens=count, budget=spent, build=build))
        check_same(model, prompt, emitted(rounds), truth)
        if name == "right" and budget is not None:
            assert len(rounds) <= 2 + TOKENS / (1 + budget), "what is right must be accepted"


@DTYPES
def test_the_oracle_is_the_argmax_of_one_forward_without_any_cache(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    for number in prompts_of(dtype):
        prompt, truth = prompt_of(number), plain(dtype, number)
        logits = model.logits(model(torch.tensor([[*prompt, *truth[:-1]]])).final[0, len(prompt) - 1 :])
        check_same(model, prompt, logits.argmax(-1).tolist(), truth)
    varied = [len(set(plain(dtype, number))) > 12 for number in prompts_of(dtype)]
    assert sum(varied) > len(varied) // 2, "outputs that loop tell little"


@DTYPES
@pytest.mark.parametrize("budget", [0, 7, 64])
def test_no_drafts_is_plain_decoding_at_any_budget(dtype: torch.dtype, budget: int) -> None:
    for number in list(prompts_of(dtype))[:3]:
        rounds = list(
            generate(model_of(dtype), NoDrafts(), prompt_of(number), max_new_tokens=TOKENS // 4, budget=budget)
        )
        assert rounds == [Round((token,), 0, 0) for token in plain(dtype, number)[: TOKENS // 4]]


@pytest.mark.case(23)
@pytest.mark.parametrize("name", ["right", "wrong", "scattered", "moody", "path-dependent", "reading layers"])
def test_after_every_round_the_cache_holds_all_tokens_but_the_last(name: str) -> None:
    model, prompt, truth = model_of(torch.float64), prompt_of(3), plain(torch.float64, 3)
    for build, budget in ((build_tree, 5), (build_tree, 31), (build_chain, 4), (build_tree, 0)):
        cache, tokens = model.new_cache(len(prompt) + 31), list(prompt)
        proposer = PROPOSERS[name]([*prompt, *truth], 0)
        for done in generate(model, proposer, prompt, max_new_tokens=32, budget=budget, build=build, cache=cache):
            tokens += done.tokens
            check_holds(cache, model, tokens[:-1])
            assert proposer.seen == cache.length
        assert tokens == [*prompt, *truth[:32]]
        assert budget or not proposer.asked


@pytest.mark.parametrize("name", list(PROPOSERS))
def test_a_round_reports_what_was_drafted_and_what_of_it_the_target_wrote(name: str) -> None:
    model, prompt, truth = model_of(torch.float64), prompt_of(5), plain(torch.float64, 5)
    built: list[DraftTree] = []

    def spy(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
        built.append(build_tree(root, scores, budget))
        return built[-1]

    proposer = PROPOSERS[name]([*prompt, *truth], 2)
    rounds = list(generate(model, proposer, prompt, max_new_tokens=40, budget=9, build=spy))
    assert rounds[0] == Round((truth[0],), 0, 0)
    done = 1
    for tree, round_ in zip(built, rounds[1:], strict=False):
        coming = tuple(truth[done:])
        paths = [tuple(tree.tokens[tree.topology.path(i)[1:]].tolist()) for i in range(len(tree.topology))]
        assert int(tree.tokens[0]) == truth[done - 1]
        assert round_.drafted == len(tree.topology) - 1 <= 9
        assert round_.accepted == max(len(path) for path in paths if path == coming[: len(path)])
        assert len(round_.tokens) == round_.accepted + 1
        done += len(round_.tokens)
    # The last token of all can only be a bonus, so nothing is drafted beside it, nor asked for.
    assert len(rounds) - 1 - len(built) in (0, 1)
    assert all(round_ == Round((truth[39],), 0, 0) for round_ in rounds[1 + len(built) :])
    assert proposer.asked == len(built)


@pytest.mark.case(16)
def test_fifty_rounds_of_nothing_accepted_write_one_token_each() -> None:
    model, prompt, truth = model_of(torch.float64), prompt_of(0), plain(torch.float64, 0)
    cache = model.new_cache(80)
    tokens = list(prompt)
    proposer = Wrong([*prompt, *truth])
    rounds = generate(model, proposer, prompt, max_new_tokens=53, budget=6, cache=cache)
    for number, done in enumerate(rounds):
        assert (done.tokens, done.accepted) == ((truth[number],), 0)
        assert done.drafted == (6 if 0 < number < 52 else 0)
        tokens += done.tokens
        check_holds(cache, model, tokens[:-1])
    assert number == 52
    assert proposer.asked == 51, "not for the first token and not for the last"


@pytest.mark.case(26)
def test_a_tree_that_is_only_a_spine_equals_the_chain_round_by_round() -> None:
    """Ids, counts and every committed bit, over 60 rounds of varying length."""

    class Spine(Scripted):
        """Right with probability one at each depth, or wrong with probability one."""

        def draft(self, coming: list[int]) -> Tensor:
            logits = torch.full((len(coming), self.vocab), -torch.inf)
            tokens = [(token + (self.integer(3) == 0)) % self.vocab for token in coming]
            logits[range(len(coming)), tokens] = 0.0
            return logits

    model, prompt = model_of(torch.float64), prompt_of(7)
    truth = plain(torch.float64, 7, 200)
    runs = []
    for build in (build_tree, build_chain):
        cache = model.new_cache(256)
        rounds = generate(
            model, Spine([*prompt, *truth], 5), prompt, max_new_tokens=200, budget=8, build=build, cache=cache
        )
        runs.append([(done, memory_of(cache)) for done in rounds])
    assert len(runs[0]) > 60
    for (tree, after_tree), (chain, after_chain) in zip(*runs, strict=True):
        assert tree == chain
        assert same_bits(after_tree, after_chain)


@pytest.mark.case(17)
@DTYPES
@pytest.mark.parametrize("seed", [0, 1])
def test_tree_chain_and_plain_forwards_mix_on_one_cache(seed: int, dtype: torch.dtype) -> None:
    model, prompt = small_model(dtype=dtype, wild=2.0), prompt_of(9)
    truth = list(decode(model, prompt, max_new_tokens=200))
    draw, cache = seeded(seed), model.new_cache(len(prompt) + 200)
    written = [next(iter(decode(model, prompt, max_new_tokens=1, cache=cache)))]
    kinds: set[str] = set()
    while len(written) < 200:
        kind = _mixed_round(model, cache, written, truth, draw)
        kinds.add(kind)
        assert cache.length == len(prompt) + len(written) - 1
    assert len(kinds) == 7, kinds
    check_same(model, prompt, written, truth)
    check_holds(cache, model, [*prompt, *truth[:-1]])


def _mixed_round(
    model: QwenGDN, cache: HybridCache, written: list[int], truth: list[int], draw: torch.Generator
) -> str:
    """One round of a kind drawn at random; appends to `written` and returns the kind."""
    kinds = ("tree", "chain window", "one token", "three tokens", "empty draft", "budget 0", "discarded")
    kind = kinds[randint(draw, 0, len(kinds) - 1)]
    done, left = len(written), len(truth) - len(written)
    root, coming = written[-1], truth[done : done + min(left - 1, 6)]
    right = Scattered([root, *coming], randint(draw, 0, 10**6))
    right.bind(model)
    if kind in ("tree", "chain window", "discarded"):
        build = build_chain if kind == "chain window" else build_tree
        tree = build(root, right.propose(root), randint(draw, 1, 20))
        branch = cache.branch(tree.topology)
        hidden = model(tree.tokens, branch)
        if kind == "discarded":
            cache.discard()
            return kind
        path, bonus = accept(tree, model.logits(hidden.final[0]).argmax(-1))
        cache.commit(path)
        written += [*tree.tokens[path[1:]].tolist(), bonus]
    elif kind in ("one token", "three tokens"):
        known = coming[:2] if kind == "three tokens" and left > 2 else []
        hidden = model(torch.tensor([[root, *known]]), cache)
        written += model.logits(hidden.final[0]).argmax(-1).tolist()
    else:
        proposer = NoDrafts() if kind == "empty draft" else right
        rounds = generate(
            model, proposer, [root], max_new_tokens=min(left, 2), budget=4 if kind == "empty draft" else 0, cache=cache
        )
        written += emitted(rounds)
    return kind


class Recorder(Scattered):
    """Keeps all it observes."""

    def __init__(self, transcript: Sequence[int], layers: Sequence[LayerId]) -> None:
        super().__init__(transcript, seed=1)
        self.layers = layers
        self.calls: list[Tensor] = []

    def observe(self, features: Tensor) -> None:
        super().observe(features)
        self.calls.append(features.clone())


@pytest.mark.case(28)
@pytest.mark.parametrize("layers", [(0,), (1, "final", 0), ("final",), ()], ids=str)
@pytest.mark.parametrize(("length", "window"), [(50, 8), (50, 2048), (16, 8), (1, 8)])
def test_every_committed_row_is_observed_once_and_in_order(
    layers: Sequence[LayerId], length: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(torch.float64)
    prompt = random_tokens(seeded(length), length, vocab=37).tolist()
    truth = list(decode(model, prompt, max_new_tokens=40))
    paths: list[list[int]] = []
    commit = HybridCache.commit

    def spy(cache: HybridCache, path: Path) -> None:
        paths.append([int(node) for node in path])
        commit(cache, path)

    monkeypatch.setattr(HybridCache, "commit", spy)
    proposer = Recorder([*prompt, *truth], layers)
    rounds = list(generate(model, proposer, prompt, max_new_tokens=40, budget=12, prefill_window=window))
    assert emitted(rounds) == truth

    windows = [len(part) for part in torch.arange(length).split(window)]
    assert [part.shape[1] for part in proposer.calls] == windows + [len(done.tokens) for done in rounds[1:]]
    assert any(path != list(range(len(path))) for path in paths), "no scattered path was committed"
    once = model(torch.tensor([[*prompt, *truth[:-1]]]), capture=layers).captured
    seen = torch.cat(proposer.calls, dim=1)
    assert seen.shape == (1, length + 39, 16 * len(layers))
    assert gap(seen, torch.cat(once, dim=-1) if once else seen[..., :0]) <= TOLERANCE[torch.float64]


@pytest.mark.case(21)
@pytest.mark.parametrize("stop", [False, True], ids=["ended by the count", "ended by a stop id"])
@pytest.mark.parametrize("budget", [0, 6, 20])
def test_a_second_turn_on_the_same_cache_equals_one_fresh_run(stop: bool, budget: int) -> None:
    model, first = model_of(torch.float64), prompt_of(4)
    layers: Sequence[LayerId] = (0, "final")
    turn, user = plain(torch.float64, 4)[:17], random_tokens(seeded(77), 9, vocab=37).tolist()
    if stop:
        turn = turn[: turn.index(turn[12]) + 1]
    whole = [*first, *turn, *user]
    truth = list(decode(model, whole, max_new_tokens=20))
    proposer, cache = Recorder([*first, *plain(torch.float64, 4)], layers), model.new_cache(100)

    count, stop_ids = (40, turn[-1:]) if stop else (17, [])
    rounds = generate(model, proposer, first, max_new_tokens=count, budget=budget, stop_ids=stop_ids, cache=cache)
    assert emitted(rounds) == turn
    check_holds(cache, model, [*first, *turn[:-1]])

    proposer.transcript = [*whole, *truth]
    again = generate(model, proposer, [turn[-1], *user], max_new_tokens=20, budget=budget, cache=cache)
    assert emitted(again) == truth
    assert proposer.seen == cache.length
    check_holds(cache, model, [*whole, *truth[:-1]])
    once = model(torch.tensor([[*whole, *truth[:-1]]]), capture=layers).captured
    assert gap(torch.cat(proposer.calls, dim=1), torch.cat(once, dim=-1)) <= TOLERANCE[torch.float64]


def test_an_emptied_cache_starts_the_proposer_afresh_and_a_filled_one_does_not() -> None:
    model, prompt, truth = model_of(torch.float64), prompt_of(2), plain(torch.float64, 2)
    proposer = Right([*prompt, *truth])
    cache = model.new_cache(100)
    for _ in range(2):
        rounds = list(generate(model, proposer, prompt, max_new_tokens=20, cache=cache, budget=30))
        assert emitted(rounds) == truth[:20]
        assert proposer.seen == cache.length == len(prompt) + 19
        assert len(rounds) == 3, "a proposer out of step would have been wrong"
        cache.crop(0)


def test_a_wrong_transcript_and_a_proposer_out_of_step_cost_rounds_only() -> None:
    model, prompt, truth = model_of(torch.float64), prompt_of(6), plain(torch.float64, 6)
    lost = AtRank([*prompt, *truth], rank=0, depth=0)
    cache = model.new_cache(100)
    model(torch.tensor([prompt]), cache)  # rows that the proposer is never shown
    rounds = generate(model, lost, truth[:1], max_new_tokens=30, cache=cache, budget=12)
    lost.seen = 3
    assert emitted(rounds) == truth[1:31]
