"""The drafter as a proposer: what it feeds itself, what it keeps, and what it refuses."""

import copy
from collections.abc import Callable

import pytest
import torch
from drafter_oracle import (
    KINDS,
    VOCAB,
    WIDTH,
    StandIn,
    bound_drafter,
    close,
    dense_proposal,
    features_of,
    layered,
    random_drafter,
)
from torch import Tensor, nn

import ddtree.drafter as drafter_module


def test_binding_registers_nothing() -> None:
    class WithModules(StandIn):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)  # type: ignore[assignment]
            self.logits = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)  # type: ignore[assignment]

    drafter = random_drafter(layered("s", "f"))
    before = dict(drafter.named_parameters()), list(drafter.modules())
    drafter.bind(WithModules())
    assert drafter.propose(1).shape == (4, VOCAB)
    assert (dict(drafter.named_parameters()), list(drafter.modules())) == before


def test_proposing_before_binding_says_so() -> None:
    with pytest.raises(RuntimeError, match="bind"):
        random_drafter(layered("f")).propose(1)


@pytest.mark.case(43)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 32}, ("hidden_size", "24", "32")),
        ({"vocab_size": 50}, ("vocab_size", "41", "50")),
        ({"num_hidden_layers": 9}, ("8", "9", "layers")),
    ],
)
def test_a_target_that_does_not_fit_is_refused_and_nothing_changes(
    changes: dict[str, int], named: tuple[str, ...]
) -> None:
    drafter = random_drafter(layered("f"))
    with pytest.raises(ValueError) as refusal:
        drafter.bind(StandIn(**changes))
    assert all(part in str(refusal.value) for part in named) and "\n" not in str(refusal.value)
    with pytest.raises(RuntimeError, match="bind"):
        drafter.propose(1)
    drafter.bind(StandIn())
    before = drafter.propose(1)
    with pytest.raises(ValueError):
        drafter.bind(StandIn(**changes))
    assert torch.equal(drafter.propose(1), before)


@pytest.mark.case(43)
@pytest.mark.parametrize(("layers", "message"), [(7, "last"), (4, "has 4 layers")])
def test_layer_ids_are_checked_against_the_target_when_the_config_names_no_count(layers: int, message: str) -> None:
    drafter = random_drafter(layered("f", num_target_layers=None))
    with pytest.raises(ValueError, match=message):
        drafter.bind(StandIn(num_hidden_layers=layers))


@pytest.mark.case(44)
def test_the_block_is_the_root_and_masks_at_the_positions_after_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, target = bound_drafter(layered("s", "f"))
    positions: list[list[int]] = []
    angles = drafter.angles
    monkeypatch.setattr(drafter, "angles", lambda where: (positions.append(where.tolist()), angles(where))[1])
    drafter.observe(features_of(6))
    drafter.observe(features_of(3))
    first = drafter.propose(17)
    assert positions == [[*range(9)], [9, 10, 11, 12, 13]]
    assert target.embedded == [[17, VOCAB - 1, VOCAB - 1, VOCAB - 1, VOCAB - 1]]
    assert first.shape == (4, VOCAB)
    assert not close(drafter.propose(18), first, 1e-3)


@pytest.mark.case(45)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_forty_rounds_of_random_accepts_equal_a_drafter_made_from_scratch(kinds: tuple[str, ...]) -> None:
    drafter, target = bound_drafter(layered(*kinds), torch.float32)
    generator = torch.Generator().manual_seed(5)
    history = features_of(13, dtype=torch.float32)
    drafter.observe(history)
    for turn in range(40):
        root = turn % VOCAB
        proposal = drafter.propose(root)
        assert drafter.context_length == history.shape[1]
        afresh, _ = bound_drafter(drafter.config, torch.float32)
        afresh.observe(history)
        assert close(proposal, afresh.propose(root), 1e-5)
        assert close(proposal, dense_proposal(drafter, target, history, root), 1e-5)
        accepted = int(torch.randint(1, drafter.config.block_size + 1, (1,), generator=generator))
        new = features_of(accepted, seed=100 + turn, dtype=torch.float32)
        history = torch.cat((history, new), dim=1)
        drafter.observe(new)


