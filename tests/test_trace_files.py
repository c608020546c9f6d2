"""`--trace` on the command line: refused before anything is read, and written however a run ends."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import scribe
import torch
from proposers import Right
from tiny import raising_at

import ddtree.run as cli
from ddtree.arguments import UsageError
from ddtree.page import Page
from ddtree.trace.files import TraceFiles
from qwen_gdn import HybridCache, QwenGDN

OLD = "what was there\n" * 400
KINDS = ["run", "round", "pieces", "end"]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scribe.write_scribe(tmp_path_factory.mktemp("cycle"), max_position_embeddings=10**6)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch, target: Path) -> list[str]:
    """Arguments of a run that drafts what is right, five tokens ahead."""
    proposer = Right([*scribe.CYCLE[:1], *scribe.written_ids(400)], length=5)
    monkeypatch.setattr(cli, "load_drafter", lambda source, **how: proposer)
    monkeypatch.setattr("ddtree.prepare._check_pairing", lambda source, target: None)
    return ["--target", str(target), "--drafter", "bundled", "--prompt", scribe.PROMPT, "--budget", "5"]


def kinds_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The objects of a JSON lines file by kind; they come in their order, with one run and one end."""
    objects = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    kinds = [each["kind"] for each in objects]
    assert kinds == ["run", *["round"] * (len(kinds) - 3), "pieces", "end"]
    return {kind: [each for each in objects if each["kind"] == kind] for kind in KINDS}


def embedded(page: Path) -> str:
    """What stands in a page's data script, as a parser finds it."""
    _, _, behind = page.read_text(encoding="utf-8").partition('id="lines">\n')
    return behind.partition("</script>")[0]


def test_page_and_lines_hold_the_same_and_say_what_was_written(
    drafted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, jsonl = tmp_path / "a.html", tmp_path / "a.jsonl"
    page.write_text(OLD)
    arguments = [*drafted, "--max-new-tokens", "50", "--json", "--trace", str(page), "--trace", str(jsonl)]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert embedded(page) == jsonl.read_text() and "what was there" not in page.read_text()
    found = kinds_of(jsonl)
    assert [token for each in found["round"] for token in each["tokens"]] == told["ids"] == scribe.written_ids(50)
    assert "".join(text for each in found["round"] for text in each["texts"]) + found["end"][0]["rest"] == told["text"]
    assert found["end"][0]["figures"] | {"target_forwards": 10} == told["figures"]
    assert (found["end"][0]["finish_reason"], found["end"][0]["error"]) == ("length", None)
    settings = found["run"][0]["settings"]
    assert settings == told["settings"] | {"seed": None} and settings["budget"] == 5
    assert max(each["accepted"] for each in found["round"]) == 5


def test_without_a_trace_nothing_watches_the_rounds(
    drafted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ddtree.recording.Recorder", None)
    assert cli.main([*drafted, "--max-new-tokens", "9"]) == 0
    with pytest.raises(TypeError):
        cli.main([*drafted, "--max-new-tokens", "9", "--trace", str(tmp_path / "a.html")])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.txt"], "a.txt: a trace is written to a file that ends in .html or .jsonl"),
        (["a"], "a trace is written to a file that ends in"),
        (["a.html", "a.html"], "a.html is named twice"),
        (["a.html", "./b/../a.html"], "is named twice"),
        (["none/a.html"], "No such file or directory"),
        (["folder.html"], "folder.html is no file that a trace can be written to"),
        (["pipe.jsonl"], "pipe.jsonl is no file that a trace can be written to"),
        (["b/a.html", "none/a.jsonl"], "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(
    names: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "check_source", None)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    before = sorted(tmp_path.rglob("*"))
    arguments = [part for name in names for part in ("--trace", str(tmp_path / name))]
    assert cli.main(["--prompt", "x", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ddtree: error: --trace: ") and words in err and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.html").write_text(OLD)

    def refused(path: Path, *how: Any, **more: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UsageError, match=r"--trace: .*Permission denied"):
        cli.opened(cli.parse(["--prompt", "x", "--trace", str(tmp_path / "a.html")]))


def test_a_run_that_ends_before_its_first_forward_leaves_files_as_they_were(
    drafted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.html", tmp_path / "new.jsonl"
    old.write_text(OLD)

    def broken(*source: Any, **how: Any) -> Any:
        assert new.exists()
        raise ValueError("no weights")

    monkeypatch.setattr(cli, "load_target", broken)
    assert cli.main([*drafted, "--trace", str(old), "--trace", str(new)]) == 1
    assert old.read_text() == OLD and not new.exists()


FAULTS = [  # owner and name, the call of it, the error, the exit status, and what the trace says
    pytest.param((HybridCache, "commit"), 3, KeyboardInterrupt, 130, "interrupted", None, id="interrupt"),
    pytest.param((HybridCache, "commit"), 3, ValueError, 1, "failed", "ValueError: injected", id="failure"),
    pytest.param((HybridCache, "commit"), 3, MemoryError, 1, "failed", "MemoryError: injected", id="memory"),
    pytest.param((QwenGDN, "forward"), 0, KeyboardInterrupt, 130, "interrupted", None, id="prompt"),
    pytest.param((Page, "write"), 4, BrokenPipeError, 141, "failed", "BrokenPipeError: injected", id="pipe"),
]


@pytest.mark.parametrize(("site", "call", "error", "status", "reason", "message"), FAULTS)
def test_what_there_is_of_a_run_that_breaks_off_is_written(
    drafted: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    site: tuple[Any, str],
    call: int,
    error: type[BaseException],
    status: int,
    reason: str,
    message: str | None,
) -> None:
    page, jsonl = tmp_path / "a.html", tmp_path / "a.jsonl"
    with raising_at(*site, call, error, after=True):
        arguments = [*drafted, "--max-new-tokens", "90", "--trace", str(page), "--trace", str(jsonl)]
        assert cli.main(arguments) == status
    found = kinds_of(jsonl)
    assert embedded(page) == jsonl.read_text()
    assert (found["end"][0]["finish_reason"], found["end"][0]["error"]) == (reason, message)
    tokens = [token for each in found["round"] for token in each["tokens"]]
    assert tokens == scribe.written_ids(len(tokens))
    assert len(found["round"]) == {"forward": 0, "commit": 4, "write": 5}[site[1]]
    if message:
        assert message in page.read_text()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("failing", [False, True])
def test_a_trace_that_cannot_be_written_in_the_end_is_told_of(
    drafted: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: bool,
) -> None:
    """The text is out by then; what failed before is told of too."""

    def full(files: TraceFiles, trace: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.html")

    monkeypatch.setattr(TraceFiles, "write", full)
    arguments = [*drafted, "--max-new-tokens", "20", "--trace", str(tmp_path / "a.html")]
    with raising_at(HybridCache, "commit", 2 if failing else 10**6, ValueError):
        assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out and "No space left on device" in err and ("injected" in err) == failing and "Traceback" not in err


def test_a_trace_belongs_to_one_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--interactive", "--trace", "a.html"]) == 2
    assert "--trace records one text; leave it out with --interactive" in capsys.readouterr().err
