"""The tools at toy size: what `bench` and `layer_diff` say is true, and they notice what is planted."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import as_stored, extras, nested, random_pair, target_config, target_tensors, write
from proposers import Branching, Random, Right, Scattered
from test_gpu_parity import TOY, check_bfloat16, check_convolution, check_float32, check_generate, check_tree, margin
from tiny import oracle, random_tokens, seeded, tiny_model

from ddtree import NoDrafts, Proposer, Round, build_chain, build_tree, generate, generate_batch
from qwen_gdn import QwenGDN, Topology, decode
from tools import bench, layer_diff
from tools.measure import batch, exactness
from tools.measure.acceptance import Forced, contexts, followed, in_use, loops, teacher_forced
from tools.measure.exactness import DifferentOutputError, Referee
from tools.measure.parts import builder_times, window_bytes
from tools.measure.prompts import read_prompts
from tools.measure.runs import Mode, Pair, accepted_length, run
from tools.measure.speed import measure, modes_of
from tools.parity.report import compare
from tools.parity.shapes import random_model, tiny
from tools.parity.theirs import twin
from tools.parity.trace import run_ours, run_theirs

COUNT = 12


@pytest.fixture(scope="module")
def model() -> QwenGDN:
    return tiny_model(3)


def prompt_of(seed: int, length: int = 9) -> list[int]:
    ids: list[int] = random_tokens(seeded(seed), length).tolist()
    return ids


def scripted(model: QwenGDN, maker: type, prompt: Sequence[int]) -> Proposer:
    """A proposer that knows what the model writes after the prompt, and after what it then is ahead of."""
    proposer: Proposer = maker([*prompt, *decode(model, prompt, max_new_tokens=60)], seed=5)
    return proposer


def test_a_chain_that_is_always_right_has_the_accepted_length_of_its_budget(model: QwenGDN) -> None:
    prompt = prompt_of(0)
    pair = Pair(model, scripted(model, Right, prompt))
    sample = run(pair, Mode("chain", 3), prompt, 1 + 4 * 5)
    assert accepted_length(sample.drafting) == 4.0
    assert len(sample.drafting) == 5
    assert sample.tokens == list(decode(model, prompt, max_new_tokens=21))


def test_plain_decoding_and_useless_drafts_have_accepted_length_one(model: QwenGDN) -> None:
    prompt = prompt_of(1)
    for pair, mode in (
        (Pair(model, NoDrafts()), Mode("plain")),
        (Pair(model, NoDrafts()), Mode("tree", 7)),
    ):
        sample = run(pair, mode, prompt, COUNT)
        assert accepted_length(sample.drafting) == 1.0
        assert len(sample.drafting) == COUNT - 1


def test_speed_compares_all_modes_on_equal_work(model: QwenGDN) -> None:
    prompt = prompt_of(2)
    pair = Pair(model, scripted(model, Right, prompt))
    outcome = measure(pair, [prompt], budgets=[2, 5, 9], depth=5, alternations=3, count=13)
    assert [str(each.mode) for each in outcome.speeds] == ["plain", "chain 2", "chain 5", "tree 2", "tree 5", "tree 9"]
    by_name = {str(each.mode): each for each in outcome.speeds}
    assert by_name["plain"].to_plain == (1.0, 1.0, 1.0)
    assert by_name["plain"].stages == {} and by_name["plain"].forwards == 12
    assert by_name["chain 5"].to_chain == (1.0, 1.0, 1.0)
    for name in ("chain 2", "tree 2"):
        assert by_name[name].tau == 3.0
        assert set(by_name[name].stages) == {"draft", "build", "verify", "sample", "commit"}
        assert all(ms > 0 for ms in by_name[name].stages.values())
    for each in outcome.speeds:
        assert 0 < each.decode.low <= each.decode.median <= each.decode.high
        assert each.to_plain.low <= each.to_plain.median <= each.to_plain.high
    assert outcome.best_tree.kind == "tree" and outcome.best_chain.kind == "chain" and not outcome.ties
    json.dumps(outcome.as_json())


def test_chains_deeper_than_what_is_proposed_are_measured_once() -> None:
    assert [str(mode) for mode in modes_of([31, 4, 8], 7)] == [
        "plain", "chain 4", "chain 7", "tree 4", "tree 8", "tree 31",
    ]  # fmt: skip


def test_outputs_that_differ_are_refused_with_the_place(model: QwenGDN) -> None:
    prompt = prompt_of(3)
    right = list(decode(model, prompt, max_new_tokens=COUNT))
    wrong = [*right[:5], (right[5] + 1) % 97, *right[6:]]
    with pytest.raises(DifferentOutputError, match=r"tree 4: token 5 is \d+, plain decoding writes \d+; their float64"):
        Referee(model).judge("tree 4", prompt, wrong, right)
    with pytest.raises(DifferentOutputError, match="wrote 11 tokens where plain decoding writes 12"):
        Referee(model).judge("tree 4", prompt, right[:-1], right)


def test_no_figure_is_given_for_a_mode_that_writes_something_else(
    model: QwenGDN, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*args: Any, **kwargs: Any) -> Iterator[Round]:
        for done in generate(*args, **kwargs):
            yield done._replace(tokens=tuple((token + 1) % 97 for token in done.tokens))

    monkeypatch.setattr("tools.measure.runs.generate", spoilt)
    pair, prompts = Pair(model, NoDrafts()), [prompt_of(3)]
    with pytest.raises(DifferentOutputError, match="prompt 0, chain 2: token 0 is"):
        measure(pair, prompts, budgets=[2], depth=5, alternations=1, count=COUNT)
    with pytest.raises(DifferentOutputError, match="prompt 0, tree 2: token 0 is"):
        in_use(pair, prompts, [Mode("tree", 2)], COUNT)


def test_a_tie_is_reported_and_not_refused() -> None:
    """Two rows of the head are equal, so either token may be written."""
    model = tiny_model(4)
    prompt = prompt_of(4)
    right = list(decode(model, prompt, max_new_tokens=1))
    twin_token = (right[0] + 1) % 97
    assert model.lm_head is not None
    model.lm_head.weight[twin_token] = model.lm_head.weight[right[0]]
    tie = Referee(model).judge("tree 4", prompt, [twin_token], right)
    assert tie is not None and tie.gap == 0 and tie.place == 0 and tie.tokens == (twin_token, right[0])


@pytest.mark.case(30)
def test_a_gap_above_the_limit_of_the_dtype_is_a_fault_and_one_below_is_not() -> None:
    prompt, limit = prompt_of(5), exactness.TIES[torch.float32]
    for factor, fault in ((0.5, False), (2.0, True)):
        model = tiny_model(4)
        first = next(decode(model, prompt, max_new_tokens=1))
        other = (first + 1) % 97
        assert model.lm_head is not None
        model.lm_head.weight[other] = model.lm_head.weight[first] * (1 - factor * limit)
        try:
            assert Referee(model).judge("x", prompt, [other], [first]) is not None
            assert not fault
        except DifferentOutputError:
            assert fault


def test_a_continuation_loops_if_its_last_half_has_a_short_period() -> None:
    noise = list(range(100, 132))
    assert loops([*noise, *([1, 2, 3, 4] * 8)])
    assert loops([*noise, *([7] * 32)])
    assert loops([*noise, *(list(range(16)) * 2)])
    assert not loops([*noise, *(list(range(17)) * 2)][-64:])  # it does not stand there twice
    assert not loops([*noise, *([1, 2, 3, 4] * 7), 1, 2, 3, 5])  # the last token breaks it
    assert not loops([*([1, 2] * 16), *noise])  # a loop that was left
    assert not loops(list(range(64)))


def test_looping_continuations_are_counted_and_left_out(model: QwenGDN, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(6), prompt_of(7)]
    written = [list(decode(model, prompt, max_new_tokens=COUNT)) for prompt in prompts]
    monkeypatch.setattr("tools.measure.acceptance.loops", lambda tokens: list(tokens) == written[0])
    used = in_use(Pair(model, NoDrafts()), prompts, [Mode("tree", 3)], COUNT)
    assert (used.prompts, used.looping) == (2, 1)
    assert used.modes[0].forwards == 2 * (COUNT - 1) and used.modes[0].steady == used.modes[0].tau == 1.0
    monkeypatch.setattr("tools.measure.acceptance.loops", lambda tokens: True)
    assert in_use(Pair(model, NoDrafts()), prompts, [Mode("tree", 3)], COUNT).modes[0].steady is None


@pytest.mark.parametrize("maker", [Random, Scattered, Right, Branching])
def test_teacher_forced_contexts_are_those_of_plain_decoding(model: QwenGDN, maker: type) -> None:
    prompt = prompt_of(8)
    plain = list(decode(model, prompt, max_new_tokens=60))
    pair = Pair(model, scripted(model, maker, prompt))
    found = list(contexts(pair, prompt, COUNT))
    assert [each.root for each in found] == plain[:COUNT]
    for i, each in enumerate(found):
        assert each.coming == plain[i + 1 : i + 1 + len(each.coming)] and len(each.coming) == 16
        if maker is Right:
            assert followed(build_chain(each.root, each.scores, 9), each.coming) == 9
    forced = teacher_forced(pair, [prompt], [1, 4, 12], COUNT)
    assert [each.contexts for each in forced] == [COUNT] * 3
    for figures in forced:
        assert figures.spine_below == 0 and 1 <= figures.chain <= figures.spine <= 16
    assert maker is Random or forced[-1].tree > 1.5


def test_a_best_first_tree_may_accept_less_than_the_chain_and_is_counted(model: QwenGDN) -> None:
    """Flat first rows fill its budget with siblings, while the right tokens lie straight ahead."""
    prompt = prompt_of(8)
    pair = Pair(model, scripted(model, _FlatButRight, prompt))
    (figures,) = teacher_forced(pair, [prompt], [4], COUNT)
    assert figures.chain == 5 and figures.tree < 5 and figures.tree_below == COUNT and figures.spine == 5


@pytest.mark.case(26)
def test_a_tree_that_should_hold_the_chain_and_accepts_less_is_counted(
    model: QwenGDN, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tools.measure.acceptance.build_spine", lambda root, scores, budget: build_tree(root, scores, 1)
    )
    prompt = prompt_of(8)
    (figures,) = teacher_forced(Pair(model, scripted(model, Right, prompt)), [prompt], [4], COUNT)
    assert figures.spine_below == COUNT and figures.tree_below == 0


class _FlatButRight(Right):
    """The right token is the likeliest by a hair at every depth."""

    def draft(self, coming: list[int]) -> torch.Tensor:
        return super().draft(coming) * 0.01


def test_window_bytes_are_those_of_its_parts(model: QwenGDN) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = window_bytes(random_model(tiny(), 0.05).to(dtype), 9)
        assert found.measured == found.stated
    assert window_bytes(model, 5).state == 6 * 4 * 8 * 8 * 4


def test_every_part_of_the_builder_takes_time() -> None:
    times = builder_times(positions=3, vocabulary=5000, nodes=8, repeats=3)
    assert min(times.whole, times.normaliser, times.top_k, times.search) > 0
    assert (times.positions, times.vocabulary, times.nodes) == (3, 5000, 8)


@pytest.mark.parametrize(
    ("content", "name", "licence"),
    [
        ({"name": "a", "licence": "MIT", "prompts": [{"text": "ab", "source": "x.py"}, {"text": "c"}]}, "a", "MIT"),
        ({"tokens": 2, "prompts": [{"text": "ab", "licence": "X"}, {"text": "c", "licence": "Y"}]}, "file", "X, Y"),
        ([[97, 98], [99]], "file", "unknown"),
        ({"prompts": [{"ids": [97, 98]}, "c"]}, "file", "unknown"),
    ],
)
def test_prompt_files_are_read_in_every_form(content: object, name: str, licence: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(content))
    found = read_prompts(file, lambda text: list(text.encode()))
    assert found == (name, licence, ([97, 98], [99]))
    assert read_prompts(file, lambda text: list(text.encode()), limit=1).prompts == ([97, 98],)


def test_one_prompt_may_be_a_flat_list_of_ids(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("[5, 6, 7]")
    assert read_prompts(tmp_path / "file.json", lambda text: []).prompts == ([5, 6, 7],)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"prompts": 3}', "[[1], []]", '[{"text": 5}]', "[[true]]"])
def test_damaged_prompt_files_are_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ValueError, match=r"file\.json"):
        read_prompts(tmp_path / "file.json", lambda text: list(text.encode()))


@pytest.fixture(scope="module")
def pair_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a random pair on disk and three prompts."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "prompts.json").write_text(json.dumps([prompt_of(seed) for seed in range(3)]))
    return [
        *random_pair(folder),
        *("--prompts", str(folder / "prompts.json"), "--threads", "1", "--max-new-tokens", "8", "--budgets", "2,6"),
    ]


def test_bench_measures_speed_and_ends_with_one_json_line(
    pair_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*pair_arguments, "--rounds", "2", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])
    assert figures["measured"] == "speed" and figures["dtype"] == "torch.float32"
    (found,) = figures["sets"]
    assert (found["name"], found["prompts"], found["longest"]) == ("prompts", 2, 9)
    assert [each["mode"] for each in found["modes"]] == ["plain", "chain 2", "chain 3", "tree 2", "tree 6"]
    assert figures["window"]["measured"] == sum(figures["window"][part] for part in ("factors", "columns", "rows"))
    assert "tok/s" in out and "stages, ms a round" in out


def test_bench_measures_acceptance(pair_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*pair_arguments, "--acceptance"]) == 0
    out = capsys.readouterr().out
    (found,) = json.loads(out.splitlines()[-1])["sets"]
    assert found["prompts"] == 3 and [each["budget"] for each in found["teacher_forced"]] == [2, 6]
    assert all(each["spine_below"] == 0 and each["contexts"] == 24 for each in found["teacher_forced"])
    assert "teacher-forced" in out and "continuations loop" in out


def test_bench_measures_a_batch_of_ever_shorter_prompts(
    pair_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*pair_arguments, "--batch", "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    (found,) = json.loads(out.splitlines()[-1])["sets"]
    assert found["prompts"] == 3 and found["near_ties"] == []
    assert [each["mode"] for each in found["modes"]] == ["plain", "tree 2", "tree 6"]
    for each in found["modes"]:
        together, alone = each["forwards"]
        assert 0 < together < alone <= 3 * 7 and each["together"]["low"] > 0 and each["gain"]["low"] > 0
    assert found["modes"][0]["forwards"] == [7, 21] and found["modes"][0]["tau"] == 1.0
    assert "one by one" in out


def test_bench_gives_no_figure_for_a_batch_that_writes_something_else(
    model: QwenGDN, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*args: Any, **kwargs: Any) -> Iterator[tuple[Round, ...]]:
        for one, other in generate_batch(*args, **kwargs):
            yield one, other._replace(tokens=tuple((token + 1) % 97 for token in other.tokens))

    monkeypatch.setattr("tools.measure.batch.generate_batch", spoilt)
    with pytest.raises(DifferentOutputError, match="row 1, tree 2: token 0 is"):
        batch.measure(
            Pair(model, NoDrafts()), [prompt_of(3), prompt_of(4)], [Mode("tree", 2)], alternations=1, count=COUNT
        )


def test_bench_fails_if_a_tree_that_holds_the_chain_accepts_less(
    pair_arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Forced(budget=2, contexts=1, chain=2.0, tree=2.0, spine=1.0, spine_below=1, tree_below=0)
    monkeypatch.setattr(bench, "teacher_forced", lambda *arguments: [below])
    assert bench.main([*pair_arguments, "--acceptance", "--limit", "1"]) == 1


def test_bench_fails_in_one_line(pair_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.json").write_text("{}")
    assert bench.main(["--target", str(tmp_path), "--threads", "1"]) == 1
    assert bench.main([*pair_arguments, "--prompts", str(tmp_path / "none.json")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(line.startswith("bench: ") for line in errors)


def bad_use(tool: Any, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a tool says in the one line with which it refuses a command line."""
    with pytest.raises(SystemExit) as exit_:
        tool.main(arguments)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    name = tool.__name__.removeprefix("tools.")
    assert out == "" and err.count("\n") == 1 and err.startswith(f"{name}: error: ")
    return err.removeprefix(f"{name}: error: ")


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budgets", "0"], "--budgets: must be an integer from 1"),
        (["--budgets", "4,x"], "--budgets: must be an integer from 1 to 2147483647, got 'x'"),
        (["--rounds", "0"], "--rounds: must be an integer from 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens: must be an integer from 2"),
        (["--threads", "two"], "--threads: must be an integer from 1"),
        (["--acceptance", "--builder"], "not allowed with"),
        (["--target", "/nope"], "--target: '/nope' is no existing folder"),
        (["--drafter", "/nope"], "--drafter: '/nope' is no existing folder"),
        (["--prompts", "/nope.json"], "--prompts: /nope.json is no file"),
        (["--device", "tpu"], "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
        pytest.param(["--device", "cuda"], "--device: cuda is not there", marks=NO_CUDA),
        (["--builder", "--budgets", "4"], "--budgets is not used when builder is measured"),
        (["--builder", "--target", "bundled"], "--target is not used when builder is measured"),
        (["--acceptance", "--rounds", "3"], "--rounds is not used when acceptance is measured"),
        (["--batch", "--layers", "3"], "--layers is not used when batch is measured"),
        (["--layers", "3"], "--layers is not used when speed is measured"),
        (["--gpu", "--max-new-tokens", "9"], "--max-new-tokens is not used when gpu is measured"),
        (["--gpu"], "--gpu needs --target-config and --drafter-config"),
        (["--gpu", "--target-config", "/nope.json"], "--target-config: /nope.json is no file"),
        (["--gpu", "--sizes", ""], "--sizes: must be an integer from 2"),
        (["--forwards"], "--forwards needs --target-config"),
        (["--fidelity"], "--fidelity needs --target-config"),
        (["--forwards", "--chunks", "64"], "--chunks is not used when forwards is measured"),
        (["--gpu", "--target-config", *2 * [__file__], "--drafter-config", __file__], "measures one --target-config"),
    ],
)
def test_bench_refuses_bad_use_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in bad_use(bench, arguments, capsys)


