"""Where stored tensors go: a whole parameter, or a part of one that the model fuses and some checkpoints do not."""

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

_FUSED = "mlp.experts."


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
    single = {_layer_of(name) for name in stored if _is_single(name)}
    found: dict[str, Slot] = {}
    for name, parameter in module.named_parameters():
        if _FUSED in name and _layer_of(name) in single:
            found |= _single_slots(name, tuple(parameter.shape))
        else:
            found[name] = Slot(name, tuple(parameter.shape))
    return found


def _layer_of(name: str) -> str:
    """A layer's experts' name, up to its last dot."""
    before, fused, _ = name.partition(_FUSED)
    return before + fused


def _is_single(name: str) -> bool:
    return name.partition(_FUSED)[2].partition(".")[0].isdecimal()


def _single_slots(fused: str, shape: tuple[int, ...]) -> dict[str, Slot]:
    """The slots of each expert's matrices in one fused parameter [experts, rows, columns]."""
    layer, (count, rows, columns) = _layer_of(fused), shape
    if fused.endswith("gate_up_proj"):
        parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    else:
        parts = {"down_proj": slice(0, rows)}
    return {
        f"{layer}{expert}.{name}.weight": Slot(fused, (part.stop - part.start, columns), (expert, part))
        for expert in range(count)
        for name, part in parts.items()
    }
