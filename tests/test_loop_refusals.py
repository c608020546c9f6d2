"""What the loop refuses from the parts that a caller supplies, before it can change what is written."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drafter_oracle import bound_drafter, layered
from proposers import small_model
from tiny import tiny_model
from torch import Tensor

from ddtree import DFlashDrafter, DraftTree, NoDrafts, Scores, build_chain, build_tree, generate
from ddtree.tree import Build
from qwen_gdn import Topology, decode, greedy

PROMPT = [1, 2, 3]


class Uniform(NoDrafts):
    """Proposes four positions at which every token is as likely as another."""

    def propose(self, root: int) -> Tensor:
        return torch.zeros(4, 37)


def another_root(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    return build_tree((root + 1) % 37, scores, budget)


def too_many(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    return build_tree(root, scores, 3 * budget)


def an_unknown_token(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    return DraftTree(torch.tensor([root, 37]), Topology.chain(2))


def a_token_missing(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    return DraftTree(torch.tensor([root]), Topology.chain(2))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (another_root, "rooted at token"),
        (too_many, "at most 4 nodes below, got root"),
        (a_token_missing, "with 1 nodes below, and 1 tokens"),
        (an_unknown_token, r"drafted token 37 is outside the target's vocabulary \[0, 37\)"),
        (lambda root, scores, budget: None, "expected a DraftTree.*got NoneType None"),
        (lambda root, scores, budget: (torch.tensor([root]), Topology([-1])), "expected a DraftTree.*got tuple"),
        (lambda root, scores, budget: DraftTree(torch.tensor([root]), [-1]), r"whose topology is \[-1\]"),
        (lambda root, scores, budget: DraftTree([root], Topology([-1])), r"int64 tensor \[N\] on the CPU, got list"),
        (lambda root, scores, budget: DraftTree(torch.tensor([]), Topology([-1])), "got a tensor .* of torch.float32"),
        (lambda root, scores, budget: DraftTree(torch.tensor([]).long(), Topology([-1])), "got root none"),
    ],
)
def test_a_tree_that_is_none_for_the_round_is_refused_and_the_cache_stays(build: Build, said: str) -> None:
    model = small_model()
    cache = model.new_cache(20)
    rounds = generate(model, Uniform(), PROMPT, max_new_tokens=5, budget=4, build=build, cache=cache)
    next(rounds)
    with pytest.raises(ValueError, match=said):
        next(rounds)
    assert cache.length == len(PROMPT)
    cache.fork()  # raises if a window were open


WRONG_DRAWS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "floats": (lambda x: x.argmax(-1).double(), "got torch.float64"),
    "truth values": (lambda x: x.argmax(-1) > 0, "got torch.bool"),
    "below zero": (lambda x: x.argmax(-1) * 0 - 1, "got -1"),
    "beyond the vocabulary": (lambda x: x.argmax(-1) * 0 + 37, r"in \[0, 37\) .*got 37"),
    "one too many": (lambda x: torch.zeros(len(x) + 1, dtype=torch.int64), r"got torch.int64 \[\d\]"),
    "a list": (lambda x: [0] * len(x), "got list"),
    "nothing": (lambda x: None, "got NoneType"),
}


@pytest.mark.parametrize("wrong", WRONG_DRAWS)
def test_draws_that_are_no_token_ids_are_refused_from_the_first_on(wrong: str) -> None:
    model, (draw, said) = small_model(), WRONG_DRAWS[wrong]
    for before in (0, 1, 2):  # how many draws are right
        for start in (
            lambda **how: generate(model, Uniform(), PROMPT, max_new_tokens=5, budget=2, **how),
            lambda **how: decode(model, PROMPT, max_new_tokens=5, **how),
        ):
            calls, cache = iter([greedy] * before), model.new_cache(20)
            going = start(sampler=lambda x, calls=calls: next(calls, draw)(x), cache=cache)
            for _ in range(before):
                next(going)
            held = cache.length
            with pytest.raises(ValueError, match=f"draws must be token ids.*{said}"):
                next(going)
            assert cache.length == held
            cache.fork()  # raises if a window were open


def test_draws_of_any_kind_of_integer_are_taken() -> None:
    model = small_model()
    written = list(decode(model, PROMPT, max_new_tokens=6))
    for dtype in (torch.int32, torch.int16, torch.uint8):
        rounds = generate(model, Uniform(), PROMPT, max_new_tokens=6, sampler=lambda x, d=dtype: greedy(x).to(d))
        assert [token for done in rounds for token in done.tokens] == written


class Children:
    """Path-dependent scores as they are given."""

    def __init__(self, answer: object, depth: object = 4) -> None:
        self.answer, self.depth = answer, depth

    def children(self, path: tuple[int, ...], /) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (None, "needs draft logits.*got NoneType None"),
        ([[0.0] * 37], "needs draft logits.*got list"),
        (np.zeros((4, 37)), "needs draft logits.*got ndarray"),
        (torch.zeros(37), r"must be \[L, vocab\], got \[37\]"),
        (torch.zeros(1, 4, 37), r"must be \[L, vocab\], got \[1, 4, 37\]"),
        (torch.zeros(4, 37, dtype=torch.complex64), "must be real numbers, got torch.complex64"),
        (Children(([1], [-1.0]), depth=None), "whose depth is an int"),
        (Children(([1], [-1.0]), depth=-1), "whose depth is an int"),
        (Children(([1], [-1.0]), depth=2.5), "whose depth is an int"),
        (Children(None), "needs a pair of tokens and log-probabilities, got None"),
        (Children(torch.zeros(2)), "needs a pair"),
        (Children(([1.5], [-1.0])), "needs integer tokens.*got torch.float32"),
        (Children(([True], [-1.0])), "needs integer tokens.*got torch.bool"),
        (Children((["a"], [-1.0])), "tokens must be a 1-D tensor or a list of numbers"),
        (Children((None, [-1.0])), "tokens must be a 1-D tensor or a list of numbers, got None"),
        (Children(([1], None)), "log-probabilities must be a 1-D tensor or a list of numbers, got None"),
        (Children(([1], torch.zeros(1, dtype=torch.complex64))), "real log-probabilities"),
        (Children(([99], [-1.0])), "drafted token 99 is outside"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_proposal_is_refused_in_words_and_the_cache_stays(scores: Any, said: str) -> None:
    class Proposes(NoDrafts):
        def propose(self, root: int) -> Any:
            return scores

    model = small_model()
    for build in (build_tree, build_chain):
        cache = model.new_cache(20)
        rounds = generate(model, Proposes(), PROMPT, max_new_tokens=5, budget=4, build=build, cache=cache)
        next(rounds)
        with pytest.raises(ValueError, match=said) as caught:
            next(rounds)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
        assert cache.length == len(PROMPT)
        cache.fork()  # raises if a window were open


def test_no_children_at_all_are_a_proposal_of_nothing() -> None:
    for none in (([], []), (torch.tensor([], dtype=torch.int64), torch.tensor([]))):
        assert len(build_tree(3, Children(none), 4).topology) == 1


class Reads(NoDrafts):
    def __init__(self, layers: Any) -> None:
        self.layers = layers


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"drafter": Reads((99,))}, r"drafter: layers: layer id 99 is neither 'final' nor in \[0, 2\)"),
        ({"drafter": Reads(("x",))}, "layer id 'x'"),
        ({"drafter": Reads((True,))}, "layer id True"),
        ({"drafter": Reads("final")}, "needs a sequence of layer ids.*got 'final'"),
        ({"drafter": Reads(None)}, "needs a sequence of layer ids.*got None"),
        ({"budget": True}, "budget must be an int of at least 0, got True"),
        ({"budget": 2.0}, "budget must be an int of at least 0, got 2.0"),
        ({"prefill_window": True}, "prefill_window must be an int of at least 1, got True"),
        ({"max_new_tokens": True}, "max_new_tokens must be an int of at least 0, got True"),
        ({"max_new_tokens": None}, "max_new_tokens must be an int of at least 0, got None"),
        ({"stop_ids": 5}, "stop_ids must be a collection of token ids, got 5"),
        ({"stop_ids": None}, "stop_ids must be a collection of token ids, got None"),
        ({"stop_ids": "ab"}, "stop_ids must be a collection of token ids, got 'ab'"),
        ({"stop_ids": [1.5]}, r"stop_ids must be a collection of token ids, got \[1.5\]"),
        ({"prompt_ids": "abc"}, "prompt_ids must be integers.*got 'abc'"),
        ({"prompt_ids": None}, "prompt_ids must be integers.*got None"),
        ({"prompt_ids": [[1], [2, 3]]}, "prompt_ids must be integers"),
        ({"prompt_ids": [1j]}, "prompt_ids must be integers.*got torch.complex64"),
        ({"prompt_ids": 5}, r"prompt_ids must be integers.*got torch.int64 \[\]"),
        ({"sampler": None}, "sampler must be callable, got None"),
        ({"build": None}, "build must be callable, got None"),
        ({"on_stage": 3}, "on_stage must be callable, got 3"),
        ({"cache": [1]}, r"memory must be a cache.*got list \[1\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_the_call(how: dict[str, Any], said: str) -> None:
    model = small_model()
    how = {"drafter": NoDrafts(), "prompt_ids": PROMPT, "max_new_tokens": 3} | how
    with pytest.raises(ValueError, match=said):
        generate(model, how.pop("drafter"), how.pop("prompt_ids"), **how)


@pytest.mark.parametrize("how", [{"stop_ids": 5}, {"prompt_ids": "a"}, {"sampler": 1}, {"cache": 2}])
def test_plain_decoding_refuses_at_the_call_too(how: dict[str, Any]) -> None:
    how = {"prompt_ids": PROMPT, "max_new_tokens": 3} | how
    with pytest.raises(ValueError, match="must be"):
        decode(small_model(), how.pop("prompt_ids"), **how)


def test_a_window_is_no_cache_to_continue_from() -> None:
    model = small_model()
    branch = model.new_cache(9).branch(Topology.chain(2))
    with pytest.raises(ValueError, match="takes a cache, not a window on one"):
        decode(model, PROMPT, max_new_tokens=3, cache=branch)


def test_stop_ids_may_be_any_collection_of_integers() -> None:
    model = small_model()
    first = next(decode(model, PROMPT, max_new_tokens=1))
    for stops in ({first}, [first], torch.tensor([first]), np.array([first])):
        assert list(decode(model, PROMPT, max_new_tokens=5, stop_ids=stops)) == [first]


def test_a_model_that_overflows_is_loud_in_plain_and_speculative_decoding() -> None:
    model = small_model()
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="must be finite"):
        list(decode(model, PROMPT, max_new_tokens=3))
    with pytest.raises(ValueError, match="must be finite"):
        list(generate(model, Uniform(), PROMPT, max_new_tokens=3))


def test_a_cache_of_another_model_is_refused_at_the_call() -> None:
    model, other = small_model(), tiny_model(dtype=torch.float64)
    for call in (
        lambda: decode(model, PROMPT, max_new_tokens=3, cache=other.new_cache(20)),
        lambda: generate(model, NoDrafts(), PROMPT, max_new_tokens=3, cache=other.new_cache(20)),
    ):
        with pytest.raises(ValueError, match="another architecture or dtype"):
            call()


def test_autocast_changes_nothing_in_a_cached_forward() -> None:
    model = small_model(dtype=torch.float32)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    plain, cast = model.new_cache(8), model.new_cache(8)
    wanted = model(tokens, plain).final
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(tokens, cast).final, wanted)
    cast.check()


def test_a_cache_forked_in_inference_mode_works_outside() -> None:
    model = small_model()
    with torch.inference_mode():
        cache = model.new_cache(12)
        model(torch.tensor([PROMPT]), cache)
        fork = cache.fork()
    for each in (cache, fork):
        model(torch.tensor([[4]]), each)
        assert each.length == len(PROMPT) + 1


def test_a_copied_drafter_owns_no_target() -> None:
    drafter, _ = bound_drafter(layered("s", "f"))
    for twin in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert isinstance(twin, DFlashDrafter)
        with pytest.raises(RuntimeError, match="no target is bound"):
            twin.propose(1)
    assert drafter.propose(1).shape[0] == drafter.config.block_size - 1
