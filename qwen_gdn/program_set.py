"""The programs over one memory: one token, trees of several sizes, and the commits that belong to them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .model import Hidden, LayerId, QwenGDN
from .programs import Nodes, Picked, Place, chain_layer, commit_delta, commit_rows, step_layer, tree_layer
from .recorded import Announce, Inputs, Recorded, applied, compiled, send
from .rope import Rotation, rotation
from .static_cache import StaticDelta, StaticMemory
from .topology import Topology

Capture = tuple[LayerId, ...]

SHORT = 16  # most accepted paths are no longer, and a commit's work goes with the length that it is made for


class Verified(NamedTuple):
    """A tree that has gone through its program: what the forward returns, what the window holds, and its commit.

    commit: takes a root path, the committed length and the bank to read; writes the other bank.
    """

    hidden: Hidden
    rows: list[Tensor]
    commit: Callable[[list[int], int, int], None]


class ProgramSet:
    """Programs of a model over one memory, each prepared when it is first run and then kept."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, announce: Announce) -> None:
        self._model = model
        self._memory = memory
        self._announce = announce
        self._steps: dict[Capture, _Step] = {}
        self._trees: dict[tuple[Capture, int], _Tree] = {}
        self._chains: dict[tuple[Capture, int], _Chain] = {}

    def step(self, capture: Capture, token: Tensor, length: int, bank: int) -> Hidden:
        """One token after the committed ones; its memory goes to the other bank."""
        if capture not in self._steps:
            self._steps[capture] = _Step(self._model, self._memory, capture, self._announce)
        return self._steps[capture].run(token, length, bank)

    def chain(self, capture: Capture, size: int, tokens: Tensor, length: int, bank: int) -> Hidden:
        """Up to `size` tokens after the committed ones; their memory goes to the other bank."""
        key = (capture, size)
        if key not in self._chains:
            self._chains[key] = _Chain(self._model, self._memory, size, capture, self._announce)
        return self._chains[key].run(tokens, length, bank)

    def verify(
        self, capture: Capture, size: int, tokens: Tensor, topology: Topology, length: int, bank: int
    ) -> Verified:
        """A tree of up to `size` nodes; committed memory is only read."""
        key = (capture, size)
        if key not in self._trees:
            self._trees[key] = _Tree(self._model, self._memory, size, capture, self._announce)
        return self._trees[key].run(tokens, topology, length, bank)


class _Step:
    """The program of one token."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, capture: Capture, announce: Announce) -> None:
        self._model, self._memory, self._capture = model, memory, capture
        self._inputs = Inputs((1, 1, 1), model.device)
        length, bank, self._token = self._inputs.parts
        self._place = Place(length, bank)
        self._program = Recorded("one token", self._launch, model.device, announce)

    def run(self, token: Tensor, length: int, bank: int) -> Hidden:
        self._inputs.fill((torch.tensor([length, bank]), token.reshape(1).long().cpu()))
        return _copied(self._program(), 1)

    def _launch(self) -> Hidden:
        place = self._place
        x, rope = _enter(self._model, self._token, place.length)
        outputs = {}
        for i, (layer, memory) in enumerate(zip(self._model.layers, self._memory.layers, strict=True)):
            x = compiled(step_layer)(layer, x, rope, memory, place)
            outputs[i] = x
        return _leave(self._model, x, outputs, self._capture)


class _Chain:
    """The program of tokens in a row. It is not recorded: its work is long enough to hide its launches."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, size: int, capture: Capture, announce: Announce) -> None:
        self._model, self._memory, self._capture = model, memory, capture
        self._inputs = Inputs((1, 1, 1, size), model.device)
        self._program = Recorded(f"{size} tokens", self._launch, model.device, announce, record=False)
        self._size = size

    def run(self, tokens: Tensor, length: int, bank: int) -> Hidden:
        count = tokens.numel()
        padding = torch.zeros(self._size - count, dtype=torch.int64)
        self._inputs.fill((torch.tensor([length, bank, count]), tokens.reshape(-1).long().cpu(), padding))
        hidden = self._program()
        return Hidden(hidden.final[:, :count], tuple(x[:, :count] for x in hidden.captured))

    def _launch(self) -> Hidden:
        length, bank, count, tokens = self._inputs.parts
        place, where = Place(length, bank), length + torch.arange(self._size, device=length.device)
        x, rope = _enter(self._model, tokens, where)
        outputs = {}
        for i, (layer, memory) in enumerate(zip(self._model.layers, self._memory.layers, strict=True)):
            x = compiled(chain_layer)(layer, x, rope, memory, place, count, where)
            if i in self._capture:
                outputs[i] = x
        return _leave(self._model, x, outputs, self._capture)


