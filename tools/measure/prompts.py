"""Prompt files: JSON, either an object with `prompts` and perhaps `name` and `licence`, or just the list of prompts;
JSON lines (`.jsonl`), a prompt a line; or plain text (any other ending), a text a line.

A prompt is a text, a list of token ids, or an object with `text` or `ids` and whatever tells its source, such as
`licence`. Without a name a set is called as its file is.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Encode = Callable[[str], list[int]]


class PromptSet(NamedTuple):
    """The prompts of one file, each a list of token ids; `licence` joins those of the prompts if the file has none."""

    name: str
    licence: str
    prompts: tuple[list[int], ...]

    def about(self) -> dict[str, Any]:
        """What a JSON object tells of the set."""
        longest = max(map(len, self.prompts))
        return {"name": self.name, "licence": self.licence, "prompts": len(self.prompts), "longest": longest}


def read_prompts(file: Path, encode: Encode, limit: int | None = None) -> PromptSet:
    """The first `limit` prompts of a file (None: all).

    Args:
        encode: text to ids, called for prompts that are texts.

    Raises:
        ValueError: the file is no prompt file, has no prompts, or one of them has no tokens.
    """
    content = _content(file)
    header = content if isinstance(content, dict) else {"prompts": content}
    entries = header.get("prompts")
    if isinstance(entries, list) and entries and all(isinstance(entry, int) for entry in entries):
        entries = [entries]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{file} has no list of prompts; see the format in {__name__}")
    used = entries[:limit]
    prompts = tuple(_ids(file, i, entry, encode) for i, entry in enumerate(used))
    licences = sorted({str(entry["licence"]) for entry in used if isinstance(entry, dict) and "licence" in entry})
    licence = header.get("licence", ", ".join(licences) or "unknown")
    return PromptSet(str(header.get("name", file.stem)), str(licence), prompts)


def _content(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            return json.loads(text)
        lines = [line for line in text.split("\n") if line.strip()]
        return [json.loads(line) for line in lines] if file.suffix == ".jsonl" else lines
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}") from None


def _ids(file: Path, place: int, entry: Any, encode: Encode) -> list[int]:
    where = f"{file}: prompt {place}"
    if isinstance(entry, dict):
        entry = entry.get("ids", entry.get("text"))
    ids = encode(entry) if isinstance(entry, str) else entry
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{where} must be a text, a list of token ids, or an object with `text` or `ids`")
    if not ids:
        raise ValueError(f"{where} is empty; a prompt has at least one token")
    return ids