def test_bench_reports_the_options_it_used_and_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = builder_times(positions=3, vocabulary=500, nodes=4, repeats=1)
    monkeypatch.setattr(bench, "builder_times", lambda: times)
    assert bench.main(["--builder", "--threads", "1"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(said) == {"measured", "threads", "torch", "builder"}


def test_layer_diff_finds_no_difference_in_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oracle("transformers")
    config = target_config(layer_types="lflf")
    write(tmp_path, nested(config), as_stored(target_tensors(config)) | extras())
    assert layer_diff.main([str(tmp_path), "--tokens", "40", "--tree", "7"]) == 0
    out = capsys.readouterr().out
    assert "one shot" in out and "cached, 20 + 3 + 1" in out and "a tree of 7 nodes" in out and "equal within" in out


def test_layer_diff_beyond_the_tolerance_names_a_place_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    oracle("transformers")
    assert layer_diff.main(["--random", "tiny", "--tokens", "20", "--tree", "0", "--tolerance", "1e-12"]) == 1
    assert "DIFFERENT one shot: first in layers.0, in its mixer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parameter", "place"),
    [
        ("embed_tokens.weight", "embedding"),
        ("layers.0.input_layernorm.weight", "layers.0, in its input_layernorm"),
        ("layers.2.linear_attn.A_log", "layers.2, in its mixer"),
        ("layers.3.self_attn.k_norm.weight", "layers.3, in its mixer"),
        ("layers.5.post_attention_layernorm.weight", "layers.5, in its post_attention_layernorm"),
        ("layers.6.mlp.up_proj.weight", "layers.6, in its mlp"),
        ("norm.weight", "norm"),
        ("lm_head.weight", "logits"),
    ],
)
def test_a_planted_fault_is_named(parameter: str, place: str) -> None:
    """One parameter of ours is off by 1 %; the other side keeps the right one."""
    oracle("transformers")
    ours = random_model(tiny(), 0.05)
    model = twin(ours, tiny())
    owner, _, name = parameter.rpartition(".")
    planted = torch.nn.Parameter(ours.get_parameter(parameter) * 1.01 + 0.01, requires_grad=False)
    setattr(ours.get_submodule(owner), name, planted)
    tokens = random_tokens(seeded(1), 30)
    for cuts in (None, [10, 20]):
        assert compare(run_ours(ours, tokens, cuts), run_theirs(model, tokens, cuts)).fault(2e-5) == place


