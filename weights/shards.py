"""The tensors of a folder of safetensors files: where each lies, of what type and shape, and reading them.

It follows `model.safetensors.index.json` where there is one and never guesses a file name. It knows no model.
"""

from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen_gdn.stated import parse_json, shown

from .files import INDEX_FILE, CheckpointError, damaged, listed, read_json

LEAST_PORTION = 1 << 20  # bytes; mapping a file goes through its whole header, so small tensors share one
MAPPINGS = 256  # most mappings of a file, about
_REFETCH = "fetch the checkpoint again"


class Stored(NamedTuple):
    """One tensor in a file, as its header states it (`dtype` in the format's own names, such as BF16)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Listing(NamedTuple):
    """What a folder holds.

    Attributes:
        stored: tensor name -> where it lies.
        absent: tensor name -> the file that the index names for it and that is not there.
    """

    stored: dict[str, Stored]
    absent: dict[str, Path]


def read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name relative to the folder, by the folder's index; None if it has no index.

    Raises:
        CheckpointError: the index is damaged, or names a file outside the folder.
    """
    file = folder / INDEX_FILE
    if not file.exists():
        return None
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{file} must have a weight_map from tensor names to file names, got {shown(weight_map)}; fetch it again"
        )
    for tensor, name in weight_map.items():
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.name.endswith(".safetensors"):
            raise CheckpointError(
                f"{file} places {tensor} in {name!r}, which is no safetensors file of this folder; fetch it again"
            )
    return weight_map


def list_tensors(folder: Path) -> Listing:
    """Reads the headers of all top-level `*.safetensors` of a folder and of those that its index names.

    Raises:
        CheckpointError: there is none, one is damaged, or index and files disagree; names file and tensor.
    """
    weight_map = read_index(folder)
    files = {path.name: path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(".")}
    if weight_map is not None:
        files |= {name: folder / name for name in weight_map.values()}
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors files; fetch the weights in that format")
    stored: dict[str, Stored] = {}
    for name, path in files.items():
        placed = None if weight_map is None else {t for t, file in weight_map.items() if file == name}
        if placed and not path.is_file():
            continue
        header = read_header(path)
        for tensor, entry in header.items():
            if placed is not None and tensor not in placed:
                raise CheckpointError(
                    f"{path} holds {tensor}, which {INDEX_FILE} does not place there; one is stale, so {_REFETCH}"
                )
            if tensor in stored:
                raise CheckpointError(
                    f"{tensor} is stored twice, in {stored[tensor].file} and in {path}; remove the file that is stale"
                )
            stored[tensor] = entry
        for tensor in sorted((placed or set()) - header.keys()):
            raise CheckpointError(
                f"{path} lacks {tensor}, which {INDEX_FILE} places there; one is stale, so {_REFETCH}"
            )
    absent = {t: folder / name for t, name in (weight_map or {}).items() if t not in stored}
    return Listing(stored, absent)


def read_header(file: Path) -> dict[str, Stored]:
    """Tensors of one safetensors file, without reading their data.

    Raises:
        CheckpointError: the file cannot be opened, its header is damaged, or its data are cut short.
    """
    with _open(file):
        pass  # it checks the header against the format and against the file's length
    try:
        entries = _entries(file)
    except ValueError as error:
        raise damaged(file, error) from None
    entries.sort(key=lambda entry: entry[1]["data_offsets"])
    header = {}
    for name, entry in entries:
        start, end = entry["data_offsets"]
        header[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), end - start)
    return header


def read_tensors(file: Path, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of one file on the CPU, in the order in which they lie there.

    A tensor is a window on the mapped file: valid until the next one is asked for, so copy what is to stay. The
    file is mapped anew whenever more than its largest wanted tensor, or a small part of it, has been read, since pages
    once read stay resident as long as the mapping.

    Raises:
        CheckpointError: the file can no longer be read.
    """
    header = {name: entry for name, entry in read_header(file).items() if name in names}
    limit = max((entry.nbytes for entry in header.values()), default=0)
    limit = max(limit, LEAST_PORTION, sum(entry.nbytes for entry in header.values()) // MAPPINGS)
    portion: list[str] = []
    size = 0
    for name, entry in header.items():
        if portion and size + entry.nbytes > limit:
            yield from _read(file, portion)
            portion, size = [], 0
        portion.append(name)
        size += entry.nbytes
    yield from _read(file, portion)


def same_values(one: tuple[str, Stored], other: tuple[str, Stored], rows: int = 4096) -> bool:
    """Whether two stored tensors, given as (name, place), have equal shapes and values; reads them by rows."""
    (name_a, a), (name_b, b) = one, other
    if a.shape != b.shape:
        return False
    for start in range(0, a.shape[0], rows):
        # Mapped anew for every block, so that pages read do not pile up.
        with _open(a.file) as left, _open(b.file) as right:
            x = left.get_slice(name_a)[start : start + rows]
            y = right.get_slice(name_b)[start : start + rows]
            if not torch.equal(x.double(), y.double()):
                return False
    return True


def _read(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    with _open(file) as handle:
        for name in names:
            yield name, handle.get_tensor(name)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; {_REFETCH}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(file, error, _cut_short(file)) from None


def _cut_short(file: Path) -> str:
    """The first tensor that runs past the end of the file, in words, if the header can still tell."""
    try:
        available = file.stat().st_size - _data_start(file)
        lost = [name for name, entry in _entries(file) if entry["data_offsets"][1] > available]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ""
    return f" (it ends before {listed(lost)})" if lost else ""


def _data_start(file: Path) -> int:
    """Layout of the format: 8 bytes of little-endian header length, the JSON header, the data."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def _entries(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The header's entries, one a tensor, as the file states them; ValueError if one is stated twice."""
    end = min(_data_start(file), file.stat().st_size)
    with file.open("rb") as stream:
        header = parse_json(stream.read(end)[8:])
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]
