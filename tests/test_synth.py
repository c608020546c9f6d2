"""Every published config: accepted or refused by name, and as a synthetic checkpoint of its names, shapes and types."""

import json
from pathlib import Path
from typing import Any

import checkpoints as ck
import pytest
import torch
from proposers import Moody, emitted
from safetensors.torch import load_file
from test_engine import check_same
from test_weights_eight_bits import FORM, by_hand
from tiny import EXPERTS

from ddtree import MTPDrafter, drafters, generate
from qwen_gdn import ModelConfig, decode
from tools import synth
from tools.synthetic.shrink import is_drafter, shrunk
from tools.synthetic.tensors import contents
from weights import load_drafter, load_mtp, load_target, load_tokenizer

PUBLISHED = {
    file.stem: json.loads(file.read_text()) for file in sorted((Path(__file__).parent / "published").iterdir())
}
REFUSED = {
    "Qwen3.5-122B-A10B-DFlash": "intermediate_size is missing or null",
    "Qwen3.5-397B-A17B-DFlash": "intermediate_size is missing or null",
    "Qwen3.6-35B-A3B-DFlash.legacy-2026-04": "rope_type 'yarn'",
    "RadixArk-Qwen3.8-27B-DSpark": "architectures .'DSparkDraftModel'.",
    "RedHatAI-Qwen3.6-35B-A3B-speculator.dspark": "architectures .'Qwen3DSparkModel'.",
}
DRAFTERS = [name for name, raw in PUBLISHED.items() if is_drafter(raw) or "speculator" in name]
TARGETS = [name for name in PUBLISHED if name not in DRAFTERS]
# Of text and of the MTP module, as the published releases count them.
PARAMETERS = {
    "Qwen3.5-0.8B": (752_393_024, 20_452_864),
    "Qwen3.5-2B": (1_881_825_088, 60_828_160),
    "Qwen3.5-4B": (4_205_751_296, 120_599_552),
    "Qwen3.5-9B": (8_953_803_264, 243_290_624),
    "Qwen3.5-27B": (26_895_998_464, 424_699_392),
    "Qwen3.6-27B": (26_895_998_464, 424_699_392),
    "Qwen3.8-27B": (26_895_998_464, 424_699_392),
    "Qwen3.5-35B-A3B": (34_660_610_688, 844_640_768),
    "Qwen3.6-35B-A3B": (34_660_610_688, 844_640_768),
    "Qwen3.5-122B-A10B": (122_111_526_912, 2_523_679_232),
    "Qwen3.5-397B-A17B": (396_346_350_336, 6_595_568_128),
}
DRAFTER_PARAMETERS = {
    "Qwen3.6-27B-DFlash": 1_730_213_120,
    "Qwen3.6-35B-A3B-DFlash": 385_906_176,
    "Qwen3.5-35B-A3B-DFlash.legacy-2026-04": 473_995_264,
    "Qwen3.5-27B-DFlash": 2_128_682_496,
    "Qwen3.5-9B-DFlash": 1_291_904_512,
    "Qwen3.5-4B-DFlash": 634_425_856,
}


