"""The command lines of the training scripts: refusals, runs continued with other settings, damage, interrupts."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from tools import train_corpus, train_drafter, train_generate, train_pair, train_target, train_tokenizer
from tools.training.card import write_card
from tools.training.command import fail_in_one_line
from tools.training.machine import parallel
from tools.training.run import Run
from tools.training.shapes import TOY
from tools.training.target import TargetJob

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a script in this process; returns its exit status and what it wrote to stderr, progress left out."""

    def run(script: object, *words: object) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, words)])  # type: ignore[attr-defined]
        capsys.readouterr()
        status = 0
        try:
            script.main()  # type: ignore[attr-defined]
        except SystemExit as end:
            assert isinstance(end.code, int)
            status = end.code
        name = Path(script.__file__).name  # type: ignore[attr-defined]
        written = capsys.readouterr().err
        assert "usage:" not in written and "Traceback" not in written
        return status, [line.removeprefix(f"{name}: ") for line in written.splitlines() if line.startswith(name)]

    return run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "seen").mkdir()
    for file in (ROOT / "qwen_gdn").glob("*.py"):
        shutil.copyfile(file, folder / "seen" / file.name)
    (folder / "unseen").mkdir()
    (folder / "unseen" / "one.py").write_text("def double(value):\n    return value + value\n" * 20)
    return folder


@pytest.fixture(scope="module")
def words(source: Path) -> list[str]:
    return ["--toy", "--device", "cpu", "--source", str(source), "--license", "MIT", "--unseen", "unseen"]


@pytest.fixture(scope="module")
def trained(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, not to be changed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_pair.py", *words, "--out", str(out)])
        patch.setattr(os, "sched_getaffinity", lambda process: {0})  # starting processes takes longer than the work
        train_pair.main()
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("bad", ["-1", "0", "nan", "inf", "-inf", "1e999", "ten", ""])
def test_budgets_that_never_end_or_never_begin_are_refused_before_any_work(
    bad: str, call: Call, words: list[str], tmp_path: Path
) -> None:
    options = [(train_pair, words, f"--{stage}-seconds") for stage in ("target", "generate", "drafter")]
    options += [(script, [], "--seconds") for script in (train_target, train_generate, train_drafter)]
    for script, others, option in options:
        status, (line,) = call(script, *others, "--out", tmp_path / "run", f"{option}={bad}")
        assert status == 2 and option in line and repr(bad) in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "bad",
    [
        ["--seed", "-1"],
        ["--seed", "1.5"],
        ["--seed", "99999999999"],
        ["--device", "tpu"],
        ["--device", "cuda:999"],
        ["--device", ""],
        ["--out", "/etc/passwd"],
        ["--out", "/etc/passwd/run"],
        ["--out", "/proc/run"],
        ["--out", ""],
        ["--source", "/nowhere"],
        ["--source", ""],
        ["--license", "GPL-3.0-only"],
        ["--until", "never"],
        ["--see", "1"],
        ["more"],
    ],
    ids=" ".join,
)
def test_bad_use_is_one_line_and_leaves_nothing_behind(
    bad: list[str], call: Call, words: list[str], tmp_path: Path
) -> None:
    status, (line,) = call(train_pair, *words, "--out", tmp_path / "run", *bad)
    assert status == 2 and bad[-1] in line
    assert not (tmp_path / "run").exists()


def test_a_stage_without_the_one_before_it_is_refused_and_makes_no_folder(call: Call, tmp_path: Path) -> None:
    for script in (train_tokenizer, train_target, train_generate, train_drafter):
        status, (line,) = call(script, "--toy", "--device", "cpu", "--out", tmp_path / "run")
        assert status == 2 and "has no finished" in line
    status, (line,) = call(train_corpus, "--toy", "--device", "cpu", "--out", tmp_path / "run")
    assert status == 2 and line.startswith("no sources")
    assert not (tmp_path / "run").exists()


def test_the_same_call_changes_nothing_in_a_finished_run(call: Call, run: Path, words: list[str]) -> None:
    before = _contents(run)
    assert call(train_pair, *words, "--out", run)[0] == 0
    for script in (train_tokenizer, train_target, train_generate, train_drafter):
        assert call(script, "--toy", "--device", "cpu", "--out", run)[0] == 0
    assert _contents(run) == before


