"""Loading: the published layouts load, every parameter is filled exactly once, anything else is one error."""

import logging
from pathlib import Path

import checkpoints as ck
import pytest
import torch

import weights.load
from qwen_gdn import ModelConfig, QwenGDN
from weights import CheckpointError, load_drafter, load_target, read_drafter, read_target


@pytest.mark.case(55)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", [ck.PUBLISHED, ck.TEXT_ONLY])
@pytest.mark.parametrize("flat", [False, True])
def test_both_prefixes_both_config_shapes_and_both_heads_give_the_same_model(
    tmp_path: Path, flat: bool, prefix: str, tied: bool
) -> None:
    config = ck.target_config(tie_word_embeddings=tied)
    tensors = ck.target_tensors(config)
    folder = ck.write(tmp_path, config if flat else ck.nested(config), ck.as_stored(tensors, prefix))
    model = load_target(folder)
    ck.assert_holds(model, tensors)
    assert model.config == ModelConfig.from_dict(config)
    hidden = torch.randn(2, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    head = tensors["embed_tokens.weight" if tied else "lm_head.weight"]
    torch.testing.assert_close(model.logits(hidden), hidden @ head.T)


@pytest.mark.case(54)
def test_no_parameter_keeps_what_it_was_built_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: ModelConfig) -> QwenGDN:
        model = QwenGDN(config).to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float("nan"))
        return model

    monkeypatch.setattr(weights.load, "_TARGET", weights.load._TARGET._replace(build=build))
    ck.write_target(tmp_path)
    assert all(bool(p.isfinite().all()) for p in load_target(tmp_path).parameters())


@pytest.mark.case(55)
def test_visual_mtp_and_rotary_tensors_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ck.target_config()
    tensors = ck.target_tensors(config)
    ck.write(tmp_path, ck.nested(config), ck.as_stored(tensors) | ck.extras())
    with caplog.at_level(logging.INFO, logger="weights"):
        model, report = read_target(tmp_path)
    ck.assert_holds(model, tensors)
    assert report.skipped == {"model.visual.*": 2, "visual.*": 1, "mtp.*": 2, "*.rotary_emb.inv_freq": 1}
    assert report.tensors == len(tensors)
    assert report.nbytes == sum(t.nbytes for t in tensors.values())
    assert "'mtp.*': 2" in caplog.text


@pytest.mark.case(55)
def test_a_head_stored_beside_the_embedding_it_is_tied_to_is_left_out_if_equal(tmp_path: Path) -> None:
    config = ck.target_config(tie_word_embeddings=True)
    tensors = ck.target_tensors(config)
    head = {"lm_head.weight": tensors["embed_tokens.weight"].clone()}
    ck.write(tmp_path, ck.nested(config), ck.as_stored(tensors | head))
    model, report = read_target(tmp_path)
    ck.assert_holds(model, tensors)
    assert report.skipped == {"lm_head.weight of a tied model": 1}


