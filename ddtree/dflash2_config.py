"""What a DFlash 2 drafter's `config.json` says: a DFlash config with convolutions and a candidate selector.

The sizes of both have no defaults. The three factors that reference code also reads are neutral where absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qwen_gdn.stated import Stated, check_real, check_whole

from .drafter_config import DFlashConfig

_WHAT = "drafter config"
_MOST_CANDIDATES = 1 << 8  # scores of pairs grow with its square
_LEAST, _GREATEST = 1e-30, 1e30  # of a factor: positive, so that it changes no order of logits

_COUNTS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """Architecture of one DFlash 2 drafter; a value out of range, or at odds with another, is a ValueError naming it.

    Args:
        conv_kernel_size: taps of the convolutions along the block, the row's own included.
        conv_group_size: neighbouring channels that share the dynamic part of a tap.
        selector_rank: width in which pairs of neighbouring tokens are scored.
        selector_top_k: candidates of a position, the target head's likeliest.
        input_embedding_scale: multiplies the target's embeddings of the block.
        output_multiplier: multiplies the target head's logits.
        final_logit_softcapping: c of c · tanh(logits / c), after that; None for none.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    architecture: ClassVar[str] = "DFlash2DraftModel"
    kinds: ClassVar[Mapping[str, type]] = {
        **DFlashConfig.kinds,
        **dict.fromkeys(_COUNTS, int),
        **dict.fromkeys(_FACTORS, float),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(_WHAT, "conv_kernel_size", self.conv_kernel_size, most=self.block_size)
        check_whole(_WHAT, "conv_group_size", self.conv_group_size, most=self.hidden_size)
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"{_WHAT}: hidden_size {self.hidden_size} is no multiple of conv_group_size {self.conv_group_size}"
            )
        check_whole(_WHAT, "2 * conv_kernel_size * hidden_size", 2 * self.conv_kernel_size * self.hidden_size)
        check_whole(_WHAT, "selector_rank", self.selector_rank)
        check_whole(_WHAT, "selector_top_k", self.selector_top_k, most=min(self.vocab_size, _MOST_CANDIDATES))
        for name in _FACTORS:
            if (value := getattr(self, name)) is not None:
                check_real(_WHAT, name, value, _LEAST, _GREATEST)

    @classmethod
    def _further(cls, table: Stated) -> dict[str, Any]:
        factors = {name: value for name in _FACTORS if (value := table.maybe(name, float)) is not None}
        if factors.get("final_logit_softcapping") == 0:  # how configs spell none
            del factors["final_logit_softcapping"]
        return {name: table.need(name, int) for name in _COUNTS} | factors
