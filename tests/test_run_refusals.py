"""What the command line refuses: one line that says why, a status that says whose fault, and no weights loaded."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import checkpoints as ck
import pytest
import scribe
import torch

import ddtree.run as cli
from ddtree import interrupts

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command line that must fail with this status, in one line and before any text; returns its message."""

    def call(status: int, *argv: object) -> str:
        assert cli.main([str(arg) for arg in argv]) == status
        out, err = capsys.readouterr()
        line = err.splitlines()[-1]
        assert out == ""
        assert err.endswith(line + "\n") and err.count("\n") == 1 + err.count("ddtree: note: ")
        assert line.startswith("ddtree: error: ")
        return line.removeprefix("ddtree: error: ")

    return call


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(source: str, **how: object) -> None:
        pytest.fail("weights are being loaded")

    monkeypatch.setattr(cli, "load_target", load)
    monkeypatch.setattr(cli, "load_drafter", load)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scribe.write_scribe(tmp_path_factory.mktemp("scribe"), max_position_embeddings=64)


@pytest.mark.case(9)
@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "required: --prompt"),
        (("--prompt",), "--prompt: expected one argument"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "", "--chat"), "the prompt is empty"),
        (("--prompt", "x", "y"), "unrecognized arguments: y"),
        (("--prompt", "x", "--budge", "3"), "unrecognized arguments: --budge 3"),
        (("--prompt", "x", "--mode", "forest"), "--mode: invalid choice: 'forest'"),
        (("--prompt", "x", "--budget", "-1"), "--budget: must be an integer from 0 to 1024, got '-1'"),
        (("--prompt", "x", "--budget", "1025"), "--budget: must be an integer from 0 to 1024, got '1025'"),
        (("--prompt", "x", "--budget", "2147483647"), "from 0 to 1024, got '2147483647'"),
        (("--prompt", "x", "--budget", "1.5"), "--budget: must be an integer"),
        (("--prompt", "x", "--budget", "Auto"), "from 0 to 1024, got 'Auto', nor is that auto"),
        (("--prompt", "x", "--max-budget", "0"), "--max-budget: must be an integer from 1 to 1024, got '0'"),
        (
            ("--prompt", "x", "--budget", "8", "--max-budget", "9"),
            "--max-budget belongs to --budget auto; leave it out, or leave out --budget 8",
        ),
        (("--prompt", "x", "--max-new-tokens", "-1"), "--max-new-tokens: must be an integer"),
        (("--prompt", "x", "--max-new-tokens", "9" * 30), "--max-new-tokens: must be an integer"),
        (("--prompt", "x", "--max-new-tokens", "²"), "--max-new-tokens: must be an integer"),
        (("--prompt", "x", "--temperature", "-0.5"), "--temperature must be finite and at least 0, got -0.5"),
        (("--prompt", "x", "--temperature", "nan"), "--temperature must be finite"),
        (("--prompt", "x", "--temperature", "inf"), "--temperature must be finite"),
        (("--prompt", "x", "--temperature", "warm"), "--temperature: invalid float value: 'warm'"),
        (("--prompt", "x", "--top-k", "-1"), "--top-k must be an int of at least 0"),
        (("--prompt", "x", "--top-k", "2.0"), "--top-k: invalid int value: '2.0'"),
        (("--prompt", "x", "--top-p", "0"), "--top-p must lie in (0, 1], got 0.0"),
        (("--prompt", "x", "--top-p", "1.1"), "--top-p must lie in (0, 1], got 1.1"),
        (("--prompt", "x", "--min-p", "1.5"), "--min-p must lie in [0, 1], got 1.5"),
        (("--prompt", "x", "--presence-penalty", "nan"), "--presence-penalty must lie in [-1e+30, 1e+30], got nan"),
        (("--prompt", "x", "--frequency-penalty", "inf"), "--frequency-penalty must lie in [-1e+30, 1e+30], got inf"),
        (("--prompt", "x", "--repetition-penalty", "0"), "--repetition-penalty must lie in [1e-30, 1e+30], got 0.0"),
        (("--prompt", "x", "--logit-bias", "3"), "--logit-bias: must be ID=VALUE, as 220=-1.5, got '3'"),
        (("--prompt", "x", "--logit-bias", "a=1"), "--logit-bias: must be ID=VALUE, as 220=-1.5, got 'a=1'"),
        (("--prompt", "x", "--logit-bias", "3=high"), "--logit-bias: must be ID=VALUE, as 220=-1.5, got '3=high'"),
        (("--prompt", "x", "--logit-bias", "3=-inf"), "--logit-bias must lie in [-1e+30, 1e+30], got -inf at 3"),
        (("--prompt", "x", "--logit-bias", "3=1", "--logit-bias", "3=2"), "token id 3 is given more than once"),
        (("--prompt", "x", "--logit-bias", "999999=1"), "--logit-bias: token id 999999 is outside the vocabulary [0, "),
        (("--prompt", "x", "--seed", "1" * 30), "--seed must be an int and lie in"),
        (("--prompt", "x", "--seed", "one"), "--seed: invalid int value: 'one'"),
        (("--prompt", "x", "--system", "be short"), "--system belongs to a conversation"),
        (("--prompt", "x", "--no-thinking"), "--no-thinking belongs to a conversation"),
        (("--prompt", "x", "--chat", "--echo"), "leave out --echo or --chat"),
        (("--prompt", "x", "--stop", ""), "--stop is empty"),
        (("--prompt", "x", "--stop", "\udcff"), "--stop is not valid UTF-8"),
        (("--prompt", "x", "--device", "tpu"), "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
        (("--prompt", "x", "--device", "cuda:99"), "--device: cuda:99 is not there"),
        (("--prompt", "x", "--dtype", "int8"), "--dtype: invalid choice: 'int8'"),
        (("--prompt", "x", "--target", "no-such-folder"), "'no-such-folder' is no existing folder"),
        (("--prompt", "x", "--target", "/no/such/folder"), "'/no/such/folder' is no existing folder"),
        (("--prompt", "x", "--target", "~nobody-here/x/y"), "no existing folder"),
        (("--prompt", "x", "--target", ""), "'' is no existing folder"),
        (("--prompt", "x", "--drafter", "./no-such-folder"), "'./no-such-folder' is no existing folder"),
        (("--prompt", "x", "--target", __file__), "is a file; give the folder"),
        (("--prompt", "a\udcffb"), "the prompt is not valid UTF-8"),
        (("--prompt", "x", "--chat", "--system", "\udcff"), "--system is not valid UTF-8"),
    ],
)
def test_bad_values_and_combinations_are_bad_use(refused: Refused, argv: tuple[str, ...], words: str) -> None:
    assert words in refused(2, *argv)


