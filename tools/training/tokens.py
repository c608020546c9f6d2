"""The tokenizer and the token files: a byte-level BPE fitted to Python source, and splits as flat files of ids.

A token file holds 16-bit ids, document after document, each followed by the separator.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.training.corpus import SPLITS, read_entries, read_split, split_files
from tools.training.machine import damaged, parallel, read_json, write_json, write_whole

SEPARATOR = "<|endoftext|>"
MASK = "<|mask|>"
MOST_IDS = 2**15

# Words with what leads them (a space, a dot, an underscore); single digits; runs of signs; line ends; indentation
# as one piece, all but the space that leads the next word. A line end never joins the sign before it, so that a
# prompt that stops after `):` is cut into the same tokens as the text it was cut from.
_PIECES = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DOCUMENTS_A_CALL = 64


class Size(NamedTuple):
    """How much text a split holds."""

    documents: int
    bytes: int
    tokens: int


def fit_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of at most `vocabulary` entries, the last two the separator and the drafter's mask token.

    It has no normaliser (the family has NFC): source text must survive encoding byte for byte.

    Raises:
        ValueError: the vocabulary has no room for the 256 bytes, or its ids do not fit 16 bits.
    """
    if not 256 + 2 <= vocabulary <= MOST_IDS:
        raise ValueError(f"vocabulary must lie in [258, {MOST_IDS}], got {vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([SEPARATOR, MASK])
    return tokenizer


def sample_texts(corpus: Path, most_bytes: int) -> Iterator[str]:
    """Training texts of up to that many bytes in all, taken evenly from the whole split."""
    total = sum(file.stat().st_size for file in split_files(corpus, "train"))
    every = max(1, -(-total // most_bytes))
    for entry in islice(read_split(corpus, "train"), 0, None, every):
        yield entry["text"]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder; text that spells a special token stays text.

    Raises:
        ValueError: its file is damaged.
    """
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more special
        raise damaged(file, error) from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token; ValueError if the tokenizer has none of that name."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}; train it with tools/train_tokenizer.py")
    return int(found)


def encode_corpus(corpus: Path, out: Path) -> dict[str, Size]:
    """Writes a token file for every text file, and `tokens.json` with the size of each split last."""
    files = [(split, file) for split in SPLITS for file in split_files(corpus, split)]
    encode = partial(_encode_file, out)
    sizes: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    for (split, _), size in zip(files, parallel(encode, [file for _, file in files], "encoding"), strict=True):
        sizes[split].update(size._asdict())
    found = {split: Size(**{name: counts[name] for name in Size._fields}) for split, counts in sizes.items()}
    write_json(out / "tokens.json", {split: size._asdict() for split, size in found.items()})
    return found


def _encode_file(out: Path, file: Path) -> Size:
    """Encodes one text file with the tokenizer of folder `out`."""
    tokenizer = load_tokenizer(out)
    separator = special_id(tokenizer, SEPARATOR)
    ids = array("H")
    documents = size = 0
    entries = read_entries(file)
    while batch := [entry["text"] for entry in islice(entries, _DOCUMENTS_A_CALL)]:
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(separator)
        documents += len(batch)
        size += sum(len(text.encode()) for text in batch)
    write_whole(out / f"{file.stem}.bin", lambda part: part.write_bytes(ids.tobytes()))
    return Size(documents, size, len(ids))


def read_sizes(folder: Path) -> dict[str, Size]:
    """The size of each split of a folder of token files."""
    return {split: Size(**counts) for split, counts in read_json(folder / "tokens.json").items()}
