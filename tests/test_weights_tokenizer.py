"""Tokenizers give the results of the libraries whose files they read, and one rule on control tokens."""

import json
import random
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import decoders
from vocabularies import CONTROL, KINDS, SAMPLES, TAGS, byte_level, pieces_model, saved, texts, unambiguous, words

from weights import CheckpointError, load_tokenizer


def test_plain_text_encodes_as_the_library_does(tmp_path: Path) -> None:
    inner, ours = byte_level(), saved(tmp_path, byte_level())
    draw = random.Random(0)
    for text in texts(draw, 200, *TAGS):
        assert ours.encode(text) == inner.encode(text, add_special_tokens=False).ids


@pytest.mark.case(60)
def test_control_tokens_in_plain_text_are_text_unless_asked_for(tmp_path: Path) -> None:
    inner, ours = byte_level(), saved(tmp_path, byte_level())
    draw = random.Random(1)
    seen = 0
    for text in texts(draw, 200, *TAGS, *CONTROL):
        plain = ours.encode(text)
        assert not set(plain) & ours.special_ids
        assert ours.decode(plain) == inner.normalizer.normalize_str(text)
        parsed = ours.encode(text, parse_special=True)
        assert parsed == inner.encode(text, add_special_tokens=False).ids
        seen += len(set(parsed) & ours.special_ids)
    assert seen > 50


def test_the_last_id_is_the_greatest_whatever_ids_are_left_out(tmp_path: Path) -> None:
    raw = json.loads(byte_level().to_str())
    raw["model"]["vocab"]["a"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert load_tokenizer(tmp_path).last_id == 5000 > load_tokenizer(tmp_path).vocab_size
    (tmp_path / "p").mkdir()
    pieces = saved(tmp_path / "p", pieces_model())
    assert pieces.last_id == pieces.vocab_size - 1


def test_a_git_lfs_pointer_is_told_from_other_damage(tmp_path: Path) -> None:
    for name in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        with pytest.raises(CheckpointError, match=rf"{name} is damaged: .*git lfs pull"):
            load_tokenizer(tmp_path)


def test_of_control_tokens_that_start_alike_the_longest_is_parsed(tmp_path: Path) -> None:
    inner = byte_level()
    inner.add_special_tokens(["<|im", "<|im_end|>>", "<|im_"])
    ours = saved(tmp_path, inner)
    draw = random.Random(6)
    for text in texts(draw, 100, "<|im", "<|im_end|>", "<|im_end|>>", "<|im_", "_end|>", ">"):
        assert ours.encode(text, parse_special=True) == inner.encode(text, add_special_tokens=False).ids


def test_names_ids_and_sizes_are_the_library_s(tmp_path: Path) -> None:
    inner, ours = byte_level(), saved(tmp_path, byte_level())
    assert ours.vocab_size == inner.get_vocab_size()
    assert ours.last_id == max(inner.get_vocab().values())
    assert ours.special_ids == {inner.token_to_id(text) for text in CONTROL}
    assert all(ours.token_id(name) == i for name, i in inner.get_vocab().items())
    assert ours.token_id("<|no such|>") is None


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_random_ids_decode_as_the_library_does(tmp_path: Path, kind: str, skip: bool) -> None:
    """Byte-level vocabularies even where bytes are no UTF-8; ids above the vocabulary decode to nothing."""
    inner, ours = KINDS[kind](), saved(tmp_path, KINDS[kind]())
    draw = random.Random(2)
    compared = 0
    for _ in range(400):
        ids = draw.choices(range(ours.vocab_size + 3), k=draw.randrange(9))
        theirs = inner.decode(ids, skip_special_tokens=skip)
        if kind == "byte level" or unambiguous(theirs):
            assert ours.decode(ids, skip_special=skip) == theirs, ids
            compared += 1
    assert compared > 50


def test_ids_of_padding_rows_decode_to_nothing_and_negative_ones_are_refused(tmp_path: Path) -> None:
    for i, inner in enumerate((byte_level(), pieces_model())):
        (tmp_path / str(i)).mkdir()
        ours = saved(tmp_path / str(i), inner)
        a = ours.encode("a b")
        assert ours.decode([ours.vocab_size, 248319, 2**31, 2**40, *a, ours.vocab_size]) == ours.decode(a)
        with pytest.raises(ValueError, match="-1 is negative"):
            ours.decode([*a, -1])


@pytest.mark.case(60)
def test_end_of_text_is_printed_only_on_request(tmp_path: Path) -> None:
    ours = saved(tmp_path, byte_level())
    end = ours.token_id("<|im_end|>")
    assert end is not None
    ids = [*ours.encode("so"), end]
    assert ours.decode(ids) == "so"
    assert ours.decode(ids, skip_special=False) == "so<|im_end|>"


def test_truncation_and_padding_stored_in_the_file_do_not_apply(tmp_path: Path) -> None:
    inner = byte_level()
    plain = inner.encode(SAMPLES[0], add_special_tokens=False).ids
    inner.enable_truncation(4)
    inner.enable_padding(length=500)
    assert saved(tmp_path, inner).encode(SAMPLES[0]) == plain


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
def test_sentencepiece_models_encode_and_decode_as_the_library_does(tmp_path: Path, flags: tuple[bool, bool]) -> None:
    data = pieces_model(add_dummy_prefix=flags[0], remove_extra_whitespaces=flags[1])
    ours = saved(tmp_path, data)
    inner = sentencepiece.SentencePieceProcessor(model_proto=data)
    draw = random.Random(4)
    for text in texts(draw, 200, "<think>", "  ", " "):
        ids = ours.encode(text)
        assert ids == inner.encode(text)
        assert ours.decode(ids) == inner.decode(ids)
    compared = 0
    for _ in range(300):
        ids = draw.choices(range(1, ours.vocab_size), k=draw.randrange(8))
        theirs = inner.decode(ids)
        if unambiguous(theirs):
            assert ours.decode(ids) == theirs, ids
            compared += 1
    assert compared > 50


def test_sentencepiece_control_symbols_follow_the_same_rule(tmp_path: Path) -> None:
    ours = saved(tmp_path, pieces_model())
    end = ours.token_id("<|im_end|>")
    assert end in ours.special_ids and ours.token_id("<think>") not in ours.special_ids
    assert end not in ours.encode("so <|im_end|>")
    assert ours.encode("so<|im_end|>", parse_special=True) == [*ours.encode("so"), end]
    assert ours.token_id("no such piece") is None


def test_tokenizer_json_wins_over_tokenizer_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(pieces_model())
    assert saved(tmp_path, byte_level()).token_id("<|im_start|>") is not None


def test_text_with_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    ours = saved(tmp_path, byte_level())
    with pytest.raises(ValueError, match="surrogate at index 2"):
        ours.encode("ab\ud800")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b"{}", b"version https://git-lfs.github.com/spec/v1\n"])
def test_damaged_tokenizers_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.CTC(), decoders.Sequence([decoders.Replace("_", " ")])]
)
def test_decoders_that_cannot_stream_exactly_are_refused_by_name(tmp_path: Path, decoder: decoders.Decoder) -> None:
    inner = words()
    inner.decoder = decoder
    kind = json.loads(inner.to_str())["decoder"]
    with pytest.raises(CheckpointError, match=kind.get("decoders", [kind])[0]["type"]):
        saved(tmp_path, inner)