def small(name: str) -> dict[str, Any]:
    """A published config cut to one group of layers, narrow, with few experts and tokens."""
    text = PUBLISHED[name].get("text_config", PUBLISHED[name])
    sizes = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 512}
    sizes |= {"num_experts": 16, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
    if name in DRAFTERS:
        return shrunk(PUBLISHED[name], None, 4, {key: n for key, n in sizes.items() if key in text})
    return shrunk(PUBLISHED[name], 4, None, {key: n for key, n in sizes.items() if key in text})


def write(folder: Path, raw: dict[str, Any], *options: str) -> Path:
    """By the command itself."""
    config = folder / "config.json"
    folder.mkdir()
    config.write_text(json.dumps(raw))
    assert synth.main([str(config), str(folder / "out"), *options]) == 0
    return folder / "out"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_config_is_accepted_or_refused_by_its_key(name: str) -> None:
    read = drafters.from_dict if name in DRAFTERS else ModelConfig.from_dict
    if name not in REFUSED:
        read(PUBLISHED[name])
        return
    with pytest.raises(ValueError, match=REFUSED[name]):
        read(PUBLISHED[name])


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_whole_target_has_as_many_parameters_as_the_release(name: str) -> None:
    made = contents(PUBLISHED[name], 0, exact=False)
    module = sum(recipe.nbytes // 2 for tensor, recipe in made.items() if tensor.startswith("mtp."))
    assert (sum(recipe.nbytes // 2 for recipe in made.values()) - module, module) == PARAMETERS[name]


@pytest.mark.parametrize("name", DRAFTER_PARAMETERS)
def test_a_whole_drafter_has_as_many_parameters_as_the_release(name: str) -> None:
    made = contents(PUBLISHED[name], 0, exact=False)
    assert sum(recipe.nbytes // 2 for recipe in made.values()) == DRAFTER_PARAMETERS[name]


def test_the_eight_bit_27b_has_as_many_scaled_weights_as_the_release() -> None:
    made = contents(PUBLISHED["Qwen3.6-27B-FP8"], 0, exact=False)
    assert sum(name.endswith("_scale_inv") for name in made) == 407


@pytest.mark.parametrize("kind", ["dense", "experts", "eight bits"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_names_and_shapes_are_those_of_the_published_layout(tmp_path: Path, kind: str, flat: bool) -> None:
    config = ck.target_config(**({} if kind == "dense" else EXPERTS))
    form = {"quantization_config": FORM} if kind == "eight bits" else {}
    raw = config | form if flat else ck.nested(config, **form)
    stored = load_file(write(tmp_path / "t", raw) / "model.safetensors")
    wanted = ck.target_tensors(config)
    if kind == "eight bits":
        wanted = ck.one_by_one(wanted)
        assert any(t.dtype == torch.float8_e4m3fn for t in stored.values())
    named = ck.as_stored(wanted, ck.TEXT_ONLY if flat else ck.PUBLISHED)
    plain = {name: t for name, t in stored.items() if not name.endswith("_scale_inv")}
    assert {name: t.shape for name, t in plain.items()} == {name: t.shape for name, t in named.items()}
    assert {t.dtype for t in stored.values()} <= {torch.bfloat16, torch.float8_e4m3fn}


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in REFUSED])
def test_a_small_checkpoint_of_every_published_target_loads_and_writes_what_plain_decoding_writes(
    tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path / "t", small(name), "--shard-gigabytes", "0.02")
    model = load_target(folder, dtype=torch.float32)
    if model.config.quantization is not None and model.config.experts is None:
        stored = {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}
        text = {k.removeprefix(ck.PUBLISHED): t for k, t in stored.items() if not k.startswith("mtp.")}
        ck.assert_holds(model, by_hand(text))
    prompt = load_tokenizer(folder).encode("def f(n):")
    wanted = list(decode(model, prompt, max_new_tokens=16))
    assert len(set(wanted)) > 4
    for proposer in (Moody([*prompt, *wanted], 1), MTPDrafter(load_mtp(folder, dtype=torch.float32))):
        found = emitted(generate(model, proposer, prompt, max_new_tokens=16, budget=15))
        check_same(model, prompt, found, wanted)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in REFUSED])
def test_a_small_checkpoint_of_every_published_drafter_loads_and_drafts(tmp_path: Path, name: str) -> None:
    target = load_target(write(tmp_path / "t", small("Qwen3.5-0.8B")), dtype=torch.float32)
    drafter = load_drafter(write(tmp_path / "d", small(name)), dtype=torch.float32)
    wanted = list(decode(target, [7, 8, 9], max_new_tokens=16))
    rounds = list(generate(target, drafter, [7, 8, 9], max_new_tokens=16, budget=15))
    check_same(target, [7, 8, 9], emitted(iter(rounds)), wanted)
    assert max(done.drafted for done in rounds) == 15


def test_gates_can_be_stored_in_float32_as_earlier_releases_do(tmp_path: Path) -> None:
    stored = load_file(write(tmp_path / "t", ck.target_config(), "--float32-gates") / "model.safetensors")
    exact = {name for name, t in stored.items() if t.dtype == torch.float32}
    assert exact and all(name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")) for name in exact)


def test_the_same_seed_gives_the_same_checkpoint(tmp_path: Path) -> None:
    raw = ck.target_config()
    folders = [write(tmp_path / name, raw, "--seed", seed) for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))]
    ones, sames, others = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(ones[name], sames[name]) for name in ones)
    assert not all(torch.equal(ones[name], others[name]) for name in ones)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "9"], "--layers 9: the config has 4 layer_types"),
        (["--set", "hidden_sizes=4"], "--set hidden_sizes=4: the config has no hidden_sizes"),
        (["--target-layers", "4"], "--target-layers is for a drafter's config"),
        (["--set", "head_dim=5"], "rotary dimension"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(ck.target_config()))
    assert synth.main([str(config), str(tmp_path / "out"), *options]) == 1
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "vocab_size"], "must be KEY=SIZE"),
        (["--set", "vocab_size=0"], "must be KEY=SIZE"),
        (["--shard-gigabytes", "0"], "must be above 0"),
    ],
)
def test_bad_use_is_one_line(
    tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(SystemExit) as exit_:
        synth.main([str(config), str(tmp_path / "out"), *options])
    assert exit_.value.code == 2 and words in capsys.readouterr().err


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(SystemExit):
        synth.main([str(config), str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err
