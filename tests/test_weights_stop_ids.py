"""Stop ids: a documented union of what three places state."""

from pathlib import Path

import checkpoints as ck
import pytest
import torch

from qwen_gdn import ModelConfig
from weights import CheckpointError, stop_ids


@pytest.mark.case(58)
@pytest.mark.parametrize(
    ("text", "root", "generation", "expected"),
    [
        (96, None, None, (96,)),
        ([5, 3], None, None, (5, 3)),
        (None, 7, None, (7,)),
        (96, 7, [2, 96, 1], (96, 7, 2, 1)),
        (None, None, 4, (4,)),
        (None, None, None, ()),
    ],
)
def test_stop_ids_are_the_union_in_the_order_text_root_generation(
    tmp_path: Path, text: object, root: object, generation: object, expected: tuple[int, ...]
) -> None:
    config = ck.target_config(eos_token_id=text)
    ck.write(tmp_path, ck.nested(config, eos_token_id=root), {"x": torch.ones(1)})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {generation}}}')
    assert stop_ids(tmp_path, ModelConfig.from_folder(tmp_path)) == expected


@pytest.mark.parametrize("stated", ["97", "-1", '"a"', "true", "[1, null]"])
def test_stop_ids_that_are_no_tokens_are_refused(tmp_path: Path, stated: str) -> None:
    ck.write(tmp_path, ck.target_config(), {"x": torch.ones(1)})
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {stated}}}')
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/generation_config\.json: eos_token_id"):
        stop_ids(tmp_path, ModelConfig.from_folder(tmp_path))


def test_a_stop_id_beyond_the_vocabulary_is_named_with_its_file(tmp_path: Path) -> None:
    for place in ({"text": 97}, {"root": 98}):
        config = ck.target_config(eos_token_id=place.get("text"))
        ck.write(tmp_path, ck.nested(config, eos_token_id=place.get("root")), {"x": torch.ones(1)})
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/config\.json: eos_token_id 9. is outside .* of 97"):
            stop_ids(tmp_path, ModelConfig.from_folder(tmp_path))
