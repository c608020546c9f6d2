"""Pairs sampled through trees have the enumerated law, a planted bias is caught, and the tool says which."""

import json

import pytest

from tools import law


@pytest.mark.case(35)
@pytest.mark.parametrize("drafter", law.DRAFTERS)
@pytest.mark.parametrize("shape", law.SHAPES)
@pytest.mark.parametrize("setting", law.SETTINGS)
def test_pairs_have_the_enumerated_law(setting: str, shape: str, drafter: str) -> None:
    how, tree = law.SETTINGS[setting], law.SHAPES[shape](law.EMITTED[-1], law.DRAFTERS[drafter], law.BUDGET)
    expected = law.np.array(law.pair_law(how))
    found = law.distance(law.pairs(tree, how, 100_000, bias=0.0), expected)
    assert found <= law.quantile(expected, 100_000)


@pytest.mark.case(35)
def test_a_bias_of_one_percent_is_caught_by_the_same_measure() -> None:
    """It moves a law by less than one percent, which a hundred thousand draws cannot tell from chance."""
    found = law.examine("plain", "chain", "one token only", 1_000_000)
    assert found.sound and found.biased > found.limit and found.expected_bias > 2 * found.limit
    assert 0.0030 < found.limit < 0.0045


def test_histories_of_other_paths_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every node of the tree carried the root's token."""
    context = law.Context
    monkeypatch.setattr(
        law, "Context", lambda history, tokens, tree: context(history, tokens[:1].expand(len(tokens)), tree)
    )
    assert not law.examine("penalties", "tree", "even", 100_000).sound


def test_the_tool_tells_its_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert law.main(["--draws", "20000", "--settings", "plain"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 6 and json.loads(last) == {"draws": 20000, "laws": 6, "biases_caught": 0, "faults": []}
    with pytest.raises(SystemExit) as ended:
        law.main(["--settings", "hot"])
    assert ended.value.code == 2 and "no setting 'hot'" in capsys.readouterr().err


def test_a_law_that_is_missed_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(law, "BIAS", 0.3)
    accept = law.accept
    monkeypatch.setattr(law, "accept", lambda tree, draws: accept(tree, [int(tree.tokens[1]), *draws[1:]]))
    assert law.main(["--draws", "20000", "--settings", "plain"]) == 1
    assert "FAULT" in capsys.readouterr().out
