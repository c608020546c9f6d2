"""Pairs of tokens sampled through draft trees on an 8-token model, held against exact enumeration.

    python tools/law.py                    1,000,000 pairs for every setting, shape of tree and drafter
    python tools/law.py --draws 100000 --settings plain,penalties

Each pair is an independent restart from one fixed prefix: a tree is drafted, every node draws, the walk emits; where it
emits one token only, the root of the next round draws the second. The total-variation distance between the pairs and
their law must lie within the 99.9 % quantile of exact multinomial draws of the same number. The law is enumerated in
plain arithmetic, which shares no code with the sampler. A planted bias, the first drafted child emitted once in a
hundred draws, must lie beyond it wherever it can be told in so many draws.

A table for people comes first, the last line of stdout is one JSON object. Exit code 0; 1 if a law is missed or a bias
is not caught; 2 for bad use.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddtree.arguments import whole  # noqa: E402
from ddtree.penalties import Adjusted  # noqa: E402
from ddtree.sampling import make_sampler  # noqa: E402
from ddtree.tree import DraftTree, accept, build_chain, build_tree  # noqa: E402
from qwen_gdn import Context, History, Topology  # noqa: E402
from tools.arguments import documented_parser, some_of  # noqa: E402

VOCAB = 8
PROMPT, EMITTED = [3, 1], [3, 6]  # the fixed prefix; what penalties count as emitted is its second part
TABLE = 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.9},
    "top-k": {"temperature": 0.9, "top_k": 4},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p": {"temperature": 0.9, "min_p": 0.12},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.4,
        "logit_bias": {2: 0.6},
    },
}
SETTINGS["penalties and all cuts"] = SETTINGS["penalties"] | {"top_k": 6, "top_p": 0.9, "min_p": 0.05}
SHAPES = {"tree": build_tree, "chain": build_chain}
DRAFTERS: dict[str, Tensor] = {
    "likely first": TABLE[EMITTED[-1]].repeat(2, 1),
    "even": torch.zeros(2, VOCAB),
    "one token only": torch.full((2, VOCAB), -torch.inf).index_fill(1, torch.tensor([5]), 0.0),
}
BUDGET = 6
BIAS = 0.01


class Finding(NamedTuple):
    """Total-variation distances of sound and of biased pairs, and what they are held against."""

    setting: str
    shape: str
    drafter: str
    distance: float
    limit: float
    biased: float
    expected_bias: float

    @property
    def sound(self) -> bool:
        return self.distance <= self.limit

    @property
    def caught(self) -> bool:
        """Whether the bias shows; one that moves the law by less than 1.5 limits may drown."""
        return self.biased > self.limit or self.expected_bias < 1.5 * self.limit


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    findings = []
    for setting in options.settings:
        for shape in SHAPES:
            for drafter in DRAFTERS:
                found = examine(setting, shape, drafter, options.draws)
                findings.append(found)
                verdict = "" if found.sound and found.caught else "  FAULT"
                print(
                    f"{setting:24}{shape:7}{drafter:16} distance {found.distance:.5f}  limit {found.limit:.5f}  "
                    f"biased {found.biased:.5f}{verdict}",
                    flush=True,
                )
    faults = [found._asdict() for found in findings if not (found.sound and found.caught)]
    shown = sum(found.biased > found.limit for found in findings)
    print(json.dumps({"draws": options.draws, "laws": len(findings), "biases_caught": shown, "faults": faults}))
    return 1 if faults else 0


def examine(setting: str, shape: str, drafter: str, draws: int) -> Finding:
    """Sound and biased pairs of one setting, one shape of tree and one drafter."""
    how, tree = SETTINGS[setting], SHAPES[shape](EMITTED[-1], DRAFTERS[drafter], BUDGET)
    law = np.array(pair_law(how))
    limit = quantile(law, draws)
    distances = [distance(pairs(tree, how, draws, bias), law) for bias in (0.0, BIAS)]
    first = law.reshape(VOCAB, VOCAB).sum(1)[int(tree.tokens[1])]
    return Finding(setting, shape, drafter, distances[0], limit, distances[1], BIAS * (1 - float(first)))


def pairs(tree: DraftTree, how: dict[str, Any], draws: int, bias: float) -> np.ndarray:
    """Counts [VOCAB²] of the first two tokens of that many rounds over one tree, each from the same prefix.

    With probability `bias` the tree's first child is what its root emits, whatever was drawn.
    """
    sampler = make_sampler(seed=1, **how)
    inner = sampler.sampler if isinstance(sampler, Adjusted) else sampler
    rows = inner(_adjusted(sampler, tree, EMITTED).repeat(draws, 1)).view(draws, -1)
    planted = torch.rand(draws, generator=torch.Generator().manual_seed(2)) < bias
    rows[planted, 0] = tree.tokens[1]
    first, second = _walked(tree, rows)
    alone = [_adjusted(sampler, DraftTree(torch.tensor([a]), Topology([-1])), [*EMITTED, a]) for a in range(VOCAB)]
    ended = second < 0
    second[ended] = inner(torch.cat(alone)[first[ended]])  # the root of the next round
    return torch.bincount(first * VOCAB + second, minlength=VOCAB**2).numpy()


def _adjusted(sampler: Any, tree: DraftTree, emitted: list[int]) -> Tensor:
    """The logits of a tree's nodes as the sampler changes them by the path to each."""
    logits = TABLE[tree.tokens]
    if not isinstance(sampler, Adjusted):
        return logits
    history = History(torch.tensor(PROMPT))
    history.extend(emitted)
    return sampler.adjusted(logits, Context(history, tree.tokens, tree.topology))


