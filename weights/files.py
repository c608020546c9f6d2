"""Where a checkpoint's files are: a folder, the bundled pair, or a hub repository fetched into the cache.

Downloads only what is asked for. It knows file names, never tensors.
"""

import glob
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download

from qwen_gdn.stated import read_object

Source = str | os.PathLike[str]
Part = Literal["target", "drafter"]

CONFIG_FILES = ("config.json", "generation_config.json")
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)

_BUNDLED = Path(__file__).parent / "bundled"
_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class CheckpointError(ValueError):
    """A checkpoint is absent, incomplete, damaged or of a kind that is not read here; the message is one line."""


def resolve(source: Source, part: Part, files: Sequence[str]) -> Path:
    """The folder of a source, with those of its top-level `files` (names) that exist there.

    The word `bundled` means the pair shipped with the package. An existing folder wins over a hub
    repository of the same name; `owner/name` that is no folder is looked up on the hub, or in its cache when
    offline.

    Raises:
        CheckpointError: the source is none of these, or the hub cannot give it.
    """
    if source == "bundled":
        return _bundled(part)
    path = Path(source).expanduser()
    if str(source) and path.is_dir():
        return path
    if str(source) and path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json and the weights")
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        return _download(source, [glob.escape(name) for name in files])
    raise CheckpointError(
        f"{str(source)!r} is no existing folder, no hub id of the form owner/name, and not the word 'bundled'"
    )


def fetch_shards(source: Source, folder: Path, needed: Iterable[str] | None) -> None:
    """Downloads weight files into a folder that `resolve` gave; does nothing where that is no hub repository.

    Args:
        needed: file names relative to the folder, or None for every top-level `*.safetensors`.

    Raises:
        CheckpointError: the hub cannot give them, or the repository changed since `resolve`.
    """
    if source == "bundled" or Path(source).expanduser().is_dir():
        return
    if needed is None:
        # In the hub's patterns * crosses folders.
        fetched = _download(str(source), ["*.safetensors"], ignore=["*/*"])
    else:
        absent = [name for name in needed if not (folder / name).is_file()]
        fetched = _download(str(source), [glob.escape(name) for name in absent]) if absent else folder
    # Asking for the first folder's commit by name would rule this out, but also the client's offline fallback.
    if fetched != folder:
        raise CheckpointError(f"{source!r} changed on the hub while it was being fetched; try again")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it cannot be read, is no object, or an object in it has a key twice.
    """
    try:
        return read_object(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}; fetch the checkpoint again") from None
    except ValueError as error:
        raise CheckpointError(one_line(error)) from None


def damaged(file: Path, error: object, lost: str = "") -> CheckpointError:
    """An error for a file that does not hold what its name says, with what to do about it."""
    try:
        with file.open("rb") as stream:
            pointer = stream.read(len(_POINTER)) == _POINTER
    except OSError:
        pointer = False
    remedy = "it is a git-lfs pointer without the data, so run `git lfs pull` or" if pointer else "so"
    return CheckpointError(f"{file} is damaged{lost}: {one_line(error)}; {remedy} fetch it again")


def one_line(error: object) -> str:
    """An error's message with its line breaks folded."""
    return " ".join(str(error).split()) or type(error).__name__


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names in words, the tail of a long list as a count."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _bundled(part: Part) -> Path:
    folder = _BUNDLED / part
    if not folder.is_dir():
        raise CheckpointError(
            f"the bundled {part} is not part of this installation ({folder} is missing); "
            "install from a full clone, or name a folder or hub id"
        )
    return folder


def _download(repository: str, allow: list[str], *, ignore: list[str] | None = None) -> Path:
    try:
        folder = snapshot_download(repository, allow_patterns=allow, ignore_patterns=ignore)
    # Its errors include those of whichever HTTP library it uses, which share no base class with its own.
    except Exception as error:
        raise CheckpointError(
            f"{repository!r} is no folder here, and the Hugging Face hub cannot give it: {one_line(error)}"
        ) from error
    return Path(folder)
