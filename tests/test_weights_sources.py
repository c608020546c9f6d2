"""Sources: what counts as a folder, a hub id or the bundled pair, and what is refused as none of them."""

from collections.abc import Callable
from pathlib import Path

import checkpoints as ck
import pytest

from weights import CheckpointError, load_drafter, load_target, load_tokenizer

CONFIG = ck.target_config()
TENSORS = ck.target_tensors(CONFIG)
TEXT = ck.as_stored(TENSORS)


@pytest.mark.parametrize("load", [load_target, load_drafter, load_tokenizer])
@pytest.mark.parametrize(
    "source", ["", "nowhere", "/no/such/folder", "./no/folder", "~/no-such-folder", "a/b/c", "a\0b"]
)
def test_a_source_that_is_nothing_is_refused_without_a_look_at_the_network(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[str], object], source: str
) -> None:
    monkeypatch.setattr("weights.files.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError) as error:
        load(source)
    assert repr(source) in str(error.value) and "\n" not in str(error.value)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    file = ck.write(tmp_path, CONFIG, TEXT) / "model.safetensors"
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        load_target(file)


def test_a_source_may_be_a_path_or_text_and_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ck.write(tmp_path / "it", CONFIG, TEXT)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "it", str(tmp_path / "it"), "~/it", "it", "./it"):
        ck.assert_holds(load_target(source), TENSORS)


def test_the_bundled_pair_is_found_by_its_word_or_missed_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.files._BUNDLED", tmp_path)
    for load in (load_target, load_drafter, load_tokenizer):
        with pytest.raises(CheckpointError, match="bundled"):
            load("bundled")
    ck.write(tmp_path / "target", CONFIG, TEXT)
    drafter = ck.drafter_config()
    ck.write(tmp_path / "drafter", drafter, ck.drafter_tensors(drafter))
    ck.assert_holds(load_target("bundled"), TENSORS)
    ck.assert_holds(load_drafter("bundled"), ck.drafter_tensors(drafter))
