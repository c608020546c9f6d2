"""Text to ids, and ids to the bytes of text they stand for, from a `tokenizer.json` or a `tokenizer.model`.

Every vocabulary read here decodes token by token: the text of a sequence is the concatenation of its tokens'
bytes, read as UTF-8, less some spaces at its very start. That is what makes exact streaming possible; a
tokenizer.json whose decoder works otherwise is refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import sentencepiece
import tokenizers

from .files import CheckpointError, damaged

_SPACE = "\u2581"  # stands for a space in sentencepiece vocabularies


class Vocabulary(Protocol):
    """What a tokenizer needs of a vocabulary."""

    @property
    def size(self) -> int:
        """Number of named ids; a model may have more rows."""

    @property
    def last_id(self) -> int:
        """The greatest of them, -1 if there is none; ids may have gaps."""

    @property
    def control(self) -> Mapping[str, int]:
        """Text -> id of control tokens (turn markers, end of text), which plain text never yields."""

    @property
    def strip(self) -> int | None:
        """Number of spaces that decoding drops at the start of a text if it has them, None for all."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; nothing is added, and control tokens spelt out in it are ordinary text."""

    def id_of(self, token: str) -> int | None:
        """The id of one token given by its name."""

    def raw(self, token: int) -> bytes:
        """The bytes of one id, its name if it is a control token, nothing if it has no name."""


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a folder, from `tokenizer.json` if there is one, else from `tokenizer.model`.

    Raises:
        CheckpointError: there is neither, or the file is damaged or of an unsupported kind.
    """
    if (folder / "tokenizer.json").exists():
        return JsonVocabulary(folder / "tokenizer.json")
    if (folder / "tokenizer.model").exists():
        return SentencePieceVocabulary(folder / "tokenizer.model")
    raise CheckpointError(f"{folder} has neither tokenizer.json nor tokenizer.model; fetch one beside the weights")


class JsonVocabulary:
    """A vocabulary in the format of the `tokenizers` library.

    Added tokens that are not marked special (such as `<think>` in the published vocabularies) are recognised in
    plain text; special ones are control tokens.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(file))
        # The library raises bare Exception for malformed files.
        except Exception as error:
            raise damaged(file, error) from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        self._spelling = _spelling(self._inner.decoder, file)
        self.strip: int | None = self._spelling.strip
        self.size: int = self._inner.get_vocab_size(with_added_tokens=True)
        added = self._inner.get_added_tokens_decoder()
        self.control: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self._added = {i: token.content.encode() for i, token in added.items()}

    @property
    def last_id(self) -> int:
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, token: str) -> int | None:
        found: int | None = self._inner.token_to_id(token)
        return found

    def raw(self, token: int) -> bytes:
        name = self._inner.id_to_token(token) if token < 1 << 32 else None
        if name is None:
            return b""
        return self._spelling.joiner + (self._added.get(token) or self._spelling.spell(name))


class SentencePieceVocabulary:
    """A vocabulary in the format of the `sentencepiece` library; user-defined symbols are plain text.

    Decodes as the library does, save that an unknown piece at the very start may lose a space.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_file=str(file))
        # The library raises RuntimeError or OSError, by version, for malformed files.
        except Exception as error:
            raise damaged(file, error) from None
        self.size: int = self._inner.get_piece_size()
        self.last_id = self.size - 1
        self.control: dict[str, int] = {
            self._inner.id_to_piece(i): i for i in range(self.size) if self._inner.is_control(i)
        }
        # How many spaces a decoding loses in front depends on two flags of the model; this shows their effect.
        kept = len(self._inner.decode_pieces([_SPACE, _SPACE, "x"])) - 1
        self.strip: int | None = None if kept == 0 else 2 - kept

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text, out_type=int, add_bos=False, add_eos=False)
        return ids

    def id_of(self, token: str) -> int | None:
        found: int = self._inner.piece_to_id(token)
        return found if self._inner.id_to_piece(found) == token else None

    def raw(self, token: int) -> bytes:
        if token >= self.size:
            return b""
        if self._inner.is_unknown(token):
            surface: str = self._inner.decode([token])
            return surface.encode()
        name: str = self._inner.id_to_piece(token)
        if self._inner.is_byte(token):
            return bytes([int(name[1:-1], 16)])
        return name.encode() if self._inner.is_control(token) else _spaced(name)


class _Spelling(NamedTuple):
    """How token names spell text: bytes before each token, bytes of a name, spaces dropped at the start."""

    joiner: bytes
    spell: Callable[[str], bytes]
    strip: int | None


def _spelling(decoder: Any, file: Path) -> _Spelling:
    """The rule that a tokenizer.json's decoder amounts to."""
    if decoder is None:
        return _Spelling(b" ", str.encode, 1)
    parts = _flat(json.loads(decoder.__getstate__()))
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _Spelling(b"", _byte_level, 0)
    for part in parts:
        if part not in _SPACED and not (part["type"] == "Strip" and (part["content"], part["stop"]) == (" ", 0)):
            raise CheckpointError(f"{file}: decoder {part['type']} is not supported; byte-level BPE is what Qwen uses")
    spell = _byte_or_spaced if "ByteFallback" in kinds else _spaced
    return _Spelling(b"", spell, sum(part.get("start", 0) for part in parts))


# Parts, beside a Strip, of the decoder of vocabularies converted from sentencepiece.
_SPACED = (
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [leaf for part in parts for leaf in ([part] if part["type"] != "Sequence" else _flat(part))]


def _spaced(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def _byte_or_spaced(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else _spaced(token)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character: itself if it prints in Latin-1, else one from
    U+0100 on, in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()
