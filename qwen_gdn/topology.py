"""The shape of a draft tree: who is whose parent, and what follows from it. It knows no tokens."""

from collections.abc import Sequence
from functools import cached_property
from operator import index

import numpy as np
import torch
from torch import Tensor

from .checked import as_integer, shown

Path = Sequence[int] | Tensor


class Topology:
    """A rooted tree over N nodes, parents before children. Immutable.

    Its tensors are made once and shared by all who ask for them: read them, and write to a clone.

    Args:
        parents: parent index of every node; `parents[0] == -1` and `0 <= parents[i] < i` otherwise.

    Raises:
        ValueError: the list is empty or breaks that order.
    """

    def __init__(self, parents: Sequence[int] | Tensor) -> None:
        try:
            listed = [index(i) for i in (parents.tolist() if isinstance(parents, Tensor) else parents)]
        except TypeError:
            raise ValueError(f"topology: parents must be one list of integers, got {shown(parents)}") from None
        if not listed or listed[0] != -1:
            first = listed[0] if listed else "an empty list"
            raise ValueError(f"topology: node 0 is the root and has parent -1, got {first}")
        depths = [0] * len(listed)
        for i, parent in enumerate(listed[1:], start=1):
            if not 0 <= parent < i:
                raise ValueError(f"topology: parent of node {i} must lie in [0, {i}), got {parent}")
            depths[i] = depths[parent] + 1
        self._parents = tuple(listed)
        self._depths = tuple(depths)

    @classmethod
    def chain(cls, n: int) -> "Topology":
        """n nodes in a row."""
        return cls(range(-1, n - 1))

    def __len__(self) -> int:
        return len(self.parents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.parents == other.parents

    def __hash__(self) -> int:
        return hash(self.parents)

    def __repr__(self) -> str:
        return f"Topology({list(self.parents)})"

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node, -1 for the root."""
        return self._parents

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; the root has depth 0."""
        return max(self._depths)

    @cached_property
    def depths(self) -> Tensor:
        """Distance of every node from the root, int64 [N] on the CPU."""
        return torch.from_numpy(np.array(self._depths, np.int64))

    @cached_property
    def ancestors(self) -> Tensor:
        """Ancestor-or-self mask, bool [N, N] on the CPU: row i is true at the nodes of root..i."""
        count, rows = len(self), list[int]()
        for i, parent in enumerate(self.parents):
            rows.append((rows[parent] if i else 0) | 1 << i)
        width = -(-count // 8)
        packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8).reshape(count, width)
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=count, bitorder="little").view(np.bool_))

    def path(self, node: int) -> list[int]:
        """Node indices from the root to `node`, both included; ValueError if there is no such node."""
        start = as_integer(node)
        if start is None or not 0 <= start < len(self):
            raise ValueError(f"topology: node {shown(node)} is outside [0, {len(self)})")
        path = [start]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def check_path(self, path: Path) -> list[int]:
        """The path as a list of ints, if it is empty or leads from the root down child by child.

        Raises:
            ValueError: it is no root path of this topology; the first wrong step is named.
        """
        try:
            nodes = [index(i) for i in (path.tolist() if isinstance(path, Tensor) else path)]
        except TypeError:
            raise ValueError(
                f"path: give one list of node indices, shared by the whole batch, got {shown(path)}"
            ) from None
        previous = -1
        for step, node in enumerate(nodes):
            if not 0 <= node < len(self):
                raise ValueError(f"path: node {node} at step {step} is outside [0, {len(self)})")
            if self.parents[node] != previous:
                where = f"node {previous}" if step else "a root path's start, node 0"
                raise ValueError(f"path: node {node} at step {step} is no child of {where}; got path {nodes}")
            previous = node
        return nodes

    def windows(self, width: int) -> Tensor:
        """Where each node's convolution window lies, int64 [N, width] on the CPU.

        Indices count rows of `width - 1` committed columns followed by the N nodes' own: row i holds the
        nearest `width - 1` ancestors of node i, oldest first, then i itself, running into the committed
        columns where the path is shorter than the window.
        """
        committed = width - 1
        before = np.array([*range(-1, committed - 1), *[committed + parent for parent in self.parents]], np.int64)
        columns = [np.arange(committed, committed + len(self))]
        for _ in range(committed):
            columns.append(before[columns[-1]])
        return torch.from_numpy(np.stack(columns[::-1], axis=1))
