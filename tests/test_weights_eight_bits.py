"""Checkpoints in eight bits: what a block's scale makes of its numbers, and every way in which the two can disagree."""

import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import checkpoints as ck
import pytest
import scribe
import torch
from tiny import EXPERTS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ddtree.run as cli
import weights.shards
from qwen_gdn import ModelConfig, QwenGDN, decode
from qwen_gdn.block_products import expanded
from qwen_gdn.fp8 import FP8Linear
from weights import CheckpointError, load_mtp, load_target, load_tokenizer, read_mtp, read_target

FORM = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.language_model.layers.0.linear_attn.in_proj_a"],
}
PLAIN = ("embed_tokens", "lm_head", "in_proj_a", "in_proj_b", "mlp.gate.", "shared_expert_gate")
UP = "model.language_model.layers.1.mlp.up_proj.weight"


def config(**changes: Any) -> dict[str, Any]:
    """Wide enough that matrices have several blocks, the last of them partial."""
    return ck.target_config(layer_types="lf", hidden_size=200, intermediate_size=300, **changes)


def quantised(tensors: Mapping[str, Tensor], block: tuple[int, int] = (128, 128)) -> dict[str, Tensor]:
    """As published: matrices of linear maps in E4M3, beside each the bfloat16 scale of every block."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(part in name for part in PLAIN):
            stored[name] = tensor.bfloat16()
            continue
        rows, columns = (-(-size // step) for size, step in zip(tensor.shape, block, strict=True))
        scales = torch.empty(rows, columns, dtype=torch.bfloat16)
        numbers = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                where = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scales[i, j] = tensor[where].abs().max() / 448
                numbers[where] = (tensor[where] / scales[i, j].float()).to(torch.float8_e4m3fn)
        stored |= {name: numbers, name + "_scale_inv": scales}
    return stored


def by_hand(stored: Mapping[str, Tensor], block: tuple[int, int] = (128, 128)) -> dict[str, Tensor]:
    """What the weights are, number by number in float32."""
    found = {name: tensor.float() for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    for name in found:
        if name + "_scale_inv" in stored:
            scales = stored[name + "_scale_inv"].float()
            rows = torch.arange(found[name].shape[0]) // block[0]
            columns = torch.arange(found[name].shape[1]) // block[1]
            found[name] = found[name] * scales[rows][:, columns]
    return found


def write(folder: Path, stored: Mapping[str, Tensor], *, form: Any = FORM, raw: dict[str, Any] | None = None) -> Path:
    return ck.write(folder, ck.nested(raw or config(), quantization_config=form), ck.as_stored(stored))


@pytest.mark.case(57)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [(128, 128), (32, 64)])
def test_weights_are_their_numbers_times_their_blocks_scale(
    tmp_path: Path, dtype: torch.dtype, block: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    original = ck.target_tensors(config())
    stored = quantised(original, block)
    folder = write(tmp_path, stored, form=FORM | {"weight_block_size": list(block)})
    with caplog.at_level(logging.WARNING, logger="weights"):
        model = load_target(folder, dtype=dtype)
    wanted = by_hand(stored, block)
    ck.assert_holds(model, wanted, dtype)
    assert max((wanted[name] - original[name]).abs().max() / original[name].abs().max() for name in wanted) < 0.05
    taken = sum(t.numel() for t in stored.values() if t.dtype == torch.float8_e4m3fn) * dtype.itemsize
    assert f"expanded to {dtype}, {taken / 2**30:.2f} GiB" in caplog.text


def test_single_experts_in_eight_bits_fill_the_fused_ones(tmp_path: Path) -> None:
    raw = config(**EXPERTS)
    tensors = ck.target_tensors(raw)
    single = quantised(ck.one_by_one(tensors))
    assert single["layers.0.mlp.experts.3.down_proj.weight"].dtype == torch.float8_e4m3fn
    model = load_target(write(tmp_path, single, raw=raw), dtype=torch.float32)
    wanted = by_hand(single)
    for name, parameter in model.named_parameters():
        if "experts." not in name or "shared" in name:
            assert torch.equal(parameter, wanted[name]), name
            continue
        layer = name.rpartition("experts.")[0] + "experts."
        leaves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for e in range(8):
            assert torch.equal(parameter[e], torch.cat([wanted[f"{layer}{e}.{leaf}.weight"] for leaf in leaves])), name


def test_scales_may_lie_in_another_file(tmp_path: Path) -> None:
    stored = quantised(ck.target_tensors(config()))
    named = ck.as_stored(stored)
    scales = [name for name in named if name.endswith("_scale_inv")]
    files = {"a.safetensors": [name for name in named if name not in scales], "b.safetensors": scales}
    ck.write(tmp_path, ck.nested(config(), quantization_config=FORM), named, files)
    ck.assert_holds(load_target(tmp_path), by_hand(stored))


def test_products_are_taken_in_float32_whatever_is_asked(tmp_path: Path) -> None:
    stored = quantised(ck.target_tensors(config()))
    stored = {name: t.float() * 1.0019 if name.endswith("_scale_inv") else t for name, t in stored.items()}
    model = load_target(write(tmp_path, stored), dtype=torch.bfloat16)
    ck.assert_holds(model, by_hand(stored), torch.bfloat16)


def test_the_type_of_the_other_weights_is_taken_where_none_is_asked(tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(ck.target_tensors(config())))
    assert load_target(folder, device="meta").dtype == torch.bfloat16


def test_excluded_modules_are_known_under_any_prefix(tmp_path: Path) -> None:
    """A list written for one layout, and a module that it names only there."""
    stored = quantised(ck.target_tensors(config()))
    name = "layers.1.mlp.up_proj"
    stored[name + ".weight"] = ck.target_tensors(config())[name + ".weight"].bfloat16()
    del stored[name + ".weight_scale_inv"]
    for prefix in (ck.PUBLISHED, ck.TEXT_ONLY):
        form = FORM | {"modules_to_not_convert": [prefix + name]}
        ck.assert_holds(load_target(write(tmp_path / prefix, stored, form=form)), by_hand(stored))


def test_float32_scales_and_an_unsaid_format_are_read(tmp_path: Path) -> None:
    stored = quantised(ck.target_tensors(config()))
    stored = {name: t.float() if name.endswith("_scale_inv") else t for name, t in stored.items()}
    form = {key: value for key, value in FORM.items() if key not in ("fmt", "modules_to_not_convert")}
    ck.assert_holds(load_target(write(tmp_path, stored, form=form)), by_hand(stored))


def faulty(fault: str) -> dict[str, Tensor]:
    stored = quantised(ck.target_tensors(config()))
    name = "layers.1.mlp.up_proj.weight"
    scales = name + "_scale_inv"
    match fault:
        case "no scales":
            del stored[scales]
        case "a row of scales too few":
            stored[scales] = stored[scales][1:].clone()
        case "scales turned":
            stored[scales] = stored[scales].T.contiguous()
        case "scale of no number":
            stored[scales][0, 1] = torch.nan
        case "negative scale":
            stored[scales][0, 1] = -1
        case "plain projection":
            stored[name] = stored[name].bfloat16()
            del stored[scales]
        case "infinite scale":
            stored[scales][0, 1] = torch.inf
        case "scales of another type":
            stored[scales] = stored[scales].half()
        case "scales of a plain weight":
            stored[name] = stored[name].bfloat16()
        case "scales without a weight":
            del stored[name]
        case "scales of nothing":
            stored["layers.9.mlp.up_proj.weight_scale_inv"] = stored[scales].clone()
        case "number of no value":
            stored[name].view(torch.uint8)[3, 5] = 0x7F
        case "another eight-bit type":
            stored[name] = stored[name].float().to(torch.float8_e5m2)
        case "filter in eight bits":
            conv = "layers.0.linear_attn.conv1d.weight"
            stored[conv] = stored[conv].float().to(torch.float8_e4m3fn)
        case "excluded module in eight bits":
            excluded = "layers.0.linear_attn.in_proj_a.weight"
            stored |= {
                excluded: stored[excluded].float().to(torch.float8_e4m3fn),
                excluded + "_scale_inv": torch.ones(1, 2, dtype=torch.bfloat16),
            }
        case "nothing in eight bits":
            return {key: t.bfloat16() for key, t in ck.target_tensors(config()).items()}
    return stored


SCALES = UP.replace(".", r"\.") + "_scale_inv"
WEIGHT = UP.replace(".", r"\.")
FAULTS = {
    "no scales": rf"{WEIGHT} is F8_E4M3, but {SCALES} is stored nowhere",
    "a row of scales too few": rf"{SCALES} has shape \[2, 2\], but .* of \[300, 200\] in blocks .* needs \[3, 2\]",
    "scales turned": rf"{SCALES} has shape \[2, 3\], but .* needs \[3, 2\]",
    "scale of no number": rf"{SCALES} has 1 values of 6 that are NaN, infinite or not above 0",
    "infinite scale": rf"{SCALES} has 1 values of 6 that are NaN, infinite or not above 0",
    "negative scale": rf"{SCALES} has 1 values of 6 that are NaN, infinite or not above 0",
    "plain projection": rf"{WEIGHT} is BF16, but config\.json says F8_E4M3 and does not name its module",
    "scales of another type": rf"{SCALES} is F16, none of the types BF16, F32",
    "scales of a plain weight": rf"{SCALES} is stored, but {WEIGHT} is BF16, not F8_E4M3",
    "scales without a weight": rf"lacks {WEIGHT} .*{SCALES} is stored, but {WEIGHT} is not there",
    "scales of nothing": r"no place for: model\.language_model\.layers\.9\.mlp\.up_proj\.weight_scale_inv",
    "number of no value": rf"{WEIGHT} has 1 values of 60000 that are NaN",
    "another eight-bit type": rf"quantised \({WEIGHT} is F8_E5M2\)",
    "filter in eight bits": r"conv1d\.weight is F8_E4M3, which only matrices can be",
    "excluded module in eight bits": r"in_proj_a\.weight is F8_E4M3, but modules_to_not_convert of config\.json names",
    "nothing in eight bits": r"/config\.json says that weights are stored as F8_E4M3, but none is",
}


@pytest.mark.case(57)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_eight_bits_is_named_in_one_line(tmp_path: Path, fault: str) -> None:
    with pytest.raises(CheckpointError, match=FAULTS[fault]) as error:
        load_target(write(tmp_path, faulty(fault)))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.case(57)
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"quant_method": "awq"}, r"quantised \(awq\)"),
        ("gptq", r"quantised \(gptq\)"),
        (FORM | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FORM | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        (FORM | {"activation_scheme": None}, "activation_scheme"),
        (FORM | {"weight_block_size": None}, "weight_block_size is missing"),
        (FORM | {"weight_block_size": [128]}, r"weight_block_size must be two sizes.*\[128\]"),
        (FORM | {"weight_block_size": [128, 0]}, "weight_block_size must be an integer from 1"),
        (FORM | {"weight_per_tensor": True}, "weight_per_tensor True"),
        (FORM | {"act_per_tensor": True}, "act_per_tensor True"),
        (FORM | {"ignored_layers": ["lm_head"]}, "ignored_layers"),
        (FORM | {"modules_to_not_convert": [7]}, "modules_to_not_convert must hold names"),
    ],
)
@pytest.mark.parametrize("at_root", [True, False])
def test_other_ways_to_quantise_are_refused_by_name(form: Any, words: str, at_root: bool) -> None:
    text = config()
    raw = ck.nested(text, quantization_config=form) if at_root else ck.nested(text | {"quantization_config": form})
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(raw)


@pytest.mark.case(57)
def test_root_and_text_part_must_say_the_same() -> None:
    text = config() | {"quantization_config": FORM}
    same = ModelConfig.from_dict(ck.nested(text, quantization_config=FORM))
    assert same.quantization is not None and same.quantization.block == (128, 128)
    with pytest.raises(ValueError, match="quantization_config at the root differs"):
        ModelConfig.from_dict(ck.nested(text, quantization_config=FORM | {"fmt": None}))


def test_eight_bits_that_the_config_does_not_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"quantised \(model\..* is F8_E4M3\) in a way that config"):
        load_target(write(tmp_path, quantised(ck.target_tensors(config())), form=None))


def test_a_form_of_no_object_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="quantization_config"):
        ModelConfig.from_dict(ck.nested(config(), quantization_config="fp8"))


@pytest.mark.parametrize("block", [[1, 1 << 20], [1 << 20, 1]])
def test_scales_are_not_spread_beyond_the_matrix(block: list[int]) -> None:
    """A block far larger than the matrix is one block of it, and takes no more memory than one that fits."""
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    scales = torch.ones(-(-4 // block[0]), -(-4 // block[1]))
    with Allocated() as allocated:
        expanded(weight, scales, (block[0], block[1]), torch.float32)
    assert allocated.most <= 1 << 16


def test_expanding_holds_little_beside_the_matrix() -> None:
    """On `meta`, where sizes alone count: an output projection of the 35B, in bfloat16."""
    shape = (2048, 4096)
    weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.empty(-(-shape[0] // 128), -(-shape[1] // 128), device="meta")
    with Allocated("meta") as allocated:
        out = expanded(weight, scales, (128, 128), torch.bfloat16)
    assert allocated.most <= out.nbytes


@pytest.mark.parametrize("kind", ["untied head", "tied head"])
def test_an_eight_bit_head_is_read_with_its_scales_or_refused_truly(tmp_path: Path, kind: str) -> None:
    tied = kind == "tied head"
    raw = config(tie_word_embeddings=tied)
    stored = ck.as_stored(quantised(ck.target_tensors(raw)))
    embedding = ck.PUBLISHED + "embed_tokens.weight"
    if tied:  # the embedding has its scales, the head that must equal it has none
        stored[embedding] = stored[embedding].float().to(torch.float8_e4m3fn)
        stored[embedding + "_scale_inv"] = torch.ones(1, 2, dtype=torch.bfloat16)
        stored["lm_head.weight"] = stored[embedding].clone()
    else:
        stored["lm_head.weight"] = stored["lm_head.weight"].float().to(torch.float8_e4m3fn)
        stored["lm_head.weight_scale_inv"] = torch.ones(1, 2, dtype=torch.bfloat16)
    form = FORM | {"modules_to_not_convert": []}
    folder = ck.write(tmp_path, ck.nested(raw, quantization_config=form), stored)
    if tied:
        with pytest.raises(CheckpointError, match="lm_head"):
            load_target(folder)
        return
    try:
        load_target(folder)
    except CheckpointError as error:
        assert "stored nowhere" not in str(error)


def test_a_file_is_not_opened_for_every_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening goes through the whole header, so that many would take time with the square of the tensors."""
    opened: Counter[Path] = Counter()
    whole = weights.shards._open

    def counting(file: Path) -> Any:
        opened[file] += 1
        return whole(file)

    raw = ck.target_config(
        layer_types="l",
        model_type="qwen3_5_moe_text",
        **{"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        shared_expert_intermediate_size=8,
    )
    stored = ck.as_stored(quantised(ck.one_by_one(ck.target_tensors(raw))))
    folder = ck.write(tmp_path, ck.nested(raw, quantization_config=FORM), stored)
    monkeypatch.setattr(weights.shards, "_open", counting)
    load_target(folder)
    assert max(opened.values()) <= 32, f"{max(opened.values())} times for {len(stored)} tensors"


SMALL = FORM | {"weight_block_size": [16, 16]}


def whole_blocks(**changes: Any) -> dict[str, Any]:
    """A target whose projections are made of whole blocks."""
    return ck.target_config(layer_types="lf", **{"hidden_size": 64, "intermediate_size": 96} | changes)


def kept(folder: Path, stored: Mapping[str, Tensor], **options: Any) -> QwenGDN:
    raw = whole_blocks(intermediate_size=len(stored["layers.1.mlp.up_proj.weight"]))
    return load_target(write(folder, stored, form=SMALL, raw=raw), eight_bits="keep", **options)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_kept_weights_are_the_stored_numbers(
    tmp_path: Path, dtype: torch.dtype | None, caplog: pytest.LogCaptureFixture
) -> None:
    stored = quantised(ck.target_tensors(whole_blocks()), (16, 16))
    with caplog.at_level(logging.INFO, logger="weights"):
        model = kept(tmp_path, stored, dtype=dtype)
    assert model.dtype == (dtype or torch.float32) and not any(p.requires_grad for p in model.parameters())
    held = dict(model.named_parameters())
    for name, tensor in stored.items():
        if tensor.dtype == torch.float8_e4m3fn:
            assert isinstance(model.get_submodule(name.removesuffix(".weight")), FP8Linear)
            assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name
            scales = held[name + "_scale_inv"]
            assert scales.dtype == torch.float32 and torch.equal(scales, stored[name + "_scale_inv"].float()), name
    plain = {name: p for name, p in held.items() if name not in stored or name + "_scale_inv" not in stored}
    plain = {name: p for name, p in plain.items() if not name.endswith("_scale_inv")}
    assert len(plain) + 2 * sum(name.endswith("_scale_inv") for name in stored) == len(held)
    for name, parameter in plain.items():
        assert torch.equal(parameter.float(), stored[name].float()), name
    taken = sum(t.nbytes for t in stored.values() if t.dtype == torch.float8_e4m3fn)
    assert f"weights in eight bits stay so, {taken / 2**30:.2f} GiB" in caplog.text and "expanded" not in caplog.text


def test_kept_and_expanded_weights_are_the_same_numbers(tmp_path: Path) -> None:
    stored = quantised(ck.target_tensors(whole_blocks()), (16, 16))
    model, wanted = kept(tmp_path, stored), load_target(tmp_path, eight_bits="expand")
    for name, part in model.named_modules():
        if isinstance(part, FP8Linear):
            found = expanded(part.weight, part.weight_scale_inv, part.block, torch.float32)
            assert torch.equal(found, wanted.get_parameter(name + ".weight")), name


def test_what_no_device_multiplies_is_expanded_unless_asked(tmp_path: Path) -> None:
    folder = write(tmp_path, quantised(ck.target_tensors(whole_blocks()), (16, 16)), form=SMALL, raw=whole_blocks())
    for choice in ("auto", "expand"):
        assert not any(isinstance(part, FP8Linear) for part in load_target(folder, eight_bits=choice).modules())
    assert load_target(folder, device="meta", eight_bits="keep").layers[0].linear_attn.out_proj.weight.is_meta
    with pytest.raises(ValueError, match="eight_bits must be one of auto, keep, expand, got 'never'"):
        load_target(folder, eight_bits="never")  # type: ignore[arg-type]


def test_experts_and_broken_blocks_are_expanded_beside_what_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The shared expert's width of 20 is no multiple of 16; the others' is, but they are fused."""
    raw = whole_blocks(**EXPERTS | {"moe_intermediate_size": 32})
    stored = quantised(ck.one_by_one(ck.target_tensors(raw)), (16, 16))
    single = [name for name in stored if ".experts." in name or "shared_expert." in name]
    folder = write(tmp_path, stored, raw=raw, form=SMALL)
    with caplog.at_level(logging.WARNING, logger="weights"):
        model = load_target(folder, eight_bits="keep")
    ways = {name: isinstance(part, FP8Linear) for name, part in model.named_modules() if name.endswith("_proj")}
    assert {name for name, stays in ways.items() if not stays} == {n for n in ways if "shared_expert" in n}
    more = sum(stored[name].numel() for name in single if stored[name].dtype == torch.float8_e4m3fn) * 4
    assert f"; others are expanded to torch.float32, {more / 2**30:.2f} GiB" in caplog.text
    wanted = by_hand(stored, (16, 16))
    down = model.get_parameter("layers.1.mlp.experts.down_proj")
    assert torch.equal(down[3], wanted["layers.1.mlp.experts.3.down_proj.weight"])


def test_an_mtp_module_stays_in_eight_bits_too(tmp_path: Path) -> None:
    raw = whole_blocks(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    form = SMALL | {"modules_to_not_convert": [*FORM["modules_to_not_convert"], "mtp.fc"]}
    own = ck.mtp_tensors(raw)
    fc = own.pop("mtp.fc.weight").bfloat16()
    stored = quantised(own, (16, 16)) | {"mtp.fc.weight": fc}
    whole = stored | ck.as_stored(quantised(ck.target_tensors(raw), (16, 16)))
    mtp = load_mtp(ck.write(tmp_path, ck.nested(raw, quantization_config=form), whole), eight_bits="keep")
    up = mtp.layers[0].mlp.up_proj
    assert isinstance(up, FP8Linear) and mtp.fc.weight.dtype == torch.float32
    assert torch.equal(up.weight.view(torch.uint8), stored["mtp.layers.0.mlp.up_proj.weight"].view(torch.uint8))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_kept_number_of_no_value_is_refused_as_an_expanded_one(tmp_path: Path, code: int) -> None:
    stored = quantised(ck.target_tensors(whole_blocks()), (16, 16))
    stored["layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = code
    with pytest.raises(CheckpointError, match=rf"{WEIGHT} has 1 values of 6144 that are NaN"):
        kept(tmp_path, stored)


def test_keeping_makes_nothing_larger_than_the_numbers(tmp_path: Path) -> None:
    stored = quantised(ck.target_tensors(whole_blocks(intermediate_size=640)), (16, 16))
    with Allocated() as allocated:
        kept(tmp_path, stored, dtype=torch.bfloat16)
    assert allocated.most == max(t.nbytes for t in stored.values()) == 640 * 64


class Allocated(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that an operation makes, on one kind of device."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device, self.most = device, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in self._tensors(made):
            if one.device.type == self.device:
                self.most = max(self.most, one.numel() * one.element_size())
        return made

    @staticmethod
    def _tensors(made: Any) -> Iterator[torch.Tensor]:
        parts = made if isinstance(made, tuple | list) else (made,)
        return (part for part in parts if isinstance(part, torch.Tensor))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in eight bits with an MTP module, and a tokenizer."""
    raw = whole_blocks(vocab_size=scribe.VOCAB, eos_token_id=0, mtp_num_hidden_layers=1)
    raw["mtp_use_dedicated_embeddings"] = False
    wild = {name: 4 * tensor for name, tensor in ck.target_tensors(raw).items()}
    own = ck.mtp_tensors(raw)
    stored = ck.as_stored(quantised(wild, (16, 16))) | {"mtp.fc.weight": own.pop("mtp.fc.weight")}
    form = SMALL | {"modules_to_not_convert": [*FORM["modules_to_not_convert"], "mtp.fc"]}
    whole = stored | quantised(own, (16, 16))
    folder = ck.write(tmp_path_factory.mktemp("release"), ck.nested(raw, quantization_config=form), whole)
    return scribe.write_tokenizer(folder)


def said(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[dict[str, Any], str]:
    ask = ("--prompt", scribe.PROMPT, "--max-new-tokens", 24, "--device", "cpu", "--json", *options)
    assert cli.main([str(part) for part in ask]) == 0
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


@pytest.mark.parametrize("drafter", [(), ("--drafter", "mtp")], ids=["plain", "mtp"])
def test_the_command_keeps_or_expands_as_it_is_asked_and_says_so(
    release: Path, drafter: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("load_target", "load_mtp"):
        load = getattr(cli, name)
        told = lambda *source, load=load, **how: asked.append(how["eight_bits"]) or load(*source, **how)  # noqa: E731
        monkeypatch.setattr(cli, name, told)
    texts = {}
    for choice in ("auto", "expand", "keep"):
        given = () if choice == "auto" else ("--eight-bits", choice)
        run, err = said(capsys, "--target", release, *drafter, *given)
        texts[choice] = run["ids"]
        assert run["settings"]["in_eight_bits"] == (choice == "keep") == ("activations become so" in err)
        assert asked == [choice] * (1 + len(drafter) // 2)
        asked.clear()
    assert texts["auto"] == texts["expand"] != texts["keep"]
    kept, whole = (load_target(release, eight_bits=choice, dtype=torch.float32) for choice in ("keep", "expand"))
    prompt = load_tokenizer(release).encode(scribe.PROMPT)
    for model, choice in ((kept, "keep"), (whole, "expand")):
        assert list(decode(model, prompt, max_new_tokens=24, stop_ids=(0,))) == texts[choice]


def test_a_choice_that_changes_nothing_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = scribe.write_scribe(tmp_path)
    for choice, told in (("keep", True), ("expand", True), ("auto", False)):
        _, err = said(capsys, "--target", target, "--eight-bits", choice)
        assert (f"no weights in eight bits, so --eight-bits {choice} changes nothing" in err) == told


@pytest.mark.parametrize("load", [load_target, load_mtp, read_target, read_mtp])
def test_eight_bits_stay_where_they_can_unless_asked_otherwise(load: Callable[..., object]) -> None:
    assert inspect.signature(load).parameters["eight_bits"].default == "auto"
