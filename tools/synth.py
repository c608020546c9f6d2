"""Writes a synthetic checkpoint of a published config: the text model's names, shapes and types, random values.

    python tools/synth.py CONFIG FOLDER                        in whole, as large as the published text model
    python tools/synth.py CONFIG FOLDER --layers 4 --set vocab_size=1024 num_experts=16
    python tools/synth.py DRAFTER_CONFIG FOLDER --target-layers 4 --set vocab_size=1024

CONFIG is a target's or a drafter's config.json. A target comes with the MTP module that its config counts, as the
multimodal or the text-only layout its architecture names, with experts fused (in eight bits: one by one), and with a
tokenizer of single bytes, so that the command can run it. `--layers` keeps the first layers, `--target-layers` makes a
drafter read the first ones of so many, `--set` changes sizes. What then lies beyond a smaller vocabulary is moved into
it. Activations stay near 1, and the output of such a model is noise. Not written: a vision tower, chat template and
generation config. Everything lies in the folder at the end, or nothing.

Exit code 0; 1 for a failure; 2 for bad use.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddtree.arguments import whole
from qwen_gdn.stated import read_object
from tools.arguments import ToolParser, file
from tools.synthetic.files import write
from tools.synthetic.shrink import shrunk
from tools.synthetic.tensors import contents


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        raw = shrunk(read_object(options.config), options.layers, options.target_layers, dict(options.set))
        tensors = contents(raw, options.seed, exact=options.float32_gates)
        size = write(options.folder, raw, tensors, int(options.shard_gigabytes * 1e9))
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        print(f"synth: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder}: {len(tensors)} tensors, {size / 1e9:.3f} GB")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ToolParser(prog="synth", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("config", type=file, metavar="CONFIG", help="a config.json")
    add("folder", type=Path, metavar="FOLDER", help="where to write; made if it is not there, and must be empty")
    add("--layers", type=whole(1), help="keep only the first layers")
    add("--target-layers", type=whole(2), help="of the target that a drafter is for")
    add("--set", nargs="+", default=[], type=_setting, metavar="KEY=SIZE", help="other sizes than the config's")
    add("--float32-gates", action="store_true", help="store A_log and the delta norms in float32, as 3.5 releases do")
    add("--shard-gigabytes", type=float, default=5.0, help="most of a weight file (default: 5)")
    add("--seed", type=whole(0), default=0)
    options = parser.parse_args(arguments)
    if options.folder.is_dir() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty; name another folder, or empty it")
    if not 0 < options.shard_gigabytes < math.inf:
        parser.error(f"--shard-gigabytes must be above 0 and finite, got {options.shard_gigabytes}")
    return options


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    try:
        return key, whole(1)(value) if equals else _fail(text)
    except (ValueError, argparse.ArgumentTypeError):
        return _fail(text)


def _fail(text: str) -> Any:
    raise argparse.ArgumentTypeError(f"must be KEY=SIZE with a size of at least 1, got {text!r}")


if __name__ == "__main__":
    sys.exit(main())
