"""The speculative loop over rows of different lengths, each written as it would be alone.

Every row drafts, draws and stops by itself; the target verifies the trees of all rows in one forward over a ragged
cache, and each row keeps its own path.
"""

import copy
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import TypeVar, cast

import torch
from torch import Tensor

from qwen_gdn.checked import checked_callables, checked_count, shown
from qwen_gdn.decode import (
    PREFILL_WINDOW,
    Draws,
    OnStage,
    Sampler,
    checked_prompt,
    checked_sampler,
    checked_stops,
    greedy,
)
from qwen_gdn.model import Hidden, LayerId, QwenGDN
from qwen_gdn.ragged import RaggedCache

from .budget import fixed
from .contexts import Replicable
from .loop import Loop, Round
from .proposer import Proposer, bound_layers
from .rows import Forwards, Observe, Row
from .tree import Build, DraftTree, build_tree

T = TypeVar("T")


def generate_batch(
    target: QwenGDN,
    drafter: Proposer | Sequence[Proposer],
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    max_new_tokens: int | Sequence[int],
    budget: int | Sequence[int] = 15,
    stop_ids: Collection[int] = (),
    sampler: Sampler | Sequence[Sampler] = greedy,
    cache: RaggedCache | None = None,
    build: Build = build_tree,
    prefill_window: int = PREFILL_WINDOW,
    on_stage: OnStage = nullcontext,
) -> Generator[tuple[Round, ...], None, None]:
    """Generates after several prompts at once; yields a tuple of `Round`s at a time, one for each prompt.

    Each row is what `generate` writes after its prompt alone, round by round (in float32 but for ties at rounding
    level). A row that has ended sits the rest out, and its rounds have no tokens: `Round((), 0, 0)`.

    After every yield, however the generation ends, the cache holds of each row all prompt and emitted tokens but the
    last. A round that raises leaves every row where it was before: none is committed unless all are.

    Args:
        target: the model itself; an engine's programs run one sequence.
        drafter: one proposer a row, in a sequence, all reading the same layers, or a single one, of which every row
            gets a replica that has observed nothing and the given one stays as it was. They are bound to the target.
        prompts: of each row, as `generate` takes one.
        max_new_tokens, budget: for all rows, or a sequence of one a row.
        stop_ids: the first of these that a row emits ends it.
        sampler: one a row, in a sequence, or a single one, of which every row gets a copy: rows then draw from equal
            streams, and equal prompts write equal texts. Give each row its own seed to tell them apart.
        cache: an empty ragged cache of that many rows, `target.new_cache(..., batch=len(prompts), ragged=True)`; None
            makes one of the right size.
        build, prefill_window, on_stage: as for `generate`.

    Raises:
        ValueError: at the call, before any forward: an argument does not fit, or not this number of prompts; the row
            is named. Later, from a round: `sampler`, `build` or a drafter returned something else than it may.
    """
    if not isinstance(target, QwenGDN):
        raise ValueError(f"generate_batch takes a QwenGDN, got {type(target).__name__}; give an engine's own .model")
    batch = _row_count(prompts)
    counts, budgets = _each("max_new_tokens", max_new_tokens, batch), _each("budget", budget, batch)
    checked_count("prefill_window", prefill_window, 1)
    stops = checked_stops(stop_ids)
    checked_callables(build=build, on_stage=on_stage)
    ids = [_in_row(row, checked_prompt, target, *pair) for row, pair in enumerate(zip(prompts, counts, strict=True))]
    spending = [fixed(f"budget of row {row}", nodes) for row, nodes in enumerate(budgets)]
    room = max(prompt.shape[1] + count - 1 for prompt, count in zip(ids, counts, strict=True))
    memory = _fitting_cache(target, cache, batch, max(room, 1))
    drawing = _drawing(target, _each("sampler", sampler, batch, copy.deepcopy), ids)
    drafters = _each("drafter", drafter, batch, lambda one: _replica(one, target))
    layers = _bound_alike(drafters, target)
    lengths = [prompt.shape[1] for prompt in ids]
    parts = zip(drafters, drawing, counts, spending, lengths, strict=True)
    rows = [Row(one, draws, stops.__contains__, most, nodes, length=held) for one, draws, most, nodes, held in parts]
    return Loop(target, Together(target, memory, layers, on_stage), rows, build, on_stage).run(ids, prefill_window)


