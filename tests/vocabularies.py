"""Small vocabularies of every supported kind, random texts, and random cuts, for tests of tokenizers."""

import io
import random
from collections.abc import Callable
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from weights import Tokenizer, load_tokenizer

SAMPLES = (
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь же ещё этих мягких французских булок",
    "你好，世界。中文分词测试 🙂 👩‍👩‍👧‍👦 🇺🇳 e\u0301 \u0000 \ufffd \t  trailing   ",
    "नमस्ते दुनिया مرحبا بالعالم שלום",
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool call>")


def byte_level() -> tokenizers.Tokenizer:
    """The published kind: NFC, a splitting pattern, byte-level BPE, control tokens and tags behind the vocabulary."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(SAMPLES, trainer)
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    return inner


def spaced(strip: int) -> tokenizers.Tokenizer:
    """The kind converted from sentencepiece: spaces as U+2581, bytes as <0xAB>, leading spaces dropped."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + list("\u2581abcdefgé你") + ["\u2581ab", "cd\u2581", "<end>"]
    inner = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", strip, 0)] if strip else parts)
    return inner


def words() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(("a", "bé", "你", "?"))}, "?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return inner


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "spaced": lambda: spaced(1),
    "spaced, two dropped": lambda: spaced(2),
    "spaced, none dropped": lambda: spaced(0),
    "words": words,
}


def pieces_model(**flags: bool) -> bytes:
    """A trained sentencepiece model with byte fallback, a control symbol and a user-defined one."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLES[:3] * 20),
        model_writer=model,
        vocab_size=350,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        control_symbols=["<|im_end|>"],
        user_defined_symbols=["<think>"],
        minloglevel=2,
        num_threads=1,
        **flags,
    )
    return model.getvalue()


def saved(folder: Path, inner: tokenizers.Tokenizer | bytes) -> Tokenizer:
    if isinstance(inner, bytes):
        (folder / "tokenizer.model").write_bytes(inner)
    else:
        inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def texts(draw: random.Random, count: int, *parts: str) -> list[str]:
    """Random joins of slices of the samples and of the given parts."""
    made = []
    for _ in range(count):
        chosen = []
        for _ in range(draw.randrange(6)):
            sample = draw.choice(SAMPLES)
            start = draw.randrange(len(sample))
            chosen.append(draw.choice((sample[start : start + draw.randrange(12)], *parts)))
        made.append("".join(chosen))
    return made


def chunks(draw: random.Random, ids: list[int]) -> list[list[int]]:
    """Ids cut at random places; empty chunks occur."""
    cuts = sorted(draw.choices(range(len(ids) + 1), k=draw.randrange(2 * len(ids) + 2)))
    return [ids[i:j] for i, j in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def unambiguous(text: str) -> bool:
    """Whether the decoders agree on it: they differ in how many U+FFFD stand for a run of invalid bytes."""
    return "\ufffd" not in text
