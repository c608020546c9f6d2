"""Trains the bundled pair from source files to finished folders, one stage after the other.

    python tools/train_pair.py --source DIR --license MIT --out RUN        a folder of Python source files
    python tools/train_pair.py --installed --out RUN                       this interpreter's packages

The result is RUN/pair (target, drafter, CARD.md), to be copied to weights/bundled, and RUN/prompts for measuring. A
call that was interrupted is continued by the same call; finished stages are not repeated. A call with settings other
than those that RUN was made with is refused; that includes budgets, which the learning rates follow. The times are
meant for one large GPU; `--toy` goes through everything on a CPU in seconds.

Exit status: 0 success, 1 failure, 2 bad use, 130 interrupted.
"""

import argparse
import sys
import time
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.train_corpus import add_source_arguments, build
from tools.train_tokenizer import tokenize
from tools.training import command
from tools.training.command import Parser, fail_in_one_line
from tools.training.run import Run, add_arguments, run_of

STAGES = ("corpus", "tokenizer", "target", "generate", "drafter", "card")


def train_pair(run: Run, arguments: argparse.Namespace) -> None:
    """Runs the stages up to `arguments.until`, the last included."""
    wanted = STAGES[: STAGES.index(arguments.until) + 1]
    build(run, arguments)
    if "tokenizer" in wanted:
        tokenize(run)
    # Not at the top: the processes that read files import this module, and need no torch.
    from tools.train_drafter import train_drafter
    from tools.train_generate import generate
    from tools.train_target import train_target
    from tools.training.card import write_card

    if "target" in wanted:
        train_target(run, arguments.target_seconds)
    if "generate" in wanted:
        generate(run, arguments.generate_seconds)
    if "drafter" in wanted:
        train_drafter(run, arguments.drafter_seconds)
    if "card" in wanted:
        write_card(run)


@fail_in_one_line
def main() -> None:
    parser = Parser(__doc__)
    add_arguments(parser)
    add_source_arguments(parser)
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to run")
    parser.add_argument(
        "--target-seconds", type=command.seconds, help="time to train the target, compilation not counted"
    )
    parser.add_argument("--generate-seconds", type=command.seconds, help="time to generate the drafter's text")
    parser.add_argument(
        "--drafter-seconds", type=command.seconds, help="time to train the drafter, compilation not counted"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    run = run_of(arguments)
    train_pair(run, arguments)
    print(f"{run.out}: done up to {arguments.until} in {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
