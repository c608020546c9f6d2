"""Reading a drafter's config: both published schemas, what wins over what, and one-line refusals."""

import json
import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from drafter_oracle import VOCAB, raw_config

from ddtree.drafter_config import DFlashConfig

FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}


def nested(**changes: Any) -> dict[str, Any]:
    """The tiny config with some keys of `dflash_config` changed; None removes one."""
    table = raw_config()["dflash_config"] | changes
    return raw_config(dflash_config={key: value for key, value in table.items() if value is not None})


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in raw_config().items() if name != key}


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        DFlashConfig.from_dict(raw)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_published_schemas_give_the_same_config() -> None:
    newer = raw_config()
    older = without("rope_parameters") | {"rope_theta": 10_000, "rope_scaling": None}
    older |= {"block_size": 5, "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [4, 1, 6]}}
    flat = without("dflash_config") | newer["dflash_config"]
    assert DFlashConfig.from_dict(newer) == DFlashConfig.from_dict(older) == DFlashConfig.from_dict(flat)


def test_the_config_of_a_published_27b_drafter_is_read() -> None:
    raw = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "max_position_embeddings": None,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 64,
        "rms_norm_eps": 1e-06,
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "vocab_size": 248320,
        "rope_theta": 10000000,
        "rope_scaling": None,
    }
    config = DFlashConfig.from_dict(raw)
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (16, 248070, 1e7)
    assert (config.sliding_window, config.num_hidden_layers, config.is_causal) == (2048, 5, None)
    assert config.target_layer_ids == (1, 16, 31, 46, 61)


def test_a_folder_is_read_through_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    assert DFlashConfig.from_folder(tmp_path) == DFlashConfig.from_dict(raw_config())
    for text in ("{", '{"a": ' * 100_000, json.dumps(raw_config())[:-1] + ', "head_dim": 6}', "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json"):
            DFlashConfig.from_folder(tmp_path)


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        DFlashConfig.from_dict(raw_config()).block_size = 3  # type: ignore[misc]


@pytest.mark.case(43, 47)
@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_dflash_config_wins_over_the_top_level_and_there_is_no_default(key: str) -> None:
    inner, outer = {"block_size": (3, 7), "mask_token_id": (11, 12), "target_layer_ids": ([2], [3])}[key]

    def read(raw: dict[str, Any]) -> Any:
        value = getattr(DFlashConfig.from_dict(raw), key)
        return list(value) if isinstance(value, tuple) else value

    assert read(nested(**{key: inner})) == inner
    assert read(nested(**{key: inner}) | {key: outer}) == inner
    assert read(nested(**{key: None}) | {key: outer}) == outer
    assert key in refusal(nested(**{key: inner}) | {key: "x"})
    assert f"{key} is missing" in refusal(nested(**{key: None}))
    assert f"{key} is missing" in refusal(nested(**{key: None}) | {key: None, "pad_token_id": 3, "eos_token_id": 3})


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "sliding_window",
    ],
)
def test_an_architecture_fact_that_is_missing_or_null_is_named(key: str) -> None:
    assert key in refusal(without(key))
    assert key in refusal(raw_config(**{key: None}))
    assert key in refusal(raw_config(**{key: "8"}))
    assert key in refusal(raw_config(**{key: 0}))


@pytest.mark.case(46)
def test_the_rotary_base_is_read_nested_first_and_never_guessed() -> None:
    bare = without("rope_parameters")
    assert DFlashConfig.from_dict(raw_config(rope_theta=5.0)).rope_theta == 10_000
    assert DFlashConfig.from_dict(raw_config(rope_parameters={"rope_theta": 7})).rope_theta == 7
    assert DFlashConfig.from_dict(bare | {"rope_theta": 5}).rope_theta == 5
    assert "rope_theta must be of type float, got 'x'" in refusal(raw_config(rope_theta="x"))
    assert "rope_theta must be a finite number" in refusal(raw_config(rope_theta=math.nan))
    assert "rope_theta must be a number from 1" in refusal(
        bare | {"rope_theta": 5, "rope_parameters": {"rope_theta": 0}}
    )
    assert "rope_theta is missing" in refusal(bare)
    assert "rope_theta is missing" in refusal(raw_config(rope_parameters={"rope_type": "default"}))
    assert "rope_theta is missing" in refusal(bare | {"rope_theta": None})
    assert "rope_theta" in refusal(bare | {"rope_theta": -1.0})


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 10**400], ids=["inf", "nan", "beyond floats"])
def test_numbers_that_are_not_finite_are_refused_by_name(key: str, value: float) -> None:
    bare = without("rope_parameters") | {"rope_theta": 1e4}
    assert f"{key} must be a finite number" in refusal(bare | {key: value})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "head_dim", "num_hidden_layers", "sliding_window"])
def test_sizes_beyond_tensors_are_refused_by_name(key: str) -> None:
    assert f"{key} must be an integer from 1 to" in refusal(raw_config(**{key: 10**30}))


@pytest.mark.parametrize("rows", [10**7, 10**30])
def test_blocks_beyond_memory_are_refused(rows: int) -> None:
    assert "block_size must be an integer from 2 to 1024" in refusal(nested(block_size=rows))


