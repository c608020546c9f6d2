"""The faults that people met on other systems of this kind, and the tests that rule each of them out here.

    python tools/cases.py                      runs every such test and prints case, test, outcome
    python tools/cases.py 21 24 --processes 2  those of two cases, on two processes
    python tools/cases.py --list               prints which test is whose, and runs none

A test says `@pytest.mark.case(21)`, and `case-21` then stands in its id. Exit code 0; 1 if a test fails or a case has
none; 2 for bad use.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddtree.arguments import whole  # noqa: E402
from tools.arguments import documented_parser  # noqa: E402

# By the rule that holds here. Numbers are fixed, and gaps between them mean nothing.
CASES = {
    1: "several tokens on a warm cache equal one forward over everything",
    2: "chunked rule, recurrence and decoding agree at every length",
    4: "the convolution's tail is right for calls shorter than it",
    5: "a later window of a prompt goes on from the state of the one before",
    7: "left padding reaches neither convolution nor recurrence",
    8: "a row that may attend to nothing makes no NaN",
    9: "empty prompts are refused, prompts of one token work",
    10: "the head reads one row of a prompt",
    11: "a crop rewinds the recurrent state or is refused",
    12: "what was cropped is never remembered",
    14: "memory is flat from round to round, and copies own their bytes",
    16: "rounds that accept nothing keep the root alone",
    17: "tree, chain and plain steps mix on one cache",
    19: "rows of a batch that accept different counts equal their own runs, or are refused",
    21: "a later turn equals one fresh prefill; layers that disagree are refused",
    23: "the rule of what is in the cache after a turn holds however it ended",
    24: "an exception anywhere leaves the last committed state",
    25: "rotary position is depth, not index",
    26: "a tree that is a spine equals the chain",
    27: "a node sees prefix and ancestors, and nothing else",
    28: "a scattered path is committed as if it had been a chain",
    29: "trees are in order, within budget, without twins and deterministic",
    30: "speculation changes no token but at ties",
    31: "a stop id ends the text wherever in a round it stands",
    32: "the count and the stop hold within a round",
    33: "the first token counts, is streamed and may be the stop",
    35: "sampling through a tree keeps the target's law",
    37: "no option is accepted and ignored",
    38: "extreme sampling values work or are refused",
    42: "layer id L is the output of layer L",
    43: "pairs that do not fit are refused in one line",
    44: "a block is the committed token and masks behind it",
    45: "a drafter keeps committed rows and nothing else",
    46: "a drafter's rotary base and windows are those of its own config",
    47: "block size and mask token have no defaults",
    48: "no drafter tensor is left unused",
    50: "layouts of projections, norms, rotary dimensions and head groups",
    52: "gates, norm and state stay in float32",
    53: "experts are routed row by row, with renormalised shares",
    54: "missing and damaged files are named",
    55: "prefixes, extra tensors and tied heads",
    56: "both layouts of experts fill the same model",
    57: "eight-bit weights are scaled, or refused by name",
    58: "config shapes and stop ids; nothing material is defaulted",
    60: "control tokens never come from a user's text",
    63: "compiled programs equal the model and repeat bit by bit",
}


class Recorder:
    """Notes, as a plugin of pytest, what became of each test of a case."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[int, str], str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._note(item.nodeid, item.user_properties, "collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._note(report.nodeid, report.user_properties, report.outcome)

    def _note(self, test: str, properties: Sequence[tuple[str, object]], outcome: str) -> None:
        self.outcomes |= {(number, test): outcome for name, number in properties if name == "case"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    numbers = options.cases or list(CASES)
    asked = ["-m", "case", "-k", " or ".join(f"case-{number:02}" for number in numbers)]
    if options.list:
        asked.append("--collect-only")
    elif options.processes > 1:
        asked += ["-n", str(options.processes), "--dist", "loadfile"]
    recorder = Recorder()
    with redirect_stdout(sys.stderr):  # the table is what is asked for
        status = pytest.main([*asked, f"--rootdir={ROOT}", *files_of(numbers)], plugins=[recorder])
    for number in numbers:
        tests = {test: outcome for (case, test), outcome in recorder.outcomes.items() if case == number}
        print(f"{number:3}  {CASES[number]}")
        print("\n".join(f"     {outcome:9}  {test}" for test, outcome in tests.items()) or "     no test")
    without = set(numbers) - {case for case, _ in recorder.outcomes}
    print(f"{len(numbers)} cases, {len(without)} of them without a test; pytest ended with {int(status)}")
    return 1 if without or status else 0


def files_of(numbers: Sequence[int]) -> list[str]:
    """The files whose tests say that they are of one of these cases; to collect the others takes longer than to run it.

    All of them if none does, for then the tool has to find that out.
    """
    files = sorted((ROOT / "tests").glob("test_*.py"))
    marks = {file: re.findall(r"mark\.case\(([\d, ]+)\)", file.read_text(encoding="utf-8")) for file in files}
    named = {file: {int(number) for mark in found for number in mark.split(",")} for file, found in marks.items()}
    return [str(file) for file in files if not named[file].isdisjoint(numbers)] or [str(ROOT / "tests")]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = documented_parser("cases", __doc__)
    parser.add_argument("cases", type=_case, nargs="*", metavar="CASE", help="numbers of cases (default: all)")
    parser.add_argument("--list", action="store_true", help="collect the tests and run none")
    parser.add_argument("--processes", type=whole(1), default=1, metavar="N", help="that run tests (default: 1)")
    return parser.parse_args(arguments)


def _case(text: str) -> int:
    number = whole()(text)
    if number not in CASES:
        raise argparse.ArgumentTypeError(f"there is no case {number}; cases: {', '.join(map(str, CASES))}")
    return number


if __name__ == "__main__":
    sys.exit(main())