@pytest.mark.case(55)
@pytest.mark.parametrize("row", [0, 50, 96])
def test_a_stored_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path, row: int) -> None:
    config = ck.target_config(tie_word_embeddings=True)
    tensors = ck.target_tensors(config)
    head = tensors["embed_tokens.weight"].clone()
    head[row, 3] += 1
    ck.write(tmp_path, ck.nested(config), ck.as_stored(tensors | {"lm_head.weight": head}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.language_model\.embed_tokens"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (torch.ones(90, 32), r"lm_head\.weight has shape \[90, 32\], but config\.json asks for \[97, 32\]"),
        (torch.ones(97, 32, dtype=torch.int8), r"lm_head\.weight is I8, none of the types BF16, F16, F32, F64"),
    ],
)
def test_a_stored_head_that_cannot_equal_a_tied_embedding_is_refused_by_what_it_is(
    tmp_path: Path, head: torch.Tensor, words: str
) -> None:
    config = ck.target_config(tie_word_embeddings=True)
    ck.write(tmp_path, config, ck.as_stored(ck.target_tensors(config) | {"lm_head.weight": head}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {words}") as error:
        load_target(tmp_path)
    assert "tie_word_embeddings" not in str(error.value)


@pytest.mark.case(55)
def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    tensors = ck.target_tensors(ck.target_config())
    del tensors["lm_head.weight"]
    ck.write_target(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight .*tie_word_embeddings"):
        load_target(tmp_path)


@pytest.mark.case(55)
def test_tie_flags_that_disagree_between_root_and_text_are_refused(tmp_path: Path) -> None:
    config = ck.target_config(tie_word_embeddings=True)
    ck.write(tmp_path, ck.nested(config, tie_word_embeddings=False), ck.as_stored(ck.target_tensors(config)))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_target(tmp_path)


def test_each_tensor_left_out_is_missed_by_name(tmp_path: Path) -> None:
    config = ck.target_config(layer_types="lf")
    stored = ck.as_stored(ck.target_tensors(config))
    for i, name in enumerate(stored):
        folder = ck.write(tmp_path / str(i), config, {n: t for n, t in stored.items() if n != name})
        with pytest.raises(CheckpointError) as error:
            load_target(folder)
        assert name in str(error.value) and str(folder / "model.safetensors") in str(error.value)
        assert "fetch both again" in str(error.value)


def test_a_tensor_in_no_shard_is_missed_by_the_folder_and_the_number_of_its_shards(tmp_path: Path) -> None:
    config = ck.target_config()
    stored = ck.as_stored(ck.target_tensors(config))
    lost = stored.popitem()[0]
    ck.write(tmp_path, config, stored, ck.dealt(list(stored), "a.safetensors", "b.safetensors"))
    with pytest.raises(CheckpointError, match=rf"{tmp_path} \(2 weight files\) lacks {lost}"):
        load_target(tmp_path)


def test_each_tensor_of_another_shape_is_refused_by_name_and_file(tmp_path: Path) -> None:
    config = ck.target_config(layer_types="lf")
    stored = ck.as_stored(ck.target_tensors(config))
    for i, (name, tensor) in enumerate(stored.items()):
        wrong = (
            tensor.T.contiguous() if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1] else tensor[1:].clone()
        )
        folder = ck.write(tmp_path / str(i), config, stored | {name: wrong})
        with pytest.raises(CheckpointError) as error:
            load_target(folder)
        message = str(error.value)
        assert f"{folder / 'model.safetensors'}: {name} has shape {list(wrong.shape)}" in message
        assert str(list(tensor.shape)) in message


@pytest.mark.case(55)
@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.0.linear_attn.bias",
        "model.language_model.layers.4.input_layernorm.weight",
        "language_model.model.norm.weight",
        "norm.weight",
        "model.lm_head.weight",
        "model.visuals.weight",
        "mtp_head.weight",
        "model.language_model.layers.0.inv_freq",
        "model.language_model.layers.0.not_rotary_emb.inv_freq",
    ],
)
def test_unknown_tensors_are_refused_by_name_and_file(tmp_path: Path, name: str) -> None:
    config = ck.target_config()
    ck.write(tmp_path, config, ck.as_stored(ck.target_tensors(config)) | {name: torch.ones(3)})
    with pytest.raises(CheckpointError) as error:
        load_target(tmp_path)
    assert name in str(error.value) and "model.safetensors" in str(error.value)
    assert "correct config.json" in str(error.value)


def test_a_head_below_a_prefix_is_no_head(tmp_path: Path) -> None:
    config = ck.target_config()
    stored = ck.as_stored(ck.target_tensors(config))
    stored["model.lm_head.weight"] = stored.pop("lm_head.weight")
    ck.write(tmp_path, config, stored)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight.*no place for: model\.lm_head\.weight"):
        load_target(tmp_path)


