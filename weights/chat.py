"""Chat templates: messages to the text a checkpoint was trained on. Renders text; it knows no token ids.

Templates come with checkpoints, so they run in a sandbox without access to Python or to the messages' storage.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .files import CheckpointError, one_line, read_json

Message = Mapping[str, Any]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One Jinja template, compiled on first use.

    Args:
        source: its text.
        tokens: special tokens by role (`eos_token`: ...), visible to the template as variables.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self.tokens = dict(tokens)

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The text of a conversation.

        Raises:
            ValueError: the template is malformed, or it refuses these messages.
        """
        try:
            return self._compiled.render(
                messages=messages, **self.tokens, **{"tools": None, "documents": None, **variables}
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {one_line(error)}") from None
        # A template is a program of the checkpoint's, so what it can raise has no bounds.
        except Exception as error:
            raise ValueError(f"chat template cannot render these messages: {one_line(error)}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.source)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The folder's chat template, or None.

    Looked for in `chat_template.jinja`, then under `chat_template` in `tokenizer_config.json` (one text, or a list
    of named ones of which `default` is taken), then in `chat_template.json`.

    Raises:
        CheckpointError: one of these files is damaged.
    """
    config = _optional_json(folder / "tokenizer_config.json")
    source = _template_file(folder / "chat_template.jinja")
    for name in ("tokenizer_config.json", "chat_template.json"):
        if source is None:
            source = _default_of(folder / name)
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _template_file(file: Path) -> str | None:
    if not file.exists():
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {one_line(error)}; fetch it again") from None


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _default_of(file: Path) -> str | None:
    """The template that a JSON file states as a text, or as the one named default in a list."""
    stated = _optional_json(file).get("chat_template")
    if isinstance(stated, list):
        default = [part for part in stated if isinstance(part, dict) and part.get("name") == "default"]
        stated = default[-1].get("template") if default else None
    if stated is not None and not isinstance(stated, str):
        raise CheckpointError(f"{file}: chat_template must be a text, got {type(stated).__name__}; fetch it again")
    return stated


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of a tokenizer config, each stated as a text or as an object with its `content`."""
    tokens = {}
    for role in _NAMED_TOKENS:
        stated = config.get(role)
        text = stated.get("content") if isinstance(stated, dict) else stated
        if isinstance(text, str):
            tokens[role] = text
    return tokens


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **more: Any) -> str:
    """JSON as it stands in prompts: Jinja's own filter escapes for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **more)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
