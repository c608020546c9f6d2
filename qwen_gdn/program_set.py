"""The programs over one memory: one token, tokens in a row, trees of several sizes, and the commits that follow."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .delta_rule import Factors
from .joined import choose_products
from .layer_cache import DeltaRows
from .model import Hidden, LayerId, QwenGDN
from .programs import (
    Nodes,
    chain_layer,
    commit_delta,
    commit_rows,
    normed,
    picked_rows,
    step_layer,
    tree_layer,
)
from .recorded import Announce, Inputs, Pool, Recorded, compiled, lent, new_pool
from .rope import rotation
from .static_cache import BANKS, StaticLayer, StaticMemory
from .topology import Topology

Capture = tuple[LayerId, ...]
Kept = list[DeltaRows]
Summands = tuple[Tensor, Tensor]

TOGETHER = 8  # delta layers of whose windows one kernel takes the path; all at once would take long to compile
SHORT = 16  # most accepted paths are no longer, and a commit's work goes with the length that it is made for

Part = TypeVar("Part", bound="_Part")


class Verified(NamedTuple):
    """A tree that has gone through its program: what the forward returns, what the window holds, and its commit.

    commit: takes a root path, the committed length and the bank to read; writes the other bank.
    """

    hidden: Hidden
    rows: list[Tensor]
    commit: Callable[[list[int], int, int], None]


class _Part(Protocol):
    def launch(self, bank: int) -> Any:
        """Starts the work on the inputs last sent, from one of the memory's banks."""


class _Program(NamedTuple, Generic[Part]):
    """The inputs and launches of a program, and how it is run from each bank.

    No part refers to what runs it: without a cycle, a memory that is given up is freed at once.
    """

    part: Part
    run: Recorded[Any]


class ProgramSet:
    """Programs of a model over one memory, each prepared when it is first run and then kept."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, announce: Announce) -> None:
        self._model = model
        self.memory = memory
        self._announce = announce
        # One pool for all but commits: nothing that a program leaves is needed once another runs, except for a tree's
        # rows, and between a tree and its commit nothing runs.
        self._pool, self._commit_pool = (new_pool(model.device) for _ in range(2))
        self._programs: dict[Hashable, _Program[Any]] = {}

    def step(self, capture: Capture, token: Tensor, length: int, bank: int) -> Hidden:
        """One token after the committed ones; its memory goes to the other bank."""
        make = partial(_Step, self._model, self.memory, capture)
        part, run = self._program((capture,), "one token", make, self._pool)
        part.send(token, length)
        return _copied(run(bank), 1)

    def chain(self, capture: Capture, size: int, tokens: Tensor, length: int, bank: int) -> Hidden:
        """Up to `size` tokens after the committed ones; their memory goes to the other bank."""
        make = partial(_Chain, self._model, self.memory, size, capture)
        part, run = self._program(("chain", capture, size), f"{size} tokens", make, self._pool)
        part.send(tokens, length)
        return _copied(run(bank), tokens.numel())

    def verify(
        self, capture: Capture, size: int, tokens: Tensor, topology: Topology, length: int, bank: int
    ) -> Verified:
        """A tree of up to `size` nodes; committed memory is only read."""
        make = partial(_Tree, self._model, self.memory, size, capture)
        part, run = self._program((capture, size), f"trees of {size} nodes", make, self._pool)
        part.send(tokens, topology, length)
        outputs = run(bank)
        rows = [tensor for layer in part.kept[bank] for tensor in layer.tensors()]
        return Verified(_copied(outputs, len(topology)), rows, partial(self._commit, part))

    def _commit(self, tree: "_Tree", path: list[int], length: int, bank: int) -> None:
        most = min(SHORT, tree.size) if len(path) <= SHORT else tree.size
        name = f"commits of {most} from trees of {tree.size} nodes"
        part, run = self._program((tree, most), name, partial(_Commit, self.memory, tree, most), self._commit_pool)
        part.send(path, length)
        run(bank)

    def _program(self, key: Hashable, name: str, make: Callable[[], Part], pool: Pool) -> _Program[Part]:
        if key not in self._programs:
            with torch.inference_mode(False):  # inputs made in that mode could not be written outside it
                part = make()
            runs = [partial(part.launch, bank) for bank in BANKS]
            run = Recorded(name, runs, self._model.device, self._announce, pool=pool)
            self._programs[key] = _Program(part, run)
        return self._programs[key]


class _Step:
    """One token."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, capture: Capture) -> None:
        self._model, self._memory, self._capture = model, memory, capture
        self._inputs = Inputs((_numbers(1), _numbers(1)), model.device)

    def send(self, token: Tensor, length: int) -> None:
        self._inputs.fill(length, token.reshape(1).cpu())

    def launch(self, bank: int) -> Tensor:
        length, token = self._inputs.parts
        choose_products(self._model, length.device, rows=1)

        def layer(*through: Any) -> Summands:
            out: Summands = compiled(step_layer)(*through, length)
            return out

        return _forward(self._model, self._memory.banks[bank], self._capture, token, length, layer)


