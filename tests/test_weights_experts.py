"""Checkpoints with experts: fused or one by one, in any mixture of layers; what is lost, doubled or turned is named."""

from pathlib import Path
from typing import Any

import checkpoints as ck
import pytest
import torch
from tiny import EXPERTS

from weights import CheckpointError, load_target, read_target

LAYER = "model.language_model.layers.1.mlp.experts."


def config() -> dict[str, Any]:
    made = ck.target_config(layer_types="lf", **EXPERTS)
    del made["intermediate_size"]
    return made


def write(folder: Path, stored: dict[str, torch.Tensor]) -> Path:
    return ck.write(folder, ck.nested(config()), ck.as_stored(stored))


@pytest.mark.case(56)
@pytest.mark.parametrize("inner", [24, 16, 32], ids=["neither", "2F = D", "F = D"])
def test_both_layouts_fill_the_same_model(tmp_path: Path, inner: int) -> None:
    made = {"moe_intermediate_size": inner}
    tensors = ck.target_tensors(config() | made)
    for name, stored in (("fused", tensors), ("single", ck.one_by_one(tensors))):
        folder = ck.write(tmp_path / name, ck.nested(config() | made), ck.as_stored(stored))
        model, report = read_target(folder)
        ck.assert_holds(model, tensors)
        assert report.tensors == len(stored) and report.nbytes == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_single_experts_are_cast_as_the_rest_is(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = ck.target_tensors(config())
    ck.assert_holds(load_target(write(tmp_path, ck.one_by_one(tensors)), dtype=dtype), tensors, dtype)


def test_a_single_expert_that_the_asked_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    single = ck.one_by_one(ck.target_tensors(config()))
    single["layers.1.mlp.experts.5.up_proj.weight"][3, 2] = 1e5
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj\.weight has values that torch.float16 cannot hold"):
        load_target(write(tmp_path, single), dtype=torch.float16)


def test_layers_may_differ_in_layout(tmp_path: Path) -> None:
    tensors = ck.target_tensors(config())
    second = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.1.")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in second}
    ck.assert_holds(load_target(write(tmp_path, rest | ck.one_by_one(second))), tensors)


def faulty(fault: str) -> dict[str, torch.Tensor]:
    tensors = ck.target_tensors(config())
    single = ck.one_by_one(tensors)
    one = "layers.1.mlp.experts.5.up_proj.weight"
    fused = "layers.1.mlp.experts.gate_up_proj"
    match fault:
        case "lost":
            del single[one]
        case "turned":
            single[one] = single[one].T.contiguous()
        case "one too many":
            single["layers.1.mlp.experts.8.up_proj.weight"] = single[one].clone()
        case "both layouts":
            single[fused] = tensors[fused]
        case "nan":
            single[one][3, 2] = torch.nan
        case "fused turned":
            return tensors | {fused: tensors[fused].transpose(1, 2).contiguous()}
        case "fused lost":
            return {name: tensor for name, tensor in tensors.items() if name != fused}
        case "fused with a suffix":
            tensors[fused + ".weight"] = tensors.pop(fused)
            return tensors
        case "no router":
            del single["layers.1.mlp.gate.weight"]
    return single


FAULTS = {
    "lost": rf"lacks {LAYER}5\.up_proj\.weight that config",
    "turned": rf"{LAYER}5\.up_proj\.weight has shape \[32, 24\], but config.json asks for \[24, 32\]",
    "one too many": rf"no place for: {LAYER}8\.up_proj\.weight",
    "both layouts": rf"no place for: {LAYER}gate_up_proj",
    "nan": rf"{LAYER}5\.up_proj\.weight has 1 values of 768 that are NaN",
    "fused turned": rf"{LAYER}gate_up_proj has shape \[8, 32, 48\], but config.json asks for \[8, 48, 32\]",
    "fused lost": rf"lacks {LAYER}gate_up_proj that config",
    "fused with a suffix": rf"lacks {LAYER}gate_up_proj .*no place for: {LAYER}gate_up_proj\.weight",
    "no router": r"lacks model\.language_model\.layers\.1\.mlp\.gate\.weight that config",
}


@pytest.mark.case(56)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_experts_is_named_in_one_line(tmp_path: Path, fault: str) -> None:
    with pytest.raises(CheckpointError, match=FAULTS[fault]) as error:
        load_target(write(tmp_path, faulty(fault)))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_dense_checkpoint_is_no_mixture(tmp_path: Path) -> None:
    dense = ck.target_tensors(ck.target_config(layer_types="lf"))
    with pytest.raises(CheckpointError, match=r"lacks .*mlp\.gate\.weight.*no place for: .*mlp\.down_proj"):
        load_target(write(tmp_path, dense))
