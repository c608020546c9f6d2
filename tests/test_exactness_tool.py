"""The tool that runs the full grid: what it reports, and that it would report a fault."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
    def credulous(tree: DraftTree, drawn: Sequence[int]) -> Acceptance:
        path, bonus = accept(tree, drawn)
        return Acceptance([0, 1], bonus) if len(path) == 1 < len(tree.topology) else Acceptance(path, bonus)

    monkeypatch.setattr("ddtree.loop.follow", credulous)
    assert exactness.main(FEW) == 1
    found = report(capsys)
    faults = [fault for outcome in found["dtypes"].values() for fault in outcome["faults"]]
    assert found["faults"] == len(faults) > 0
    assert {fault["budget"] for fault in faults} == {4}
    assert all(fault["proposer"] == "scattered" and fault["ours"] != fault["theirs"] for fault in faults)
    assert any(fault["gap"] and fault["gap"] > 1e-5 for fault in faults)


BATCHES = ["--batches", "4", "--tokens", "10", "--dtypes", "float64"]


def test_rows_of_random_batches_have_no_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert exactness.main(BATCHES) == 0
    outcome = report(capsys)["dtypes"]["float64"]
    assert outcome["faults"] == outcome["ties"] == [] and outcome["runs"] >= 8 and outcome["tokens"] > 20


def test_rows_that_keep_padding_in_their_convolution_are_faults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "qwen_gdn.ragged_lanes._newest", lambda joined, counts, layer: joined[:, -layer.columns.shape[1] :]
    )
    assert exactness.main(BATCHES) == 1
    faults = report(capsys)["dtypes"]["float64"]["faults"]
    assert faults and all({"batch", "row", "sampled"} <= fault.keys() for fault in faults)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budgets", "-1"], "--budgets"),
        (["--budgets", "1,x"], "give numbers of at least 0 with commas between, got '1,x'"),
        (["--proposers", "lucky"], "unknown name 'lucky', give some of"),
        (["--prompts", "0"], "give a number of at least 1, got '0'"),
        (["--dtypes", ""], "give some of: float64"),
        (["--model", "no such folder"], "--model: 'no such folder' is no existing folder"),
        (["--drafter", "/nope"], "--drafter: '/nope' is no existing folder"),
        (["--promts", "3"], "unrecognized arguments: --promts 3"),
    ],
)
def test_bad_use_ends_with_code_two_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        exactness.main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("exactness: error: ") and err.count("\n") == 1


def test_a_model_that_cannot_be_had_is_one_line_and_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exactness.main(["--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
