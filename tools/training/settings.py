"""The settings that shaped what a run holds, kept with it, so that nothing else is ever continued from it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.training.command import UsageError

Settings = Mapping[str, Any]

_DIGITS = 12


def check(made: object, wanted: Settings, *, where: Path, delete: Path) -> None:
    """Compares the settings that something was made with and those of this call, as far as the latter are given.

    Args:
        where: what was made, for the error.
        delete: what to delete to be rid of it.

    Raises:
        UsageError: they differ, or none are known; names every difference with both values.
    """
    remedy = f"give another --out, or delete {delete}"
    if not isinstance(made, Mapping):
        raise UsageError(f"{where} does not say with which settings it was made; {remedy}")
    differences = [
        f"{name} {_shown(made.get(name))}, not {_shown(value)}"
        for name, value in wanted.items()
        if made.get(name) != value
    ]
    if differences:
        raise UsageError(f"{where} was made with {'; '.join(differences)}: repeat that call, {remedy}")


def digest(value: object) -> str:
    """A short name of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def file_digest(file: Path) -> str:
    """A short name of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:_DIGITS]


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