@pytest.mark.parametrize(
    ("other", "values"),
    [
        (["--seed", "5"], "seed 0, not 5"),
        (["--license", "BSD-3-Clause"], "licence MIT, not BSD-3-Clause"),
        (["--unseen", "one"], "not one"),
        (["--target-seconds", "7"], "budget 6 steps, not 7.0 s"),
        (["--generate-seconds", "7"], "budget 2 steps, not 7.0 s"),
        (["--drafter-seconds", "7"], "budget 6 steps, not 7.0 s"),
        (["--source", str(ROOT / "ddtree")], str(ROOT / "ddtree")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_run_is_not_continued_with_other_settings(
    other: list[str], values: str, call: Call, run: Path, words: list[str]
) -> None:
    before = _contents(run)
    status, (line,) = call(train_pair, *words, "--out", run, *other)
    assert status == 2 and values in line and f"delete {run}" in line
    assert _contents(run) == before


def test_a_run_is_not_continued_at_another_size_or_from_changed_sources(
    call: Call, run: Path, words: list[str], source: Path, tmp_path: Path
) -> None:
    status, (line,) = call(train_pair, *words[1:], "--out", run)
    assert status == 2 and "shape toy" in line and "not bundled" in line
    for script in (train_tokenizer, train_target, train_generate, train_drafter):
        status, (line,) = call(script, "--device", "cpu", "--out", run)
        assert status == 2 and "shape toy" in line and "not bundled" in line
    edited = shutil.copytree(source, tmp_path / source.name)
    out = tmp_path / "edited"
    edited_words = [str(edited) if word == str(source) else word for word in words]
    assert call(train_pair, *edited_words, "--out", out, "--until", "corpus")[0] == 0
    (edited / "seen" / "cache.py").write_text("x = 1\n")
    status, (line,) = call(train_pair, *edited_words, "--out", out, "--until", "corpus")
    assert status == 2 and "content" in line


def test_begun_text_is_not_continued_with_other_settings(run: Path, call: Call, words: list[str]) -> None:
    (run / "generated" / "result.json").unlink()
    settings = run / "generated" / "settings.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace('"seed": 0', '"seed": 3'))
    status, (line,) = call(train_pair, *words, "--out", run)
    assert status == 2 and "seed 3, not 0" in line
    settings.write_text(settings.read_text(encoding="utf-8").replace('"seed": 3', '"seed": 0'))
    status, (line,) = call(train_pair, *words, "--out", run, "--generate-seconds", "7")
    assert status == 2 and "budget 2 steps, not 7.0 s" in line


@pytest.mark.parametrize(
    ("file", "stages", "remedy"),
    [
        ("target/result.json", [], "target/result.json"),
        ("target/checkpoint.pt", ["target"], "target/checkpoint.pt"),
        ("corpus/train-00.jsonl", ["tokens"], "corpus"),
        ("tokens/tokenizer.json", ["target"], "tokens"),
        ("tokens/tokens.json", ["target"], "tokens"),
        ("prompts/unseen-8.json", ["generated"], "tokens"),
        ("generated/train-0000.safetensors", ["generated"], "generated"),
        ("generated/eval-unseen-8.safetensors", ["drafter"], "generated"),
        ("pair/target/model.safetensors", [], "target/result.json"),
        ("pair/drafter/model.safetensors", [], "drafter/result.json"),
        ("pair/target/config.json", [], "target/result.json"),
        ("corpus/manifest.json", [], "corpus"),
    ],
)
def test_a_damaged_file_is_named_with_a_remedy(
    file: str, stages: list[str], remedy: str, call: Call, run: Path, words: list[str]
) -> None:
    damaged = run / file
    for stage in stages:
        (run / stage / "result.json").unlink()
    os.truncate(damaged, damaged.stat().st_size // 2)
    status, (line,) = call(train_pair, *words, "--out", run)
    assert status == 1 and f"{damaged} is damaged" in line and f"delete {run / remedy} and" in line


@pytest.mark.parametrize("content", ["{}", "[]", "\ufeff", "7"])
def test_a_note_that_says_nothing_is_damaged(content: str, call: Call, run: Path) -> None:
    (run / "target" / "result.json").write_text(content, encoding="utf-8")
    status, (line,) = call(train_target, "--toy", "--device", "cpu", "--out", run)
    assert status == 1 and "target/result.json is damaged" in line


def test_an_interrupted_stage_is_saved_and_ends_where_an_uninterrupted_one_does(
    call: Call, run: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (run / "pair" / "target" / "model.safetensors").read_bytes()
    for path in ("target", "pair", "generated", "drafter"):
        shutil.rmtree(run / path)
    loss = TargetJob.loss

    def interrupted(job: TargetJob, step: int) -> Tensor:
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        return loss(job, step)

    with monkeypatch.context() as patch:
        patch.setattr(TargetJob, "loss", interrupted)
        status, (line,) = call(train_pair, *words, "--out", run)
    assert status == 130 and line.startswith("interrupted; target is saved at step 4")
    assert call(train_pair, *words, "--out", run, "--until", "target")[0] == 0
    assert (run / "pair" / "target" / "model.safetensors").read_bytes() == weights


def test_a_script_says_in_one_line_how_it_ended(call: Call) -> None:
    class Script:
        __file__ = "train_it.py"

        def __init__(self, error: BaseException) -> None:
            def fail() -> None:
                raise error

            self.main = fail_in_one_line(fail)

    assert call(Script(KeyboardInterrupt())) == (130, ["interrupted; the same call continues"])
    assert call(Script(FloatingPointError("the loss is nan"))) == (1, ["the loss is nan"])
    assert call(Script(OSError(28, "No space left"))) == (1, ["[Errno 28] No space left"])
    assert call(Script(ValueError("two\nlines"))) == (1, ["two lines"])
    with pytest.raises(KeyError):
        call(Script(KeyError("a fault of the program")))


def test_processes_that_read_files_leave_interrupts_to_the_one_that_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    tasks: Sequence[tuple[int, ...]] = [(), ()]
    blocked = parallel(partial(signal.pthread_sigmask, signal.SIG_BLOCK), tasks, "asking")
    assert all(signal.SIGINT in one for one in blocked)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_card_is_made_of_one_run(run: Path) -> None:
    one = Run(run, TOY, "cpu", 0, eager=True)
    write_card(one)
    with pytest.raises(ValueError, match="seed 0, not 1"):
        write_card(Run(run, TOY, "cpu", 1, eager=True))
