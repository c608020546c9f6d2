"""Simulated acceptance is the law that its profile states, and runs through the real loop under every budget."""

from typing import Any

import pytest
import torch
from test_engine_gpu import DRAFTER

import ddtree.recorded_drafter
import qwen_gdn.program_set
from qwen_gdn.recorded import unannounced
from tools.measure import simulated
from tools.measure.gpu import Setting, Shape
from tools.measure.simulated import PROFILES, RANKS, Simulation
from tools.parity.shapes import tiny

CPU = torch.device("cpu")


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> tuple[Setting, Shape]:
    for module in (qwen_gdn.program_set, ddtree.recorded_drafter):
        monkeypatch.setattr(module, "compiled", lambda function: function)
    raw: dict[str, Any] = DRAFTER | {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [5, 1]}}
    shape = Shape(tiny(), raw, sizes=(8, 16), prefixes=(9,), accepted=(), chunks=(), repeats=2)
    return Setting.of(shape, CPU, torch.float32, unannounced, lambda line: None), shape


@pytest.mark.parametrize("name", PROFILES)
def test_chances_fall_from_rank_to_rank_and_are_no_more_than_certain(name: str) -> None:
    chances = PROFILES[name].chances(7)
    assert chances.shape == (7, RANKS) and bool((chances.diff(dim=1) < 0).all())
    assert bool((chances.sum(1) <= 1 + 1e-12).all())
    assert chances[0, 0] == PROFILES[name].first
    assert torch.allclose(chances[1:, 0] / chances[:-1, 0], torch.tensor(PROFILES[name].further, dtype=torch.float64))


def test_draws_follow_the_chances_that_the_drafter_states(setting: tuple[Setting, Shape]) -> None:
    drafter = setting[0].drafter
    profile = PROFILES["fair"]
    made = Simulation(drafter, profile, 97)
    chances = profile.chances(7)
    drawn, count = torch.zeros(7, 98), 200
    logits = torch.zeros(8, 97)
    for _ in range(count):
        said = made.propose(3)
        tokens = made.at(range(8))(logits)
        drawn[torch.arange(7), tokens[:7]] += 1
        assert tokens[7] == 0  # nothing was proposed so far ahead
    assert torch.allclose(said.softmax(-1)[:, 1 : RANKS + 1].double(), chances, atol=1e-6)
    spread = 4.5 * (chances * (1 - chances) / count).sqrt()
    assert bool(((drawn[:, 1 : RANKS + 1] / count - chances).abs() <= spread + 1 / count).all())


def test_every_budget_runs_under_every_profile(setting: tuple[Setting, Shape], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "WARM", 3)
    monkeypatch.setattr(simulated, "ROUNDS", 6)
    kept: list[int] = []
    found = simulated.measure(*setting, lambda found: kept.append(len(found["prefixes"])))
    assert kept == [*range(1, 5)]
    for place in found["prefixes"]:
        modes = {mode["mode"]: mode for mode in place["modes"]}
        assert list(modes) == ["plain", "tree:7", "tree:15", "auto"]
        assert modes["plain"]["tau"] == 1 and modes["plain"]["nodes"] == 0
        if place["profile"] == "good":
            assert modes["tree:15"]["tau"] >= 3
        if place["profile"] == "useless":
            assert modes["tree:15"]["tau"] <= 1.5