def _walked(tree: DraftTree, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first and second token that each row of draws emits, −1 for none, by `accept`; equal rows are walked once."""
    codes, places = (rows * VOCAB ** torch.arange(rows.shape[1])).sum(1).unique(return_inverse=True)
    kinds = codes[:, None] // VOCAB ** torch.arange(rows.shape[1]) % VOCAB
    emitted = []
    for draws in kinds.tolist():
        path, bonus = accept(tree, draws)
        emitted.append([*(draws[node] for node in path[:-1]), bonus, -1][:2])
    return tuple(torch.tensor(emitted)[places].unbind(1))


def pair_law(how: dict[str, Any]) -> list[float]:
    """Probabilities [VOCAB²] of the two tokens after the prefix, by enumeration."""
    first = token_law(TABLE[EMITTED[-1]].tolist(), EMITTED, how)
    return [p * q for a, p in enumerate(first) for q in token_law(TABLE[a].tolist(), [*EMITTED, a], how)]


def token_law(row: list[float], emitted: list[int], how: dict[str, Any]) -> list[float]:
    """One token's probabilities: bias, penalties, temperature, top-k, top-p and min-p one after the other."""
    logits = [_penalised(token, logit, emitted, how) for token, logit in enumerate(row)]
    weights = [math.exp((x - max(logits)) / how["temperature"]) for x in logits]
    order = sorted(range(VOCAB), key=lambda token: (-weights[token], token))[: how.get("top_k") or VOCAB]
    total, mass, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if mass < how.get("top_p", 1.0) * total:
            kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= how.get("min_p", 0.0) * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def _penalised(token: int, logit: float, emitted: list[int], how: dict[str, Any]) -> float:
    logit += how.get("logit_bias", {}).get(token, 0.0)
    if token in PROMPT or token in emitted:
        factor = how.get("repetition_penalty", 1.0)
        logit = logit * factor if logit < 0 else logit / factor
    count = emitted.count(token)
    return logit - how.get("frequency_penalty", 0.0) * count - how.get("presence_penalty", 0.0) * (count > 0)


def distance(counts: np.ndarray, law: np.ndarray) -> float:
    """Total variation between counts and a law."""
    return float(abs(counts / counts.sum() - law).sum() / 2)


def quantile(law: np.ndarray, draws: int, times: int = 20_000) -> float:
    """The 99.9 % quantile of the distance of exact draws of a law."""
    sample = np.random.default_rng(7).multinomial(draws, law / law.sum(), size=times)
    return float(np.quantile(abs(sample / draws - law).sum(1) / 2, 0.999))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = documented_parser("law", __doc__)
    add = parser.add_argument
    add("--draws", type=whole(1000), default=1_000_000, metavar="N", help="pairs of each law (default: 1000000)")
    add(
        "--settings",
        type=some_of("setting", SETTINGS),
        default=list(SETTINGS),
        help=f"of {', '.join(SETTINGS)} (default: all)",
    )
    add("--threads", type=whole(1), default=1, help="of torch (default: 1)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
