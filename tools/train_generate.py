"""Stage 4 of training the pair: the target continues prompts from the corpus, for the drafter to learn from.

    python tools/train_generate.py --out RUN --seconds 60         after train_target.py

Half of the continuations are greedy, half sampled. A continued run keeps the files it finds. The evaluation prompts
are continued too, greedily. Writes RUN/generated.
"""

import sys
import time
from pathlib import Path

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qwen_gdn import QwenGDN
from tools.training import command
from tools.training.command import Parser, fail_in_one_line
from tools.training.data import read_tokens
from tools.training.generated import evaluation_batch, read_notes, training_batch, write_continued
from tools.training.machine import Progress
from tools.training.prompts import read_prompts
from tools.training.run import Run, add_arguments, run_of
from tools.training.schedule import Position, Schedule
from tools.training.tokens import load_tokenizer
from weights import load_target


def generate(run: Run, seconds: float | None = None) -> None:
    """Generates text unless it is there; `seconds` replaces the shape's own budget."""
    budget = run.shape.generation if seconds is None else Schedule(seconds=seconds)
    settings = run.on_device(target=run.weights("target"), budget=budget.budget)
    if run.finished("generated", settings):
        return
    run.claim("generated", settings)
    with run.stage("generated", settings) as notes:
        device = torch.device(run.device)
        target = load_target(run.pair / "target", device=device)
        run.generated.mkdir(parents=True, exist_ok=True)
        _continue_evaluation(run, target)
        notes |= _continue_training(run, target, budget)


def _continue_evaluation(run: Run, target: QwenGDN) -> None:
    tokenizer = load_tokenizer(run.tokens)
    # the last anchor's block must be known to its end
    count = run.shape.evaluation_tokens + run.shape.block - 1
    for file in sorted(run.prompts.glob("*.json")):
        continued = evaluation_batch(target, read_prompts(file, tokenizer), count)
        write_continued(run.generated / f"eval-{file.stem}.safetensors", continued, {})


def _continue_training(run: Run, target: QwenGDN, budget: Schedule) -> dict[str, int]:
    stream = read_tokens(run.tokens, "train", target.device)
    progress = Progress("generated")
    at, sequences, tokens = Position(0, 0.0), 0, 0
    while budget.spent(at) < 1.0:
        file = run.generated / f"train-{at.step:04}.safetensors"
        if not file.is_file():
            start = time.monotonic()
            continued = training_batch(target, stream, run.shape, at.step, run.seed)
            size = {"sequences": len(continued.tokens), "tokens": len(continued.tokens) * run.shape.continuation}
            write_continued(file, continued, size | {"seconds": time.monotonic() - start})
        written = read_notes(file)
        at = Position(at.step + 1, at.seconds + float(written["seconds"]))
        sequences += int(written["sequences"])
        tokens += int(written["tokens"])
        progress.show(min(1.0, budget.spent(at)), 1.0, f"{sequences} sequences  {tokens / 1e6:.1f} M tokens")
    return {"sequences": sequences, "tokens": tokens, "seconds": round(at.seconds)}


@fail_in_one_line
def main() -> None:
    parser = Parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=command.seconds, help="time to generate")
    arguments = parser.parse_args()
    generate(run_of(arguments), arguments.seconds)


if __name__ == "__main__":
    main()
