"""Left padding: which tokens of a batch of texts of different lengths are none.

Nothing after a token changes what a causal model makes of it. So a forward moves each row's own tokens to the front,
runs, and moves the results back; what stands at padding is never read.
"""

import torch
from torch import Tensor

from .checked import holds_integers, shown
from .transfer import indices


class LeftPadding:
    """Padding in front of the rows of one batch of tokens.

    Attributes:
        counts: the number of each row's own tokens, which come last; maybe 0.

    Args:
        mask: bool or integers of 0 and 1, [B, T]; true at a row's own tokens.
        tokens: what it is about, [B, T] or [T].

    Raises:
        ValueError: it is no such mask, has not the shape of the tokens, or a token of its own is followed by padding.
    """

    def __init__(self, mask: Tensor, tokens: Tensor) -> None:
        needs = "mask must be bool (or 0 and 1) of the tokens' shape [B, T]"
        if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor):
            raise ValueError(f"{needs}, got {shown(mask)}")
        if mask.shape != tokens.shape or not 1 <= mask.dim() <= 2:
            raise ValueError(f"{needs}, got {list(mask.shape)} for tokens {list(tokens.shape)}")
        if mask.dtype != torch.bool and not (holds_integers(mask) and bool(((mask == 0) | (mask == 1)).all())):
            raise ValueError(f"{needs}, got {mask.dtype} {shown(mask.unique().tolist())}")
        own = mask.detach().cpu().bool()
        own = own[None] if own.dim() == 1 else own
        width = own.shape[1]
        counts = own.sum(1)
        wrong = (own != (torch.arange(width) >= width - counts[:, None])).any(1).tolist()
        if any(wrong):
            row = wrong.index(True)
            raise ValueError(
                f"mask: row {row} has padding after a token of its own; pad on the left, that is "
                f"{width - int(counts[row])} times 0 and then {int(counts[row])} times 1"
            )
        self.counts: list[int] = counts.tolist()
        self._width = width

    def aligned(self, tokens: Tensor) -> Tensor:
        """The tokens, int64 [B, T], each row's own first and then 0."""
        shift = self._shift(tokens.device)
        places = torch.arange(self._width, device=tokens.device) + shift
        own = tokens.view(len(shift), -1).gather(1, places.clamp(max=self._width - 1))
        return own.masked_fill(places >= self._width, 0)

    def restored(self, rows: Tensor) -> Tensor:
        """What a forward made of aligned tokens, [B, T, D], where the tokens were; 0 at padding."""
        places = torch.arange(self._width, device=rows.device) - self._shift(rows.device)
        each = torch.arange(len(rows), device=rows.device)[:, None]
        return rows[each, places.clamp(min=0)].masked_fill((places < 0)[..., None], 0)

    def _shift(self, device: torch.device) -> Tensor:
        """The number of padding tokens of each row, [B, 1]."""
        return self._width - indices(self.counts, device)[:, None]