def test_cuts_sum_to_the_total_and_random_trees_are_trees() -> None:
    assert layer_diff.cut(10, [4, 3, 1]) == [4, 3, 1, 1, 1]
    assert layer_diff.cut(3, [70, 3, 1]) == [3]
    assert layer_diff.random_tree(1, seeded(0)) == Topology([-1])
    assert len(layer_diff.random_tree(20, seeded(0))) == 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of the arguments source --random is required"),
        (["bundled", "--random", "tiny"], "not allowed with"),
        (["bundled", "--layers", "2"], "--layers is for --random"),
        (["/nope"], "'/nope' is no existing folder"),
        (["bundled", "--tree", "-1"], "--tree"),
        (["bundled", "--tree", "x"], "--tree: must be an integer from 0"),
        (["bundled", "--tokens", "x"], "--tokens: must be an integer from 1"),
        (["bundled", "--cuts", "3,x"], "--cuts: must be an integer from 1 to 2147483647, got 'x'"),
        (["bundled", "--device", "gpu"], "--device: must be cpu, cuda or cuda:N, got 'gpu'"),
        pytest.param(["bundled", "--device", "cuda"], "--device: cuda is not there", marks=NO_CUDA),
        (["bundled", "--tolerance", "nan"], "--tolerance: must be a finite number of at least 0, got 'nan'"),
        (["bundled", "--tolerance", "inf"], "--tolerance: must be a finite number"),
        (["bundled", "--tolerance", "-1"], "--tolerance"),
        (["bundled", "--tolerance", "small"], "--tolerance: must be a finite number of at least 0, got 'small'"),
    ],
)
def test_layer_diff_refuses_bad_use_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in bad_use(layer_diff, arguments, capsys)


