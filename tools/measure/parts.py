"""Two parts measured alone: the bytes of a speculative window, and the time of the tree builder."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from ddtree import build_tree
from ddtree.ranking import ranked
from ddtree.scores import Prefix, Siblings, rank
from ddtree.tree import grow
from qwen_gdn import QwenGDN, Topology

CONV_WIDTH = 4  # of every published model; the builder's topology is asked for windows of this width


class WindowBytes(NamedTuple):
    """Bytes a node of an open window, measured, and what they are made of; `state` is one whole recurrent state."""

    nodes: int
    measured: float
    factors: int
    columns: int
    rows: int
    state: int

    @property
    def stated(self) -> int:
        return self.factors + self.columns + self.rows


def window_bytes(model: QwenGDN, nodes: int) -> WindowBytes:
    """Opens a window of that many nodes, fills it, and compares its bytes with what its parts come to."""
    c = model.config
    cache = model.new_cache(nodes + 1)
    model(torch.zeros(1, 1, dtype=torch.long), cache)
    branch = cache.branch(Topology([-1] + [(i - 1) // 2 for i in range(1, nodes)]))
    model(torch.zeros(1, nodes, dtype=torch.long), branch)
    delta = c.layer_types.count("linear_attention")
    exact, own = max(4, model.dtype.itemsize), model.dtype.itemsize
    return WindowBytes(
        nodes=nodes,
        measured=branch.nbytes / nodes,
        factors=delta * exact * (c.key_dim + c.value_dim + c.linear_num_value_heads),
        columns=delta * own * c.conv_dim,
        rows=(len(c.layer_types) - delta) * own * 2 * c.num_key_value_heads * c.head_dim,
        state=delta * exact * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim,
    )


class BuilderTimes(NamedTuple):
    """Milliseconds, medians: the whole builder, and its parts one by one.

    normaliser: log-softmax of all rows. top_k: the best `nodes` of each row. search: heap and topology, with the
    depths, the ancestor mask and the convolution windows that a forward asks of it.
    """

    positions: int
    vocabulary: int
    nodes: int
    whole: float
    normaliser: float
    top_k: float
    search: float


def builder_times(positions: int = 15, vocabulary: int = 248_320, nodes: int = 64, repeats: int = 20) -> BuilderTimes:
    """Times `build_tree` on random logits of spread 4."""
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(positions, vocabulary, generator=draw)
    normalised = logits.log_softmax(-1)
    families = rank(logits, nodes)

    def children(prefix: Prefix) -> Siblings:
        return families[len(prefix)] if len(prefix) < positions else Siblings([], [])

    def search() -> None:
        shape_of(grow(0, children, nodes).topology)

    return BuilderTimes(
        positions,
        vocabulary,
        nodes,
        whole=_milliseconds(lambda: shape_of(build_tree(0, logits, nodes).topology), repeats),
        normaliser=_milliseconds(lambda: logits.log_softmax(-1), repeats),
        top_k=_milliseconds(lambda: ranked(normalised, nodes), repeats),
        search=_milliseconds(search, repeats),
    )


def shape_of(topology: Topology) -> None:
    """Makes a topology compute all that a forward reads of it."""
    _ = topology.depths, topology.ancestors, topology.windows(CONV_WIDTH)


def _milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * median(taken)
