"""Where stored tensors go: a whole parameter, or a part of one that the model fuses and some checkpoints do not."""

import re
from collections.abc import Collection
from typing import NamedTuple

from torch import nn

_EXPERTS = re.compile(r"(layers\.\d+\.mlp\.experts\.)(.+)")


class Slot(NamedTuple):
    """The place of one stored tensor.

    Attributes:
        parameter: the parameter that it fills, whole or in part.
        shape: what the tensor must have.
        part: an expert and the rows of its matrix, or None for all of the parameter.
    """

    parameter: str
    shape: tuple[int, ...]
    part: tuple[int, slice] | None = None


def slots(module: nn.Module, stored: Collection[str]) -> dict[str, Slot]:
    """A slot for every tensor that the module needs, by the name it is stored under, prefix apart.

    The experts of a layer are stored fused, as the module has them, or each by itself as `experts.7.gate_proj.weight`
    and so on. The names of what is stored tell which; shapes do not, since both can agree with a transposed one.

    Args:
        stored: names in the checkpoint, prefix apart.
    """
    named = [match.groups() for name in stored if (match := _EXPERTS.fullmatch(name)) is not None]
    single = {layer for layer, rest in named if rest.partition(".")[0].isdecimal()}
    found: dict[str, Slot] = {}
    for name, parameter in module.named_parameters():
        match = _EXPERTS.fullmatch(name)
        if match is not None and match[1] in single:
            found |= _single_slots(match[1], match[2], tuple(parameter.shape))
        else:
            found[name] = Slot(name, tuple(parameter.shape))
    return found


def _single_slots(layer: str, leaf: str, shape: tuple[int, ...]) -> dict[str, Slot]:
    """The slots of each expert's matrices in one fused parameter [experts, rows, columns]."""
    fused, (count, rows, columns) = layer + leaf, shape
    if leaf == "gate_up_proj":
        parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    else:
        parts = {"down_proj": slice(0, rows)}
    return {
        f"{layer}{expert}.{name}.weight": Slot(fused, (part.stop - part.start, columns), (expert, part))
        for expert in range(count)
        for name, part in parts.items()
    }
