"""The least time of a forward: the bytes of the weights that it reads, over the bandwidth of the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from qwen_gdn import QwenGDN
from qwen_gdn.fp8 import FP8Linear
from qwen_gdn.moe import SparseMoE


class Floor(NamedTuple):
    """What every forward reads whole, and what each expert adds that some row of it goes to.

    Args:
        bandwidth: bytes a second.
        always: bytes of every linear map, the head's and the scales of weights in eight bits included.
        expert: bytes of one expert of one layer, 0 without experts.
    """

    bandwidth: float
    always: int
    expert: int

    @classmethod
    def of(cls, model: QwenGDN, bandwidth: float) -> "Floor":
        head = model.embed_tokens.weight.nbytes if model.lm_head is None else 0
        linears = [part for part in model.modules() if isinstance(part, nn.Linear | FP8Linear)]
        always = head + sum(parameter.nbytes for part in linears for parameter in part.parameters())
        mixtures = [part for part in model.modules() if isinstance(part, SparseMoE)]
        return cls(bandwidth, always, sum(w[0].nbytes for w in mixtures[0].experts.parameters()) if mixtures else 0)

    def bytes_read(self, experts: int) -> int:
        return self.always + experts * self.expert

    def milliseconds(self, experts: int = 0) -> float:
        return 1e3 * self.bytes_read(experts) / self.bandwidth


def experts_used(model: QwenGDN, forward: Callable[[], object]) -> int:
    """How many experts of all layers a forward of the model goes to."""
    with _seen(model) as chosen:
        forward()
    return sum(int(indices.unique().numel()) for indices in chosen)


@contextmanager
def _seen(model: QwenGDN) -> Iterator[list[Tensor]]:
    """Collects the experts that each router chooses meanwhile."""
    chosen: list[Tensor] = []
    hooks = [
        part.experts.register_forward_pre_hook(lambda module, inputs: chosen.append(inputs[2]))
        for part in model.modules()
        if isinstance(part, SparseMoE)
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()
