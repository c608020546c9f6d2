"""Stage 2 of training the pair: fits the tokenizer, encodes the corpus, and cuts the evaluation prompts.

    python tools/train_tokenizer.py --out RUN          after train_corpus.py

Writes RUN/tokens (tokenizer.json, a file of 16-bit ids for every text file) and RUN/prompts.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.training.command import Parser, fail_in_one_line
from tools.training.machine import write_whole
from tools.training.prompts import write_prompts
from tools.training.run import Run, add_arguments, run_of
from tools.training.tokens import encode_corpus, fit_tokenizer, load_tokenizer, sample_texts


def tokenize(run: Run) -> None:
    """Makes tokenizer, token files and prompts unless they are there."""
    run.require("corpus", {})
    settings, shape = run.settings(), run.shape
    if run.finished("tokens", settings):
        return
    with run.stage("tokens", settings) as notes:
        tokenizer = fit_tokenizer(sample_texts(run.corpus, shape.sample_bytes), shape.vocabulary)
        write_whole(run.tokens / "tokenizer.json", lambda part: tokenizer.save(str(part)))
        sizes = encode_corpus(run.corpus, run.tokens)
        notes["sizes"] = {split: size._asdict() for split, size in sizes.items()}
        notes["prompts"] = write_prompts(
            run.corpus,
            load_tokenizer(run.tokens),
            run.prompts,
            lengths=shape.evaluated,
            count=shape.evaluation_prompts,
            seed=run.seed,
        )
        print(f"{sizes['train'].tokens} training tokens; prompts: {notes['prompts']}", file=sys.stderr)


@fail_in_one_line
def main() -> None:
    parser = Parser(__doc__)
    add_arguments(parser)
    tokenize(run_of(parser.parse_args()))


if __name__ == "__main__":
    main()
