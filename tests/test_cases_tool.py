"""The table of cases: every case has a test, and the tool says so only if it is true."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import cases

ROOT = Path(cases.__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/cases.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_every_case_has_a_test() -> None:
    for number in cases.CASES:
        assert all("test_" in file for file in cases.files_of([number])), number
    assert cases.files_of([98]) == [str(ROOT / "tests")] and len(cases.files_of([1, 44])) > len(cases.files_of([44]))


def test_outcomes_are_told_by_case_and_a_failing_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = run("44")
    assert passed.returncode == 0
    assert "passed     tests/test_drafter.py::test_the_block_is_the_root_and_masks" in passed.stdout
    monkeypatch.setattr(cases, "CASES", cases.CASES | {98: "nobody tests this"})
    monkeypatch.setattr(cases.pytest, "main", lambda *_, **__: 0)
    assert cases.main(["98"]) == 1
    monkeypatch.setattr(
        cases.pytest, "main", lambda _, plugins: (plugins[0]._note("t", [("case", 98)], "failed"), 1)[1]
    )
    assert cases.main(["98"]) == 1


def test_an_unknown_case_is_bad_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cases.main(["3"])
    assert ended.value.code == 2 and "there is no case 3" in capsys.readouterr().err
