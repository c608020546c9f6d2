"""The kinds of DFlash drafters there are: which one a config describes, and the module of each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_gdn.stated import Stated, read_config, shown

from .dflash2 import DFlash2Drafter
from .dflash2_config import DFlash2Config
from .drafter import DFlashDrafter
from .drafter_config import DFlashConfig

_CONFIGS: tuple[type[DFlashConfig], ...] = (DFlashConfig, DFlash2Config)
ARCHITECTURES = tuple(kind.architecture for kind in _CONFIGS)
"""What the configs of drafters that are read here name."""


def from_dict(raw: Mapping[str, Any]) -> DFlashConfig:
    """Reads a parsed config as the kind that its `architectures` names; the first generation, where it names none.

    Raises:
        ValueError: it names another kind, or what it says is none of this kind.
    """
    table = Stated("drafter config", raw)
    names = table.maybe("architectures", list) or [DFlashConfig.architecture]
    for kind in _CONFIGS:
        if names == [kind.architecture]:
            return kind.from_dict(raw)
    raise table.error(f"architectures {shown(names)} is not supported; supported are {', '.join(ARCHITECTURES)}")


def from_folder(path: str | Path) -> DFlashConfig:
    """`from_dict` of the `config.json` of a checkpoint folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a config of a drafter implemented here (file and key are named).
    """
    return read_config(path, from_dict)


def build(config: DFlashConfig) -> DFlashDrafter:
    """The drafter of a config, with parameters as they begin."""
    return DFlash2Drafter(config) if isinstance(config, DFlash2Config) else DFlashDrafter(config)
