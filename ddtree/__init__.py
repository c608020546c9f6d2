"""DDTree speculative decoding on hybrid models: a drafter proposes, one forward verifies a tree, a path is kept."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto import AutoBudget
    from .batch import generate_batch
    from .budget import Budget
    from .dflash2 import DFlash2Drafter
    from .dflash2_config import DFlash2Config
    from .drafter import DFlashDrafter
    from .drafter_config import DFlashConfig
    from .loop import Round, generate
    from .mtp import MTPDrafter
    from .numerics import debug_numerics
    from .proposer import NoDrafts, Proposer
    from .rows import Verified
    from .sampling import make_sampler
    from .scores import Scores
    from .scoring import calibrated, scored, tempered
    from .session import Session
    from .streaming import End, Step, Stream, stream
    from .tree import Acceptance, DraftTree, ScoredTree, accept, build_chain, build_spine, build_tree

__all__ = [
    "Acceptance",
    "AutoBudget",
    "Budget",
    "DFlash2Config",
    "DFlash2Drafter",
    "DFlashConfig",
    "DFlashDrafter",
    "DraftTree",
    "End",
    "MTPDrafter",
    "NoDrafts",
    "Proposer",
    "Round",
    "ScoredTree",
    "Scores",
    "Session",
    "Step",
    "Stream",
    "Verified",
    "accept",
    "build_chain",
    "build_spine",
    "build_tree",
    "calibrated",
    "debug_numerics",
    "generate",
    "generate_batch",
    "make_sampler",
    "scored",
    "stream",
    "tempered",
]

# Imported when one is first asked for: torch takes a second or two, in which `python -m ddtree.run`, which imports
# this package before anything of its own can run, would not know what to do with an interrupt.
_HOMES = {
    "Acceptance": "tree",
    "AutoBudget": "auto",
    "Budget": "budget",
    "DFlash2Config": "dflash2_config",
    "DFlash2Drafter": "dflash2",
    "DFlashConfig": "drafter_config",
    "DFlashDrafter": "drafter",
    "DraftTree": "tree",
    "End": "streaming",
    "MTPDrafter": "mtp",
    "NoDrafts": "proposer",
    "Proposer": "proposer",
    "Round": "loop",
    "ScoredTree": "tree",
    "Scores": "scores",
    "Session": "session",
    "Step": "streaming",
    "Stream": "streaming",
    "Verified": "rows",
    "accept": "tree",
    "build_chain": "tree",
    "build_spine": "tree",
    "build_tree": "tree",
    "calibrated": "scoring",
    "debug_numerics": "numerics",
    "generate": "loop",
    "generate_batch": "batch",
    "make_sampler": "sampling",
    "scored": "scoring",
    "stream": "streaming",
    "tempered": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