def test_any_split_of_the_features_gives_the_same_context() -> None:
    whole, _ = bound_drafter(layered("s", "f"))
    whole.observe(features_of(23))
    for split in ((1, 22), (22, 1), (7, 7, 9), (0, 23, 0), (1,) * 23):
        parts, _ = bound_drafter(layered("s", "f"))
        for part in features_of(23).split(split, dim=1):
            parts.observe(part)
        assert parts.context_length == 23
        assert close(parts.propose(2), whole.propose(2), 1e-12)


def test_sliding_layers_hold_no_more_than_they_can_see_and_full_layers_grow_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafter_module, "AT_ONCE", 1)  # rows are taken in as they come
    drafter, _ = bound_drafter(layered("s", "f"))
    storages = set()
    for count in (50, *(1,) * 200):
        drafter.observe(features_of(count))
        sliding, full = drafter._context.layers
        for part in sliding:
            assert part.shape[2] == 7
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
        assert full.keys.shape[2] <= 2 * drafter.context_length
        storages.add(full.keys.data_ptr())
    assert drafter.context_length == 250
    assert len(storages) <= 5


def test_a_context_observed_in_inference_mode_grows_outside_it() -> None:
    features = features_of(9)
    drafter, _ = bound_drafter(layered("s", "f"))
    wanted, _ = bound_drafter(layered("s", "f"))
    wanted.observe(features)
    with torch.inference_mode():
        drafter.observe(features[:, :4])
        drafter.observe(features[:, 4:5])  # now the buffer of the full layer has room for three rows more
    drafter.observe(features[:, 5:7])
    drafter.observe(features[:, 7:])
    assert close(drafter.propose(2), wanted.propose(2), 1e-12)


def test_proposing_changes_no_context_and_repeats_exactly() -> None:
    drafter, _ = bound_drafter(layered("s", "f"))
    drafter.observe(features_of(12))
    drafter.propose(1)  # takes them in
    kept = [part[:, :, :12].clone() for rows in drafter._context.layers for part in rows]
    first = drafter.propose(3)
    drafter.propose(4)
    assert drafter.context_length == 12
    for part, before in zip((p for rows in drafter._context.layers for p in rows), kept, strict=True):
        assert torch.equal(part[:, :, :12], before)
    assert torch.equal(drafter.propose(3), first)


def test_reset_forgets_the_context_and_keeps_the_target() -> None:
    drafter, _ = bound_drafter(layered("s", "f"))
    at_start = drafter.propose(3)
    drafter.observe(features_of(12))
    assert not close(drafter.propose(3), at_start, 1e-3)
    drafter.reset()
    assert drafter.context_length == 0
    assert torch.equal(drafter.propose(3), at_start)


class Interrupted(BaseException):
    pass


