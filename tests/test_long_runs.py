"""The tool of long runs: its figures at small size, and that it tells when memory differs or an error grows."""

import json

import pytest

from qwen_gdn import HybridCache
from tools import long_runs


@pytest.mark.case(21)
def test_turns_of_the_bundled_pair_equal_fresh_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_runs.main(["turns", "--count", "3", "--step", "9"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert len(table) == 3 and found["holds"] and 0 < found["worst_gap"] < 1e-4
    assert [f"read {count:3}" in line for line, count in zip(table, (9, 10, 10), strict=True)] == [True] * 3


@pytest.mark.case(52)
def test_bfloat16_rounds_keep_their_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_runs.main(["rounds", "--count", "30", "--step", "10"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert len(table) == 3 and found["holds"] and found["tokens"] > 30
    assert 1e-4 < found["first_third"] < 0.05


@pytest.mark.parametrize("what", ["turns", "rounds"])
def test_memory_that_drifts_is_told(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every commit of a path changes all states a little, and more so the longer the cache is."""
    commit = HybridCache.commit

    def drifting(cache: HybridCache, path: object) -> None:
        commit(cache, path)  # type: ignore[arg-type]
        for layer in cache:
            if hasattr(layer, "state"):
                layer.state.mul_(1 + 1e-4 * cache.length)

    monkeypatch.setattr(HybridCache, "commit", drifting)
    assert long_runs.main([what, "--count", "30" if what == "rounds" else "3", "--step", "10"]) == 1
    out = capsys.readouterr()
    assert "is the most that rounding explains" in out.err or not json.loads(out.out.splitlines()[-1])["holds"]