def test_layer_diff_fails_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert layer_diff.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("layer_diff: ")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layer_diff_is_content_with_two_programs_that_round_differently(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    oracle("transformers")
    ask = ["--random", "tiny", "--tokens", "40", "--tree", "12", "--dtype", dtype]
    for seed in ("1", "8"):  # here the largest single errors differ by more than the factor
        assert layer_diff.main([*ask, "--seed", seed]) == 0
    assert "rms errors to float32" in capsys.readouterr().out
    assert layer_diff.main([*ask, "--tolerance", "1e-4"]) == 1
    assert "errors to transformers, tolerance 1.0e-04" in capsys.readouterr().out


def test_layer_diff_finds_a_fault_beyond_the_rounding_of_the_dtype(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oracle("transformers")

    def spoilt(options: Any) -> layer_diff.Sides:
        sides = load(options)
        norm = sides.ours.layers[3].self_attn.k_norm  # its parameter is replaced, for theirs shares the storage
        norm.weight = torch.nn.Parameter(norm.weight + 1.0, requires_grad=False)
        return sides

    load = layer_diff.load
    monkeypatch.setattr(layer_diff, "load", spoilt)
    ask = ["--random", "tiny", "--tokens", "40", "--tree", "0", "--dtype", "bfloat16"]
    assert layer_diff.main(ask) == 1
    assert "DIFFERENT one shot: first in layers." in capsys.readouterr().out


def test_the_checks_of_the_gpu_hold_at_toy_size_in_float32() -> None:
    check_float32(TOY, "cpu")
    check_convolution("cpu", channels=12, tokens=9)


def test_the_checks_of_the_gpu_hold_at_toy_size_in_bfloat16() -> None:
    check_bfloat16(TOY, "cpu")
    assert margin(1.0, 100) == pytest.approx(0.03) and margin(0.5, 900) == pytest.approx(0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tree_check_of_the_gpu_holds_at_toy_size(dtype: torch.dtype) -> None:
    check_tree(TOY, "cpu", dtype)


def test_the_generation_check_of_the_gpu_holds_at_toy_size() -> None:
    check_generate(TOY, "cpu")
