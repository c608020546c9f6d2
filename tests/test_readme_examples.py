"""The README's code blocks, run as they stand, and what they print."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddtree.recorded_drafter
import qwen_gdn.program_set
from ddtree import generate, make_sampler
from ddtree.trace import lines
from qwen_gdn import decode

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)

Names = dict[str, Any]


def round_by_hand(names: Names) -> str:
    """The root, the accepted tokens and the bonus are what plain decoding writes; the cache holds all but the last."""
    ids, path = names["ids"], names["path"]
    written = list(decode(names["target"], ids, max_new_tokens=len(path) + 1))
    assert len(path) > 1, "the example accepts nothing"
    return f"{names['tokenizer'].decode(written)} {len(ids) + len(path)}\n"


def own_proposer(names: Names) -> str:
    """It compares its tokens itself and prints nothing; its drafts must have been put before the target."""
    assert sum(len(done.tokens) for done in names["rounds"]) == 24
    assert all(done.drafted for done in names["rounds"][1:-1])
    return ""


def streamed(names: Names) -> str:
    """The text is plain decoding's up to the first empty line."""
    written = list(decode(names["target"], names["prompt"], max_new_tokens=80))
    text = names["tokenizer"].decode(written)
    assert "\n\n" in text, "the example meets no stop string"
    return text[: text.index("\n\n")] + "[stop_string]\n"


def conversation(names: Names) -> str:
    """Every turn writes what plain decoding writes after the whole conversation, and reads all but its last id once."""
    tokenizer, session = names["tokenizer"], names["session"]
    ids, said, held = tokenizer.encode("class Stack:\n    def __init__(self):\n"), "", 0
    for more in ("", "\n    def push(self, item):\n", "\n    def pop(self):\n"):
        ids += tokenizer.encode(more)
        written = list(decode(session._target, ids, max_new_tokens=24))
        said += f"{tokenizer.decode(written)}\n[{held} of {len(ids)} tokens were there already]\n"
        ids += written
        held = len(ids) - 1
    return said


def traced(names: Names) -> str:
    """The text is plain decoding's, and the page holds the trace of all of its rounds."""
    written = list(decode(names["target"], names["prompt"], max_new_tokens=40))
    trace = names["recorder"].trace()
    assert [token for each in trace.rounds for token in each.tokens] == written
    assert max(each.accepted for each in trace.rounds) > 1
    assert all(line in names["html"] for line in lines(trace))
    return names["tokenizer"].decode(written) + "\n"


def batch_of_rows(names: Names) -> str:
    """Each row is its own generation, with a sampler of its seed."""
    target, drafter, tokenizer, texts = names["target"], names["drafter"], names["tokenizer"], []
    for row, (prompt, count) in enumerate(zip(names["prompts"], (32, 24, 24), strict=True)):
        sampler = make_sampler(0.5, seed=row)
        rounds = generate(target, drafter, prompt, max_new_tokens=count, budget=8, sampler=sampler)
        texts.append(tokenizer.decode([*prompt, *(token for done in rounds for token in done.tokens)]))
    return "\n".join(texts) + "\n"


def forked_cache(names: Names) -> str:
    """Each continuation is that of the prompt and its own start, whatever the other one was."""
    target, tokenizer = names["target"], names["tokenizer"]
    lead = tokenizer.encode("import os\nimport sys\n\n")
    texts = []
    for start in ("def main(", "class Config("):
        written = decode(target, [*lead, *tokenizer.encode(start)], max_new_tokens=20)
        texts.append(start + tokenizer.decode(list(written)))
    assert names["cache"].length == len(lead), "a fork changed the cache it came from"
    return "\n".join(texts) + "\n"


def engine(names: Names) -> str:
    model = names["engine"].model
    return names["tokenizer"].decode(list(decode(model, names["prompt"], max_new_tokens=32))) + "\n"


EXAMPLES: list[Callable[[Names], str]] = [
    round_by_hand,
    own_proposer,
    streamed,
    conversation,
    traced,
    batch_of_rows,
    forked_cache,
    engine,
]


def test_every_example_is_checked() -> None:
    assert len(BLOCKS) == len(EXAMPLES)


@pytest.mark.parametrize(
    ("code", "wanted"),
    list(zip(BLOCKS, EXAMPLES, strict=False)),
    ids=["round by hand", "own proposer", "stream", "session", "trace", "batch", "fork", "engine"],
)
def test_an_example_of_the_readme_prints_what_it_should(
    code: str,
    wanted: Callable[[Names], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Compiling the bundled pair takes a minute and is tested on smaller models.
    for module in (qwen_gdn.program_set, ddtree.recorded_drafter):
        monkeypatch.setattr(module, "compiled", lambda function: function)
    names: Names = {"__name__": "example"}
    exec(compile(code, str(README), "exec"), names)
    assert capsys.readouterr().out == wanted(names)
