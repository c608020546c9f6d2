"""The MTP proposer: its module against an independent one, its memory over rounds, and the loop that it drafts for."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch
from mtp_oracle import Oracle
from proposers import check_holds, emitted, small_model, table_model
from tiny import fill, raising_at, random_tokens, seeded, tiny_model, tiny_raw
from torch import Tensor

import ddtree.mtp
import qwen_gdn.program_set
from ddtree import DraftTree, MTPDrafter, Scores, build_chain, build_tree, generate
from ddtree.mtp import Drafted
from qwen_gdn import MTP, ModelConfig, QwenGDN, Topology, decode
from qwen_gdn.engine import Engine

COURSE = (7, 1, 3, 1, 5, 2, 4)  # rows committed before each round


def module_of(config: ModelConfig, dtype: torch.dtype = torch.float64, *, seed: int = 1, wild: float = 4.0) -> MTP:
    """A module of random weights for targets of that config."""
    mtp = MTP(config).double().requires_grad_(False)
    fill(mtp, seed, wild)
    return mtp.to(dtype).eval()


def features_of(model: QwenGDN, tokens: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random states of those tokens [T], and what a proposer observes of them, [1, T, 2 · D]."""
    shape = (1, len(tokens), model.config.hidden_size)
    states = torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(model.dtype)
    return states, torch.cat((states, model.embed(tokens[None])), dim=-1)


class Course:
    """Tokens and states committed so far, a proposer that observed them, and an oracle that is told of them."""

    def __init__(self, dtype: torch.dtype, **how: int) -> None:
        self.model = tiny_model(dtype=dtype, wild=4.0)
        mtp = module_of(self.model.config, dtype)
        self.drafter = MTPDrafter(mtp, **how)
        self.drafter.bind(self.model)
        assert self.model.lm_head is not None
        embedding, head = self.model.embed_tokens.weight, self.model.lm_head.weight
        self.oracle = Oracle(tiny_raw(), mtp.state_dict(), embedding, head)
        self.tokens: list[int] = []
        self.states = torch.empty(1, 0, self.model.config.hidden_size, dtype=dtype)

    def commit(self, tokens: Tensor) -> None:
        states, features = features_of(self.model, tokens, seed=len(self.tokens))
        self.drafter.observe(features)
        self.tokens += tokens.tolist()
        self.states = torch.cat((self.states, states), dim=1)

    def wanted(self, root: int, path: Sequence[int]) -> Any:
        return self.oracle.log_probs([*self.tokens, root], self.states[0].double().numpy(), path)

    def check(self, drafted: Drafted, root: int, tolerance: float) -> None:
        """Every family holds the likeliest tokens after its path, with the oracle's log-probabilities."""
        for path, (tokens, log_probs) in drafted.families.items():
            wanted = self.wanted(root, path)
            best = np.sort(wanted)[::-1][: len(tokens)]
            assert len(tokens) == 64
            for found in (wanted[tokens], np.array(log_probs)):
                assert np.abs(found - best).max() <= tolerance * np.abs(best).max(), path


