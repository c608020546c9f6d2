"""Rounds whose acceptance is simulated: what each fixed budget and an automatic one make of a drafter of known quality.

Target and drafter have random weights, so that nothing drafted would ever be accepted; all that costs time runs as
always. What the drafter says is put in the place of its logits, and the target's draws follow just these chances, so
that the drafter is as good as its profile says and knows how good it is.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree import AutoBudget, NoDrafts, generate
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn import HybridCache, greedy
from qwen_gdn.engine import Engine
from qwen_gdn.model import LayerId
from tools.measure.gpu import Setting, Shape, feed

WARM, ROUNDS = 16, 40  # rounds of a mode that do not count, and that do
RANKS = 64  # tokens of a position that can be drafted or drawn
FALL = 0.7  # most that a rank's chance is of the one's before it
SPARE = (WARM + ROUNDS) * 16  # rows that one mode may add


class Profile(NamedTuple):
    """The chance of a drafter's likeliest token at the first position, and what each further one leaves of it."""

    first: float
    further: float

    def chances(self, positions: int) -> Tensor:
        """[positions, RANKS], rank by rank, each the same share of the one before; what is missing to 1 none drafts."""
        best = self.first * self.further ** torch.arange(positions, dtype=torch.float64)[:, None]
        return best * (1 - best).clamp_max(FALL) ** torch.arange(RANKS)


PROFILES = {
    "good": Profile(0.9, 0.98),
    "fair": Profile(0.7, 0.95),
    "poor": Profile(0.4, 0.9),
    "useless": Profile(0.02, 1.0),
}


class Simulation:
    """A drafter of that quality, and the sampler of its target; of a round both know the same coming tokens."""

    def __init__(self, drafter: RecordedDrafter, profile: Profile, vocab: int, seed: int = 0) -> None:
        self._drafter = drafter
        chances = profile.chances(drafter.drafter.config.block_size - 1)
        rest = (1 - chances.sum(1, keepdim=True)).clamp_min(0)
        self._chances = torch.cat((rest, chances), 1)  # of token 0, which is never drafted, and of the drafted ones
        self._draw = torch.Generator().manual_seed(seed)
        said = torch.full((len(chances), vocab), -30.0)
        said[:, 1 : RANKS + 1] = chances.log()
        self._said = said.to(drafter.drafter.fc.weight.device)
        self._coming = [0]

    @property
    def layers(self) -> Sequence[LayerId]:
        return self._drafter.layers

    def bind(self, target: Any) -> None:
        self._drafter.bind(target)

    def reset(self) -> None:
        self._drafter.reset()

    def observe(self, features: Tensor) -> None:
        self._drafter.observe(features)

    def propose(self, root: int) -> Tensor:
        self._drafter.propose(root)
        self._coming = torch.multinomial(self._chances, 1, generator=self._draw)[:, 0].tolist()
        return self._said

    def __call__(self, logits: Tensor) -> Tensor:
        return greedy(logits)

    def at(self, depths: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Draws for nodes at these depths, after the time that real ones take."""
        coming = [*self._coming, 0]

        def draws(logits: Tensor) -> Tensor:
            greedy(logits)
            return torch.tensor([coming[min(depth, len(coming) - 1)] for depth in depths])

        return draws

    def passed(self, count: int) -> None: ...


def measure(setting: Setting, shape: Shape, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Every profile at every prefix, in all modes; `keep` all that has been found so far."""
    engine, drafter, say = setting.engine, setting.drafter, setting.say
    cache = engine.new_cache(max(shape.prefixes) + SPARE)
    autos = {name: AutoBudget(most=max(shape.sizes) - 1) for name in PROFILES}
    found: dict[str, Any] = {"profiles": {name: p._asdict() for name, p in PROFILES.items()}, "prefixes": []}
    say("acceptance is simulated: the chance of a drafter's likeliest token, and what a further position leaves of it")
    for prefix in shape.prefixes:
        cache.crop(0)
        drafter.reset()
        feed(engine.model, drafter, torch.full((1, prefix), 7), cache)
        for name, profile in PROFILES.items():
            budgets: list[int | AutoBudget] = [0, *(size - 1 for size in shape.sizes), autos[name]]
            modes = list(_modes(engine, drafter, cache, profile, budgets))
            best = max(mode["tokens_per_second"] for mode in modes[:-1])
            found["prefixes"].append({"prefix": prefix, "profile": name, "modes": modes})
            say(f"prefix {prefix}, {name} drafter ({profile.first}, {profile.further}):")
            for mode in modes:
                speed, taken = mode["tokens_per_second"], mode["ms"]
                drafts = f"tau {mode['tau']:5.2f}, {mode['nodes']:5.1f} nodes"
                say(f"  {mode['mode']:9} {speed:6.1f} tok/s, {taken:6.2f} ms a round, {drafts}")
            say(f"  auto is {modes[-1]['tokens_per_second'] / best:.3f} x the best fixed budget")
            keep(found)
    return found


def _modes(
    engine: Engine, drafter: RecordedDrafter, cache: HybridCache, profile: Profile, budgets: Sequence[int | AutoBudget]
) -> Iterator[dict[str, Any]]:
    """Rounds under each budget, all from the same context."""
    held, context = cache.snapshot(), drafter.snapshot()
    for budget in budgets:
        cache.restore(held)
        drafter.restore(context)
        simulated = Simulation(drafter, profile, engine.config.vocab_size)
        rounds = generate(
            engine,
            simulated if budget else NoDrafts(),
            [7],
            max_new_tokens=SPARE - 1,
            budget=budget,
            cache=cache,
            sampler=simulated,
        )
        for _ in islice(rounds, WARM + 1):
            pass
        start = time.perf_counter()
        done = list(islice(rounds, ROUNDS))
        taken = time.perf_counter() - start
        tokens = sum(len(each.tokens) for each in done)
        yield {
            "mode": "auto" if isinstance(budget, AutoBudget) else f"tree:{budget}" if budget else "plain",
            "tokens_per_second": tokens / taken,
            "ms": 1e3 * taken / len(done),
            "tau": tokens / len(done),
            "nodes": sum(each.drafted for each in done) / len(done),
        }
    cache.restore(held)
    drafter.restore(context)