def test_a_parameter_under_both_prefixes_is_refused(tmp_path: Path) -> None:
    config = ck.target_config()
    stored = ck.as_stored(ck.target_tensors(config))
    ck.write(tmp_path, config, stored | {"model.norm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"norm\.weight is stored as model\..*norm\.weight in .* and as model\."):
        load_target(tmp_path)


def test_many_faults_are_one_short_line(tmp_path: Path) -> None:
    config = ck.target_config(layer_types="lllf" * 4)
    wider = ck.target_tensors(ck.target_config(layer_types="lllf" * 4, hidden_size=36))
    strange = {f"strange.{i}": torch.ones(1) for i in range(300)}
    ck.write(tmp_path, config, ck.as_stored(wider) | strange)
    with pytest.raises(CheckpointError) as error:
        load_target(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 2000
    assert "294 more" in str(error.value) and "more faults" in str(error.value)


def test_a_config_error_names_the_file(tmp_path: Path) -> None:
    config = ck.target_config()
    tensors = ck.as_stored(ck.target_tensors(config))
    del config["head_dim"]
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/config\.json: config: head_dim"):
        load_target(ck.write(tmp_path, config, tensors))


@pytest.mark.case(43)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_a_drafter_loads_in_whole(tmp_path: Path, dtype: torch.dtype | None) -> None:
    config = ck.drafter_config()
    tensors = ck.drafter_tensors(config)
    ck.write(tmp_path, config, tensors)
    drafter, report = read_drafter(tmp_path, dtype=dtype)
    ck.assert_holds(drafter, tensors, dtype or torch.float32)
    assert report.skipped == {}
    assert not any(p.requires_grad for p in drafter.parameters()) and not drafter.training


@pytest.mark.case(48)
@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "mtp.fc.weight", "layers.2.mlp.x"])
def test_unknown_drafter_tensors_are_refused_by_name(tmp_path: Path, name: str) -> None:
    config = ck.drafter_config()
    ck.write(tmp_path, config, ck.drafter_tensors(config) | {name: torch.ones(97, 32)})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_drafter(tmp_path)


def test_a_target_is_no_drafter_and_the_other_way_round(tmp_path: Path) -> None:
    ck.write_target(tmp_path / "t")
    config = ck.drafter_config()
    ck.write(tmp_path / "d", config, ck.drafter_tensors(config))
    with pytest.raises(CheckpointError, match="drafter"):
        load_drafter(tmp_path / "t")
    with pytest.raises(CheckpointError, match="model_type"):
        load_target(tmp_path / "d")


def test_a_checkpoint_saved_by_transformers_loads_and_computes_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for tied in (False, True):
        folder = tmp_path / str(tied)
        config = ck.target_config(tie_word_embeddings=tied, layer_types="lllf")
        theirs = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config)).eval()
        tensors = ck.as_stored(ck.target_tensors(config), ck.TEXT_ONLY)
        missing = theirs.load_state_dict(tensors, strict=False).missing_keys
        assert missing == (["lm_head.weight"] if tied else [])
        theirs.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        tokens = torch.arange(40)[None] * 7 % 97
        with torch.no_grad():
            expected = theirs(tokens).logits
            ours = load_target(folder)
            logits = ours.logits(ours(tokens).final)
        assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
def test_values_that_are_no_finite_numbers_are_refused_by_file_and_tensor(
    tmp_path: Path, bad: float, dtype: torch.dtype | None
) -> None:
    config = ck.target_config(layer_types="lf")
    tensors = ck.target_tensors(config)
    tensors["layers.1.mlp.up_proj.weight"][7, 3] = bad
    stored = ck.as_stored(tensors)
    ck.write(tmp_path / "t", config, stored, ck.dealt(list(stored), "a.safetensors", "b.safetensors", "c.safetensors"))
    with pytest.raises(CheckpointError, match=r"/[abc]\.safetensors: .*layers\.1\.mlp\.up_proj\.weight has 1 value"):
        load_target(tmp_path / "t", dtype=dtype)
    config = ck.drafter_config()
    tensors = ck.drafter_tensors(config)
    tensors["norm.weight"][0] = bad
    ck.write(tmp_path / "d", config, tensors)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: norm\.weight has 1 values of 32 that are NaN or inf"
    ):
        load_drafter(tmp_path / "d", dtype=dtype)


def test_great_but_finite_values_load(tmp_path: Path) -> None:
    tensors = ck.target_tensors(ck.target_config())
    tensors["norm.weight"].fill_(torch.finfo(torch.float32).max)
    ck.assert_holds(load_target(ck.write_target(tmp_path, tensors)), tensors)
