"""Dtypes: what is stored, what is asked, the few parameters kept in float32, and what is refused."""

from pathlib import Path

import checkpoints as ck
import pytest
import torch

from weights import CheckpointError, load_target, read_target


@pytest.mark.parametrize("asked", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mixed_stored_types_become_the_asked_one_but_for_the_float32_islands(
    tmp_path: Path, asked: torch.dtype
) -> None:
    tensors = ck.target_tensors(ck.target_config())
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    mixed = {name: tensor.to(types[i % 4]) for i, (name, tensor) in enumerate(tensors.items())}
    ck.write_target(tmp_path, mixed)
    ck.assert_holds(load_target(tmp_path, dtype=asked), mixed, asked)


def test_the_published_mixes_of_stored_types_load_on_a_cpu_as_float32(tmp_path: Path) -> None:
    tensors = ck.target_tensors(ck.target_config())
    all_bf16 = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    some_float32 = {
        name: tensor.float() if name.endswith(("A_log", "linear_attn.norm.weight")) else tensor.bfloat16()
        for name, tensor in tensors.items()
    }
    for i, stored in enumerate((all_bf16, some_float32)):
        ck.assert_holds(load_target(ck.write_target(tmp_path / str(i), stored)), stored)


def test_off_the_cpu_the_type_of_most_bytes_is_the_default(tmp_path: Path) -> None:
    tensors = ck.target_tensors(ck.target_config())
    stored = {n: t if ck.is_island(n) else t.bfloat16() for n, t in tensors.items()}
    ck.write_target(tmp_path, stored)
    model, report = read_target(tmp_path, device="meta")
    assert report.dtype == torch.bfloat16
    assert {p.dtype for n, p in model.named_parameters() if not ck.is_island(n)} == {torch.bfloat16}
    assert {p.dtype for n, p in model.named_parameters() if ck.is_island(n)} == {torch.float32}


def test_values_that_the_asked_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors = ck.target_tensors(ck.target_config())
    tensors["norm.weight"][5] = 1e5
    ck.write_target(tmp_path, tensors)
    assert float(load_target(tmp_path, dtype=torch.bfloat16).norm.weight[5].detach()) == pytest.approx(1e5, rel=1e-2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.language_model\.norm\.weight .*float16"):
        load_target(tmp_path, dtype=torch.float16)


@pytest.mark.case(57)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_tensors_are_refused_as_quantised(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = ck.target_tensors(ck.target_config())
    name = "layers.0.linear_attn.out_proj.weight"
    ck.write_target(tmp_path, tensors | {name: tensors[name].to(stored)})
    with pytest.raises(CheckpointError, match=r"quantised \(model\..*out_proj\.weight is F8"):
        load_target(tmp_path)


@pytest.mark.case(57)
def test_scales_beside_a_weight_are_refused_as_quantised(tmp_path: Path) -> None:
    tensors = ck.target_tensors(ck.target_config())
    ck.write_target(tmp_path, tensors | {"layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(CheckpointError, match=r"quantised .*up_proj\.weight_scale_inv"):
        load_target(tmp_path)


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    tensors = ck.target_tensors(ck.target_config())
    ck.write_target(tmp_path, tensors | {"norm.weight": torch.ones(32, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"norm\.weight is I32"):
        load_target(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.complex64])
def test_types_that_no_model_runs_in_are_refused_before_reading(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="not supported; use one of"):
        load_target("/nowhere", dtype=dtype)


def test_devices_that_are_not_there_are_refused_before_reading() -> None:
    for device in ("cuda:99", "warp"):
        with pytest.raises(ValueError, match=device):
            load_target("/nowhere", device=device)
