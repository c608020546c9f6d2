"""What a checkpoint's JSON states: one reader of files, one of the values in them, and checks that configs share.

Errors are ValueErrors of one line that name file or key. It knows no architecture.
"""

import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

MOST_SIZE = 1 << 24  # of one dimension: far above any model, and no tensor of two of them overflows its byte count
MOST_LAYERS = 1 << 12

_ACCEPTED: dict[type, tuple[type, ...]] = {float: (int, float), list: (list, tuple)}

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """A JSON text; ValueError if it is malformed, too deeply nested, or states a key of an object twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, is no object, or an object in it has a key twice.
    """
    try:
        parsed = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}; correct it, or fetch it again") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(parsed).__name__}; fetch it again")
    return parsed


def read_config(folder: str | Path, from_dict: Callable[[dict[str, Any]], T]) -> T:
    """What `from_dict` makes of a folder's `config.json`; errors as of `read_object`, and its own with the file."""
    file = Path(folder) / "config.json"
    raw = read_object(file)
    try:
        return from_dict(raw)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def shown(value: object) -> str:
    """A value in words for an error, cut where it is long."""
    return _SHORT.repr(value)


@dataclass(frozen=True)
class Stated:
    """A table of a config, read value by value; to `need`, `maybe` and `inner` a null states nothing.

    Args:
        what: the config's name, with which errors begin.
    """

    what: str
    table: Mapping[str, Any]

    def need(self, key: str, kind: type[T]) -> T:
        """The value of a key; ValueError if it is missing or no `kind`."""
        value = self.maybe(key, kind)
        if value is None:
            raise self.error(f"{key} is missing or null; it has no safe default, so state it in config.json")
        return value

    def maybe(self, key: str, kind: type[T]) -> T | None:
        """The value of a key or None; ValueError if it is no `kind`. An int will do for a float, if finite."""
        value = self.table.get(key)
        if value is None:
            return None
        accepted = _ACCEPTED.get(kind, (kind,))
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{key} must be of type {kind.__name__}, got {shown(value)}")
        if kind is float and not _is_finite(value):
            raise self.error(f"{key} must be a finite number, got {shown(value)}")
        return kind(value)  # type: ignore[call-arg]

    def inner(self, key: str) -> "Stated":
        """The object under a key, without its nulls; empty if there is none."""
        value = self.table.get(key)
        if not isinstance(value, Mapping | None):
            raise self.error(f"{key} must be an object, got {shown(value)}")
        return Stated(self.what, {name: stated for name, stated in (value or {}).items() if stated is not None})

    def refuse_others(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Refuses keys that ask for other arithmetic: those that are stated and have no neutral value."""
        for key, accepted in neutral.items():
            if key in self.table and self.table[key] not in accepted:
                raise self.error(
                    f"{key} {shown(self.table[key])} is not supported; this model computes with {accepted[0]!r}, "
                    "so its output would be wrong; use a checkpoint without it"
                )

    def refuse_quantised(self, remedy: str = "use the BF16 release") -> None:
        """Refuses a table that states how its weights are quantised."""
        method = self.table.get("quantization_config")
        if method is not None:
            form = method.get("quant_method") if isinstance(method, Mapping) else method
            raise self.error(
                f"quantization_config says that the weights are quantised ({shown(form).strip(chr(39))}), "
                f"which is not read here; {remedy}"
            )

    def refuse_scaled_rope(self) -> None:
        """Refuses a table of rotary parameters that names, under its new or its old key, another kind than default."""
        for key in ("rope_type", "type"):
            kind = self.table.get(key)
            if kind not in ("default", None):
                raise self.error(
                    f"rope_type {shown(kind)} is not supported; this model implements 'default', "
                    "so use a checkpoint without scaled positions"
                )

    def error(self, message: str) -> ValueError:
        """An error about this table."""
        return ValueError(f"{self.what}: {message}")


def check_whole(what: str, name: str, value: object, least: int = 1, most: int = MOST_SIZE) -> None:
    """Raises ValueError unless the value is an integer in [least, most]."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{what}: {name} must be an integer from {least} to {most}, got {shown(value)}")


def check_real(what: str, name: str, value: float, least: float, most: float) -> None:
    """Raises ValueError unless the value lies in [least, most]."""
    if not least <= value <= most:
        raise ValueError(f"{what}: {name} must be a number from {least:g} to {most:g}, got {shown(value)}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"key {counts.most_common(1)[0][0]!r} stands there twice")
    return table


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to spell integers of more than some thousand digits.
        return super().repr_int(x, level) if x.bit_length() < 1 << 10 else f"an integer of {x.bit_length()} bits"


_SHORT = _Short()