class _Chain:
    """Tokens in a row, padded to `size`."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, size: int, capture: Capture) -> None:
        self._model, self._memory, self._size, self._capture = model, memory, size, capture
        self._inputs = Inputs((_numbers(1), _numbers(1), _numbers(size)), model.device)

    def send(self, tokens: Tensor, length: int) -> None:
        self._inputs.fill(length, tokens.numel(), tokens.reshape(-1).cpu())

    def launch(self, bank: int) -> Tensor:
        length, count, tokens = self._inputs.parts
        where = length + torch.arange(self._size, device=length.device)

        def layer(*through: Any) -> Summands:
            x, update, _ = compiled(chain_layer)(*through, length, count, where)
            return x, update

        return _forward(self._model, self._memory.banks[bank], self._capture, tokens, where, layer)


class _Tree:
    """A tree, padded to `size` nodes; `kept` is what its last run from each bank has left for a commit.

    It is of delta layers: keys and values are in the memory's last rows. A recording does not hold what is kept, so
    trees of all sizes and both banks leave it in the same memory.
    """

    def __init__(self, model: QwenGDN, memory: StaticMemory, size: int, capture: Capture) -> None:
        self._model, self._memory, self._capture, self.size = model, memory, capture, size
        # A padding node has no ancestor but itself, and reads committed columns.
        committed = torch.arange(model.config.linear_conv_kernel_dim - 1)
        own = torch.arange(size)[:, None] + len(committed)
        windows, ancestors = torch.cat((committed.expand(size, -1), own), dim=1), torch.eye(size, dtype=torch.bool)
        self._inputs = Inputs((_numbers(1), _numbers(size), _numbers(size), windows, ancestors), model.device)
        self._length, *nodes = self._inputs.parts
        self._nodes = Nodes(*nodes)
        self.device = model.device
        self.kept: list[Kept] = [[] for _ in BANKS]

    def send(self, tokens: Tensor, topology: Topology, length: int) -> None:
        windows = topology.windows(self._nodes.windows.shape[1])
        self._inputs.fill(length, tokens.reshape(-1).cpu(), topology.depths, windows, topology.ancestors)

    def launch(self, bank: int) -> Tensor:
        length, nodes = self._length, self._nodes
        choose_products(self._model, length.device, rows=self.size)
        kept: Kept = []

        def layer(*through: Any) -> Summands:
            x, update, rows = compiled(tree_layer)(*through, length, nodes)
            if rows is not None:
                kept.append(rows)
            return x, update

        memory, positions = self._memory.banks[bank], length + nodes.depths
        outputs = _forward(self._model, memory, self._capture, nodes.tokens, positions, layer)
        self.kept[bank] = [_lent(rows) for rows in kept]
        return outputs


class _Commit:
    """The commit of a path of up to `most` nodes from what a tree's program kept."""

    def __init__(self, memory: StaticMemory, tree: _Tree, most: int) -> None:
        self._memory, self._tree = memory, tree
        self._inputs = Inputs((_numbers(1), _numbers(1), _numbers(most)), tree.device)

    def send(self, path: list[int], length: int) -> None:
        self._inputs.fill(length, len(path), path)

    def launch(self, bank: int) -> None:
        length, count, nodes = self._inputs.parts
        memory, kept = self._memory, self._tree.kept[bank]
        if memory.rows.keys.numel():
            compiled(commit_rows)(memory.rows, self._tree.size, length, nodes)
        if kept:  # all layers at once: by themselves they are too small to keep a device busy
            groups = [kept[i : i + TOGETHER] for i in range(0, len(kept), TOGETHER)]
            picked = [compiled(picked_rows)(group, nodes) for group in groups]
            numbers, columns = (torch.cat(parts) for parts in zip(*picked, strict=True))
            compiled(commit_delta)(memory.deltas[bank], numbers, columns, count)


def _forward(
    model: QwenGDN,
    memory: Sequence[StaticLayer],
    capture: Capture,
    tokens: Tensor,
    positions: Tensor,
    run: Callable[..., Summands],
) -> Tensor:
    """Tokens [T] through every layer; `run` takes a layer, its input's summands, the rotation and the layer's memory.

    Returns:
        the normed end and the captured layers' outputs, [1 + captured, 1, T, D]: one tensor is one copy.
    """
    c = model.config
    rope = compiled(rotation)(positions, c.rotary_dim, c.rope_theta, model.dtype)
    x = model.embed(tokens)[None]
    update = torch.zeros_like(x)
    outputs: dict[LayerId, Tensor] = {"embedding": x} if "embedding" in capture else {}
    for i, (layer, own) in enumerate(zip(model.layers, memory, strict=True)):
        x, update = run(layer, x, update, rope, own)
        if i in capture:  # any other output need not outlive the next layer
            outputs[i] = x + update
    outputs["final"] = final = compiled(normed)(model.norm, x, update)
    return torch.stack((final, *(outputs[i] for i in capture)))


def _numbers(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _copied(outputs: Tensor, count: int) -> Hidden:
    """What `_forward` returns of the first rows, in storage that the next run leaves alone."""
    final, *captured = outputs[:, :, :count].clone()
    return Hidden(final, tuple(captured))


def _lent(rows: DeltaRows) -> DeltaRows:
    return DeltaRows(Factors(*map(lent, rows.factors)), lent(rows.columns))
