"""Files: damaged, missing, doubled or stale ones are one error that names file and tensor; odd names load."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import checkpoints as ck
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from weights import CheckpointError, load_target, read_target
from weights.shards import read_header, same_values

INDEX = "model.safetensors.index.json"
LAYOUTS = {
    "numbered": [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)],
    "numbered behind": [f"model.safetensors-0000{i}-of-00002.safetensors" for i in (1, 2)],
    "by layer": ["layers-0.safetensors", "layers-1.safetensors", "outside.safetensors"],
    "brackets and spaces": ["a[0].safetensors", "b c*.safetensors"],
    "one": ["model.safetensors"],
}
CONFIG = ck.target_config()
TEXT = ck.as_stored(ck.target_tensors(CONFIG))
NAMES = list(TEXT)


def assert_loads(folder: Path) -> None:
    """Every parameter has the values of TEXT."""
    parameters = ck.as_stored(dict(load_target(folder).named_parameters()))
    assert parameters.keys() == TEXT.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in TEXT.items())


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_target(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def sharded(folder: Path, *files: str, tensors: dict[str, Tensor] = TEXT) -> Path:
    return ck.write(folder, CONFIG, tensors, ck.dealt(list(tensors), *files))


@pytest.mark.case(54)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_any_name_load_by_the_index(tmp_path: Path, layout: str) -> None:
    assert_loads(sharded(tmp_path, *LAYOUTS[layout]))


def test_an_index_may_place_shards_in_a_subfolder(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    assert_loads(sharded(tmp_path, "parts/one.safetensors", "two.safetensors"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_an_index_all_top_level_files_are_read(tmp_path: Path, layout: str) -> None:
    sharded(tmp_path, *LAYOUTS[layout])
    (tmp_path / INDEX).unlink()
    assert_loads(tmp_path)


@pytest.mark.case(54)
def test_files_in_subfolders_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    ck.write(tmp_path, CONFIG, TEXT)
    ck.write(tmp_path / "original", CONFIG, {name: torch.zeros_like(t) for name, t in TEXT.items()})
    (tmp_path / "._model.safetensors").write_bytes(b"resource fork")
    assert_loads(tmp_path)


@pytest.mark.case(54)
@pytest.mark.parametrize("lost", LAYOUTS["by layer"])
def test_a_missing_shard_is_named_with_its_tensors(tmp_path: Path, lost: str) -> None:
    sharded(tmp_path, *LAYOUTS["by layer"])
    (tmp_path / lost).unlink()
    message = refusal(tmp_path)
    assert str(tmp_path / lost) in message
    assert any(name in message for name in ck.dealt(NAMES, *LAYOUTS["by layer"])[lost])


def test_a_shard_of_tensors_that_text_does_without_may_be_absent(tmp_path: Path) -> None:
    extras = ck.extras()
    files = ck.dealt(NAMES, "layers-0.safetensors", "outside.safetensors") | {"mtp.safetensors": list(extras)}
    ck.write(tmp_path, CONFIG, TEXT | extras, files)
    (tmp_path / "mtp.safetensors").unlink()
    assert_loads(tmp_path)
    assert sum(read_target(tmp_path)[1].skipped.values()) == len(extras)


def _header(data: bytes, length: int) -> bytes:
    return struct.pack("<Q", length) + data[8:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "one byte cut": lambda data: data[:-1],
    "half cut": lambda data: data[: len(data) // 2],
    "nearly all cut": lambda data: data[:5],
    "empty": lambda data: b"",
    "header length zeroed": lambda data: _header(data, 0),
    "header zeroed": lambda data: data[:8] + bytes(len(data) - 8),
    "all zero": lambda data: bytes(len(data)),
    "header past the end": lambda data: _header(data, len(data) * 2),
    "header absurdly long": lambda data: _header(data, 2**63 - 1),
    "one byte more": lambda data: data + b"\0",
    "a text": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.case(54)
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str, indexed: bool) -> None:
    files = LAYOUTS["by layer"]
    for i, file in enumerate(files):
        folder = sharded(tmp_path / str(i), *files)
        if not indexed:
            (folder / INDEX).unlink()
        (folder / file).write_bytes(DAMAGES[damage]((folder / file).read_bytes()))
        message = refusal(folder)
        assert str(folder / file) in message and message.endswith("fetch it again")
        assert ("git lfs pull" in message) == (damage == "a text")


def test_a_header_nested_beyond_reason_is_damage(tmp_path: Path) -> None:
    file = ck.write(tmp_path, CONFIG, TEXT) / "model.safetensors"
    header = b'{"a": ' * 100_000
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert f"{file} is damaged" in refusal(tmp_path)


@pytest.mark.case(54)
@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_file_cut_short_names_the_tensors_it_lost(tmp_path: Path, cut: int) -> None:
    file = ck.write(tmp_path, CONFIG, TEXT) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-cut])
    start = 8 + struct.unpack("<Q", data[:8])[0]
    ends = {n: e["data_offsets"][1] for n, e in json.loads(data[8:start]).items() if n != "__metadata__"}
    lost = [name for name, end in ends.items() if start + end > len(data) - cut]
    message = refusal(tmp_path)
    assert lost and any(name in message for name in lost)
    assert not any(f"{name} " in message or f"{name}," in message for name in set(ends) - set(lost))


def test_a_header_that_states_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    ck.write(tmp_path, CONFIG, TEXT)
    entry = b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    header = b"{" + entry + b"," + entry + b"}"
    (tmp_path / "more.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    message = refusal(tmp_path)
    assert "more.safetensors" in message and "twice" in message


def test_a_tensor_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    ck.write(tmp_path, CONFIG, TEXT)
    save_file({NAMES[7]: TEXT[NAMES[7]]}, tmp_path / "again.safetensors")
    message = refusal(tmp_path)
    assert NAMES[7] in message and "model.safetensors" in message and "again.safetensors" in message


@pytest.mark.case(54)
def test_an_index_that_places_a_tensor_where_it_is_not_is_stale(tmp_path: Path) -> None:
    files = ck.dealt(NAMES, "a.safetensors", "b.safetensors")
    ck.write(tmp_path, CONFIG, TEXT, files)
    place = {name: file for file, names in files.items() for name in names}
    ck.write_index(tmp_path, place | {"model.language_model.ghost.weight": "b.safetensors"})
    message = refusal(tmp_path)
    assert f"{tmp_path / 'b.safetensors'} lacks model.language_model.ghost.weight" in message


def test_a_tensor_that_the_index_does_not_place_in_its_file_is_stale(tmp_path: Path) -> None:
    files = ck.dealt(NAMES, "a.safetensors", "b.safetensors")
    for i, moved in enumerate((NAMES[0], NAMES[1], NAMES[-1])):
        folder = ck.write(tmp_path / str(i), CONFIG, TEXT, files)
        place = {name: file for file, names in files.items() for name in names}
        was = place.pop(moved)
        ck.write_index(folder, place)
        message = refusal(folder)
        assert moved in message and str(folder / was) in message
        ck.write_index(folder, place | {moved: "b.safetensors" if was == "a.safetensors" else "a.safetensors"})
        assert moved in refusal(folder)


@pytest.mark.case(54)
def test_a_file_that_the_index_does_not_name_is_stale(tmp_path: Path) -> None:
    sharded(tmp_path, "a.safetensors", "b.safetensors")
    save_file(TEXT, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert str(tmp_path / "model.safetensors") in message and any(name in message for name in NAMES)


@pytest.mark.parametrize("name", ["{tmp}/a.safetensors", "../a.safetensors", "x/../../a.safetensors", "b.bin", ""])
def test_an_index_may_not_point_out_of_the_folder_or_at_other_files(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path / "it", "b.safetensors")
    (folder / "x").mkdir()
    save_file(TEXT, tmp_path / "a.safetensors")
    (folder / "b.safetensors").rename(folder / "b.bin")
    ck.write_index(folder, dict.fromkeys(NAMES, name.format(tmp=tmp_path)))
    assert INDEX in refusal(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "\xff",
        '{"a": ' * 100_000,
        '{"weight_map": 3}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {}}',
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    sharded(tmp_path, "a.safetensors")
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    message = refusal(tmp_path)
    assert INDEX in message and message.endswith(" again")


def test_an_index_that_places_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    file = sharded(tmp_path, "a.safetensors") / INDEX
    file.write_text(file.read_text().replace('"weight_map": {', f'"weight_map": {{"{NAMES[0]}": "b.safetensors", '))
    assert f"{NAMES[0]!r} stands there twice" in refusal(tmp_path)


def test_stored_tensors_are_compared_in_every_row(tmp_path: Path) -> None:
    a = torch.arange(30.0).view(10, 3)
    for rows in (1, 3, 10, 11):
        for row in range(10):
            b = a.clone()
            b[row, 1] = -1
            save_file({"a": a, "b": b, "c": a.bfloat16(), "d": a[:9].clone()}, tmp_path / "x.safetensors")
            header = read_header(tmp_path / "x.safetensors")
            same = [same_values(("a", header["a"]), (other, header[other]), rows) for other in "abcd"]
            assert same == [True, False, True, False]


def test_weights_that_are_not_there_at_all_are_missed(tmp_path: Path) -> None:
    ck.write(tmp_path, CONFIG, TEXT)
    (tmp_path / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "\xff", '{"a": ' * 100_000])
def test_a_config_that_is_absent_or_damaged_is_named(tmp_path: Path, text: str | None) -> None:
    ck.write(tmp_path, CONFIG, TEXT)
    if text is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refusal(tmp_path) and str(tmp_path) in refusal(tmp_path)
