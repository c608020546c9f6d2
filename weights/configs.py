"""What the small JSON files of a checkpoint say: a model's config, and the ids that end a text."""

from pathlib import Path
from typing import Protocol, TypeVar

from qwen_gdn.config import ModelConfig, token_ids
from qwen_gdn.stated import shown

from .files import CONFIG_FILES, CheckpointError, Source, one_line, read_json, resolve

Config_co = TypeVar("Config_co", covariant=True)


class ConfigKind(Protocol[Config_co]):
    """What reads configs: a class of them, as `ModelConfig` is, or a module for several, as `ddtree.drafters` is."""

    def from_folder(self, path: str | Path) -> Config_co:
        """Reads `config.json` of a folder; FileNotFoundError, or ValueError that names the file."""


def read_config(kind: ConfigKind[Config_co], folder: Path) -> Config_co:
    """The config of a checkpoint's folder.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not one that `kind` implements.
    """
    try:
        return kind.from_folder(folder)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json; give the folder of a whole checkpoint") from None
    except ValueError as error:
        raise CheckpointError(one_line(error)) from None


def stop_ids(source: Source, config: ModelConfig) -> tuple[int, ...]:
    """All token ids that end a text, without repeats.

    The union, in this order, of `eos_token_id` in the text part of config.json, at its root, and in
    generation_config.json: published checkpoints name different ones in each and mean all of them.

    Raises:
        CheckpointError: a file is damaged, or an id is outside the vocabulary.
    """
    folder = resolve(source, "target", CONFIG_FILES)
    stated, generation = folder / "config.json", folder / "generation_config.json"
    ids = [*_in_vocabulary(config.eos_token_ids, stated, config), *_stop_ids_of(stated, config)]
    if generation.exists():
        ids += _stop_ids_of(generation, config)
    return tuple(dict.fromkeys(ids))


def _stop_ids_of(file: Path, config: ModelConfig) -> tuple[int, ...]:
    stated = read_json(file).get("eos_token_id")
    try:
        ids = token_ids(stated, f"{file}: eos_token_id")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return _in_vocabulary(ids, file, config)


def _in_vocabulary(ids: tuple[int, ...], file: Path, config: ModelConfig) -> tuple[int, ...]:
    for i in ids:
        if not 0 <= i < config.vocab_size:
            raise CheckpointError(
                f"{file}: eos_token_id {shown(i)} is outside the vocabulary of {config.vocab_size}; correct or drop it"
            )
    return ids
