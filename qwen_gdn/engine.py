"""A model whose short forwards are compiled programs, on CUDA recorded as graphs and replayed.

An eager step of a large hybrid waits for a thousand kernel launches; a replayed one for memory alone. `Engine` has
the model's own face, so that decoding and drafting loops need not know which of the two they drive. One token and
trees of up to the largest size are programs, and so are pieces of a prompt where sizes for them are given; everything
else (batches, rollback) is the model's own forward on the same cache.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from .cache import Branch, HybridCache
from .checked import shown
from .face import ModelFace
from .joined import join_projections
from .layer_cache import LayerCache
from .model import Hidden, LayerId, QwenGDN
from .program_set import ProgramSet, Verified
from .recorded import Announce, unannounced
from .static_cache import StaticCache, StaticMemory

SIZES = (16, 32, 64, 128, 256)
"""Nodes, root included, of the trees that have a program; a tree takes the smallest that holds it."""

GRAIN = 1024  # rows by which memory is sized, so that a later generation finds some that fits
IDLE = 2  # memories that are kept, programs included, when no cache uses them


class Engine(ModelFace):
    """Runs a model's forwards over caches that it makes; results are the model's, to rounding.

    A program is compiled and recorded when it is first needed, once for each memory and choice of captured layers, and
    kept. Memory goes from a cache that is dropped to the next one made, with its programs.

    Args:
        model: its projections are joined (`join_projections`). Do not move it afterwards, nor change its weights in
            another way than by `load_state_dict`.
        sizes: ascending node counts of tree programs.
        chunks: ascending token counts of programs that read prompts, such as (128, 512, 2048); without any, the model
            itself reads them.
        announce: entered with a program's name while it is prepared, which takes seconds to minutes.
    """

    def __init__(
        self,
        model: QwenGDN,
        *,
        sizes: Sequence[int] = SIZES,
        chunks: Sequence[int] = (),
        announce: Announce = unannounced,
    ) -> None:
        if not isinstance(model, QwenGDN):
            raise ValueError(f"engine: takes a QwenGDN, got {shown(model)}")
        self.sizes, self.chunks = _counts("sizes", sizes), _counts("chunks", chunks)
        if not self.sizes:
            raise ValueError("engine: sizes must hold at least one count of nodes, got none")
        join_projections(model)
        super().__init__(model)
        self._kind = (model.device, model.dtype)
        self._announce = announce
        self._own: WeakSet[ProgramSet] = WeakSet()
        self._idle: list[ProgramSet] = []

    def new_cache(self, capacity: int, batch: int = 1, rollback: int = 0) -> HybridCache:
        """Empty memory, as `QwenGDN.new_cache` makes it; of one sequence without rollback at fixed addresses."""
        if (type(capacity), type(batch), type(rollback)) != (int, int, int) or batch != 1 or rollback or capacity < 1:
            return super().new_cache(capacity, batch, rollback)
        self._check_model()
        return self._static_cache(capacity)

    def __call__(
        self, tokens: Tensor, memory: HybridCache | Branch | None = None, *, capture: Sequence[LayerId] = ()
    ) -> Hidden:
        """What `QwenGDN.forward` does, by a program where there is one. It raises what that raises."""
        self._check_model()
        shape = self.model.checked_tokens(tokens).shape
        cache = memory.cache if isinstance(memory, Branch) else memory
        if isinstance(cache, ProgrammedCache) and cache.programs in self._own:
            if isinstance(memory, Branch) and shape[0] == 1 and shape[1] <= self.sizes[-1]:
                return self._verify(tokens, memory, cache, capture)
            if memory is cache and shape[0] == 1 and (shape[1] == 1 or shape[1] <= max(self.chunks, default=0)):
                return self._append(tokens, cache, capture)
        hidden: Hidden = self.model(tokens, memory, capture=capture)
        return hidden

    def _check_model(self) -> None:
        now = (self.model.device, self.model.dtype)
        if now != self._kind:
            was, now_is = (f"{dtype} on {device}" for device, dtype in (self._kind, now))
            raise ValueError(f"engine: its model was {was} and now is {now_is}; make a new Engine of it")

    @torch.no_grad()
    def _append(self, tokens: Tensor, cache: "ProgrammedCache", capture: Sequence[LayerId]) -> Hidden:
        layers = self.model.checked_layers(capture)
        count = tokens.numel()
        cache.expect(count)
        bank, free = cache.start()
        if count == 1:
            hidden = cache.programs.step(layers, tokens, cache.length, bank)
        else:
            hidden = cache.programs.chain(layers, _holding(self.chunks, count), tokens, cache.length, bank)
        cache.extend(count, free)
        return hidden

    @torch.no_grad()
    def _verify(self, tokens: Tensor, branch: Branch, cache: "ProgrammedCache", capture: Sequence[LayerId]) -> Hidden:
        layers = self.model.checked_layers(capture)
        count = tokens.numel()
        branch.expect(1, count)
        size = _holding(self.sizes, count)
        bank, _ = cache.start()
        done = cache.programs.verify(layers, size, tokens, branch.topology, cache.length, bank)
        branch.fill(_Window(cache, done))
        return done.hidden

    def _static_cache(self, capacity: int) -> "ProgrammedCache":
        programs = self._program_set(capacity)
        cache = ProgrammedCache(programs, capacity, self._static_cache)
        weakref.finalize(cache, self._put_back, programs)
        return cache

    def _program_set(self, capacity: int) -> ProgramSet:
        """One that is idle, or a new one. Who asks owns it alone, so that it is freed if nothing comes of it."""
        fitting = [programs for programs in self._idle if programs.memory.capacity >= capacity]
        if fitting:
            programs = min(fitting, key=lambda programs: programs.memory.capacity)
            self._idle.remove(programs)
            return programs
        rounded = -(-capacity // GRAIN) * GRAIN
        spare, like = max((2 * self.sizes[-1], *self.chunks)), self.model.embed_tokens.weight.detach()
        with torch.inference_mode(False):  # rows made in that mode could not be written outside it
            memory = StaticMemory(self.config, rounded, spare, like)
        made = ProgramSet(self.model, memory, self._announce)
        self._own.add(made)
        return made

    def _put_back(self, programs: ProgramSet) -> None:
        self._idle.append(programs)
        if len(self._idle) > IDLE:
            del self._idle[0]


class ProgrammedCache(StaticCache):
    """A cache that owns the programs over its memory, which its engine takes back when it is dropped."""

    def __init__(self, programs: ProgramSet, capacity: int, again: "Callable[[int], ProgrammedCache]") -> None:
        self.programs = programs
        super().__init__(programs.memory, capacity, again)


def _counts(name: str, given: Sequence[int]) -> tuple[int, ...]:
    """Ascending counts of at least 2; ValueError if they are something else."""
    counts = list(given) if isinstance(given, Sequence) else [None]
    if any(type(n) is not int or n < 2 for n in counts) or counts != sorted(set(counts)):
        raise ValueError(f"engine: {name} must be ascending counts of at least 2, got {shown(given)}")
    return tuple(given)


def _holding(sizes: Sequence[int], count: int) -> int:
    """The smallest of the sizes that holds that many."""
    return sizes[bisect_left(sizes, count)]


class _Window:
    """What a tree program has left for a commit; keys and values are in the cache's memory, which counts them."""

    def __init__(self, cache: StaticCache, done: Verified) -> None:
        self._cache = cache
        self._done = done

    def committed(self, path: list[int]) -> tuple[LayerCache, ...]:
        bank, free = self._cache.start()
        self._done.commit(path, self._cache.length, bank)
        return self._cache.written(free)

    def tensors(self) -> Iterable[Tensor]:
        return self._done.rows
