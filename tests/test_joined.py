"""Linear maps that read one input, run as one product: same names, same numbers, same memory."""

import copy

import pytest
import torch
from tiny import gap, random_tokens, seeded, tiny_model

from qwen_gdn.joined import ReadsOnce, join_projections


def test_a_joined_model_keeps_names_numbers_and_memory() -> None:
    apart, joined = tiny_model(), tiny_model()
    join_projections(joined)
    tokens = random_tokens(seeded(1), 1, 20)
    with torch.no_grad():
        assert gap(joined(tokens).final, apart(tokens).final) <= 2e-6
    ours, theirs = joined.state_dict(), apart.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in joined.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in apart.parameters())


def test_a_joined_model_trains() -> None:
    model = tiny_model().requires_grad_(True)
    join_projections(model)
    model(random_tokens(seeded(1), 1, 8)).final.square().mean().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lm_head" not in name)


@pytest.mark.parametrize("change", ["cast", "copy", "replaced", "last replaced"])
def test_moved_weights_are_not_read_from_where_they_were(change: str) -> None:
    model = tiny_model()
    join_projections(model)
    tokens = random_tokens(seeded(1), 1, 8)
    if change == "cast":
        model = model.double()
    elif change == "copy":
        original, model = model, copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, ReadsOnce):
            for name in part.reads:
                weight = getattr(part, name).weight
                if change == "replaced" or (change == "last replaced" and name == part.reads[-1]):
                    weight.data = weight * 0.5
                else:
                    weight.data.mul_(0.5)
    wanted = tiny_model(dtype=model.dtype)
    for part in wanted.modules():
        if isinstance(part, ReadsOnce):
            for name in part.reads:
                getattr(part, name).weight.data.mul_(0.5)
    with torch.no_grad():
        assert gap(model(tokens).final, wanted(tokens).final) <= 2e-6
        if change == "copy":
            assert gap(original(tokens).final, tiny_model()(tokens).final) <= 2e-6


def test_weights_read_into_a_joined_model_are_the_ones_it_runs_on() -> None:
    model, other = tiny_model(0), tiny_model(1)
    join_projections(model)
    model.load_state_dict(other.state_dict())
    tokens = random_tokens(seeded(1), 1, 8)
    with torch.no_grad():
        assert gap(model(tokens).final, other(tokens).final) <= 2e-6
