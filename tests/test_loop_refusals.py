"""What the loop refuses from the parts that a caller supplies, before it can change what is written."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from drafter_oracle import bound_drafter, layered
from proposers import small_model
from tiny import tiny_model
from torch import Tensor

from ddtree import DFlashDrafter, DraftTree, NoDrafts, Scores, build_tree, generate
from ddtree.loop import Build
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


def a_token_missing(root: int, scores: Tensor | Scores, budget: int) -> DraftTree:
    return DraftTree(torch.tensor([root]), Topology.chain(2))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (another_root, "rooted at token"),
        (too_many, "at most 4 nodes below, got root"),
        (a_token_missing, "with 1 nodes below, and 1 tokens"),
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


@pytest.mark.parametrize("draw", [lambda x: x.argmax(-1).double(), lambda x: x.argmax(-1) - 99])
def test_draws_that_are_no_token_ids_are_refused(draw: Callable[[Tensor], Tensor]) -> None:
    model = small_model()
    calls = iter([greedy])
    rounds = generate(model, Uniform(), PROMPT, max_new_tokens=5, budget=2, sampler=lambda x: next(calls, draw)(x))
    next(rounds)
    with pytest.raises(ValueError, match="draws must be token ids"):
        next(rounds)


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