def test_absent_layer_types_do_not_spell_out_layers_beyond_reason() -> None:
    bare = without("layer_types") | {"use_sliding_window": False}
    assert "num_hidden_layers must be an integer" in refusal(bare | {"num_hidden_layers": 10**30})
    assert "target_layer_ids * hidden_size" in refusal(raw_config(hidden_size=1 << 23))


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_other_kinds_of_rotary_embedding_are_refused_by_name(kind: str, key: str) -> None:
    scaled = {key: kind, "factor": 32.0, "rope_theta": 1e7}
    assert repr(kind) in refusal(raw_config(rope_parameters=scaled))
    assert repr(kind) in refusal(without("rope_parameters") | {"rope_theta": 1e7, "rope_scaling": scaled})
    assert repr(kind) in refusal(raw_config(rope_parameters={"rope_theta": 1e7}, rope_scaling=scaled))
    plain = {"rope_theta": 1e7, "rope_type": "default"}
    assert repr(kind) in refusal(raw_config(rope_parameters=plain, rope_scaling=scaled))
    assert repr(kind) in refusal(raw_config(rope_parameters=plain | {"type": kind}))


def test_absent_layer_types_mean_full_attention_unless_a_window_is_asked_for() -> None:
    bare = without("layer_types")
    assert DFlashConfig.from_dict(bare | {"use_sliding_window": False}).layer_types == ("full_attention",) * 2
    del bare["use_sliding_window"]
    assert DFlashConfig.from_dict(bare).sliding_window is None
    assert "layer_types is missing" in refusal(bare | {"use_sliding_window": True})


@pytest.mark.case(46)
def test_layer_types_that_contradict_the_rest_are_refused() -> None:
    assert "num_hidden_layers = 2" in refusal(raw_config(layer_types=["full_attention"]))
    assert "chunked" in refusal(raw_config(layer_types=["full_attention", "chunked"]))
    assert "use_sliding_window is false" in refusal(raw_config(use_sliding_window=False))
    assert DFlashConfig.from_dict(raw_config(**FULL)).sliding_window is None


@pytest.mark.case(43, 48)
@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([], "empty"),
        ([1, -1], "-1"),
        ([1, 8], "layer 8"),
        ([1, 2, 1], "layer 1 twice"),
        ([1, 7], "post-norm"),
        ([1.0], "integers"),
        ([True], "integers"),
        (3, "list"),
    ],
)
def test_layer_ids_that_name_no_readable_layer_are_refused(ids: object, named: str) -> None:
    message = refusal(nested(target_layer_ids=ids))
    assert "target_layer_ids" in message and named in message


def test_the_number_of_target_layers_may_be_left_unsaid() -> None:
    config = DFlashConfig.from_dict(without("num_target_layers"))
    assert config.num_target_layers is None and config.target_layer_ids == (4, 1, 6)


@pytest.mark.case(43)
@pytest.mark.parametrize(("changes", "named"), [({"block_size": 1}, "block_size"), ({"mask_token_id": VOCAB}, "41")])
def test_blocks_without_drafts_and_masks_outside_the_vocabulary_are_refused(
    changes: dict[str, int], named: str
) -> None:
    assert named in refusal(nested(**changes))
    assert "mask_token_id -1" in refusal(nested(mask_token_id=-1))


@pytest.mark.parametrize("count", [0, -3, 10**30])
def test_a_count_of_target_layers_that_is_none_is_refused(count: int) -> None:
    assert "num_target_layers must be an integer from 1" in refusal(raw_config(num_target_layers=count))


@pytest.mark.case(46)
def test_causality_is_the_layer_types_unless_stated() -> None:
    def rule(raw: dict[str, Any]) -> tuple[bool, bool]:
        config = DFlashConfig.from_dict(raw)
        return config.causal("sliding_attention"), config.causal("full_attention")

    assert rule(raw_config()) == rule(raw_config(is_causal=None)) == (True, False)
    assert rule(raw_config(is_causal=True)) == (True, True)
    assert rule(raw_config(is_causal=False)) == (False, False)
    assert rule(nested(is_causal=False) | {"is_causal": True}) == (False, False)
    assert "is_causal" in refusal(raw_config(is_causal=1))


@pytest.mark.parametrize("name", ["DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel", "Qwen3ForCausalLM"])
def test_other_architectures_are_refused_by_name(name: str) -> None:
    assert name in refusal(raw_config(architectures=[name]))
    assert name in refusal(raw_config(architectures=["DFlashDraftModel", name]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("markov_rank", 256),
        ("speculators_model_type", "dspark"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_experts", 8),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_keys_that_ask_for_other_arithmetic_are_refused(key: str, value: object) -> None:
    assert key in refusal(raw_config(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("projector_type", "dspark", "dflash"),
        ("conv_kernel_size", 2, None),
        ("selector_rank", 256, None),
        ("output_multiplier", 0.5, 1.0),
        ("input_embedding_scale", 2.0, 1.0),
        ("final_logit_softcapping", 30.0, 0.0),
    ],
)
def test_extensions_are_refused_in_either_place_and_their_neutral_values_are_not(
    key: str, value: object, neutral: object
) -> None:
    assert key in refusal(nested(**{key: value}))
    assert key in refusal(raw_config(**{key: value}))
    assert key in refusal(nested(**{key: neutral}) | {key: value})
    assert DFlashConfig.from_dict(nested(**{key: neutral})) == DFlashConfig.from_dict(raw_config())