@pytest.mark.case(9)
@pytest.mark.usefixtures("no_weights")
def test_an_empty_or_broken_standard_input_is_bad_use(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "the prompt is empty" in refused(2, "--prompt", "-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert "no text in utf-8: byte 2 is wrong" in refused(2, "--prompt", "-")


@pytest.mark.usefixtures("no_weights")
def test_a_closed_standard_input_is_bad_use_where_the_prompt_is_read_from_it(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "--prompt - reads standard input, which is closed" in refused(2, "--prompt", "-")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("ask", [["--prompt", "x"], ["--help"]])
def test_a_closed_standard_output_is_a_failure(
    ask: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(ask) == 1
    err = capsys.readouterr().err
    assert err.startswith("ddtree: error: standard output is closed") and err.count("\n") == 1


def test_help_that_cannot_be_written_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", scribe.Full())
    assert cli.main(["--help"]) == 1
    assert capsys.readouterr().err == "ddtree: error: [Errno 28] No space left on device\n"


@pytest.mark.usefixtures("no_weights")
def test_a_chat_without_template_is_bad_use(refused: Refused, target: Path) -> None:
    assert f"--chat: {target} ships no chat template" in refused(2, "--target", target, "--prompt", "x", "--chat")


@pytest.mark.usefixtures("no_weights")
def test_more_tokens_than_the_context_holds_are_bad_use(refused: Refused, target: Path) -> None:
    message = refused(2, "--target", target, "--prompt", "n" * 4, "--max-new-tokens", 61)
    assert "a prompt of 4 tokens and --max-new-tokens 61 are 65 tokens" in message and "is 64;" in message


def test_just_as_many_tokens_as_the_context_holds_are_fine(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--target", str(target), "--prompt", "n" * 4, "--max-new-tokens", "60"]) == 0
    assert "60 tokens after a prompt of 4" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_target_layers": 9}, "made for a target of 9 layers, this one has 4"),
        ({"vocab_size": 97}, "vocab_size 97 differs from the target's 300"),
    ],
)
def test_a_drafter_of_another_target_is_bad_use(
    refused: Refused, tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    target, drafter = scribe.write_random_pair(tmp_path)
    raw = json.loads((drafter / "config.json").read_text()) | changes
    (drafter / "config.json").write_text(json.dumps(raw))
    assert words in refused(2, "--target", target, "--drafter", drafter, "--prompt", "x")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("part", [0, 1])
def test_a_damaged_config_is_a_failure_that_names_its_file(refused: Refused, tmp_path: Path, part: int) -> None:
    pair = scribe.write_random_pair(tmp_path)
    ask = ["--target", pair[0], "--drafter", pair[1], "--prompt", "x"]
    file = pair[part] / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"rms_norm_eps": None}))
    message = refused(1, *ask)
    assert str(file) in message and "rms_norm_eps is missing" in message
    file.write_text("{\n")
    assert "cannot be read as JSON" in refused(1, *ask)
    file.write_text('{"a": ' * 100_000)
    assert f"{file} cannot be read as JSON: it is nested too deeply" in refused(1, *ask)
    for key, value in (("head_dim", 10**30), ("rope_theta", float("inf"))):
        rope = {"rope_parameters": raw["rope_parameters"] | {key: value}} if key == "rope_theta" else {key: value}
        file.write_text(json.dumps(raw | rope))
        message = refused(1, *ask)
        assert str(file) in message and key in message
    file.unlink()
    assert f"{pair[part]} has no config.json; give the folder of a checkpoint" in refused(2, *ask)


@pytest.mark.usefixtures("no_weights")
def test_a_target_as_drafter_and_a_drafter_as_target_are_bad_use(refused: Refused, tmp_path: Path) -> None:
    target, drafter = scribe.write_random_pair(tmp_path)
    message = refused(2, "--target", drafter, "--prompt", "x")
    assert message == f"--target {drafter} is a drafter; give it as --drafter, and a target as --target"
    message = refused(2, "--target", target, "--drafter", target, "--prompt", "x")
    assert message == f"--drafter {target} is a target; give it as --target, and a drafter as --drafter"


@pytest.mark.usefixtures("no_weights")
def test_a_damaged_tokenizer_is_a_failure(refused: Refused, tmp_path: Path) -> None:
    folder = scribe.write_scribe(tmp_path)
    ask = ["--target", folder, "--prompt", "x"]
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is damaged" in refused(1, *ask)
    (folder / "tokenizer.json").unlink()
    assert "neither tokenizer.json nor tokenizer.model" in refused(1, *ask)


@pytest.mark.usefixtures("no_weights")
def test_a_template_that_refuses_is_a_failure(refused: Refused, tmp_path: Path) -> None:
    folder = scribe.write_scribe(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no\nsystem') }}")
    assert "chat template: no system" in refused(1, "--target", folder, "--prompt", "x", "--chat")


@pytest.mark.usefixtures("no_weights")
def test_a_tokenizer_with_more_tokens_than_the_target_is_a_failure(refused: Refused, tmp_path: Path) -> None:
    config = ck.target_config(vocab_size=4, eos_token_id=0)
    folder = scribe.write_tokenizer(ck.write(tmp_path, config, ck.as_stored(ck.target_tensors(config))))
    assert "outside the vocabulary [0, 4)" in refused(1, "--target", folder, "--prompt", "x")


@pytest.mark.usefixtures("no_weights")
def test_a_tokenizer_with_ids_beyond_the_target_is_a_failure_even_if_it_has_few(
    refused: Refused, tmp_path: Path
) -> None:
    folder = scribe.write_scribe(tmp_path)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"] = {name: i + 3000 for name, i in raw["model"]["vocab"].items()}
    raw["added_tokens"] = [token | {"id": token["id"] + 3000} for token in raw["added_tokens"]]
    file.write_text(json.dumps(raw))
    message = refused(1, "--target", folder, "--prompt", "n", "--mode", "plain")
    assert str(folder) in message and f"[0, {scribe.VOCAB})" in message and "the tokenizer names token id 32" in message


@pytest.mark.usefixtures("no_weights")
def test_a_context_that_is_no_number_is_a_failure(refused: Refused, tmp_path: Path) -> None:
    folder = scribe.write_scribe(tmp_path, max_position_embeddings="x")
    message = refused(1, "--target", folder, "--prompt", "n")
    assert f"{folder}/config.json" in message and "max_position_embeddings must be of type int, got 'x'" in message


@pytest.mark.usefixtures("no_weights")
def test_a_template_that_fails_is_a_failure(refused: Refused, tmp_path: Path) -> None:
    folder = scribe.write_scribe(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ 'x'.encode('foo') }}")
    assert "unknown encoding: foo" in refused(1, "--target", folder, "--prompt", "x", "--chat")


@pytest.mark.usefixtures("no_weights")
def test_a_hub_that_does_not_answer_is_a_failure(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repository: str, **how: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr("weights.files.snapshot_download", snapshot_download)
    message = refused(1, "--target", "some-owner/some-model", "--prompt", "x")
    assert "some-owner/some-model" in message and "no route to host" in message


def test_truncated_weights_are_a_failure(refused: Refused, tmp_path: Path) -> None:
    folder = scribe.write_scribe(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert str(file) in refused(1, "--target", folder, "--prompt", "n", "--mode", "plain")


def test_weights_that_are_no_numbers_are_a_failure(refused: Refused, tmp_path: Path) -> None:
    config = ck.target_config(vocab_size=scribe.VOCAB)
    tensors = ck.target_tensors(config)
    tensors["norm.weight"].fill_(torch.nan)
    folder = scribe.write_tokenizer(ck.write(tmp_path, config, ck.as_stored(tensors)))
    message = refused(1, "--target", folder, "--prompt", "n", "--mode", "plain")
    assert f"{folder}/model.safetensors: model.language_model.norm.weight has 32 values of 32 that are NaN" in message


def test_an_interrupt_while_loading_is_one_line(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(source: str, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_target", load)
    assert cli.main(["--target", str(target), "--prompt", "x", "--mode", "plain", "--max-new-tokens", "9"]) == 130
    assert capsys.readouterr() == ("", "ddtree: interrupted\n")


@pytest.mark.case(9)
def test_a_prompt_of_white_space_is_a_prompt(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--target", str(target), "--prompt", " \n", "--max-new-tokens", "2"]) == 0
    assert "2 tokens after a prompt of" in capsys.readouterr().err


def test_help_names_every_option_with_its_default_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert leaving.value.code == 0
    options = "--prompt --target --drafter --mode --budget --max-new-tokens --temperature --top-k --top-p --seed"
    options += " --min-p --presence-penalty --frequency-penalty --repetition-penalty --logit-bias --sampling"
    for option in f"{options} --chat --system --no-thinking --device --dtype --eight-bits --json --echo".split():
        assert said.count(option) >= 2, f"{option} in usage and list"
    for words in (
        "the root not counted (default: auto); at most 1024",
        "(default: tree)",
        "exit status: 0 success",
        "<|im_end|>",
    ):
        assert words in said


def test_an_interrupt_while_the_command_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n")
    done = subprocess.run(
        [sys.executable, "-m", "ddtree.run", "--prompt", "x"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
        timeout=20,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"ddtree: interrupted\n")


def test_the_package_gives_its_public_names_without_importing_torch_before_they_are_asked_for() -> None:
    code = (
        "import sys, ddtree\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(ddtree.__all__) <= set(dir(ddtree))\n"
        "assert not hasattr(ddtree, 'forest')\n"
        "from ddtree import *\n"
        "print([name for name in ddtree.__all__ if getattr(ddtree, name) is not globals()[name]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, check=False, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_an_interrupt_that_is_ignored_from_the_start_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.leave_at_once()
        interrupts.interrupt_again()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.leave_at_once()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        interrupts.interrupt_again()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_as_a_process_bad_use_has_status_2_and_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddtree.run", "--prompt", "x", "--budget", "many"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"ddtree: error: argument --budget:") and done.stderr.count(b"\n") == 1
