"""The tool that compares modes: its ratios and intervals by oracles, its texts the same in all modes, its refusals."""

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import random_pair
from proposers import Branching, Right
from test_tools import bad_use, prompt_of, scripted
from tiny import seeded, tiny_model

from ddtree import NoDrafts, Round, generate
from qwen_gdn import QwenGDN, decode
from tools import compare
from tools.measure import paired, speed
from tools.measure.acceptance import Forced
from tools.measure.comparison import Set, together
from tools.measure.exactness import DifferentOutputError, Referee
from tools.measure.intervals import Interval, Resampled, interval
from tools.measure.paired import Plan, measure
from tools.measure.prompts import PromptSet, read_prompts
from tools.measure.runs import PLAIN, Mode, Pair, Sample, run
from tools.measure.sampled import Sampling

COUNT = 12


@pytest.fixture(scope="module")
def model() -> QwenGDN:
    return tiny_model(3)


def test_intervals_are_those_of_all_resamples() -> None:
    """Five prompts have 3,125 resamples, which are all looked at here."""
    accepted, rounds = [10.0, 7.0, 31.0, 12.0, 9.0], [4.0, 6.0, 8.0, 5.0, 9.0]
    every = list(itertools.product(range(5), repeat=5))
    ratios = sorted(sum(accepted[i] for i in drawn) / sum(rounds[i] for i in drawn) for drawn in every)
    low, high = ratios[round(0.025 * len(ratios))], ratios[round(0.975 * len(ratios))]
    found = interval(Resampled(5).ratio(np.array(accepted), np.array(rounds)))
    assert found.value == pytest.approx(sum(accepted) / sum(rounds))
    assert found.low == pytest.approx(low, rel=0.01) and found.high == pytest.approx(high, rel=0.01)


def test_the_interval_of_a_mean_of_many_is_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(3, 1, 400)
    reach = statistics.NormalDist().inv_cdf(0.975) * values.std() / 20
    found = interval(Resampled(400).mean(values))
    assert found.low == pytest.approx(values.mean() - reach, abs=0.05 * reach)
    assert found.high == pytest.approx(values.mean() + reach, abs=0.05 * reach)
    with pytest.raises(ValueError, match="at least 2 of them, got 1"):
        Resampled(1)


CHAIN, TREE = Mode("chain", 2), Mode("tree", 4)


