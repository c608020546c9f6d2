"""Whether what stands behind a source is of the kind that its option asks for. It reads config.json alone."""

from collections.abc import Callable, Mapping
from typing import Any

from qwen_gdn.config import ModelConfig
from weights.files import CONFIG_FILES, Part, read_json, resolve

from . import drafters
from .arguments import UsageError

_READERS: Mapping[Part, Callable[[dict[str, Any]], object]] = {
    "target": ModelConfig.from_dict,
    "drafter": drafters.from_dict,
}


def check_source(source: str, part: Part) -> None:
    """Refuses a source that is none for this part; what is damaged or not supported shows when it is read in full.

    Raises:
        UsageError: it holds no config.json, or that of the other part.
        CheckpointError: it cannot be found, or its config.json cannot be read at all.
    """
    other: Part = "drafter" if part == "target" else "target"
    folder = resolve(source, part, CONFIG_FILES)
    if not (folder / "config.json").exists():
        raise UsageError(f"--{part} {source}: {folder} has no config.json; give the folder of a checkpoint")
    raw = read_json(folder / "config.json")
    if not _reads(part, raw) and _reads(other, raw):
        raise UsageError(f"--{part} {source} is a {other}; give it as --{other}, and a {part} as --{part}")


def _reads(part: Part, raw: dict[str, Any]) -> bool:
    try:
        _READERS[part](raw)
    except ValueError:
        return False
    return True
