"""The programs over one memory: one token, tokens in a row, trees of several sizes, and the commits that follow."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .layer_cache import DeltaRows
from .model import Hidden, LayerId, QwenGDN
from .programs import (
    KVRows,
    Nodes,
    chain_layer,
    commit_delta,
    commit_rows,
    normed,
    picked_rows,
    step_layer,
    tree_layer,
)
from .recorded import Announce, Inputs, Recorded, compiled, send
from .rope import rotation
from .static_cache import BANKS, StaticDelta, StaticLayer, StaticMemory
from .topology import Topology

Capture = tuple[LayerId, ...]
Kept = list[DeltaRows | KVRows]
Summands = tuple[Tensor, Tensor]

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
        # One pool for all: nothing that a program leaves is needed once another runs, but a tree's rows, and between
        # a tree and its commit nothing runs.
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self._programs: dict[Hashable, _Program[Any]] = {}

    def step(self, capture: Capture, token: Tensor, length: int, bank: int) -> Hidden:
        """One token after the committed ones; its memory goes to the other bank."""
        make = partial(_Step, self._model, self.memory, capture)
        part, run = self._program((capture,), "one token", make)
        part.send(token, length)
        return _copied(run(bank), 1)

    def chain(self, capture: Capture, size: int, tokens: Tensor, length: int, bank: int) -> Hidden:
        """Up to `size` tokens after the committed ones; their memory goes to the other bank."""
        make = partial(_Chain, self._model, self.memory, size, capture)
        part, run = self._program(("chain", capture, size), f"{size} tokens", make)
        part.send(tokens, length)
        return _copied(run(bank), tokens.numel())

    def verify(
        self, capture: Capture, size: int, tokens: Tensor, topology: Topology, length: int, bank: int
    ) -> Verified:
        """A tree of up to `size` nodes; committed memory is only read."""
        make = partial(_Tree, self._model, self.memory, size, capture)
        part, run = self._program((capture, size), f"trees of {size} nodes", make)
        part.send(tokens, topology, length)
        outputs = run(bank)
        return Verified(_copied(outputs, len(topology)), _tensors(part.kept[bank]), partial(self._commit, part))

    def _commit(self, tree: "_Tree", path: list[int], length: int, bank: int) -> None:
        most = min(SHORT, tree.size) if len(path) <= SHORT else tree.size
        name = f"commits of {most} from trees of {tree.size} nodes"
        part, run = self._program((tree, most), name, partial(_Commit, self.memory, tree, most))
        part.send(path, length)
        run(bank)

    def _program(self, key: Hashable, name: str, make: Callable[[], Part]) -> _Program[Part]:
        if key not in self._programs:
            with torch.inference_mode(False):  # inputs made in that mode could not be written outside it
                part = make()
            runs = [partial(part.launch, bank) for bank in BANKS]
            run = Recorded(name, runs, self._model.device, self._announce, pool=self._pool)
            self._programs[key] = _Program(part, run)
        return self._programs[key]


class _Step:
    """One token."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, capture: Capture) -> None:
        self._model, self._memory, self._capture = model, memory, capture
        self._inputs = Inputs((1, 1), model.device)

    def send(self, token: Tensor, length: int) -> None:
        self._inputs.fill((torch.tensor([length]), token.reshape(1).long().cpu()))

    def launch(self, bank: int) -> Tensor:
        length, token = self._inputs.parts

        def layer(*through: Any) -> Summands:
            out: Summands = compiled(step_layer)(*through, length)
            return out

        return _forward(self._model, self._memory.banks[bank], self._capture, token, length, layer)


