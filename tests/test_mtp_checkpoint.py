"""A target's MTP module from its checkpoint: what loads, what is refused, and drafting with it on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints as ck
import pytest
import scribe
import torch
from tiny import EXPERTS
from torch import Tensor

import ddtree.run as cli
from ddtree import DFlashDrafter
from weights import CheckpointError, load_mtp, load_target, read_mtp

CONFIG = ck.target_config(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)


def stored_tensors(config: dict[str, Any] = CONFIG) -> dict[str, Tensor]:
    """A target's tensors and its module's, under their names in a published checkpoint."""
    return ck.as_stored(ck.target_tensors(config)) | ck.mtp_tensors(config)


def module_tensors() -> dict[str, Tensor]:
    return {name.removeprefix("mtp."): tensor for name, tensor in ck.mtp_tensors(CONFIG).items()}


def refusal(folder: Path) -> str:
    """The one line with which the module is refused."""
    with pytest.raises(CheckpointError) as error:
        load_mtp(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [False, True])
def test_the_module_of_a_published_layout_holds_its_tensors(tmp_path: Path, flat: bool, dtype: torch.dtype) -> None:
    folder = ck.write(tmp_path, CONFIG if flat else ck.nested(CONFIG), stored_tensors())
    mtp, report = read_mtp(folder, dtype=dtype)
    assert len(module_tensors()) == report.tensors == 15
    ck.assert_holds(mtp, module_tensors(), dtype)
    assert not mtp.training and not any(p.requires_grad for p in mtp.parameters())
    assert report.skipped == {"all but mtp.*": len(ck.target_tensors(CONFIG))}
    ck.assert_holds(load_target(folder, dtype=dtype), ck.target_tensors(CONFIG), dtype)


@pytest.mark.parametrize("layout", [dict, ck.one_by_one], ids=["fused", "one by one"])
def test_the_module_of_a_mixture_holds_its_experts(tmp_path: Path, layout: Callable[[Any], dict[str, Tensor]]) -> None:
    config = CONFIG | EXPERTS
    stored = layout(stored_tensors(config))
    mtp, report = read_mtp(ck.write(tmp_path, ck.nested(config), stored))
    wanted = {name.removeprefix("mtp."): tensor for name, tensor in ck.mtp_tensors(config).items()}
    assert len(wanted) == 19 and report.tensors == sum(name.startswith("mtp.") for name in stored)
    ck.assert_holds(mtp, wanted)


def test_a_module_in_a_file_of_its_own_needs_no_other(tmp_path: Path) -> None:
    stored, own = stored_tensors(), list(ck.mtp_tensors(CONFIG))
    files = {"layers.safetensors": [name for name in stored if name not in own], "mtp.safetensors": own}
    folder = ck.write(tmp_path, ck.nested(CONFIG), stored, files)
    (folder / "layers.safetensors").unlink()
    ck.assert_holds(load_mtp(folder), module_tensors())
    (folder / "mtp.safetensors").unlink()
    assert "mtp.safetensors is missing, with mtp.fc.weight" in refusal(folder)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is missing or 0, so this checkpoint has no MTP module"),
        ({"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers is missing or 0"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2 is not supported"),
        ({"mtp_num_hidden_layers": "1"}, "mtp_num_hidden_layers must be of type int"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings true is not supported"),
        ({"head_dim": None}, "head_dim is missing or null"),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_a_config_without_such_a_module_is_refused_by_its_key(
    tmp_path: Path, flat: bool, stated: dict[str, Any], words: str
) -> None:
    config = CONFIG | stated
    folder = ck.write(tmp_path, config if flat else ck.nested(config), stored_tensors())
    assert f"{folder / 'config.json'}: config: {words}" in refusal(folder)


def test_a_config_that_does_not_speak_of_a_module_has_none(tmp_path: Path) -> None:
    assert "is missing or 0" in refusal(ck.write_target(tmp_path))


def test_a_checkpoint_that_lost_its_module_is_refused_as_such(tmp_path: Path) -> None:
    folder = ck.write(tmp_path, ck.nested(CONFIG), ck.as_stored(ck.target_tensors(CONFIG)))
    said = refusal(folder)
    assert said.startswith(f"{folder} holds no mtp.* tensors, though config.json states an MTP module")


def test_each_tensor_that_is_missing_or_of_another_shape_is_named_with_its_file(tmp_path: Path) -> None:
    stored = stored_tensors()
    for i, name in enumerate(ck.mtp_tensors(CONFIG)):
        lacking = ck.write(tmp_path / f"lacking {i}", CONFIG, {n: t for n, t in stored.items() if n != name})
        assert f"{lacking / 'model.safetensors'} lacks {name} that config.json asks for" in refusal(lacking)
        wrong = ck.write(tmp_path / f"wrong {i}", CONFIG, stored | {name: stored[name][1:].clone()})
        assert f"{wrong / 'model.safetensors'}: {name} has shape {list(stored[name][1:].shape)}" in refusal(wrong)


@pytest.mark.parametrize(
    "name", ["mtp.layers.1.input_layernorm.weight", "mtp.embed_tokens.weight", "mtp.lm_head.weight", "mtp.fc.bias"]
)
def test_a_tensor_that_the_module_has_no_place_for_is_refused(tmp_path: Path, name: str) -> None:
    folder = ck.write(tmp_path, CONFIG, stored_tensors() | {name: torch.ones(3)})
    assert "has no place for: " in (said := refusal(folder)) and "mtp." in said and name.split(".")[-2] in said


def test_many_faults_and_values_that_are_not_finite_are_one_line(tmp_path: Path) -> None:
    stored = stored_tensors()
    few = {name: tensor for name, tensor in stored.items() if "proj" not in name} | {"mtp.x": torch.ones(1)}
    said = refusal(ck.write(tmp_path / "few", CONFIG, few))
    assert "lacks mtp.layers.0.self_attn.q_proj.weight" in said and "has no place for: mtp.x" in said
    stored["mtp.norm.weight"][3] = torch.nan
    assert "mtp.norm.weight has 1 values of 32 that are NaN" in refusal(ck.write(tmp_path / "nan", CONFIG, stored))
    scaled = stored_tensors() | {"mtp.fc.weight_scale_inv": torch.ones(1)}
    assert "is quantised" in refusal(ck.write(tmp_path / "scaled", CONFIG, scaled))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with an MTP module, and a tokenizer."""
    config = CONFIG | {"vocab_size": scribe.VOCAB, "eos_token_id": 0}
    wild = {name: 4 * tensor for name, tensor in stored_tensors(config).items()}
    return scribe.write_tokenizer(ck.write(tmp_path_factory.mktemp("target"), ck.nested(config), wild))


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call(*argv: object) -> tuple[int, str, str]:
        ask = ("--prompt", scribe.PROMPT, "--max-new-tokens", 24, "--dtype", "float64", "--json", *argv)
        status = cli.main([str(part) for part in ask])
        return status, *capsys.readouterr()

    return call


