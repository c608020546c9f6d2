"""What a proposer knows of a sequence, as something that can be kept, put back and shortened.

A proposer without these methods serves every loop; a session then lets it read a conversation anew where it would
otherwise go back to a shared prefix.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from qwen_gdn.checked import as_integer, shown


class Kept(Protocol):
    """A context that is kept; what else it holds is the proposer's own affair."""

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held."""


@runtime_checkable
class Rewindable(Protocol):
    """A proposer whose context can be put back to where it was; rows are counted from the last `reset` on."""

    @property
    def context_length(self) -> int:
        """Rows observed and not taken back."""

    @property
    def crop_floor(self) -> int:
        """The lowest length that `crop` reaches exactly."""

    def crop(self, length: int) -> None:
        """Forgets the rows from `length` on; ValueError, and no change, below `crop_floor`."""

    def snapshot(self) -> Kept:
        """A copy of the context that nothing here changes any more."""

    def restore(self, kept: Any) -> None:
        """Takes on a copy of what `snapshot` returned."""


@runtime_checkable
class Replicable(Protocol):
    """A proposer of which there can be several over the same weights."""

    def replica(self) -> Any:
        """Another proposer of these weights, unbound, that has observed nothing and shares no context."""


class RowCount(NamedTuple):
    """The context of a proposer that keeps nothing of its rows but their number."""

    length: int

    @property
    def nbytes(self) -> int:
        return 0


def check_crop(length: int, floor: int, most: int) -> None:
    """Raises ValueError unless the length is an integer in [floor, most]."""
    wanted = as_integer(length)
    if wanted is None or not floor <= wanted <= most:
        raise ValueError(
            f"drafter: crop to {shown(length)}, but of its {most} rows only those from {floor} on can be taken back; "
            "reset it and let it observe the others again"
        )
