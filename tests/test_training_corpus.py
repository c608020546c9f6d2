"""What the pair is trained on: licences, corpus, tokens, prompts, and the order of training windows."""

from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch

from tools.training.corpus import build_corpus, read_split
from tools.training.data import Windows
from tools.training.licences import judge
from tools.training.packages import installed, plain_folder
from tools.training.prompts import choose_prompts
from tools.training.tokens import MASK, SEPARATOR, fit_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "qwen_gdn").glob("*.py"))]


@pytest.mark.parametrize(
    ("metadata", "permissive"),
    [
        ("License-Expression: MIT", True),
        ("License-Expression: (MIT OR GPL-3.0-only) AND BSD-3-Clause", True),
        ("License-Expression: MIT AND MPL-2.0", False),
        ("License-Expression: Apache-2.0 WITH LLVM-exception", True),
        ("License-Expression: LicenseRef-NVIDIA-SOFTWARE-LICENSE", False),
        ("License: Apache License, Version 2.0", True),
        ("License: GNU LGPL", False),
        ("License: see the file", False),
        ("Classifier: License :: OSI Approved :: BSD License", True),
        ("Classifier: License :: OSI Approved\nLicense: BSD-3-Clause", True),
        ("Classifier: License :: OSI Approved :: MIT License\nLicense: GPL-3.0", False),
        (
            "Classifier: License :: OSI Approved :: MIT License\n"
            "Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
            False,
        ),
        ("Name: nothing-said", False),
    ],
)
def test_a_distribution_counts_as_permissive_only_if_all_that_its_metadata_states_is(
    metadata: str, permissive: bool
) -> None:
    assert judge(HeaderParser().parsestr(metadata)).permissive is permissive


def _distribution(site: Path, name: str, licence: str, files: Mapping[str, str]) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n")
    (info / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in files))
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def test_a_corpus_holds_permissive_files_once_and_no_copy_of_an_unseen_one(tmp_path: Path) -> None:
    def code(name: str) -> str:
        return f"def {name}(value):\n    return value + value\n" * 5

    site = tmp_path / "site"
    good = {f"good/m{i}.py": code(f"f{i}") for i in range(300)} | {"good/copy.py": code("u")}
    _distribution(site, "good", "MIT", good)
    _distribution(site, "other", "MIT", {"other/a.py": code("f1"), "other/_vendor/b.py": code("vendored")})
    _distribution(site, "zzz", "MIT", {"zzz/u.py": code("u")})
    _distribution(site, "viral", "GPL-3.0-only", {"viral/a.py": code("viral")})
    packages, excluded = installed(site)
    out = tmp_path / "corpus"
    manifest = build_corpus(packages, excluded, unseen={"zzz"}, out=out, shards=3)

    assert [refused.name for refused in excluded] == ["viral"]
    texts = {split: [entry["text"] for entry in read_split(out, split)] for split in ("train", "heldout", "unseen")}
    assert texts["unseen"] == [code("u")]
    everything = [text for split in texts.values() for text in split]
    assert len(everything) == len(set(everything)) == 301
    assert not any("vendored" in text or "viral" in text for text in everything)
    assert 0 < len(texts["heldout"]) < 20
    assert manifest["splits"]["train"]["files"] == len(texts["train"])
    assert manifest["dropped"] == {"a copy of another file": 2}


def test_a_plain_folder_needs_a_permissive_licence(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("x = 1\n")
    assert [package.name for package in plain_folder(tmp_path, "MIT")] == ["a"]
    with pytest.raises(ValueError, match="is not permissive"):
        plain_folder(tmp_path, "GPL-3.0-only")


def test_tokens_keep_text_and_a_prompt_is_cut_as_the_text_it_came_from() -> None:
    tokenizer = fit_tokenizer(TEXTS, 512)
    tokenizer.encode_special_tokens = True
    assert tokenizer.get_vocab_size() == 512
    assert [tokenizer.token_to_id(token) for token in (SEPARATOR, MASK)] == [510, 511]
    for text in (*TEXTS, "é\r\n\tif x:\n        pass  # naïve ﬁ " + SEPARATOR, ""):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert not {510, 511} & set(ids)
    whole, start = (tokenizer.encode(text).tokens for text in ("def f(n):\n    return n", "def f(n):"))
    assert whole[: len(start)] == start
    entries = [{"package": "p", "path": str(i), "licence": "MIT", "text": text} for i, text in enumerate(TEXTS)]
    prompts = choose_prompts(tokenizer, entries, tokens=20, count=12, seed=0)
    assert len({prompt.text for prompt in prompts}) == 12
    assert all(len(tokenizer.encode(prompt.text).ids) == 20 for prompt in prompts)


def test_an_epoch_of_windows_visits_every_token_once_and_a_batch_depends_on_its_step_alone() -> None:
    stream = torch.arange(1000).short()
    windows = Windows(stream, length=10, batch=9, seed=3)
    seen = torch.cat([windows.batch(step)[:, :-1].flatten() for step in range(11)])
    assert len(seen) == len(seen.unique()) == 990
    assert torch.equal(windows.batch(14), Windows(stream, length=10, batch=9, seed=3).batch(14))
    assert not torch.equal(windows.batch(0), windows.batch(11))
    batch = windows.batch(5)
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
