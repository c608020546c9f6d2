"""The README's code blocks, run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.split("\n")[0])
def test_an_example_of_the_readme_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, str(README), "exec"), {"__name__": "example"})


def test_there_are_three_examples() -> None:
    assert len(BLOCKS) == 3