def same(ours: Drafted, theirs: Drafted) -> bool:
    """Whether the same paths were drafted, with the same scores to float64 rounding."""
    if (ours.depth, *ours.families) != (theirs.depth, *theirs.families):
        return False
    pairs = [(*ours.families[path], *theirs.families[path]) for path in ours.families]
    return all(a == c and np.allclose(b, d, rtol=1e-10) for a, b, c, d in pairs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_drafts_are_those_of_an_independent_module_over_rounds_of_any_length(
    dtype: torch.dtype, tolerance: float
) -> None:
    course, draw = Course(dtype, depth=4, width=3), seeded(3)
    for number, rows in enumerate(COURSE):
        course.commit(random_tokens(draw, rows))
        if number in (2, 5):  # a budget of 0 asks for no proposal
            continue
        root = int(random_tokens(draw, 1))
        drafted = course.drafter.propose(root)
        assert len(drafted.families) == 1 + 3 * 3
        assert course.drafter.context_length == len(course.tokens)
        course.check(drafted, root, tolerance)


def test_the_most_probable_paths_are_drafted_further_and_the_greedy_one_always() -> None:
    course = Course(torch.float64, depth=4, width=3)
    course.commit(random_tokens(seeded(1), 6))
    kept_for_being_greedy = 0
    for root in range(8):
        drafted = course.drafter.propose(root)
        beam: list[tuple[int, ...]] = [()]
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        for depth in range(1, 4):
            children = {}
            for path in beam:
                row = course.wanted(root, path)
                children |= {(*path, int(t)): scores[path] + float(row[t]) for t in np.argsort(-row)[:3]}
            greedy = (*beam[0], int(np.argmax(course.wanted(root, beam[0]))))
            best = sorted(children, key=lambda path: -children[path])
            kept_for_being_greedy += greedy not in best[:3]
            beam = [greedy, *(path for path in best if path != greedy)][:3]
            scores = {path: children[path] for path in beam}
            assert {path for path in drafted.families if len(path) == depth} == set(beam)
        assert drafted.children((*beam[0], 0)) == ([], [])
        assert tuple(build_chain(root, drafted, 3).tokens[1:].tolist()) == beam[0]
        assert len(build_chain(root, drafted, 15).tokens) == 1 + 4
    assert kept_for_being_greedy, "the best three held the greedy path every time"


def test_at_a_width_of_one_only_the_greedy_path_goes_on() -> None:
    course = Course(torch.float64, depth=5, width=1)
    course.commit(random_tokens(seeded(1), 6))
    drafted = course.drafter.propose(5)
    path: list[int] = []
    for token in build_chain(5, drafted, 15).tokens[1:].tolist():
        assert len(drafted.children(tuple(path))[0]) == 64
        assert token == int(np.argmax(course.wanted(5, path)))
        path.append(token)
    assert len(path) == len(drafted.families) == 5


def test_proposals_depend_on_what_was_committed_alone() -> None:
    """Not on what was proposed before, nor on how the rows came."""
    together, apart = Course(torch.float64, depth=3, width=2), Course(torch.float64, depth=3, width=2)
    tokens = random_tokens(seeded(2), 11)
    _, features = features_of(together.model, tokens)
    together.drafter.observe(features)
    for part in features.split([4, 1, 1, 5], dim=1):
        apart.drafter.observe(part)
        for root in (9, 3, 9):
            apart.drafter.propose(root)
    wanted = together.drafter.propose(9)
    assert same(apart.drafter.propose(9), wanted)
    apart.drafter.reset()
    assert apart.drafter.propose(9) == Drafted(0, {})
    apart.drafter.observe(features)
    assert same(apart.drafter.propose(9), wanted)


def varied(budgets: Iterator[int], shapes: Iterator[Callable[..., DraftTree]]) -> Callable[..., DraftTree]:
    """A builder whose budget and kind of tree change from round to round."""

    def build(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
        return next(shapes)(root, scores, min(budget, next(budgets)))

    return build


BUILDS: dict[str, Callable[[], Callable[..., DraftTree]]] = {
    "tree": lambda: build_tree,
    "chain": lambda: build_chain,
    "both, of changing budgets": lambda: varied(cycle((1, 12, 0, 3, 7, 20)), cycle((build_tree, build_chain))),
}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("window", [3, 2048])
def test_generation_is_plain_decoding_also_in_a_second_turn_on_the_same_cache(build: str, window: int) -> None:
    model = small_model()
    drafter = MTPDrafter(module_of(model.config, seed=window % 2), depth=4, width=4)
    prompt, user = (random_tokens(seeded(part), 8, vocab=37).tolist() for part in (40, 50))
    truth = list(decode(model, prompt, max_new_tokens=30))
    cache = model.new_cache(100)
    how: dict[str, Any] = {"cache": cache, "build": BUILDS[build](), "budget": 20, "prefill_window": window}
    assert emitted(generate(model, drafter, prompt, max_new_tokens=30, **how)) == truth
    whole = [*prompt, *truth, *user]
    again = emitted(generate(model, drafter, [truth[-1], *user], max_new_tokens=30, **how))
    assert again == list(decode(model, whole, max_new_tokens=30))
    check_holds(cache, model, [*whole, *again[:-1]])
    assert drafter.context_length == cache.length
    cache.crop(0)
    assert emitted(generate(model, drafter, prompt, max_new_tokens=30, **how)) == truth
    assert drafter.context_length == cache.length


@pytest.mark.parametrize(("build", "depth"), [*product((build_tree, build_chain), (1, 4))])
def test_a_module_that_guesses_right_is_accepted_to_its_depth(build: Callable[..., DraftTree], depth: int) -> None:
    """The target's next token depends on the last one alone, and the module looks it up likewise."""
    vocab = 23
    model = table_model(8 * torch.randn(vocab, vocab, generator=seeded(4), dtype=torch.float64))
    drafter = MTPDrafter(successor_module(model), depth=depth)
    prompt = [3, 1, 4]
    rounds = list(generate(model, drafter, prompt, max_new_tokens=1 + 6 * (depth + 1), build=build))
    assert emitted(rounds) == list(decode(model, prompt, max_new_tokens=1 + 6 * (depth + 1)))
    assert [done.accepted for done in rounds] == [0, *[depth] * 6]


def successor_module(model: QwenGDN) -> MTP:
    """A module that hands the next token's embedding through to the head."""
    mtp, width = module_of(model.config), model.config.hidden_size
    weights = dict(mtp.named_parameters())
    names = ("pre_fc_norm_embedding", "norm", "layers.0.self_attn.o_proj", "layers.0.mlp.down_proj")
    for name in names:
        weights[f"{name}.weight"].zero_()
    weights["fc.weight"].copy_(torch.eye(width, 2 * width))
    return mtp


@pytest.mark.parametrize("build", ["tree", "chain"])
def test_it_drafts_beside_a_target_that_runs_by_programs(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_gdn.program_set, "compiled", lambda function: function)
    model = small_model()
    engine, mtp = Engine(small_model(), sizes=(8, 32)), module_of(model.config)
    prompt = random_tokens(seeded(8), 9, vocab=37).tolist()
    runs = [
        list(generate(each, MTPDrafter(mtp), prompt, max_new_tokens=40, build=BUILDS[build]()))
        for each in (model, engine)
    ]
    assert runs[0] == runs[1]
    assert emitted(runs[0]) == list(decode(model, prompt, max_new_tokens=40))


def test_embeddings_are_captured_like_layers_by_model_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_gdn.program_set, "compiled", lambda function: function)
    model, capture = small_model(), ("embedding", 1, "final", "embedding")
    engine = Engine(small_model(), sizes=(8,))
    for runner in (model, engine):
        cache = runner.new_cache(20)
        tokens = random_tokens(seeded(1), 1, 6, vocab=37)
        for part, window in ((tokens, False), (tokens[:, :1], False), (tokens, True)):
            hidden = runner(part, cache.branch(Topology.chain(6)) if window else cache, capture=capture)
            assert torch.equal(hidden.captured[0], model.embed_tokens.weight[part])
            assert torch.equal(hidden.captured[3], hidden.captured[0])
            assert torch.equal(hidden.captured[2], hidden.final)
        cache.discard()


def test_what_does_not_fit_is_one_line_and_changes_nothing() -> None:
    course = Course(torch.float64)
    other = tiny_model(vocab_size=98)
    with pytest.raises(ValueError, match="vocab_size 97 differs from the target's 98"):
        course.drafter.bind(other)
    course.commit(random_tokens(seeded(1), 4))
    wanted = course.drafter.propose(3)
    for shape in ((1, 2, 63), (2, 1, 64), (1, 64)):
        with pytest.raises(ValueError, match=r"must be \[1, T, 64\], a state and an embedding of 32 each, got"):
            course.drafter.observe(torch.zeros(shape))
    course.drafter.observe(torch.zeros(1, 0, 64))
    assert same(course.drafter.propose(3), wanted)
    with pytest.raises(RuntimeError, match="no target is bound"):
        MTPDrafter(course.drafter.mtp).propose(1)
    for name in ("depth", "width"):
        with pytest.raises(ValueError, match=f"MTP drafter: {name} must be an int of at least 1, got 0"):
            MTPDrafter(course.drafter.mtp, **{name: 0})


@pytest.mark.parametrize("call", range(3))
def test_an_exception_leaves_the_committed_rows_as_they_were(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddtree.mtp, "AT_ONCE", 1)  # rows are read as they come
    course = Course(torch.float64, depth=3, width=2)
    course.commit(random_tokens(seeded(1), 4))
    wanted = course.drafter.propose(3)
    with raising_at(course.drafter.mtp, "forward", call, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        course.drafter.propose(8)
    assert same(course.drafter.propose(3), wanted)
    features = features_of(course.model, random_tokens(seeded(2), 3))[1]
    with raising_at(course.drafter.mtp, "forward", 0, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        course.drafter.observe(features)
    assert course.drafter.context_length == 4
    assert same(course.drafter.propose(3), wanted)


def test_rows_observed_in_inference_mode_are_drafted_from_outside_it() -> None:
    course = Course(torch.float64, depth=2, width=2)
    with torch.inference_mode():
        course.commit(random_tokens(seeded(1), 4))
        course.commit(random_tokens(seeded(2), 2))
    course.commit(random_tokens(seeded(3), 2))
    course.check(course.drafter.propose(3), 3, 1e-10)
