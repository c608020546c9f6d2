"""DDTree speculative decoding on hybrid models: a drafter proposes, one forward verifies a tree, a path is kept."""

from .drafter import DFlashDrafter
from .drafter_config import DFlashConfig
from .loop import NoDrafts, Proposer, Round, generate
from .sampling import make_sampler
from .tree import Acceptance, DraftTree, Scores, accept, build_chain, build_tree

__all__ = [
    "Acceptance",
    "DFlashConfig",
    "DFlashDrafter",
    "DraftTree",
    "NoDrafts",
    "Proposer",
    "Round",
    "Scores",
    "accept",
    "build_chain",
    "build_tree",
    "generate",
    "make_sampler",
]
