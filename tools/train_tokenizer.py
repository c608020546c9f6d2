"""Stage 2 of training the pair: fits the tokenizer, encodes the corpus, and cuts the evaluation prompts.

    python tools/train_tokenizer.py --out RUN          after train_corpus.py

Writes RUN/tokens (tokenizer.json, a file of 16-bit ids for every text file) and RUN/prompts.
"""

import argparse
import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.training.machine import fail_in_one_line, write_whole
from tools.training.prompts import write_prompts
from tools.training.run import Run, add_arguments, run_of
from tools.training.tokens import encode_corpus, fit_tokenizer, load_tokenizer, sample_texts


def tokenize(run: Run) -> None:
    """Makes tokenizer, token files and prompts unless they are there."""
    if run.finished("tokens"):
        return
    run.require("corpus")
    shape = run.shape
    with run.stage("tokens") as notes:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    tokenize(run_of(parser.parse_args()))


if __name__ == "__main__":
    main()