def drifting(seconds: dict[Mode, list[float]]) -> Any:
    """A `run` in which a mode takes the seconds of each prompt times the pace of the machine, new for every three."""
    calls, paces = itertools.count(), (1.0, 3.0, 10.0, 2.0, 7.0)

    def ran(pair: Pair, mode: Mode, prompt: Sequence[int], count: int, sampler: Any = None) -> Sample:
        rounds = [Round((1,), 0, 0), Round((1, 1, 1), 4, 2), Round((1,), 4, 0)]
        return Sample([1] * 5, rounds, 0.1, seconds[mode][prompt[0]] * paces[next(calls) // 3 % 5])

    return ran


def test_ratios_are_paired_within_alternations(model: QwenGDN, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine gets ten times slower on the way, which no ratio may show."""
    seconds = {PLAIN: [2.0, 4.0], CHAIN: [1.0, 4.0], TREE: [0.5, 1.0]}
    monkeypatch.setattr(speed, "run", drifting(seconds))
    monkeypatch.setattr(paired, "run", lambda *_, **__: Sample([1] * 5, [], 0.1, 1.0))
    measured = measure(Pair(model, NoDrafts()), [[0], [1]], list(seconds), Plan(0.0, 1, 3, 5))
    found = Set(PromptSet("x", "y", ([0], [1])), Plan(0.0, 1, 3, 5), measured)
    plain, chain, tree = found.figures
    assert found.best == TREE and plain.to_plain == (1, 1, 1)
    assert chain.to_plain == pytest.approx((2**0.5, 1, 2))  # 2 on one prompt, 1 on the other
    assert tree.to_plain == pytest.approx((4, 4, 4)) and tree.to_best == (1, 1, 1)
    assert tree.tau.value == 2.0 and tree.drafted == 4.0 and tree.forwards == 4
    over = found.over(TREE, CHAIN)
    assert over.speed == pytest.approx((8**0.5, 2, 4)) and over.tau.value == 1.0
    all_sets = together([found, Set(found.prompts, found.plan, measured, 1)])
    assert all_sets.best == TREE and all_sets.to_plain[CHAIN].value == pytest.approx(2**0.5)
    json.dumps([found.as_json(), all_sets.as_json()])


@pytest.mark.parametrize("maker", [Right, Branching])
def test_every_mode_writes_the_same_at_a_temperature(model: QwenGDN, maker: type) -> None:
    prompt = prompt_of(8)
    pair = Pair(model, scripted(model, maker, prompt))
    modes = [PLAIN, Mode("chain", 3), Mode("tree", 9), Mode("spine", 5), Mode("auto")]
    texts = [
        [run(pair, mode, prompt, COUNT, sampler=Sampling(0.8, s).sampler()).tokens for mode in modes] for s in (1, 2)
    ]
    assert all(text == row[0] for row in texts for text in row)
    assert texts[0][0] != texts[1][0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_figure_is_given_for_texts_that_differ(
    model: QwenGDN, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*args: Any, **kwargs: Any) -> Iterator[Round]:
        for done in generate(*args, **kwargs):
            yield done._replace(tokens=tuple((token + 1) % 97 for token in done.tokens))

    monkeypatch.setattr("tools.measure.runs.generate", spoilt)
    with pytest.raises(DifferentOutputError, match=r"prompt 0, .*tree:2: token 0 is \d+, plain decoding writes \d+"):
        measure(Pair(model, NoDrafts()), [prompt_of(3)], [Mode("tree", 2)], Plan(temperature, 1, 1, COUNT))


def test_a_draw_at_the_edge_of_two_tokens_is_a_tie_and_any_other_difference_is_not(model: QwenGDN) -> None:
    """The likeliest token is made to end just where the number of the first place lies, and every other to be even."""
    prompt, sampling = prompt_of(4), Sampling(0.8, 6)
    number = float(torch.rand(64, 2, dtype=torch.float64, generator=seeded(6))[0, 0])
    logits = torch.zeros(97, dtype=torch.float64)
    logits[0] = 0.8 * math.log(96 * number / (1 - number))
    assert {0, 1} <= sampling.near(logits, 0, 1e-4) and not {0, 1} <= sampling.near(
        logits + 0.01 * (logits != 0), 0, 1e-4
    )
    referee = Referee(model)
    referee._logits = lambda context: logits  # type: ignore[method-assign]
    tie = referee.judge("x", prompt, [0], [1], sampling)
    assert tie is not None and tie.gap is None and tie.tokens == (0, 1)
    with pytest.raises(DifferentOutputError, match=r"x: token 0 is 1, .* not both drawn by numbers"):
        referee.judge("x", prompt, [1], [9], sampling)


def test_prompts_are_read_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\n\ncd\n")
    (tmp_path / "b.jsonl").write_text('"ab"\n{"text": "cd", "licence": "MIT"}\n[5, 6]\n')
    ids = [[97, 98], [99, 100]]
    assert read_prompts(tmp_path / "a.txt", lambda text: list(text.encode())) == ("a", "unknown", tuple(ids))
    assert read_prompts(tmp_path / "b.jsonl", lambda text: list(text.encode())) == ("b", "MIT", (*ids, [5, 6]))
    for name, content in (("c.jsonl", b"{"), ("c.txt", b""), ("d.txt", b"\xff\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            read_prompts(tmp_path / name, lambda text: [])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a random pair on disk and two sets of prompts."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("one", "two"):
        (folder / f"{name}.json").write_text(json.dumps([prompt_of(seed) for seed in range(2)]))
    return [
        *random_pair(folder),
        *("--threads", "1", "--rounds", "1"),
        *("--prompts", str(folder / "one.json"), str(folder / "two.json"), "--max-new-tokens", "6"),
    ]


def test_the_tool_compares_and_ends_with_one_json_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    how = [
        "--modes",
        "chain:2,tree:6,spine:6,auto",
        "--temperature",
        "0.6",
        "--seeds",
        "2",
        "--forced",
        "--clock",
        "cpu",
    ]
    assert compare.main([*arguments, *how]) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    said = json.loads(last)
    assert said["clock"] == "cpu" and said["threads"] == 1
    assert said["modes"] == ["plain", "chain:2", "tree:6", "spine:6", "auto"] and said["dtype"] == "torch.float32"
    assert [(each["name"], each["prompts"], each["seeds"]) for each in said["sets"]] == [("one", 2, 2), ("two", 2, 2)]
    for each in said["sets"]:
        assert [figures["mode"] for figures in each["modes"]] == said["modes"] and len(each["over"]) == 10
        for figures in each["modes"]:
            for name in ("speed", "to_plain", "to_best", "tau"):
                found = Interval(**figures[name])
                assert 0 < found.low <= found.value <= found.high
        assert each["modes"][0]["forwards"] == 2 * 2 * 5
    for rows in said["teacher_forced"]:
        assert [(each["budget"], each["contexts"], each["spine_below"]) for each in rows] == [(2, 24, 0), (6, 24, 0)]
    assert set(said["together"]["to_best"]) == set(said["modes"])
    assert sum("tok/s [95 %]" in line for line in tables) == 2 and any("all sets together" in line for line in tables)


def test_the_tool_draws_a_figure(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert compare.main([*arguments, "--modes", "chain:2,tree:6", "--plot", str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_tool_gives_no_figures_for_different_outputs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.measure.runs.decode", lambda *a, **k: ((t + 1) % 97 for t in decode(*a, **k)))
    assert compare.main([*arguments, "--modes", "tree:6"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("compare: prompt 0, tree:6: token 0 is ")


def test_a_spine_that_accepts_less_than_its_chain_fails(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    below = Forced(budget=6, contexts=1, chain=2.0, tree=2.0, spine=1.0, spine_below=1, tree_below=0)
    monkeypatch.setattr(compare, "teacher_forced", lambda *_: [below])
    assert compare.main([*arguments, "--modes", "spine:6", "--forced"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["teacher_forced"] == [[below._asdict()]] * 2


def test_a_set_of_one_prompt_is_refused_before_anything_is_written(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.json").write_text("[[5, 6, 7]]")
    assert compare.main([*arguments, "--prompts", str(tmp_path / "one.json")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "one has one prompt" in err and err.count("\n") == 1


def test_the_bundled_sets_are_there_and_differ() -> None:
    options = compare._options(["--limit", "4"])
    sets = list(compare._prompt_sets(options, lambda text: list(text.encode())))
    assert [prompts.name for prompts, _ in sets] == ["code", "prose", "repetitive", "hopeless"]
    assert [heat for _, heat in sets] == [0, 0, 0, 3] and all(len(prompts.prompts) == 4 for prompts, _ in sets)
    assert sets[0][0].prompts == sets[3][0].prompts and len({tuple(p) for p in sets[0][0].prompts}) == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--modes", "chain"], "there is no mode 'chain'; there are plain, chain:N, tree:N, spine:N, auto"),
        (["--modes", "tree:0"], "no mode 'tree:0'"),
        (["--modes", "plain:3"], "no mode 'plain:3'"),
        (["--sets", "poems"], "there is no set 'poems'; there are code"),
        (["--sets", "code", "--prompts", __file__], "--sets names bundled prompts and --prompts replaces them"),
        (["--modes", "plain", "--forced"], "--forced compares drafts of a budget"),
        (["--limit", "1"], "--limit: must be an integer from 2"),
        (["--temperature", "-1"], "--temperature: must be a finite number of at least 0"),
        (["--target", str(Path(__file__).parent)], "--target needs the --drafter"),
    ],
)
def test_bad_use_is_refused_in_one_line(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in bad_use(compare, given, capsys)


def test_a_figure_without_matplotlib_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'ddtree[tools]'" in bad_use(compare, ["--plot", "x.png"], capsys)