class _Chain:
    """Tokens in a row, padded to `size`."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, size: int, capture: Capture) -> None:
        self._model, self._memory, self._size, self._capture = model, memory, size, capture
        self._inputs = Inputs((1, 1, size), model.device)

    def send(self, tokens: Tensor, length: int) -> None:
        count = tokens.numel()
        padding = torch.zeros(self._size - count, dtype=torch.int64)
        self._inputs.fill((torch.tensor([length, count]), tokens.reshape(-1).long().cpu(), padding))

    def launch(self, bank: int) -> Tensor:
        length, count, tokens = self._inputs.parts
        where = length + torch.arange(self._size, device=length.device)

        def layer(*through: Any) -> Summands:
            x, update, _ = compiled(chain_layer)(*through, length, count, where)
            return x, update

        return _forward(self._model, self._memory.banks[bank], self._capture, tokens, where, layer)


class _Tree:
    """A tree, padded to `size` nodes; `kept` is what its last run from each bank has left for a commit."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, size: int, capture: Capture) -> None:
        self._model, self._memory, self._capture, self.size = model, memory, capture, size
        width = model.config.linear_conv_kernel_dim
        self._inputs = Inputs((1, size, size, size * width), model.device)
        self._length, tokens, depths, windows = self._inputs.parts
        ancestors = torch.eye(size, dtype=torch.bool, device=model.device)
        self._nodes = Nodes(tokens, depths, windows.view(size, width), ancestors)
        self.device = model.device
        self.kept: list[Kept] = [[] for _ in BANKS]

    def send(self, tokens: Tensor, topology: Topology, length: int) -> None:
        count, width = len(topology), self._nodes.windows.shape[1]
        missing = self.size - count
        own = torch.arange(width - 1 + count, width - 1 + self.size)[:, None]
        padding = torch.cat((torch.arange(width - 1).expand(missing, -1), own), dim=1)
        none = torch.zeros(missing, dtype=torch.int64)
        self._inputs.fill(
            (
                torch.tensor([length]),
                tokens.reshape(-1).long().cpu(),
                none,
                topology.depths,
                none,
                topology.windows(width).flatten(),
                padding.flatten(),
            )
        )
        ancestors = torch.eye(self.size, dtype=torch.bool)
        ancestors[:count, :count] = topology.ancestors
        send(ancestors, self._nodes.ancestors)

    def launch(self, bank: int) -> Tensor:
        length, nodes = self._length, self._nodes
        kept: Kept = []

        def layer(*through: Any) -> Summands:
            x, update, rows = compiled(tree_layer)(*through, length, nodes)
            kept.append(rows)
            return x, update

        memory, positions = self._memory.banks[bank], length + nodes.depths
        outputs = _forward(self._model, memory, self._capture, nodes.tokens, positions, layer)
        self.kept[bank] = kept
        return outputs


class _Commit:
    """The commit of a path of up to `most` nodes from what a tree's program kept."""

    def __init__(self, memory: StaticMemory, tree: _Tree, most: int) -> None:
        self._memory, self._tree, self._most = memory, tree, most
        self._inputs = Inputs((1, 1, most), tree.device)

    def send(self, path: list[int], length: int) -> None:
        padding = [0] * (self._most - len(path))
        self._inputs.fill((torch.tensor([length, len(path), *path, *padding]),))

    def launch(self, bank: int) -> None:
        length, count, nodes = self._inputs.parts
        memory, picked = self._memory, []
        for own, kept in zip(memory.banks[bank], self._tree.kept[bank], strict=True):
            if isinstance(own, StaticDelta):
                picked.append(compiled(picked_rows)(kept, nodes))
            else:
                compiled(commit_rows)(own, kept, length, nodes)
        if picked:  # all layers at once: by themselves they are too small to keep a device busy
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


def _copied(outputs: Tensor, count: int) -> Hidden:
    """What `_forward` returns of the first rows, in storage that the next run leaves alone."""
    final, *captured = outputs[:, :, :count].clone()
    return Hidden(final, tuple(captured))


def _tensors(kept: Sequence[DeltaRows | KVRows]) -> list[Tensor]:
    return [t for rows in kept for t in (rows.tensors() if isinstance(rows, DeltaRows) else rows)]
