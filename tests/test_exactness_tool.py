"""The tool that runs the full grid: what it reports, and that it would report a fault."""

import json
from typing import Any

import pytest
from torch import Tensor

from ddtree import Acceptance, DraftTree, accept
from tools import exactness

FEW = ["--prompts", "1", "--tokens", "10", "--budgets", "0,4", "--proposers", "right,scattered"]


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_sound_loop_has_no_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert exactness.main(FEW) == 0
    found = report(capsys)
    assert found["faults"] == 0
    for dtype in ("float64", "float32"):
        outcome = found["dtypes"][dtype]
        assert (outcome["runs"], outcome["tokens"]) == (12, 120)  # two proposers and plain, two shapes, two budgets
        assert outcome["accepted"]["right"] > 3 > outcome["accepted"]["plain"] == 1


def test_a_walk_that_takes_what_was_drafted_is_a_fault_with_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def credulous(tree: DraftTree, drawn: Tensor) -> Acceptance:
        path, bonus = accept(tree, drawn)
        return Acceptance([0, 1], bonus) if len(path) == 1 < len(tree.topology) else Acceptance(path, bonus)

    monkeypatch.setattr("ddtree.loop.accept", credulous)
    assert exactness.main(FEW) == 1
    found = report(capsys)
    faults = [fault for outcome in found["dtypes"].values() for fault in outcome["faults"]]
    assert found["faults"] == len(faults) > 0
    assert {fault["budget"] for fault in faults} == {4}
    assert all(fault["proposer"] == "scattered" and fault["ours"] != fault["theirs"] for fault in faults)
    assert any(fault["gap"] and fault["gap"] > 1e-5 for fault in faults)


@pytest.mark.parametrize(
    "arguments", [["--budgets", "-1"], ["--proposers", "lucky"], ["--prompts", "0"], ["--dtypes", ""]]
)
def test_bad_use_ends_with_code_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exactness.main(arguments)
    assert ended.value.code == 2
    assert "give" in capsys.readouterr().err


def test_a_model_that_cannot_be_had_is_one_line_and_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert exactness.main(["--model", "no such folder"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
