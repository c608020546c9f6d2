"""Reading config.json: both published shapes, and an error that names the key for whatever is not understood."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny import EXPERTS, tiny_raw

from qwen_gdn import ModelConfig

ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
PUBLISHED_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}


@pytest.mark.case(58)
def test_the_published_nested_layout_and_its_flat_export_read_the_same() -> None:
    nested = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": PUBLISHED_TEXT, "vision_config": {}}
    config = ModelConfig.from_dict(nested)
    assert config == ModelConfig.from_dict(PUBLISHED_TEXT)
    assert (config.num_hidden_layers, config.rotary_dim, config.rope_theta) == (64, 64, 1e7)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (2048, 6144, 10240)
    assert config.head_dim * config.num_attention_heads != config.hidden_size
    assert (config.output_gate, config.eos_token_ids, config.max_position_embeddings) == ("silu", (248044,), 262144)


def test_configs_are_frozen() -> None:
    config = ModelConfig.from_dict(tiny_raw())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 5  # type: ignore[misc]


MATERIAL = sorted(set(tiny_raw()) - {"rope_parameters"})


@pytest.mark.case(58)
@pytest.mark.parametrize("key", MATERIAL)
@pytest.mark.parametrize("null", [False, True], ids=["missing", "null"])
def test_every_architecture_key_is_required_by_name(key: str, null: bool) -> None:
    raw = tiny_raw()
    del raw[key]
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_dict(raw | ({key: None} if null else {}))


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_rotary_keys_are_read_nested_first_then_flat_and_never_defaulted(key: str) -> None:
    raw = tiny_raw()
    nested = dict(raw["rope_parameters"])
    value = nested.pop(key)
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_dict(raw | {"rope_parameters": nested})
    flat = ModelConfig.from_dict(raw | {"rope_parameters": nested, key: value})
    assert flat == ModelConfig.from_dict(raw)
    assert ModelConfig.from_dict(raw | {key: value}) == flat
    without = {k: v for k, v in raw.items() if k != "rope_parameters"}
    assert ModelConfig.from_dict(without | {"rope_theta": 1e4, "partial_rotary_factor": 0.25}) == flat


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 1), ("partial_rotary_factor", 0.5)])
def test_rotary_keys_stated_twice_must_agree(key: str, value: float) -> None:
    raw = tiny_raw()
    nested = raw["rope_parameters"][key]
    with pytest.raises(ValueError, match=f"{key} is {float(value)}, but {nested} in rope_parameters"):
        ModelConfig.from_dict(raw | {key: value})
    for flat in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"{key} must be a finite number"):
            ModelConfig.from_dict(raw | {key: flat})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown layer": ({"layer_types": ["linear_attention", "mamba"], "num_hidden_layers": 2}, "mamba"),
    "short layer list": ({"num_hidden_layers": 9}, "8.*9"),
    "no layers": ({"layer_types": [], "num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1"),
    "interval contradicts the list": ({"full_attention_interval": 3}, r"layer_types\[2\].*3"),
    "interval of zero": ({"full_attention_interval": 0}, "full_attention_interval.*0"),
    "negative interval": ({"full_attention_interval": -4}, "full_attention_interval.*-4"),
    "yarn": ({"rope_parameters": tiny_raw()["rope_parameters"] | {"rope_type": "yarn"}}, "rope_type 'yarn'"),
    "old name of the rope type": ({"rope_parameters": {"type": "linear", "rope_theta": 1e4}}, "rope_type 'linear'"),
    "flat rope scaling": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
    "other activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "attention bias": ({"attention_bias": True}, "attention_bias True"),
    "no output gate": ({"attn_output_gate": False}, "attn_output_gate False"),
    "unknown output gate": ({"output_gate_type": "tanh"}, "output_gate_type 'tanh'"),
    "experts": ({"num_experts": 8}, "num_experts 8"),
    "another family": ({"model_type": "qwen3_next"}, "model_type 'qwen3_next'"),
    "no experts in a mixture": ({"model_type": "qwen3_5_moe_text"}, "num_experts is missing"),
    "more experts a token than there are": (
        EXPERTS | {"num_experts_per_tok": 9},
        "num_experts_per_tok 9.*num_experts 8",
    ),
    "no expert a token": (EXPERTS | {"num_experts_per_tok": 0}, "num_experts_per_tok.*0"),
    "experts of no width": (EXPERTS | {"moe_intermediate_size": 0}, "moe_intermediate_size.*0"),
    "no width of the shared expert": (
        {key: value for key, value in EXPERTS.items() if key != "shared_expert_intermediate_size"},
        "shared_expert_intermediate_size is missing",
    ),
    "dense layers in a mixture": (EXPERTS | {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
    "experts in every other layer": (EXPERTS | {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    "groups of experts": (EXPERTS | {"n_group": 4}, "n_group 4"),
    "scaled shares": (EXPERTS | {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
    "shares of no sum": (EXPERTS | {"norm_topk_prob": False}, "norm_topk_prob False"),
    "dense architecture of a mixture": (
        EXPERTS | {"architectures": ["Qwen3_5ForCausalLM"]},
        "architectures Qwen3_5ForCausalLM is a dense model's, but model_type qwen3_5_moe_text",
    ),
    "architecture of a mixture over a dense type": (
        {"architectures": ["Qwen3_5MoeForCausalLM"]},
        "model_type qwen3_5_text is a dense model's, but architectures Qwen3_5MoeForCausalLM",
    ),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "query heads no multiple": ({"num_attention_heads": 5}, "5.*2"),
    "value heads no multiple": ({"linear_num_value_heads": 5}, "5.*2"),
    "zero size": ({"hidden_size": 0}, "hidden_size.*0"),
    "negative size": ({"linear_conv_kernel_dim": -1}, "linear_conv_kernel_dim.*-1"),
    "size as text": ({"vocab_size": "97"}, "vocab_size.*'97'"),
    "size as fraction": ({"head_dim": 16.5}, "head_dim.*16.5"),
    "flag as size": ({"head_dim": True}, "head_dim.*True"),
    "flag as text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings.*'false'"),
    "odd rotary dimension": ({"head_dim": 20}, "5.*20"),
    "rotary wider than the head": ({"partial_rotary_factor": 1.5}, "24.*16"),
    "negative theta": ({"rope_theta": -1.0}, "rope_theta.*-1"),
    "theta below one": ({"rope_theta": 0.5}, "rope_theta.*0.5"),
    "infinite theta": ({"rope_theta": math.inf}, "rope_theta.*inf"),
    "theta that is no number": ({"rope_theta": math.nan}, "rope_theta must be a finite number, got nan"),
    "theta beyond floats": ({"rope_theta": 10**400}, "rope_theta must be a finite number"),
    "infinite rotary factor": ({"partial_rotary_factor": math.inf}, "partial_rotary_factor must be a finite"),
    "rotary factor that is no number": ({"partial_rotary_factor": math.nan}, "partial_rotary_factor must be a finite"),
    "rotary factor beyond floats": ({"partial_rotary_factor": 1e308}, "partial_rotary_factor 1e\\+308"),
    "rotary factor of no whole dimension": (
        {"partial_rotary_factor": 0.26},
        "4.16, .*partial_rotary_factor 0.26 of head_dim 16",
    ),
    "two kinds of rope": ({"rope_parameters": tiny_raw()["rope_parameters"] | {"type": "linear"}}, "'linear'"),
    "negative rotary factor": ({"partial_rotary_factor": -0.25}, "partial_rotary_factor -0.25"),
    "infinite epsilon": ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a finite number, got inf"),
    "epsilon that is no number": ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number, got nan"),
    "epsilon beyond floats": ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
    "epsilon that outweighs all values": ({"rms_norm_eps": 1e39}, "rms_norm_eps.*1e\\+39"),
    "size beyond tensors": ({"head_dim": 10**30}, "head_dim must be an integer from 1 to 16777216"),
    "size beyond words": ({"hidden_size": 10**5000}, "hidden_size.*bits"),
    "width beyond tensors": ({"num_attention_heads": 1 << 22}, "num_attention_heads . head_dim .*67108864"),
    "layers beyond reason": ({"layer_types": ["full_attention"] * 5000, "num_hidden_layers": 5000}, "num_hidden.*5000"),
    "layer types as text": ({"layer_types": "linear_attention"}, "layer_types must be of type list.*'linear_att"),
    "layer type of no name": ({"layer_types": [[]], "num_hidden_layers": 1}, r"layer_types names \[\]"),
    "output gate of no name": ({"output_gate_type": []}, r"output_gate_type must be of type str, got \[\]"),
    "context as text": ({"max_position_embeddings": "x"}, "max_position_embeddings must be of type int, got 'x'"),
    "context as fraction": ({"max_position_embeddings": 2.5}, "max_position_embeddings .*2.5"),
    "context that is no number": ({"max_position_embeddings": math.nan}, "max_position_embeddings .*nan"),
    "negative context": ({"max_position_embeddings": -5}, "max_position_embeddings .*-5"),
    "sliding window": ({"sliding_window": 128}, "sliding_window 128"),
    "flag of a sliding window": ({"use_sliding_window": True}, "use_sliding_window True"),
    "softcapped logits": ({"final_logit_softcapping": 30}, "final_logit_softcapping 30"),
    "softcapped attention": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50"),
    "experts by their other name": ({"num_local_experts": 8}, "num_local_experts 8"),
    "another architecture": ({"architectures": ["Qwen3NextForCausalLM"]}, "architectures 'Qwen3NextForCausalLM'"),
    "architectures as text": ({"architectures": "Qwen3_5ForCausalLM"}, "architectures must be of type list"),
    "negative epsilon": ({"rms_norm_eps": -1e-6}, "rms_norm_eps.*-1e-06"),
    "eos as text": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "eos in a nested list": ({"eos_token_id": [[1]]}, "eos_token_id"),
}


@pytest.mark.case(58)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_in_one_line(name: str) -> None:
    changes, words = REFUSED[name]
    rope = {k: changes[k] for k in ("rope_theta", "partial_rotary_factor") if k in changes}
    with pytest.raises(ValueError, match=words) as error:
        ModelConfig.from_dict(tiny_raw(**rope) | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 8}, "num_experts 8"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4 at the root, but None in text_config"),
        ({"hidden_size": 64}, "hidden_size is 64 at the root, but 32 in text_config"),
        ({"max_position_embeddings": 7}, "max_position_embeddings is 7 at the root, but None in text_config"),
        ({"rope_parameters": {"rope_theta": 5}}, "rope_parameters is .* at the root"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures 'LlamaForCausalLM'"),
    ],
)
def test_the_root_may_not_contradict_the_text_part(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict({"text_config": tiny_raw()} | changes)


def test_the_root_may_repeat_the_text_part() -> None:
    raw = tiny_raw()
    assert ModelConfig.from_dict(raw | {"text_config": raw}) == ModelConfig.from_dict(raw)
    null = dict.fromkeys((*raw, "architectures", "num_experts"))
    assert ModelConfig.from_dict(null | {"text_config": raw}) == ModelConfig.from_dict(raw)


@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"])
def test_published_architectures_are_read(name: str) -> None:
    assert ModelConfig.from_dict(tiny_raw(architectures=[name])) == ModelConfig.from_dict(tiny_raw())


def test_the_flat_rotary_factor_that_transformers_writes_unasked_says_nothing() -> None:
    raw = tiny_raw(partial_rotary_factor=0.5)
    assert ModelConfig.from_dict(raw | {"partial_rotary_factor": 0.25}).rotary_dim == 8


def test_a_rotary_factor_may_be_a_rounded_fraction() -> None:
    assert ModelConfig.from_dict(tiny_raw(head_dim=96, partial_rotary_factor=1 / 3)).rotary_dim == 32


@pytest.mark.case(55)
def test_the_tie_flag_is_read_at_the_root_and_in_the_text_part() -> None:
    text = {k: v for k, v in tiny_raw().items() if k != "tie_word_embeddings"}
    assert ModelConfig.from_dict({"text_config": text, "tie_word_embeddings": True}).tie_word_embeddings
    assert ModelConfig.from_dict({"text_config": text | {"tie_word_embeddings": True}}).tie_word_embeddings
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        ModelConfig.from_dict({"text_config": text | {"tie_word_embeddings": True}, "tie_word_embeddings": False})


@pytest.mark.case(58)
def test_the_layer_list_may_come_with_its_interval_or_with_none() -> None:
    plain = ModelConfig.from_dict(tiny_raw())
    assert ModelConfig.from_dict(tiny_raw(full_attention_interval=4)) == plain
    assert ModelConfig.from_dict(tiny_raw(layer_types=["full_attention"])).num_hidden_layers == 1


@pytest.mark.case(58)
@pytest.mark.parametrize(("stated", "ids"), [(3, (3,)), ([3, 1], (3, 1)), ([], ()), (None, ())])
def test_stop_ids_may_be_one_many_or_none(stated: Any, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(tiny_raw(eos_token_id=stated)).eos_token_ids == ids
    assert ModelConfig.from_dict({"text_config": tiny_raw(eos_token_id=stated)}).eos_token_ids == ids


def test_unknown_keys_without_meaning_for_the_arithmetic_are_ignored() -> None:
    extra = {"bos_token_id": 5, "initializer_range": 0.02, "use_cache": True, "mamba_ssm_dtype": "float32"}
    assert ModelConfig.from_dict(tiny_raw(**extra)) == ModelConfig.from_dict(tiny_raw())


def test_folders_without_a_readable_config_are_refused_by_file_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    for text in ("{", "[1, 2]", "null", "\x00", '{"a": ' * 100_000, '{"a": [{"b": 1, "b": 2}]}', '{"vocab_size": "x"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json") as error:
            ModelConfig.from_folder(tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps(tiny_raw()))
    assert ModelConfig.from_folder(str(tmp_path)) == ModelConfig.from_dict(tiny_raw())


def test_a_key_stated_twice_is_refused_by_name_whatever_its_values(tmp_path: Path) -> None:
    text = json.dumps(tiny_raw())
    (tmp_path / "config.json").write_text(text[:-1] + ', "rms_norm_eps": 0.5}')
    with pytest.raises(ValueError, match=r"config\.json .*'rms_norm_eps' stands there twice"):
        ModelConfig.from_folder(tmp_path)


def test_long_values_are_cut_in_errors() -> None:
    with pytest.raises(ValueError, match="vocab_size") as error:
        ModelConfig.from_dict(tiny_raw(vocab_size="9" * 10**6))
    assert len(str(error.value)) < 200
