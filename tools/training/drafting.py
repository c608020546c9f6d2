"""How a drafter is trained: blocks at many anchors of a sequence at once, under one mask.

A block at anchor a holds the token at a and masks behind it. It sees the target's states of rows before a, within
the window, and itself; slot j is to name the token at a + j.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.drafter import DFlashDrafter
from ddtree.drafter_config import DFlashConfig
from qwen_gdn import QwenGDN
from qwen_gdn.rope import Rotation
from tools.training.generated import Continued

_TOKENS_A_FORWARD = 2**18
_WEIGHT_DECAY_SLOTS = 5.0


class Sequences(NamedTuple):
    """Rows of sequences that a drafter learns from, all cut alike.

    tokens: int16 [N, R]. features: [N, R, taps · D], the target's states. start: absolute position of row 0.
    prompt: the row of the first generated token, which is the first anchor.
    """

    tokens: Tensor
    features: Tensor
    start: int
    prompt: int

    def anchors(self, block: int) -> int:
        """How many rows from `prompt` on can be anchors: all tokens of their blocks are known."""
        return self.tokens.shape[1] - self.prompt - block + 1


@torch.no_grad()
def with_features(target: QwenGDN, config: DFlashConfig, continued: Continued) -> Sequences:
    """Runs the target over sequences and keeps what a drafter can see: the last `sliding_window` prompt rows on."""
    assert config.sliding_window is not None
    tokens, prompt = continued.tokens.to(target.device), continued.prompt
    start = max(0, prompt - config.sliding_window)
    features = []
    for part in tokens.split(max(1, _TOKENS_A_FORWARD // tokens.shape[1])):
        captured = target(part.int(), capture=config.target_layer_ids).captured
        features.append(torch.cat([states[:, start:] for states in captured], dim=-1))
    return Sequences(tokens[:, start:].clone(), torch.cat(features), start, prompt - start)


class Blocks(NamedTuple):
    """Blocks at anchors [A] that a batch shares, Q = A · block rows a sequence, and all the drafter needs of them."""

    embedded: Tensor  # [B, Q, D]
    features: Tensor  # [B, R, taps · D]
    context_by: Rotation
    block_by: Rotation
    mask: Tensor  # bool [Q, R + Q]
    following: Tensor  # int64 [B, A, block − 1], the tokens to name


def make_blocks(
    target: QwenGDN, drafter: DFlashDrafter, sequences: Sequences, rows: Tensor, anchors: Tensor, room: int
) -> Blocks:
    """Cuts blocks out of some sequences.

    Args:
        rows: int64 [B], which sequences.
        anchors: int64 [A], rows of theirs.
        room: context rows R of the result; the sequences' are padded to it.
    """
    config, device = drafter.config, rows.device
    tokens = sequences.tokens[rows].long()
    features = sequences.features[rows]
    features = F.pad(features, (0, 0, 0, room - features.shape[1]))
    inside = torch.arange(config.block_size, device=device)
    spans = anchors[:, None] + inside
    block = tokens[:, spans]
    masked = torch.where(inside == 0, block, config.mask_token_id)
    return Blocks(
        embedded=target.embed(masked.flatten(1)),
        features=features,
        context_by=drafter.angles(sequences.start + torch.arange(room, device=device)),
        block_by=drafter.angles(sequences.start + spans.flatten()),
        mask=anchors_mask(anchors, config, room),
        following=block[..., 1:],
    )


def anchors_mask(anchors: Tensor, config: DFlashConfig, rows: int) -> Tensor:
    """What the rows of blocks at these anchors see: bool [A · block, rows + A · block]."""
    assert config.sliding_window is not None
    device = anchors.device
    inside = torch.arange(config.block_size, device=device)
    position = (anchors[:, None] + inside).flatten()[:, None]
    anchor = anchors.repeat_interleave(config.block_size)[:, None]
    context = torch.arange(rows, device=device)
    sees_context = (context < anchor) & (position - context < config.sliding_window)
    own = torch.arange(len(anchors), device=device).repeat_interleave(config.block_size)
    sees_block = own[:, None] == own
    if config.causal("sliding_attention"):
        sees_block = sees_block.tril()
    return torch.cat((sees_context, sees_block), dim=1)


def draft_logits(target: QwenGDN, drafter: DFlashDrafter, blocks: Blocks) -> Tensor:
    """Logits of every slot but the anchors', [B, A, block − 1, vocab]."""
    rows = drafter.project(drafter.context(blocks.features), blocks.context_by)
    hidden = cast(Tensor, drafter(blocks.embedded, rows, blocks.block_by, {"sliding_attention": blocks.mask}))
    slots = hidden.unflatten(1, (-1, drafter.config.block_size))[:, :, 1:]
    return target.logits(slots)


def draft_loss(target: QwenGDN, drafter: DFlashDrafter, blocks: Blocks) -> Tensor:
    """Cross entropy in nats, slot j weighted by e^(−(j−1)/5): a later slot counts only if all before it are right."""
    logits = draft_logits(target, drafter, blocks).float()
    nats = F.cross_entropy(logits.flatten(0, 2), blocks.following.flatten(), reduction="none")
    slots = blocks.following.shape[-1]
    weights = torch.exp(-torch.arange(slots, device=nats.device) / _WEIGHT_DECAY_SLOTS)
    return (nats.view(-1, slots).mean(dim=0) * weights).sum() / weights.sum()


@torch.no_grad()
def chain_length(target: QwenGDN, drafter: DFlashDrafter, sequences: Sequences) -> float:
    """Mean accepted tokens a round, the bonus included, of chains drafted along greedy continuations.

    Every anchor's draft is compared with what the target wrote; rounds then go from anchor to anchor as decoding
    would, until no anchor is left.
    """
    count, device = sequences.anchors(drafter.config.block_size), sequences.tokens.device
    anchors = sequences.prompt + torch.arange(count, device=device)
    accepted = []
    for rows in torch.arange(len(sequences.tokens), device=device).split(16):
        blocks = make_blocks(target, drafter, sequences, rows, anchors, sequences.tokens.shape[1])
        right = draft_logits(target, drafter, blocks).argmax(dim=-1) == blocks.following
        accepted.append(right.int().cumprod(dim=-1).sum(dim=-1))
    rounds = [length for row in torch.cat(accepted).tolist() for length in _rounds(row)]
    return sum(rounds) / len(rounds)


def _rounds(accepted: list[int]) -> list[int]:
    """Tokens emitted by each round, given how many drafts are right at each anchor."""
    lengths, at = [], 0
    while at < len(accepted):
        lengths.append(accepted[at] + 1)
        at += lengths[-1]
    return lengths