class Together(Forwards[QwenGDN, RaggedCache]):
    """Forwards over rows of their own lengths, of which some may have ended."""

    def read(self, prompts: Sequence[Tensor], window: int, observe: Observe) -> Tensor:
        lengths = [prompt.shape[1] for prompt in prompts]
        longest = max(lengths)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - lengths[row] :] = prompt[0]
        mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
        last = tokens[:, :0]
        for part, own in zip(tokens.split(window, 1), mask.split(window, 1), strict=True) if longest else ():
            with self.on_stage("prefill"):
                hidden: Hidden = self.target(part, self.cache, mask=own, capture=self.layers)
            for row, count in enumerate(own.sum(1).tolist()):
                if count:
                    observe(row, _of_row(hidden, row, slice(-count, None)))
            last = hidden.final[:, -1]
        return last

    def verify(self, trees: Mapping[int, DraftTree], branched: bool) -> list[Hidden]:
        sizes = {row: len(tree.topology) for row, tree in trees.items()}
        tokens = torch.zeros(self.cache.batch, max(sizes.values()), dtype=torch.int64)
        for row, tree in trees.items():
            tokens[row, : sizes[row]] = tree.tokens
        every = range(self.cache.batch)
        hidden: Hidden
        if branched:
            window = self.cache.branch([trees[row].topology if row in trees else None for row in every])
            hidden = self.target(tokens, window, capture=self.layers)
        else:
            own = torch.tensor([[row in trees] for row in every])
            hidden = self.target(tokens, self.cache, mask=own, capture=self.layers)
        return [_of_row(hidden, row, slice(size)) for row, size in sizes.items()]

    def commit(self, paths: Mapping[int, list[int]]) -> None:
        self.cache.commit([paths.get(row, []) for row in range(self.cache.batch)])


def _of_row(hidden: Hidden, row: int, tokens: slice) -> Hidden:
    """Some tokens of one row, as a batch of one."""
    return Hidden(hidden.final[row : row + 1, tokens], tuple(part[row : row + 1, tokens] for part in hidden.captured))


def _row_count(prompts: Sequence[Sequence[int] | Tensor]) -> int:
    if not isinstance(prompts, Sequence | Tensor) or len(prompts) == 0:
        raise ValueError(f"prompts must be a list of one prompt a row, of at least one row, got {shown(prompts)}")
    return len(prompts)


def _each(name: str, given: T | Sequence[T], batch: int, again: Callable[[T], T] = lambda value: value) -> list[T]:
    """One a row: as given, or what `again` makes for each of the single one."""
    if not isinstance(given, Sequence):
        return [again(given) for _ in range(batch)]
    if len(given) != batch:
        raise ValueError(f"{name}: give one for all rows or one a row, got {len(given)} for {batch} prompts")
    return list(given)


def _in_row(row: int, check: Callable[..., Tensor], *arguments: object) -> Tensor:
    """What a check returns; the ValueError that it raises names the row."""
    try:
        return check(*arguments)
    except ValueError as error:
        raise ValueError(f"row {row}: {error}") from None


def _fitting_cache(target: QwenGDN, cache: RaggedCache | None, batch: int, room: int) -> RaggedCache:
    """The given cache if it can take so many tokens a row, or a new one of that size."""
    if cache is None:
        return target.new_cache(room, batch, ragged=True)
    target.check_memory(cache)
    if not isinstance(cache, RaggedCache) or cache.batch != batch or cache.capacity < room or cache.extent:
        raise ValueError(
            f"generate_batch takes an empty cache of its size, new_cache({room}, batch={batch}, ragged=True) or more, "
            f"got {shown(cache)}"
        )
    cache.refuse_open_window("decoding")
    return cache


def _drawing(target: QwenGDN, samplers: Sequence[Sampler], prompts: Sequence[Tensor]) -> list[Draws]:
    """Each row's sampler, told of its prompt."""
    for row, sampler in enumerate(samplers):
        checked_callables(**{f"sampler of row {row}": sampler})
    _check_distinct("sampler", [sampler for sampler in samplers if not isinstance(sampler, FunctionType)])
    return [checked_sampler(target, *pair, 0, ()) for pair in zip(samplers, prompts, strict=True)]


def _check_distinct(name: str, given: Sequence[object]) -> None:
    """Raises ValueError if two rows would share what each changes by using it."""
    if len({id(one) for one in given}) < len(given):
        raise ValueError(f"{name}: two rows were given one and the same; give each its own, or a single one, no list")


def _bound_alike(drafters: Sequence[Proposer], target: QwenGDN) -> tuple[LayerId, ...]:
    """Binds and resets the rows' proposers; the layers that all of them read."""
    _check_distinct("drafter", drafters)
    layers = [bound_layers(drafter, target) for drafter in drafters]
    if len(set(layers)) > 1:
        found = " and ".join(map(str, dict.fromkeys(layers)))
        raise ValueError(f"drafter: all rows must read the same layers of the target, got {found}")
    for drafter in drafters:
        drafter.reset()
    return layers[0]


def _replica(drafter: Proposer, target: QwenGDN) -> Proposer:
    """A proposer of its own for a row: of the same weights where the drafter can say so, else a copy."""
    if isinstance(drafter, Replicable):
        return cast(Proposer, drafter.replica())
    return copy.deepcopy(drafter, {id(target): target})
