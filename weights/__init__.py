"""Checkpoints: where they are, what they hold, and how they become models and tokenizers."""

from .chat import ChatTemplate
from .configs import stop_ids
from .files import CheckpointError
from .load import LoadReport, load_drafter, load_mtp, load_target, read_drafter, read_mtp, read_target
from .stream import TextStream
from .tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "CheckpointError",
    "LoadReport",
    "TextStream",
    "Tokenizer",
    "load_drafter",
    "load_mtp",
    "load_target",
    "load_tokenizer",
    "read_drafter",
    "read_mtp",
    "read_target",
    "stop_ids",
]
