"""`--sampling checkpoint`: what generation_config.json states is taken, overruled by options, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import scribe
from transformers import GenerationConfig

import ddtree.run as cli
from ddtree.arguments import UsageError
from ddtree.checkpoint_sampling import ELSEWHERE, NEUTRAL, checkpoint_sampling
from ddtree.options import parse, settled
from weights import CheckpointError

QWEN = {
    "bos_token_id": 248044,
    "do_sample": True,
    "eos_token_id": [248046, 248044],
    "pad_token_id": 248044,
    "temperature": 1.0,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": None,
}


def stating(folder: Path, **values: Any) -> str:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("stated", "taken"),
    [
        (QWEN, {"temperature": 1.0, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "min_p": 0.1}, {"temperature": 0.6, "min_p": 0.1}),
        ({}, {"temperature": 0.0}),
        (QWEN | {"do_sample": None}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.05}, {"temperature": 0.0, "repetition_penalty": 1.05}),
        (
            {"do_sample": True, "presence_penalty": 1.5, "frequency_penalty": 0.5},
            {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        ),
        ({"do_sample": True, "typical_p": 1.0, "num_beams": 1, "sequence_bias": None}, {"temperature": 1.0}),
    ],
    ids=str,
)
def test_what_the_file_states_is_taken(tmp_path: Path, stated: dict[str, Any], taken: dict[str, Any]) -> None:
    assert checkpoint_sampling(stating(tmp_path, **stated)) == taken


def test_every_key_that_transformers_knows_is_judged(tmp_path: Path) -> None:
    """Neutral where transformers' own default is, which it writes into its files."""
    neutral = GenerationConfig._get_default_generation_params()
    assert neutral.pop("top_k") == 50
    assert checkpoint_sampling(stating(tmp_path, **neutral)) == {"temperature": 0.0, "repetition_penalty": 1.0}
    settings = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    assert set(GenerationConfig().to_dict()) <= settings | set(NEUTRAL) | ELSEWHERE


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        ({"typical_p": 0.9}, "typical_p 0.9 is not done here; leave out --sampling checkpoint"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3 is not done here"),
        ({"num_beams": 4}, "num_beams 4 is not done here"),
        ({"guidance_scale": 1.5}, "guidance_scale 1.5 is not done here"),
        ({"suppress_tokens": [3]}, r"suppress_tokens \[3\] is not done here"),
        ({"some_new_warp": 0.3}, "some_new_warp 0.3 is not done here"),
        ({"do_sample": True, "temperature": -1}, "generation_config.json: temperature must be finite and at least 0"),
        ({"do_sample": True, "top_k": 2.5}, "generation_config.json: top_k must be an int"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
        ({"repetition_penalty": "much"}, "repetition_penalty must lie in"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path, stated: dict[str, Any], fault: str) -> None:
    with pytest.raises(CheckpointError, match=fault) as caught:
        checkpoint_sampling(stating(tmp_path, **stated))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no generation_config\.json; leave it out"):
        checkpoint_sampling(str(tmp_path))


def test_options_that_are_given_win_even_with_their_default(tmp_path: Path) -> None:
    defaults = checkpoint_sampling(stating(tmp_path, **QWEN, repetition_penalty=1.1))
    ask = ["--prompt", "x", "--sampling", "checkpoint"]
    options = settled(parse(ask), defaults)
    assert (options.temperature, options.top_k, options.top_p, options.repetition_penalty) == (1.0, 20, 0.95, 1.1)
    assert options.seed is not None and not options.notes
    given = settled(parse([*ask, "--top-k", "0", "--temperature", "0.4", "--seed", "3", "--min-p", "0.1"]), defaults)
    assert (given.temperature, given.top_k, given.top_p, given.min_p, given.seed) == (0.4, 0, 0.95, 0.1, 3)
    greedy = settled(parse([*ask, "--temperature", "0"]), defaults)
    assert (greedy.seed, greedy.notes) == (None, ())
    assert parse(ask[:2]).temperature == 0


def test_the_command_samples_as_the_checkpoint_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = scribe.write_scribe(tmp_path)
    stating(target, do_sample=True, temperature=0.9, top_k=7, repetition_penalty=1.2)
    ask = ["--target", str(target), "--prompt", "class", "--max-new-tokens", "3", "--json", "--device", "cpu"]
    assert cli.main([*ask, "--sampling", "checkpoint", "--top-k", "5"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    settings = {name: said["settings"][name] for name in ("temperature", "top_k", "repetition_penalty", "top_p")}
    assert settings == {"temperature": 0.9, "top_k": 5, "repetition_penalty": 1.2, "top_p": 1.0}
    assert said["seed"] is not None
    stating(target, do_sample=True, eta_cutoff=0.1)
    assert cli.main([*ask, "--sampling", "checkpoint"]) == 1
    assert "eta_cutoff 0.1 is not done here" in capsys.readouterr().err
