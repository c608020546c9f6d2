"""The hub: only needed files are asked for, the offline cache is enough, and its failures are one line."""

import os
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import checkpoints as ck
import pytest
import torch

import weights.load
from weights import CheckpointError, load_drafter, load_target, load_tokenizer, stop_ids

CONFIG = ck.target_config()
TEXT = ck.as_stored(ck.target_tensors(CONFIG))
REPOSITORY = "Qwen/Tiny-0.1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A stand-in for snapshot_download: a folder as the repository, copied from file by file."""

    def __init__(self, remote: Path, cache: Path) -> None:
        self.remote, self.cache = remote, cache
        self.commit = COMMIT
        self.calls = 0

    def __call__(self, repository: str, *, allow_patterns: list[str], ignore_patterns: list[str] | None) -> str:
        assert repository == REPOSITORY
        self.calls += 1
        folder = self.cache / self.commit
        for file in self.remote.rglob("*"):
            name = file.relative_to(self.remote).as_posix()
            wanted = any(fnmatch(name, p) for p in allow_patterns)
            if file.is_file() and wanted and not any(fnmatch(name, p) for p in ignore_patterns or []):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(file.read_bytes())
        return str(folder)

    @property
    def fetched(self) -> set[str]:
        folder = self.cache / COMMIT
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    stand_in = Hub(tmp_path / "remote", tmp_path / "cache")
    monkeypatch.setattr("weights.files.snapshot_download", stand_in)
    yield stand_in


def clutter(folder: Path) -> None:
    """Files that repositories have and that are not needed."""
    for name in ("README.md", "pytorch_model.bin", "tokenizer.json", "original/model.safetensors", "vocab.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")


def test_of_a_sharded_repository_only_shards_with_text_weights_are_fetched(hub: Hub) -> None:
    extras = ck.extras()
    files = ck.dealt(list(TEXT), "layers-0.safetensors", "a[1].safetensors")
    files |= {
        "mtp.safetensors": [n for n in extras if "mtp" in n],
        "vision.safetensors": [n for n in extras if "mtp" not in n],
    }
    ck.write(hub.remote, CONFIG, TEXT | extras, files)
    clutter(hub.remote)
    assert_loads()
    assert hub.fetched == {"config.json", "model.safetensors.index.json", "layers-0.safetensors", "a[1].safetensors"}


def test_of_a_repository_without_index_all_top_level_weights_are_fetched(hub: Hub) -> None:
    ck.write(hub.remote, CONFIG, TEXT)
    clutter(hub.remote)
    assert_loads()
    assert hub.fetched == {"config.json", "model.safetensors"}


def test_shards_that_are_there_are_not_asked_for_again(hub: Hub) -> None:
    ck.write(hub.remote, CONFIG, TEXT, ck.dealt(list(TEXT), "a.safetensors", "b.safetensors"))
    assert_loads()
    hub.calls = 0
    assert_loads()
    assert hub.calls == 1


@pytest.mark.parametrize("indexed", [True, False])
def test_a_push_between_config_and_weights_is_noticed(hub: Hub, monkeypatch: pytest.MonkeyPatch, indexed: bool) -> None:
    ck.write(hub.remote, CONFIG, TEXT, ck.dealt(list(TEXT), "a.safetensors") if indexed else None)

    def push(folder: Path) -> None:
        hub.commit = "f" * 40

    read_index = weights.load.read_index
    monkeypatch.setattr("weights.load.read_index", lambda folder: [read_index(folder), push(folder)][0])
    with pytest.raises(CheckpointError, match="changed on the hub"):
        load_target(REPOSITORY)


def test_a_config_that_is_refused_costs_no_weights(hub: Hub) -> None:
    ck.write(hub.remote, CONFIG | {"model_type": "qwen4_exp"}, TEXT)
    with pytest.raises(CheckpointError, match="qwen4_exp"):
        load_target(REPOSITORY)
    assert hub.fetched == {"config.json"}


def test_a_drafter_and_stop_ids_and_a_tokenizer_fetch_their_own_files(hub: Hub) -> None:
    config = ck.drafter_config()
    ck.write(hub.remote, config, ck.drafter_tensors(config))
    (hub.remote / "generation_config.json").write_text('{"eos_token_id": [3]}')
    clutter(hub.remote)
    load_drafter(REPOSITORY)
    assert hub.fetched == {"config.json", "generation_config.json", "model.safetensors"}
    ck.write(hub.remote, CONFIG, TEXT)
    assert stop_ids(REPOSITORY, load_target(REPOSITORY).config) == (96, 3)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(REPOSITORY)
    assert "tokenizer.json" in hub.fetched


def test_a_folder_wins_over_a_repository_of_its_name(hub: Hub, tmp_path: Path) -> None:
    ck.write(tmp_path / REPOSITORY, CONFIG, TEXT)
    assert_loads()
    assert hub.calls == 0


@pytest.mark.parametrize("error", [OSError("no\nnetwork"), RuntimeError("what"), ValueError("bad id"), KeyError("x")])
def test_whatever_the_hub_raises_is_one_line_that_names_the_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weights.files.snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        load_target("owner/name")
    assert "'owner/name'" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_the_offline_cache_is_enough_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    extras = ck.extras()
    files = ck.dealt(list(TEXT), "a.safetensors", "b.safetensors") | {"c.safetensors": list(extras)}
    ck.write(tmp_path / "sharded", CONFIG, TEXT | extras, files)
    (tmp_path / "sharded" / "c.safetensors").unlink()
    ck.hub_cache(tmp_path / "cache", "Qwen/Sharded", tmp_path / "sharded", COMMIT)
    ck.hub_cache(tmp_path / "cache", "Qwen/Single", ck.write(tmp_path / "single", CONFIG, TEXT), COMMIT)
    ck.hub_cache(tmp_path / "cache", "Qwen/Other", ck.write(tmp_path / "other", CONFIG, TEXT), "main-of-old")
    ck.write(tmp_path / "partial", CONFIG, TEXT, ck.dealt(list(TEXT), "a.safetensors", "b.safetensors"))
    (tmp_path / "partial" / "b.safetensors").unlink()
    ck.hub_cache(tmp_path / "cache", "Qwen/Partial", tmp_path / "partial", COMMIT)
    program = """
import sys, weights
for name in ("Qwen/Sharded", "Qwen/Single", "Qwen/Other"):
    print(name, sum(p.numel() for p in weights.load_target(name).parameters()))
for name in ("Qwen/Absent", "Qwen/Tiny--2", "Qwen/Partial"):
    try:
        weights.load_target(name)
    except weights.CheckpointError as error:
        print("refused", error)
"""
    count = sum(t.numel() for t in TEXT.values())
    done = run(program, tmp_path, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "cache"))
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"Qwen/{name} {count}" for name in ("Sharded", "Single", "Other")], done.stderr
    assert lines[3].startswith("refused 'Qwen/Absent' is no folder here")
    assert "HF_HUB_OFFLINE" in lines[3]
    assert lines[4].startswith("refused 'Qwen/Tiny--2'")
    assert "b.safetensors is missing" in lines[5] and len(lines) == 6
    assert done.stderr == ""


def run(program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_loads() -> None:
    parameters = ck.as_stored(dict(load_target(REPOSITORY).named_parameters()))
    assert parameters.keys() == TEXT.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in TEXT.items())
