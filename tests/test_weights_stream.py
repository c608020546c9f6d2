"""Streams give the exact decoding of any ids, however they come in pieces, as early as it is decided."""

import random
from pathlib import Path

import pytest
from vocabularies import CONTROL, KINDS, SAMPLES, byte_level, chunks, pieces_model, saved, texts

from weights import TextStream


@pytest.mark.parametrize("kind", [*KINDS, "pieces", "pieces, nothing removed"])
def test_a_stream_gives_the_decoding_however_ids_are_cut(tmp_path: Path, kind: str) -> None:
    if kind in KINDS:
        ours = saved(tmp_path, KINDS[kind]())
    else:
        ours = saved(tmp_path, pieces_model(remove_extra_whitespaces=kind == "pieces"))
    draw = random.Random(3)
    for trial in range(300):
        skip = draw.random() < 0.5
        ids = draw.choices(range(ours.vocab_size + 3), k=draw.randrange(24))
        if trial % 2:
            ids = ours.encode(texts(draw, 1, *CONTROL)[0], parse_special=True)[: draw.randrange(1, 40)]
        stream = TextStream(ours, skip_special=skip)
        given = [stream.push(chunk) for chunk in chunks(draw, ids)]
        assert "".join([*given, stream.finish()]) == ours.decode(ids, skip_special=skip)
        again = [stream.push([i]) for i in ids]
        assert "".join([*again, stream.finish()]) == ours.decode(ids, skip_special=skip)


def test_a_stream_holds_back_nothing_but_an_unfinished_character(tmp_path: Path) -> None:
    ours = saved(tmp_path, byte_level())
    for text in (*SAMPLES, "🙂👩‍👩‍👧‍👦中é"):
        ids = ours.encode(text)
        stream, given = TextStream(ours), ""
        for i, token in enumerate(ids):
            given += stream.push([token])
            sofar = b"".join(ours.piece(j) for j in ids[: i + 1])
            assert given == sofar.decode(errors="ignore")
        assert stream.finish() == ""


@pytest.mark.parametrize("strip", [0, 1, 2, 3, None])
def test_leading_spaces_are_dropped_alike_however_they_come(strip: int | None) -> None:
    class Spaces:
        def __init__(self) -> None:
            self.strip = strip

        def piece(self, token: int, *, skip_special: bool = True) -> bytes:
            return (b"", b" ", b"  ", b"a", b" a")[token]

    draw = random.Random(5)
    for _ in range(300):
        ids = draw.choices(range(5), weights=(3, 5, 3, 1, 1), k=draw.randrange(8))
        text = "".join(("", " ", "  ", "a", " a")[i] for i in ids)
        spaces = len(text) - len(text.lstrip())
        stream = TextStream(Spaces())
        given = [stream.push(chunk) for chunk in chunks(draw, ids)]
        assert "".join(given) + stream.finish() == text[spaces if strip is None else min(spaces, strip) :]


def test_a_stream_looks_at_each_id_once() -> None:
    class Counting:
        strip = 0
        asked = 0

        def piece(self, token: int, *, skip_special: bool = True) -> bytes:
            self.asked += 1
            return bytes([token])

    counting = Counting()
    stream = TextStream(counting)
    for byte in "🙂".encode() * 1000 + b"\xf0\x9f" * 1000:
        stream.push([byte])
    stream.finish()
    assert counting.asked == 6000


def test_invalid_bytes_become_replacement_characters_and_never_stop_the_text(tmp_path: Path) -> None:
    ours = saved(tmp_path, byte_level())
    alphabet = {ours.piece(i): i for i in range(ours.vocab_size)}

    def ids(data: bytes) -> list[int]:
        return [alphabet[bytes([byte])] for byte in data]

    assert ours.decode(ids(b"a\xffb")) == "a\ufffdb"
    assert ours.decode(ids(b"\xe4\xbd")) == "\ufffd"
    assert ours.decode(ids(b"\xe4\xbdx")) == "\ufffdx"
    stream = TextStream(ours)
    assert [stream.push(ids(bytes([byte]))) for byte in b"\xf0\x9f\x99\x82!"] == ["", "", "", "🙂", "!"]
    assert stream.push(ids(b"\xe4\xbd")) == "" and stream.finish() == "\ufffd"
    assert stream.push(ids(b"ok")) == "ok"
