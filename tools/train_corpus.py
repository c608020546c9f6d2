"""Stage 1 of training the pair: gathers Python source of permissive licence into a corpus.

    python tools/train_corpus.py --installed --out RUN             this interpreter's packages and standard library
    python tools/train_corpus.py --source DIR --license MIT --out RUN

A source folder that has `*.dist-info` in it is read as a site-packages: packages are kept or left out by the licence
that their metadata states. RUN/corpus/manifest.json lists both, with counts.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.training import command
from tools.training.command import Parser, UsageError, fail_in_one_line
from tools.training.corpus import build_corpus
from tools.training.packages import UNSEEN, content_digest, gather, standard_library
from tools.training.run import Run, add_arguments, run_of

_SHARDS = 16


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say where source files are."""
    parser.add_argument(
        "--source", type=command.folder, action="append", default=[], help="a folder of source files; repeatable"
    )
    parser.add_argument("--installed", action="store_true", help="this interpreter's packages and standard library")
    parser.add_argument("--license", help="licence of plain source folders, as an SPDX expression")
    parser.add_argument(
        "--unseen", action="append", help=f"a package never to train on; repeatable (default: {', '.join(UNSEEN)})"
    )


def build(run: Run, arguments: argparse.Namespace) -> None:
    """Builds the corpus unless it is there; a call that names no sources takes the one that is.

    Raises:
        UsageError: sources are absent, cannot be used, or are not those of the corpus that is there.
    """
    sources = [Path(sysconfig.get_path("purelib"))] if arguments.installed else []
    sources += arguments.source
    if not sources:
        if arguments.license is not None or arguments.unseen is not None or not run.finished("corpus"):
            raise UsageError("no sources: give --source DIR or --installed")
        return
    packages, excluded = gather(sources, arguments.license)
    packages += [standard_library()] if arguments.installed else []
    unseen = frozenset(UNSEEN if arguments.unseen is None else arguments.unseen)
    settings = {
        "sources": [str(source.resolve()) for source in sources],
        "licence": arguments.license,
        "unseen": sorted(unseen),
        "content": content_digest(packages),
    }
    if run.finished("corpus", settings):
        return
    with run.stage("corpus", settings) as notes:
        manifest = build_corpus(packages, excluded, unseen=unseen, out=run.corpus, shards=_SHARDS)
        notes["splits"] = manifest["splits"]
        for name, size in manifest["splits"].items():
            print(f"{name}: {size['files']} files, {size['bytes'] / 1e6:.1f} MB", file=sys.stderr)
        for refused in excluded:
            print(f"left out: {refused.name} ({refused.reason})", file=sys.stderr)


@fail_in_one_line
def main() -> None:
    parser = Parser(__doc__)
    add_arguments(parser)
    add_source_arguments(parser)
    arguments = parser.parse_args()
    build(run_of(arguments), arguments)


if __name__ == "__main__":
    main()
