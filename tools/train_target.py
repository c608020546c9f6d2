"""Stage 3 of training the pair: the target, a small hybrid language model of Python source.

    python tools/train_target.py --out RUN --seconds 230          after train_tokenizer.py

Continues from the last checkpoint if it was interrupted. Writes RUN/pair/target in the published layout.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qwen_gdn import ModelConfig
from tools.training import command
from tools.training.command import Parser, fail_in_one_line
from tools.training.export import write_target
from tools.training.fit import fit
from tools.training.run import Run, add_arguments, run_of
from tools.training.settings import file_digest
from tools.training.shapes import generation_config, target_config
from tools.training.target import TargetJob
from tools.training.tokens import MASK, SEPARATOR, load_tokenizer, special_id


def train_target(run: Run, seconds: float | None = None) -> None:
    """Trains and writes the target unless it is there; `seconds` replaces the shape's own budget."""
    shape = run.shape
    schedule = shape.target if seconds is None else replace(shape.target, seconds=seconds, steps=None)
    run.require("tokens", run.settings())
    settings = run.on_device(budget=schedule.budget)
    if run.finished("target", settings):
        return
    with run.stage("target", settings) as notes:
        tokenizer = load_tokenizer(run.tokens)
        eos = special_id(tokenizer, SEPARATOR)
        config = target_config(shape, max(eos, special_id(tokenizer, MASK)) + 1, eos)
        job = TargetJob(ModelConfig.from_dict(config), shape, run.tokens, torch.device(run.device), run.seed)
        if run.compiles:
            job.compile()
        figures = fit(job, schedule, run.out / "target", settings)
        write_target(job.model, config, generation_config(eos), run.tokens / "tokenizer.json", run.pair / "target")
        notes["weights"] = file_digest(run.pair / "target" / "model.safetensors")
        notes["parameters"] = sum(p.numel() for p in job.model.parameters())
        notes["tokens"] = int(figures["steps"]) * shape.batch * shape.length
        notes["figures"] = figures


@fail_in_one_line
def main() -> None:
    parser = Parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=command.seconds, help="time to train, compilation not counted")
    arguments = parser.parse_args()
    train_target(run_of(arguments), arguments.seconds)


if __name__ == "__main__":
    main()
