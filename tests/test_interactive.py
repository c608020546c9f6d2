"""The command line's conversation: its lines, what they are put after, and what Ctrl-C and Ctrl-D end."""

import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scribe
import torch
from test_run import Ran, start
from tiny import raising_at

import ddtree.run as cli
from ddtree import NoDrafts, Session
from qwen_gdn import decode
from weights import load_target, load_tokenizer

Talk = Callable[..., Ran]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = scribe.write_random_pair(tmp_path_factory.mktemp("pair"))
    (target / "chat_template.jinja").write_text(scribe.TEMPLATE)
    return target, drafter


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Talk:
    def call(lines: str, *argv: object) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = cli.main(["--interactive", *map(str, argv)])
        return Ran(status, *capsys.readouterr())

    return call


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The conversations that sessions are given, as ids, while they answer as ever."""
    seen: list[list[int]] = []
    original = Session._encoded

    def encoded(self: Session, *args: Any) -> list[int]:
        seen.append(original(self, *args))
        return seen[-1]

    monkeypatch.setattr(Session, "_encoded", encoded)
    return seen


def objects(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.out.splitlines() if line.startswith('{"ids"')]


def test_a_line_continues_the_text_on_a_line_of_its_own(
    talk: Talk, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair
    asked = recorded(monkeypatch)
    ran = talk(
        "def f(n):\n\n  x\nend", "--target", target, "--drafter", drafter, "--max-new-tokens", 6, "--json",
        "--dtype", "float64", "--prompt", "class",
    )  # fmt: skip
    assert ran.status == 0
    tokenizer, model = load_tokenizer(target), load_target(target, dtype=torch.float64)
    ids: list[int] = []
    for line, conversation, said in zip(("class", "def f(n):", "  x", "end"), asked, objects(ran), strict=True):
        lead = "\n" if ids and not tokenizer.decode(ids).endswith("\n") else ""
        ids += tokenizer.encode(lead + line)
        assert conversation == ids
        assert said["ids"] == list(decode(model, ids, max_new_tokens=6, stop_ids=[0]))
        ids += said["ids"]
    assert ran.err.count("tokens read\n") == 4


def test_a_chat_keeps_its_messages(talk: Talk, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = pair
    asked = recorded(monkeypatch)
    ran = talk("one\ntwo\n", "--target", target, "--chat", "--system", "s", "--max-new-tokens", 4, "--json")
    tokenizer = load_tokenizer(target)
    messages = [{"role": "system", "content": "s"}]
    for line, conversation, said in zip(("one", "two"), asked, objects(ran), strict=True):
        messages += [{"role": "user", "content": line}]
        assert conversation == tokenizer.encode_chat(messages)
        messages += [{"role": "assistant", "content": said["text"]}]


def test_stops_and_counts_hold_for_every_turn(talk: Talk, tmp_path: Path) -> None:
    cycle = scribe.write_scribe(tmp_path)
    ran = talk("n\nn\n", "--target", cycle, "--max-new-tokens", 20, "--stop", "漢")
    assert ran.out == "é\né\n"
    assert ran.err.count("stop_string; 5 tokens") == 2
    ran = talk("n\nn\n", "--target", cycle, "--max-new-tokens", 10, "--json")
    assert [said["text"] for said in objects(ran)] == [scribe.SCRIPT] * 2
    assert ran.out.startswith(scribe.SCRIPT + "{")


def test_a_turn_that_cannot_be_is_said_to_be_and_leaves_the_conversation(talk: Talk, tmp_path: Path) -> None:
    cycle = scribe.write_scribe(tmp_path, max_position_embeddings=40)
    ran = talk(f"n\n{'x' * 50}\nn\n", "--target", cycle, "--max-new-tokens", 10)
    assert (ran.status, ran.out) == (0, scribe.SCRIPT * 2)
    assert "ddtree: error: the conversation of 61 tokens leaves no room in a context of 40; shorten it\n" in ran.err
    assert "2 of 12 tokens read" in ran.err


def test_an_interrupt_ends_the_turn_and_keeps_what_it_wrote(talk: Talk, tmp_path: Path) -> None:
    cycle = scribe.write_scribe(tmp_path)
    with raising_at(NoDrafts, "observe", 4, KeyboardInterrupt):
        ran = talk("n\nn\n", "--target", cycle, "--max-new-tokens", 10, "--json")
    first, second = objects(ran)
    assert first["finish_reason"] == "interrupted"
    assert first["ids"] == scribe.written_ids(4) and first["text"] == scribe.written_text(4)
    assert second["text"] == scribe.SCRIPT
    assert second["figures"]["prompt_tokens"] == 1 + 4 + 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--prompt", "-"), "leave out --prompt -"),
        (("--echo",), "leave it out with --interactive"),
        (("--chat",), "ships no chat template"),
    ],
)
def test_what_does_not_go_with_it_is_refused(talk: Talk, argv: tuple[str, ...], message: str) -> None:
    ran = talk("", *argv)
    assert ran.status == 2 and message in ran.err and ran.err.count("\n") == 1


def test_a_closed_standard_input_is_refused(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("io.StringIO", lambda lines: None)
    assert talk("").status == 2


def test_as_a_process_control_c_ends_a_turn_and_the_end_of_input_the_conversation(tmp_path: Path) -> None:
    cycle = scribe.write_scribe(tmp_path, max_position_embeddings=10**6)
    process = start("--target", cycle, "--interactive", "--max-new-tokens", 200_000, "--stop", "x")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"n\n")
    begun = process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"x\n", timeout=60)
    assert process.returncode == 0, err
    assert (begun + out).decode().startswith("é")
    assert err.count(b"interrupted; ") == 1 and err.count(b"stop_string; 1 tokens") == 1 and b"Traceback" not in err
