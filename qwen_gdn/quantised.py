"""How a checkpoint says that its weights are stored in eight bits: blocks of E4M3 numbers, each with a scale."""

from dataclasses import dataclass

from .stated import Stated, check_whole, shown

# Keys that would mean another arithmetic if set to anything else.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic",),
    "weight_per_tensor": (False, None),
    "act_per_tensor": (False, None),
    "ignored_layers": ([], None),
}
PROJECTIONS = frozenset(
    (
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
)
"""The linear maps that are stored so, unless a config excludes them; the others are too small to matter."""


@dataclass(frozen=True)
class BlockFP8:
    """Weights W = W_fp8 · scale, one scale for each block of a matrix; the last ones of a row or column may be partial.

    Args:
        block: rows and columns of a block.
        excluded: modules whose weights are not stored so, under their full names in the checkpoint.
    """

    block: tuple[int, int]
    excluded: tuple[str, ...] = ()


def block_fp8(root: Stated, text: Stated) -> BlockFP8 | None:
    """What a config says of its weights, at the root or in its text part; None if they are not quantised.

    Raises:
        ValueError: they are quantised in another way, or the two places disagree; the key is named.
    """
    stating = [table for table in (root, text) if table.table.get("quantization_config") is not None]
    if not stating:
        return None
    stated = [table.table["quantization_config"] for table in stating]
    if stated[0] != stated[-1]:
        raise root.error("quantization_config at the root differs from that in text_config; state it once")
    form = stated[0] if isinstance(stated[0], dict) else {}
    if form.get("quant_method") != "fp8":
        stating[0].refuse_quantised("use the BF16 or the FP8 release")
    table = Stated(f"{root.what}: quantization_config", form)
    table.refuse_others(_NEUTRAL)
    table.need("activation_scheme", str)
    block = table.need("weight_block_size", list)
    if len(block) != 2:
        raise table.error(f"weight_block_size must be two sizes, rows and columns, got {shown(block)}")
    for size in block:
        check_whole(table.what, "weight_block_size", size)
    excluded = table.maybe("modules_to_not_convert", list) or []
    if not all(isinstance(name, str) for name in excluded):
        raise table.error(f"modules_to_not_convert must hold names, got {shown(excluded)}")
    return BlockFP8((block[0], block[1]), tuple(excluded))
