"""The drafter's programs propose what the drafter proposes, for every kind of layer and any course of rounds."""

from typing import Any

import pytest
import torch
from drafter_oracle import bound_drafter, close, features_of, layered
from proposers import small_model

import ddtree.recorded_drafter
from ddtree import DFlashConfig, DFlashDrafter, generate
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn import decode
from qwen_gdn.engine import Engine

KINDS: dict[str, dict[str, Any]] = {
    "full": {"types": "ff"},
    "sliding": {"types": "ss", "window": 8},
    "mixed": {"types": "sf", "window": 6},
    "mixed, causal": {"types": "fs", "window": 6, "is_causal": True},
    "mixed, not causal": {"types": "fs", "window": 6, "is_causal": False},
    "a window below the block": {"types": "ss", "window": 3},
}
COURSE = (20, 1, 3, 2, 5, 1, 1, 4, 30, 2, 1, 5, 5, 3, 1, 6, 2, 2, 1, 4)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddtree.recorded_drafter, "compiled", lambda function: function)


def alike(config: DFlashConfig, dtype: torch.dtype) -> tuple[RecordedDrafter, DFlashDrafter]:
    """A drafter by programs and the same one itself, both bound."""
    theirs, _ = bound_drafter(config, dtype)
    drafter, target = bound_drafter(config, dtype)
    ours = RecordedDrafter(drafter)
    ours.bind(target)
    return ours, theirs


def check_course(
    kind: dict[str, Any], dtype: torch.dtype, tolerance: float, first: int | None = None, every: int = 1
) -> None:
    """Rows observed in many pieces; something is proposed after every so many of them, the others wait."""
    config = layered(*kind["types"], **{k: v for k, v in kind.items() if k != "types"})
    ours, theirs = alike(config, dtype)
    assert close(ours.propose(2), theirs.propose(2), tolerance)  # no context yet
    for number, rows in enumerate(COURSE[first:]):
        features = features_of(rows, seed=number, dtype=dtype)
        ours.observe(features)
        theirs.observe(features)
        assert ours.context_length == theirs.context_length
        if number % every == 0:
            assert close(ours.propose(number), theirs.propose(number), tolerance), number


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_proposals_are_the_drafters_own(kind: dict[str, Any], every: int) -> None:
    check_course(kind, torch.float64, 1e-10, every=every)


@pytest.mark.usefixtures("uncompiled")
def test_a_context_longer_than_its_buffer_moves_to_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddtree.recorded_drafter, "ROWS", 8)
    check_course(KINDS["mixed"], torch.float64, 1e-10)
    check_course(KINDS["mixed"], torch.float64, 1e-10, first=1)
    check_course(KINDS["mixed"], torch.float64, 1e-10, first=1, every=4)


@pytest.mark.usefixtures("uncompiled")
def test_rows_that_wait_are_part_of_what_is_kept_and_cropped() -> None:
    ours, theirs = alike(layered("f", "f"), torch.float64)
    kept = []
    for proposer in (ours, theirs):
        for rows in (9, 2, 1):
            proposer.observe(features_of(rows, seed=rows))
        kept.append(proposer.snapshot())
        proposer.observe(features_of(3, seed=4))
        proposer.crop(13)
        proposer.observe(features_of(1, seed=5))
    assert close(ours.propose(3), theirs.propose(3), 1e-10)
    for proposer, before in zip((ours, theirs), kept, strict=True):
        proposer.observe(features_of(2, seed=6))
        proposer.restore(before)
        proposer.observe(features_of(2, seed=7))
        assert proposer.context_length == 14
    assert close(ours.propose(3), theirs.propose(3), 1e-10)


def test_compiled_proposals_are_the_drafters_own() -> None:
    check_course(KINDS["mixed"], torch.float32, 1e-5)


@pytest.mark.usefixtures("uncompiled")
def test_rebinding_keeps_the_context_and_reset_forgets_it() -> None:
    config = layered("s", "f")
    theirs, target = bound_drafter(config)
    drafter, other = bound_drafter(config)
    ours = RecordedDrafter(drafter)
    with pytest.raises(RuntimeError, match="bind"):
        ours.propose(1)
    ours.bind(target)
    for proposer in (ours, theirs):
        proposer.observe(features_of(7))
    ours.bind(other)
    assert close(ours.propose(3), theirs.propose(3), 1e-10)
    for proposer in (ours, theirs):
        proposer.reset()
        proposer.observe(features_of(2, seed=5))
    assert close(ours.propose(3), theirs.propose(3), 1e-10)
    with pytest.raises(ValueError, match="features must be"):
        ours.observe(features_of(2)[..., 1:])
    assert ours.context_length == 2


@pytest.mark.usefixtures("uncompiled")
def test_what_was_proposed_stays_when_the_next_proposal_is_made() -> None:
    drafter, target = bound_drafter(layered("s"))
    ours = RecordedDrafter(drafter)
    ours.bind(target)
    first = ours.propose(1)
    kept = first.clone()
    ours.propose(2)
    assert torch.equal(first, kept)


@pytest.mark.usefixtures("uncompiled")
def test_a_generation_by_programs_alone_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import qwen_gdn.program_set

    monkeypatch.setattr(qwen_gdn.program_set, "compiled", lambda function: function)
    raw = {
        "hidden_size": 16, "vocab_size": 37, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "block_size": 6,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "use_sliding_window": True,
        "dflash_config": {"mask_token_id": 36, "target_layer_ids": [0]},
    }  # fmt: skip
    torch.manual_seed(0)
    drafter = DFlashDrafter(DFlashConfig.from_dict(raw)).double()
    engine, model = Engine(small_model(), sizes=(8, 16)), small_model()
    wanted = list(decode(model, [4, 8, 1], max_new_tokens=60))
    rounds = {}
    for name, target, proposer in (("eager", model, drafter), ("programs", engine, RecordedDrafter(drafter))):
        rounds[name] = list(generate(target, proposer, [4, 8, 1], max_new_tokens=60, budget=15))
        assert [token for done in rounds[name] for token in done.tokens] == wanted
    assert rounds["eager"] == rounds["programs"]
