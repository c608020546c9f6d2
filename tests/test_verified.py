"""What a round tells of itself through `on_round`, and that a watched generation is the same generation."""

import pytest
import torch
from proposers import Branching, Random, Right, Scattered, emitted, small_model
from tiny import random_tokens, seeded

from ddtree import DraftTree, NoDrafts, ScoredTree, Verified, accept, build_chain, build_spine, build_tree, generate
from qwen_gdn import QwenGDN, Topology, decode

COUNT = 40
MAKERS = [Right, Scattered, Random, Branching]


@pytest.fixture(scope="module")
def model() -> QwenGDN:
    return small_model()


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = random_tokens(seeded(4), 7, vocab=37).tolist()
    return ids


@pytest.fixture(scope="module")
def truth(model: QwenGDN, prompt: list[int]) -> list[int]:
    return list(decode(model, prompt, max_new_tokens=COUNT))


@pytest.mark.parametrize("build", [build_tree, build_spine, build_chain])
@pytest.mark.parametrize("maker", MAKERS)
def test_every_round_but_the_first_says_how_it_came_about(
    model: QwenGDN, prompt: list[int], truth: list[int], maker: type, build: object
) -> None:
    told: list[Verified] = []
    drafter = maker([*prompt, *truth], 3)
    rounds = list(generate(model, drafter, prompt, max_new_tokens=COUNT, budget=6, build=build, on_round=told.append))
    assert emitted(rounds) == truth and len(told) == len(rounds) - 1
    written = list(rounds[0].tokens)
    for done, found in zip(rounds[1:], told, strict=True):
        assert (found.tokens, found.budget) == (done.tokens, 6)
        assert (len(found.tree.topology) - 1, len(found.path) - 1) == (done.drafted, done.accepted)
        assert found.length == len(prompt) + len(written) - 1 and int(found.tree.tokens[0]) == written[-1]
        assert accept(found.tree, found.draws) == (list(found.path), found.draws[found.path[-1]])
        for node in range(done.drafted + 1):
            branch = [int(found.tree.tokens[i]) for i in found.tree.topology.path(node)]
            assert found.draws[node] == next(decode(model, [*prompt, *written[:-1], *branch], max_new_tokens=1))
        assert isinstance(found.tree, ScoredTree) and len(found.tree.log_probs) == done.drafted + 1
        written += done.tokens


@pytest.mark.parametrize("maker", MAKERS)
def test_a_spine_accepts_no_less_than_the_chain_of_the_same_scores_in_any_round(
    model: QwenGDN, prompt: list[int], truth: list[int], maker: type
) -> None:
    chains = []

    def both(root: int, scores: object, budget: int) -> DraftTree:
        chains.append(build_chain(root, scores, budget))
        return build_spine(root, scores, budget)

    told: list[Verified] = []
    drafter = maker([*prompt, *truth], 5)
    list(generate(model, drafter, prompt, max_new_tokens=COUNT, budget=9, build=both, on_round=told.append))
    drafted = [found for found in told if len(found.tree.topology) > 1]
    for chain, found in zip([each for each in chains if len(each.tokens) > 1], drafted, strict=True):
        place = found.length + 1 - len(prompt)
        followed = 0
        for token, true in zip(chain.tokens.tolist()[1:], truth[place:], strict=False):
            if token != true:
                break
            followed += 1
        assert len(found.path) - 1 >= followed


def test_a_round_that_a_stop_cuts_tells_the_whole_path(model: QwenGDN, prompt: list[int], truth: list[int]) -> None:
    told: list[Verified] = []
    stop = next(token for i, token in enumerate(truth) if i > 4 and token not in truth[:i] and i % 8 != 1)
    drafter = Right([*prompt, *truth], 3)
    rounds = list(
        generate(model, drafter, prompt, max_new_tokens=COUNT, budget=8, stop_ids=[stop], on_round=told.append)
    )
    assert rounds[-1].tokens[-1] == stop and told[-1].tokens == rounds[-1].tokens
    assert len(told[-1].path) - 1 == rounds[-1].accepted > len(rounds[-1].tokens) - 1


def test_plain_rounds_tell_of_a_root_alone(model: QwenGDN, prompt: list[int], truth: list[int]) -> None:
    told: list[Verified] = []
    list(generate(model, NoDrafts(), prompt, max_new_tokens=3, budget=0, on_round=told.append))
    assert [(each.path, each.draws, each.tokens) for each in told] == [((0,), (t,), (t,)) for t in truth[1:3]]


def test_a_watcher_that_raises_undoes_the_round(model: QwenGDN, prompt: list[int], truth: list[int]) -> None:
    cache = model.new_cache(len(prompt) + COUNT)

    def fail(verified: Verified) -> None:
        raise RuntimeError("no")

    rounds = generate(model, Right([*prompt, *truth], 3), prompt, max_new_tokens=COUNT, cache=cache, on_round=fail)
    assert next(rounds).tokens == (truth[0],)
    with pytest.raises(RuntimeError, match="no"):
        next(rounds)
    assert cache.length == len(prompt)
    cache.check()
    with pytest.raises(ValueError, match="on_round must be callable"):
        generate(model, NoDrafts(), prompt, max_new_tokens=1, on_round=None)  # type: ignore[arg-type]


def test_a_tree_cut_to_what_can_be_emitted_keeps_its_scores(
    model: QwenGDN, prompt: list[int], truth: list[int]
) -> None:
    """A builder of one's own may go deeper than the scores it was given."""
    told: list[Verified] = []

    def deep(root: int, scores: object, budget: int) -> DraftTree:
        return ScoredTree(torch.tensor([root, 1, 2, 3, 4]), Topology([-1, 0, 1, 2, 1]), [0.0, -1.0, -2.0, -3.0, -4.0])

    list(generate(model, Right([*prompt, *truth], 3), prompt, max_new_tokens=4, build=deep, on_round=told.append))
    assert isinstance(told[0].tree, ScoredTree)
    assert (told[0].tree.tokens.tolist()[1:], told[0].tree.log_probs) == ([1, 2, 4], (0.0, -1.0, -2.0, -4.0))
