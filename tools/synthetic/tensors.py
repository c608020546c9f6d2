"""What a synthetic checkpoint holds: a recipe for each tensor, under its published name and in its published type."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree import drafters
from qwen_gdn import MTP, ModelConfig, QwenGDN
from qwen_gdn.quantised import PROJECTIONS, BlockFP8
from tools.synthetic.shrink import is_drafter

GREATEST = 448.0  # of an E4M3 number
_FLOAT32_GATES = ("linear_attn.A_log", "linear_attn.norm.weight")

Shape = tuple[int, ...]


class Recipe(NamedTuple):
    """How to make a tensor when it is written.

    Attributes:
        nbytes: its stored size.
        make: gives the tensor.
    """

    nbytes: int
    make: Callable[[], Tensor]


def contents(raw: Mapping[str, Any], seed: int, *, exact: bool) -> dict[str, Recipe]:
    """Every tensor of a config's checkpoint by its name, in the order of the model's layers.

    Args:
        exact: whether A_log and the delta layers' norms are stored in float32.

    Raises:
        ValueError: the config is not one that is read here.
    """
    with torch.device("meta"):
        if is_drafter(raw):
            shapes = _shapes(drafters.build(drafters.from_dict(raw)))
            return _recipes(shapes, seed, plain_norms=True, exact=False, form=None)
        config = ModelConfig.from_dict(raw)
        model = QwenGDN(config)
        shapes = {_stored_name(raw, name): shape for name, shape in _shapes(model).items()}
        shapes |= _mtp_shapes(raw, config)
    form = config.quantization
    if form is not None:
        shapes = dict(_one_by_one(shapes))
    return _recipes(shapes, seed, plain_norms=False, exact=exact, form=form)


def _shapes(module: nn.Module) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _stored_name(raw: Mapping[str, Any], name: str) -> str:
    if name == "lm_head.weight":
        return name
    return ("model.language_model." if "text_config" in raw else "model.") + name


def _mtp_shapes(raw: Mapping[str, Any], config: ModelConfig) -> dict[str, Shape]:
    """The multi-token-prediction module's tensors, if the config counts its layers."""
    text = raw.get("text_config", raw)
    if not text.get("mtp_num_hidden_layers"):
        return {}
    return {f"mtp.{name}": shape for name, shape in _shapes(MTP(config)).items()}


def _one_by_one(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Fused experts as single matrices."""
    for name, shape in shapes.items():
        layer, fused, what = name.rpartition("experts.")
        if not fused:
            yield name, shape
            continue
        count, rows, columns = shape
        leaves = ("gate_proj", "up_proj") if what == "gate_up_proj" else ("down_proj",)
        for expert in range(count):
            for leaf in leaves:
                yield f"{layer}experts.{expert}.{leaf}.weight", (rows // len(leaves), columns)


def _recipes(
    shapes: Mapping[str, Shape], seed: int, *, plain_norms: bool, exact: bool, form: BlockFP8 | None
) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for name, shape in shapes.items():
        draw = partial(_values, name, shape, seed, plain_norms)
        if form is not None and _in_eight_bits(name, shape, form):
            scales = tuple(ceil(size / step) for size, step in zip(shape, form.block, strict=True))
            found[name] = Recipe(prod(shape), lambda draw=draw: _quantised(draw(), form.block)[0])
            found[name + "_scale_inv"] = Recipe(2 * prod(scales), lambda draw=draw: _quantised(draw(), form.block)[1])
        else:
            dtype = torch.float32 if exact and name.endswith(_FLOAT32_GATES) else torch.bfloat16
            found[name] = Recipe(dtype.itemsize * prod(shape), lambda draw=draw, dtype=dtype: draw().to(dtype))
    return found


def _values(name: str, shape: Shape, seed: int, plain_norms: bool) -> Tensor:
    """Random float32 values that keep activations near 1; the same for the same name and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    normal = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return normal.uniform_(0.0, 2.5, generator=generator)
    if name.endswith("dt_bias"):
        return normal - 4
    if len(shape) == 1:
        return 0.1 * normal + float(plain_norms or name.endswith("linear_attn.norm.weight"))
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.02 * normal
    if name.endswith(("conv1d.weight", "base_kernel")):
        return 0.4 * normal
    return normal * shape[-1] ** -0.5


def _in_eight_bits(name: str, shape: Shape, form: BlockFP8) -> bool:
    module = name.removesuffix(".weight")
    return len(shape) == 2 and module.rpartition(".")[2] in PROJECTIONS and module not in form.excluded


def _quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """E4M3 numbers [rows, columns] and the bfloat16 scale of each block, whose greatest number becomes the type's."""
    rows, columns = weight.shape
    tall, wide = block
    padded = F.pad(weight, (0, -columns % wide, 0, -rows % tall))
    blocks = padded.view(padded.shape[0] // tall, tall, -1, wide)
    scales = (blocks.abs().amax((1, 3)) / GREATEST).clamp_min(1e-12).bfloat16()
    numbers = (blocks / scales.float()[:, None, :, None]).clamp(-GREATEST, GREATEST)
    return numbers.view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scales
