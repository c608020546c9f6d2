"""All that is alive in one soak, and how a cache is held against a replay from scratch."""

import random
from collections import Counter

import torch
from proposers import PROPOSERS
from tiny import memory_of, worst_gap
from torch import Tensor

from qwen_gdn import HybridCache, QwenGDN, Topology
from qwen_gdn.decode import HybridModel

from .held import DivergenceError, Held, Window, require

CAPACITY = 96
MOST = 4  # caches alive at once
ROLLBACKS = (0, 0, 3, 10)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
SCRIPTS = tuple(name for name in PROPOSERS if name != "right")  # that one drafts 70 tokens


class World:
    """The caches alive, the model that runs them and the model that replays them.

    worst: the largest gap met, max|a − b| / max|b|.
    done: how often each kind of thing has happened.
    """

    def __init__(self, seed: int, model: HybridModel, oracle: QwenGDN) -> None:
        self.dice = random.Random(seed)
        self.probing = random.Random(seed)  # its own, so that the operations do not depend on the comparisons
        self.model, self.oracle = model, oracle
        self.tolerance = TOLERANCE[oracle.dtype]
        self.held: list[Held] = []
        self.made = 0
        self.worst = 0.0
        self.done = Counter[str]()

    def ids(self, count: int) -> list[int]:
        return self.dice.choices(range(self.oracle.config.vocab_size), k=count)

    def new(self) -> None:
        self.adopt(self.model.new_cache(CAPACITY, rollback=self.dice.choice(ROLLBACKS)))

    def adopt(self, cache: HybridCache, like: Held | None = None) -> None:
        """Takes a cache in: an empty one, or a copy of another's."""
        self.made += 1
        held = Held(f"c{self.made}", cache)
        if like is not None:
            held.tokens, held.floor = list(like.tokens), like.floor
        self.held.append(held)

    def close_windows(self) -> None:
        for held in self.held:
            held.cache.discard()
            held.window = held.rows = None

    def glance(self) -> None:
        """What can be told of every cache without a forward: lengths, floors, windows, storage, the process's modes."""
        owners: dict[int, str] = {}
        for held in self.held:
            _check_words(held)
            for tensor in (t for layer in held.cache for t in layer.tensors() if t.numel()):
                owner = owners.setdefault(tensor.untyped_storage().data_ptr(), held.name)
                require(owner == held.name, f"{owner} and {held.name} share storage")
                require(not tensor.requires_grad, f"{held.name} holds a tensor with a gradient")
        require(
            torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), "the process's grad mode was changed"
        )

    def compare(self, held: Held) -> None:
        """Replays a cache's tokens in one forward from nothing, and compares memory and what comes next."""
        held.cache.check()
        fresh = self.oracle.new_cache(CAPACITY + 1)
        rows = self.oracle(torch.tensor([held.tokens]), fresh).final[0] if held.tokens else None
        self._agree(f"{held.name}'s memory", worst_gap(memory_of(held.cache), memory_of(fresh)))
        if held.rows is not None and rows is not None:
            self._same_logits(f"{held.name}'s logits", held.rows, rows[-len(held.rows) :])
        if held.emitted and rows is not None:
            self._check_greedy(held, rows[-len(held.emitted) :])
        held.rows, held.emitted, held.compared = None, [], True
        if held.window is None and held.room:
            self._probe(held, fresh)
        elif held.window is not None and held.window.final is not None:
            self._check_node(held.window, held.window.final, fresh)

    def _probe(self, held: Held, fresh: HybridCache) -> None:
        """The logits after one more token, through a window that is dropped; often none, since it settles things."""
        if self.probing.random() < 0.5:
            return
        token = torch.tensor([[self.probing.randrange(self.oracle.config.vocab_size)]])
        ours = self.model(token, held.cache.branch(Topology([-1]))).final[0]
        held.cache.discard()
        self._same_logits(f"{held.name}'s next logits", ours, self.oracle(token, fresh).final[0])

    def _check_node(self, window: Window, final: Tensor, fresh: HybridCache) -> None:
        """One node's logits against its path in a row."""
        node = self.probing.randrange(len(window.tokens))
        path = torch.tensor([[window.tokens[i] for i in window.topology.path(node)]])
        self._same_logits(f"node {node}'s logits", final[node : node + 1], self.oracle(path, fresh).final[0, -1:])

    def _check_greedy(self, held: Held, rows: Tensor) -> None:
        """Every emitted token must be the likeliest after what precedes it, or tie with it to rounding."""
        logits = self.oracle.logits(rows)
        chosen = logits.gather(1, torch.tensor(held.emitted)[:, None])[:, 0]
        self._agree(f"{held.name}'s emitted tokens", float((logits.amax(1) - chosen).max() / logits.abs().max()))

    def _same_logits(self, what: str, ours: Tensor, theirs: Tensor) -> None:
        self._agree(what, worst_gap([self.model.logits(ours)], [self.oracle.logits(theirs)]))

    def _agree(self, what: str, gap: float) -> None:
        if not gap <= self.tolerance:
            raise DivergenceError(f"{what} differ from the replay's by {gap:.1e}, allowed is {self.tolerance:.0e}")
        self.worst = max(self.worst, gap)


def _check_words(held: Held) -> None:
    """Whether the cache says of itself what the reference says."""
    cache, length = held.cache, len(held.tokens)
    require(cache.length == length, f"{held.name} has length {cache.length}, it should be {length}")
    lowest = length - 2 * cache.rollback  # beyond that the log would grow for ever
    floor = cache.crop_floor
    require(
        lowest <= floor <= max(held.floor, 0),
        f"{held.name} has crop_floor {floor} at length {length} with rollback {cache.rollback}, promised {held.floor}",
    )
    if held.window is None:
        try:
            cache.refuse_open_window("going on")
        except RuntimeError:
            raise DivergenceError(f"{held.name} has an open window that nobody opened") from None
        return
    require(cache.holds(held.window.branch), f"{held.name} has lost its window")
    filled = held.window.final is not None
    require(
        (held.window.branch.nbytes > 0) == filled, f"{held.name}'s window should {'' if filled else 'not '}be filled"
    )