@pytest.mark.parametrize("how", [(), ("--mode", "chain"), ("--mtp-depth", 1), ("--budget", 40)], ids=str)
def test_the_command_drafts_with_the_targets_module_and_writes_what_plain_decoding_does(
    run: Run, target: Path, how: tuple[object, ...]
) -> None:
    plain = json.loads(run("--target", target)[1].splitlines()[-1])
    status, out, err = run("--target", target, "--drafter", "mtp", *how)
    said = json.loads(out.splitlines()[-1])
    assert (status, said["ids"]) == (0, plain["ids"]), err
    assert (said["settings"]["drafter"], said["settings"]["mode"]) == ("mtp", "chain" if "chain" in how else "tree")
    assert said["figures"]["drafted"] > plain["figures"]["drafted"] == 0


def test_the_command_refuses_a_target_without_a_module_and_a_depth_without_a_use(
    run: Run, target: Path, tmp_path: Path
) -> None:
    bare = scribe.write_tokenizer(ck.write_target(tmp_path / "bare", vocab_size=scribe.VOCAB))
    for source in (bare, "bundled"):
        status, out, err = run("--target", source, "--drafter", "mtp")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "--drafter mtp: " in err and "mtp_num_hidden_layers is missing or 0" in err
    for drafter in ((), ("--drafter", "bundled")):
        status, _, err = run("--target", target, *drafter, "--mtp-depth", 3)
        assert status == 2 and "--mtp-depth belongs to the target's MTP module; add --drafter mtp" in err
    assert run("--target", target, "--drafter", "mtp", "--mtp-depth", 0)[0] == 2
    assert (
        "plain decoding does not use --drafter and --mtp-depth"
        in run("--target", target, "--drafter", "mtp", "--mtp-depth", 2, "--mode", "plain")[2]
    )


def test_a_drafter_in_a_folder_named_like_the_word_is_reached_by_its_path(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = ck.drafter_config(vocab_size=scribe.VOCAB)
    ck.write(tmp_path / "mtp", draft, ck.drafter_tensors(draft))
    monkeypatch.chdir(tmp_path)
    loaded: list[str] = []
    original = cli.load_drafter

    def load(source: str, **how: Any) -> DFlashDrafter:
        loaded.append(source)
        return original(source, **how)

    monkeypatch.setattr(cli, "load_drafter", load)
    assert run("--target", target, "--drafter", "./mtp")[0] == 0
    assert run("--target", target, "--drafter", "mtp")[0] == 0
    assert loaded == ["./mtp"]