class _Tree:
    """The program of a padded tree, and of the commit of one of its paths."""

    def __init__(self, model: QwenGDN, memory: StaticMemory, size: int, capture: Capture, announce: Announce) -> None:
        self._model, self._memory, self._capture, self._size = model, memory, capture, size
        width = model.config.linear_conv_kernel_dim
        device = model.device
        self._inputs = Inputs((1, 1, size, size, size * width), device)
        length, bank, tokens, depths, windows = self._inputs.parts
        ancestors = torch.eye(size, dtype=torch.bool, device=device)
        self._nodes = Nodes(tokens, depths, windows.view(size, width), ancestors)
        self._place = Place(length, bank)
        self._program = Recorded(f"trees of {size} nodes", self._launch, device, announce)
        self._kept: list[Any]
        lengths = sorted({min(SHORT, size), size})
        self._commits = [_Commit(memory, lambda: self._kept, size, most, device, announce) for most in lengths]

    def run(self, tokens: Tensor, topology: Topology, length: int, bank: int) -> Verified:
        count, width = len(topology), self._nodes.windows.shape[1]
        missing = self._size - count
        own = torch.arange(width - 1 + count, width - 1 + self._size)[:, None]
        padding = torch.cat((torch.arange(width - 1).expand(missing, -1), own), dim=1)
        none = torch.zeros(missing, dtype=torch.int64)
        self._inputs.fill(
            (
                torch.tensor([length, bank]),
                tokens.reshape(-1).long().cpu(),
                none,
                topology.depths,
                none,
                topology.windows(width).flatten(),
                padding.flatten(),
            )
        )
        ancestors = torch.eye(self._size, dtype=torch.bool)
        ancestors[:count, :count] = topology.ancestors
        send(ancestors, self._nodes.ancestors)
        hidden, self._kept = self._program()
        return Verified(_copied(hidden, count), _tensors(self._kept), self.commit)

    def commit(self, path: list[int], length: int, bank: int) -> None:
        next(one for one in self._commits if len(path) <= one.most).run(path, length, bank)

    def _launch(self) -> tuple[Hidden, list[Any]]:
        place, nodes = self._place, self._nodes
        x, rope = _enter(self._model, nodes.tokens, place.length + nodes.depths)
        outputs, kept = {}, []
        for i, (layer, memory) in enumerate(zip(self._model.layers, self._memory.layers, strict=True)):
            x, rows = compiled(tree_layer)(layer, x, rope, memory, place, nodes)
            outputs[i] = x
            kept.append(rows)
        return _leave(self._model, x, outputs, self._capture), kept


class _Commit:
    """The program that commits paths of up to `most` nodes from what a tree's program kept."""

    def __init__(
        self,
        memory: StaticMemory,
        kept: Callable[[], list[Any]],
        size: int,
        most: int,
        device: torch.device,
        announce: Announce,
    ) -> None:
        self._memory, self._kept, self.most = memory, kept, most
        self._inputs = Inputs((1, 1, 1, most), device)
        self._program = Recorded(f"commits of {most} from trees of {size} nodes", self._launch, device, announce)

    def run(self, path: list[int], length: int, bank: int) -> None:
        padding = [0] * (self.most - len(path))
        self._inputs.fill((torch.tensor([length, bank, len(path), *path, *padding]),))
        self._program()

    def _launch(self) -> None:
        length, bank, count, nodes = self._inputs.parts
        place, path = Place(length, bank), Picked(nodes, count)
        for memory, rows in zip(self._memory.layers, self._kept(), strict=True):
            commit = commit_delta if isinstance(memory, StaticDelta) else commit_rows
            compiled(commit)(memory, rows, place, path)


def _enter(model: QwenGDN, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
    c = model.config
    return model.embed(tokens)[None], compiled(rotation)(positions, c.rotary_dim, c.rope_theta, model.dtype)


def _leave(model: QwenGDN, x: Tensor, outputs: dict[int, Tensor], capture: Capture) -> Hidden:
    final = compiled(applied)(model.norm, x)
    return Hidden(final, tuple(final if i == "final" else outputs[i] for i in capture))


def _copied(hidden: Hidden, count: int) -> Hidden:
    """The first rows, in storage that the next run leaves alone."""
    return Hidden(hidden.final[:, :count].clone(), tuple(x[:, :count].clone() for x in hidden.captured))


def _tensors(kept: Sequence[Any]) -> list[Tensor]:
    return [t for rows in kept for t in (rows.tensors() if hasattr(rows, "tensors") else rows)]
