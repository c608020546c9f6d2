"""The card that lies next to the weights: what they are, what they were made of, how, and how well they do."""

import platform
from collections.abc import Iterable
from typing import Any

import torch

from tools.training.machine import read_json, write_whole
from tools.training.run import Run

_INTRODUCTION = """\
# The bundled pair

A small Qwen3.5-style hybrid target (Gated DeltaNet and gated attention), its DFlash drafter, and their tokenizer,
trained from scratch by `tools/train_pair.py` on openly licensed Python source. It exists so that the engine can be
tried and tested without a download: it writes recognisable Python and knows nothing else. Do not run what it writes.

**Licence of the weights:** Apache-2.0, like the code of this repository. Nothing but the packages listed below was
trained on; each states a permissive licence, which is given with it. The authors of those packages are not involved.
"""


def write_card(run: Run) -> None:
    """Writes `CARD.md` beside the two folders, from what the stages noted.

    Raises:
        UsageError: a stage is unfinished, or was made with other settings.
        ValueError: a file of the run is damaged.
    """
    run.require("corpus", {})
    for part in ("target", "drafter"):
        run.weights(part)
    notes = {stage: run.require(stage, run.settings()) for stage in ("tokens", "target", "generated", "drafter")}
    manifest = read_json(run.corpus / "manifest.json")
    parts = [
        _INTRODUCTION,
        _models(run, notes),
        _figures(notes),
        _corpus(manifest, notes["tokens"]["sizes"]),
        _commands(run, notes),
        _packages(manifest),
    ]
    write_whole(run.pair / "CARD.md", lambda part: part.write_text("\n".join(parts), encoding="utf-8"))


def _models(run: Run, notes: dict[str, Any]) -> str:
    target = _config(run, "target")["text_config"]
    drafter = _config(run, "drafter")
    block = drafter["dflash_config"]
    return f"""\
## The models

- **Target**: {notes["target"]["parameters"]:,} parameters, width {target["hidden_size"]}, layers {run.shape.layers}
  (l is Gated DeltaNet, f full attention), vocabulary {target["vocab_size"]}, tied head. Trained on windows of
  {run.shape.length} tokens.
- **Drafter**: {notes["drafter"]["parameters"]:,} parameters, {drafter["num_hidden_layers"]} layers. All slide over
  {drafter["sliding_window"]} rows. Blocks of {block["block_size"]}; reads target layers {block["target_layer_ids"]}.
- **Tokenizer**: byte-level BPE without a normaliser, so that text survives it byte for byte.
"""


def _config(run: Run, part: str) -> dict[str, Any]:
    return read_json(run.pair / part / "config.json", delete=run.out / part / "result.json")


def _figures(notes: dict[str, Any]) -> str:
    target, drafter = notes["target"]["figures"], notes["drafter"]["figures"]
    losses = [
        (split, f"{target[f'{split}_nats_per_token']:.3f}", f"{target[f'{split}_bits_per_byte']:.3f}")
        for split in ("heldout", "unseen")
        if f"{split}_nats_per_token" in target
    ]
    chains = [(name, f"{value:.2f}") for name, value in drafter.items() if name not in ("steps", "seconds")]
    return f"""\
## Figures at the end of training

The target's loss on files that were held out, and on packages never trained on:

{_table(("split", "nats a token", "bits a byte"), losses)}

Mean accepted tokens a round, bonus included, of a chain along greedy continuations of the evaluation prompts (by
split and prompt length in tokens; estimated in training, all continuations counted, looping ones too):

{_table(("prompts", "chain"), chains)}
"""


def _corpus(manifest: dict[str, Any], sizes: dict[str, Any]) -> str:
    rows = [
        (split, f"{size['files']:,}", f"{size['bytes']:,}", f"{sizes[split]['tokens']:,}")
        for split, size in manifest["splits"].items()
    ]
    dropped = "; ".join(f"{reason}: {count:,}" for reason, count in manifest["dropped"].items())
    return f"""\
## Corpus and split

{_table(("split", "files", "bytes", "tokens"), rows)}

`train` and `heldout` are divided by a hash of a file's content, about one file in a hundred held out; `unseen` holds
whole packages. Exact copies count once. Code that a package vendors is left out, and so are files for these reasons
(number of files): {dropped}.
"""


def _commands(run: Run, notes: dict[str, Any]) -> str:
    target, generated, drafter = (notes[stage] for stage in ("target", "generated", "drafter"))
    device = torch.cuda.get_device_name(run.device) if run.device != "cpu" else platform.processor() or "CPU"
    commands = "\n".join(run.commands)
    return f"""\
## How it was made

```
{commands}
```

On {device} with torch {torch.__version__}.

- Target: {target["figures"]["steps"]:,} steps, {target["tokens"]:,} tokens, {target["figures"]["seconds"]:.0f} s.
- Text written by the target: {generated["sequences"]:,} continuations, {generated["tokens"]:,} tokens,
  {generated["seconds"]} s. The drafter learned from {drafter["sequences"]:,} of them.
- Drafter: {drafter["figures"]["steps"]:,} steps, {drafter["figures"]["seconds"]:.0f} s.
"""


def _packages(manifest: dict[str, Any]) -> str:
    used = [
        (p["name"], p["version"], p["licence"], f"{p['files']:,}", f"{p['bytes']:,}", "unseen" if p["unseen"] else "")
        for p in manifest["packages"]
    ]
    left_out = [(e["name"], e["reason"]) for e in manifest["excluded"]]
    table = _table(("package", "version", "licence as stated", "files", "bytes", ""), used)
    return f"""\
## Packages

{table}

Installed, but left out:

{_table(("package", "reason"), left_out)}
"""


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
