"""Stage 5 of training the pair: the DFlash drafter, on text that the target wrote.

    python tools/train_drafter.py --out RUN --seconds 300         after train_generate.py

Prints, as it learns, the mean accepted length of chains along greedy continuations of held-out prompts. Continues
from the last checkpoint if it was interrupted. Writes RUN/pair/drafter in the published layout.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddtree.drafter_config import DFlashConfig
from tools.training import command
from tools.training.command import Parser, fail_in_one_line
from tools.training.drafter import DrafterJob
from tools.training.export import write_drafter
from tools.training.fit import fit
from tools.training.run import Run, add_arguments, run_of
from tools.training.settings import file_digest
from tools.training.shapes import drafter_config
from tools.training.tokens import MASK, load_tokenizer, special_id
from weights import load_target


def train_drafter(run: Run, seconds: float | None = None) -> None:
    """Trains and writes the drafter unless it is there; `seconds` replaces the shape's own budget."""
    shape = run.shape
    schedule = shape.drafter if seconds is None else replace(shape.drafter, seconds=seconds, steps=None)
    target_weights = run.weights("target")
    written = run.require("generated", run.settings(target=target_weights))
    settings = run.on_device(target=target_weights, text=written["tokens"], budget=schedule.budget)
    if run.finished("drafter", settings):
        return
    with run.stage("drafter", settings) as notes:
        target = load_target(run.pair / "target", device=torch.device(run.device))
        mask = special_id(load_tokenizer(run.tokens), MASK)
        config = drafter_config(shape, target.config.vocab_size, mask)
        job = DrafterJob(
            target,
            DFlashConfig.from_dict(config),
            shape,
            training=sorted(run.generated.glob("train-*.safetensors")),
            evaluation=sorted(run.generated.glob("eval-*.safetensors")),
            seed=run.seed,
        )
        if run.compiles:
            job.compile()
        notes["figures"] = fit(job, schedule, run.out / "drafter", settings)
        write_drafter(job.drafter, config, run.pair / "drafter")
        notes["weights"] = file_digest(run.pair / "drafter" / "model.safetensors")
        notes["parameters"] = sum(p.numel() for p in job.drafter.parameters())
        notes["sequences"] = job.sequences


@fail_in_one_line
def main() -> None:
    parser = Parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=command.seconds, help="time to train, compilation not counted")
    arguments = parser.parse_args()
    train_drafter(run_of(arguments), arguments.seconds)


if __name__ == "__main__":
    main()