def failing_places() -> list[tuple[int, str]]:
    return [(i, name) for i in range(3) for name in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")]


@pytest.mark.case(24)
@pytest.mark.parametrize("at_once", [1, 64])
@pytest.mark.parametrize(("layer", "name"), failing_places())
def test_a_failure_in_any_layer_leaves_the_context_as_it_was(
    layer: int, name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both where rows are taken in as they come and where they wait for the next proposal."""
    monkeypatch.setattr(drafter_module, "AT_ONCE", at_once)

    def fail(*_: object) -> None:
        raise Interrupted

    spared, _ = bound_drafter(layered("f", "s", "f"))
    struck, _ = bound_drafter(layered("f", "s", "f"))
    for each in (spared, struck):
        each.observe(features_of(9))
    acts = [lambda: struck.propose(1)]
    if at_once == 1:
        acts.append(lambda: struck.observe(features_of(3)))
    for act in acts:
        hook = struck.get_submodule(f"layers.{layer}.{name}").register_forward_hook(fail)
        with pytest.raises(Interrupted):
            act()
        hook.remove()
        assert struck.context_length == 9
        assert torch.equal(struck.propose(1), spared.propose(1))
    for each in (spared, struck):
        each.observe(features_of(4))
    assert torch.equal(struck.propose(1), spared.propose(1))


@pytest.mark.parametrize("calls", range(1, 7))
def test_a_failure_while_rows_are_kept_leaves_the_context_as_it_was(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_module, "AT_ONCE", 1)
    drafter, _ = bound_drafter(layered("f", "s", "f"))
    drafter.observe(features_of(9))
    drafter.observe(features_of(1))
    before, left = drafter.propose(1), [calls]

    def failing(store: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def stored(*args: object) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
            return store(*args)

        return stored

    with monkeypatch.context() as patch:
        for name in ("_grown", "_slid"):
            patch.setattr(drafter_module, name, failing(getattr(drafter_module, name)))
        with pytest.raises(Interrupted):
            drafter.observe(features_of(3))
    assert drafter.context_length == 10
    assert torch.equal(drafter.propose(1), before)


def test_a_copy_goes_on_from_the_same_context_without_touching_it() -> None:
    drafter, target = bound_drafter(layered("s", "f"))
    alike, _ = bound_drafter(layered("s", "f"))
    for each in (drafter, alike):
        for rows in (70, 3, 1):  # now the full layer's buffer has room, and a row waits
            each.observe(features_of(rows, seed=rows))
            if rows > 1:
                each.propose(1)
    other = copy.copy(drafter)
    assert other.fc.weight is drafter.fc.weight
    with pytest.raises(RuntimeError, match="no target is bound"):
        other.propose(1)
    other.bind(target)
    assert torch.equal(other.propose(1), drafter.propose(1))
    for each, seed in ((drafter, 8), (other, 9), (alike, 8)):
        each.observe(features_of(2, seed=seed))
    other.propose(1)
    assert close(drafter.propose(1), alike.propose(1), 1e-12)


@pytest.mark.parametrize("length", [0, 5, 9, 10, 12])
def test_rows_that_cannot_be_taken_in_are_given_up_without_a_look(length: int) -> None:
    """Else one bad row would fail every later text, whatever it has to do with it."""

    def fail(*_: object) -> None:
        raise Interrupted

    spared, _ = bound_drafter(layered("f", "f"))
    struck, _ = bound_drafter(layered("f", "f"))
    for each in (spared, struck):
        each.observe(features_of(9))
        each.propose(1)
        each.observe(features_of(3, seed=2))
    hook = struck.fc.register_forward_hook(fail)
    with pytest.raises(Interrupted):
        struck.propose(1)
    assert struck.context_length == 12 and struck.crop_floor == 0
    kept = struck.snapshot()
    struck.crop(length)
    hook.remove()
    spared.crop(length)
    assert struck.context_length == length
    assert torch.equal(struck.propose(1), spared.propose(1))
    struck.restore(kept)
    spared.reset()
    for rows, seed in ((9, 1), (3, 2)):
        spared.observe(features_of(rows, seed=seed))
    assert struck.context_length == 12
    assert close(struck.propose(1), spared.propose(1), 1e-10)


def test_rows_wait_until_they_are_many_or_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a token of plain decoding costs no pass over the drafter's weights; what is proposed is the same."""
    monkeypatch.setattr(drafter_module, "AT_ONCE", 8)
    waiting, _ = bound_drafter(layered("f", "s", "f"))
    eager, _ = bound_drafter(layered("f", "s", "f"))
    passes = []
    waiting.fc.register_forward_hook(lambda *_: passes.append(waiting.context_length))
    for count, wanted in ((3, 0), (4, 0), (0, 0), (1, 1), (5, 1), (9, 2), (2, 2)):
        features = features_of(count)
        waiting.observe(features)
        with monkeypatch.context() as patch:
            patch.setattr(drafter_module, "AT_ONCE", 0)
            eager.observe(features)
        features.zero_()  # what waits is a copy
        assert len(passes) == wanted and waiting.context_length == eager.context_length
    assert torch.allclose(waiting.propose(1), eager.propose(1), rtol=0, atol=1e-10)
    assert len(passes) == 3
    waiting.propose(1)
    assert len(passes) == 3


@pytest.mark.parametrize("shape", [(3, 72), (2, 3, 72), (1, 3, 71), (1, 3, 48)])
def test_features_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    drafter, _ = bound_drafter(layered("s", "f"))
    with pytest.raises(ValueError, match="72"):
        drafter.observe(torch.zeros(shape, dtype=torch.float64))
    assert drafter.context_length == 0


def test_nothing_kept_or_proposed_carries_a_gradient_and_the_grad_mode_stays() -> None:
    drafter, _ = bound_drafter(layered("s", "f"))
    drafter.observe(features_of(9).requires_grad_())
    (waiting,) = drafter._context.waiting
    assert waiting.grad_fn is None and not waiting.requires_grad
    assert not drafter.propose(1).requires_grad
    kept = [part for rows in drafter._context.layers for part in rows]
    assert kept and all(part.grad_fn is None and not part.requires_grad for part in kept)
    assert torch.is_grad_enabled()
