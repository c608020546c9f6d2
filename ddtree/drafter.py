"""The DFlash drafter: a small transformer that fills a block of masked positions in one pass.

It reads the target's hidden states of committed tokens as context, and borrows the target's embedding and head.
It knows no trees and no acceptance, and nothing it proposes can change what the target would write.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor, nn

from qwen_gdn.config import ModelConfig
from qwen_gdn.layer_cache import storage_bytes
from qwen_gdn.norms import PlainRMSNorm
from qwen_gdn.products import LinearMap
from qwen_gdn.rope import Rotation, rotation

from .contexts import check_crop
from .drafter_config import AttentionType, DFlashConfig, check_layer_ids
from .drafter_layers import DrafterLayer, Rows, SeenRows, block_mask
from .scores import Scores

AT_ONCE = 64  # rows that are taken into a context together, if nothing is proposed before


class Target(Protocol):
    """What a drafter borrows from its target."""

    @property
    def config(self) -> ModelConfig: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class _Borrowed(NamedTuple):
    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]


class _Context(NamedTuple):
    """Context rows of every layer (none before the first row), replaced as a whole and so never half-updated.

    A sliding layer holds exactly the rows that a later block can see. A full layer holds a buffer, whose rows
    past `length` are scratch.

    waiting: features of the rows after these, observed but not projected yet.
    held: how many rows these are.
    """

    length: int
    layers: tuple[Rows, ...]
    waiting: tuple[Tensor, ...] = ()
    held: int = 0

    @property
    def observed(self) -> int:
        return self.length + self.held

    def followed_by(self, features: Tensor) -> "_Context":
        """With rows that wait after the others."""
        return _Context(self.length, self.layers, (*self.waiting, features), self.held + features.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held."""
        return storage_bytes([*(part for rows in self.layers for part in rows), *self.waiting])


class DFlashDrafter(nn.Module):
    """A proposer of independent positions (DFlash); parameters are named as in published checkpoints.

    `context`, `project` and `forward` are the network, pure and differentiable. `bind`, `reset`, `observe` and
    `propose` are the proposer: they run it for one sequence, whose context they keep, without gradients.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = LinearMap(len(config.target_layer_ids) * width, width)
        self.hidden_norm = PlainRMSNorm(width, eps)
        # Checkpoints call the blocks `layers`; a proposer's attribute of that name lists target layers.
        self._modules["layers"] = nn.ModuleList(self._layer() for _ in config.layer_types)
        self.norm = PlainRMSNorm(width, eps)
        self._borrowed: _Borrowed | None = None
        self._context = _Context(0, ())

    def _layer(self) -> DrafterLayer:
        return DrafterLayer(self.config)

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of the target layers it reads, in the order of concatenation."""
        return self.config.target_layer_ids

    @property
    def blocks(self) -> nn.ModuleList:
        """Its own transformer layers, whose parameters are named `layers.N.…`."""
        return cast(nn.ModuleList, self._modules["layers"])

    def get_submodule(self, target: str) -> nn.Module:
        """The submodule of that name in the checkpoint's sense: `layers.N` is a block."""
        first, _, rest = target.partition(".")
        return self.blocks.get_submodule(rest) if first == "layers" else super().get_submodule(target)

    def context(self, features: Tensor) -> Tensor:
        """Concatenated target states [B, T, len(layers) · D] to what every layer reads of them, [B, T, D]."""
        states: Tensor = self.hidden_norm(self.fc(features))
        return states

    def angles(self, positions: Tensor) -> Rotation:
        """The rotation of rows at absolute positions, int64 [T], or [B, 1, T] if they differ over the batch."""
        return rotation(positions, self.config.head_dim, self.config.rope_theta, self.fc.weight.dtype)

    def project(self, context: Tensor, by: Rotation) -> tuple[Rows, ...]:
        """Every layer's rows of a context [B, T, D]; `by` is the rotation of its own positions."""
        return tuple(cast(DrafterLayer, block).self_attn.project(context, by) for block in self.blocks)

    def forward(
        self,
        block: Tensor,
        rows: Sequence[Rows],
        by: Rotation,
        masks: Mapping[AttentionType, Tensor | None],
    ) -> Tensor:
        """Hidden states [B, Q, D] of a block's rows, after the final norm.

        Args:
            block: embeddings [B, Q, D].
            rows: each layer's context rows, T of them in layers of one type.
            by: the rotation of the block's rows.
            masks: for each type of layer here, what each block row sees of context and block: bool [Q, T + Q] or
                [B, 1, Q, T + Q], None for all of it.
        """
        x = block
        for layer, kind, context in zip(self.blocks, self.config.layer_types, rows, strict=True):
            x = layer(x, SeenRows(context, masks[kind]), by)
        hidden: Tensor = self.norm(x)
        return hidden

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled drafter is unbound: it owns no target."""
        return self.__dict__ | {"_borrowed": None}

    @property
    def context_length(self) -> int:
        """Rows observed since the last reset, which is the position of the next root."""
        return self._context.observed

    def bind(self, target: Target) -> None:
        """Borrows the embedding and head of a target; they become no part of this module.

        Raises:
            ValueError: target and drafter do not fit together. What was bound before stays bound.
        """
        _check_pairing(self.config, target.config)
        self._borrowed = _Borrowed(target.embed, target.logits)

    def reset(self) -> None:
        """Forgets the context, not the target."""
        self._context = _Context(0, ())

    @property
    def crop_floor(self) -> int:
        """The lowest length that `crop` reaches: 0 until a sliding layer has dropped rows, then the rows in layers."""
        now = self._context
        kept = zip(self.config.layer_types, now.layers, strict=False)  # no layers before the first row
        whole = all(self.config.window(kind) is None or rows.keys.shape[2] == now.length for kind, rows in kept)
        return 0 if whole else now.length

    def crop(self, length: int) -> None:
        """Forgets the rows from `length` on; ValueError, and no change, below `crop_floor` or past the end."""
        now = self._context
        check_crop(length, self.crop_floor, now.observed)
        if length <= now.length:
            kept = zip(self.config.layer_types, now.layers, strict=False)
            self._context = _Context(length, tuple(self._first(kind, rows, length) for kind, rows in kept))
        else:
            held = length - now.length
            waiting = torch.cat(now.waiting, dim=1)[:, :held].clone()
            self._context = _Context(now.length, now.layers, (waiting,), held)

    def snapshot(self) -> _Context:
        """A copy of the context, for `restore`, in storage of exactly its size."""
        return self._copied(self._context)

    def restore(self, kept: _Context) -> None:
        """Takes on a context that `snapshot` returned, here or at another drafter of these weights."""
        self._context = self._copied(kept)

    def _copied(self, context: _Context) -> _Context:
        counts = [_count(context.length, self.config.window(kind)) for kind in self.config.layer_types]
        with torch.inference_mode(False):  # rows made in that mode could not be written outside it
            pairs = zip(context.layers, counts, strict=False)
            layers = tuple(Rows(*(part[:, :, :count].clone() for part in rows)) for rows, count in pairs)
            waiting = tuple(features.clone() for features in context.waiting)
        return _Context(context.length, layers, waiting, context.held)

    def _first(self, kind: AttentionType, rows: Rows, length: int) -> Rows:
        """The first rows of a layer; those of a full layer stay in their buffer."""
        if self.config.window(kind) is None:
            return rows
        return Rows(*(part[:, :, :length].clone() for part in rows))

    def replica(self) -> Self:
        """Another proposer of these weights, unbound, that has observed nothing."""
        other = self._sharing()
        other.reset()
        return other

    def __copy__(self) -> Self:
        """Another proposer of these weights, unbound, with a context of its own that holds the same."""
        other = self._sharing()
        other._context = self._copied(self._context)
        return other

    def _sharing(self) -> Self:
        other = type(self).__new__(type(self))
        other.__setstate__(self.__getstate__())  # type: ignore[no-untyped-call]
        return other

    def observe(self, features: Tensor) -> None:
        """Appends the rows of committed tokens to the context of every layer; if anything raises, of none.

        Few rows wait until there are more, or until something is proposed: alone each would take as long as all. If
        taking them in then raises, they go on waiting; `crop` and `reset` give them up without a look at them.

        Args:
            features: [1, T, len(layers) · D], the target layers' outputs concatenated in the order of `layers`.

        Raises:
            ValueError: features have another shape.
        """
        self.check_features(features)
        now, rows = self._context, features.shape[1]
        if now.held + rows >= AT_ONCE:
            self._context = self._read(now.followed_by(features.to(self.fc.weight.dtype)))
        elif rows:
            self._context = now.followed_by(features.detach().to(self.fc.weight.dtype, copy=True))

    @torch.no_grad()
    def _read(self, now: _Context) -> _Context:
        """The context with the rows that wait in its layers."""
        if not now.waiting:
            return now
        start, end = now.length, now.observed
        by = self.angles(torch.arange(start, end, device=self.fc.weight.device))
        features = now.waiting[0] if len(now.waiting) == 1 else torch.cat(now.waiting, dim=1)
        added = self.project(self.context(features), by)
        kept = zip(self.config.layer_types, now.layers or self._no_rows(), added, strict=True)
        layers = tuple(_appended(old, new, start, self.config.window(kind)) for kind, old, new in kept)
        return _Context(end, layers)

    def check_features(self, features: Tensor) -> None:
        """Raises ValueError unless features are [1, T, len(layers) · D]."""
        width = self.fc.weight.shape[1]
        if features.dim() != 3 or features.shape[0] != 1 or features.shape[2] != width:
            raise ValueError(
                f"drafter: features must be [1, T, {width}], that is {len(self.layers)} layers of "
                f"{self.config.hidden_size}, got {list(features.shape)}"
            )

    @torch.no_grad()
    def propose(self, root: int) -> Tensor | Scores:
        """What may follow `root`, the first token not yet observed: see `proposal`.

        Raises:
            RuntimeError: no target is bound.
        """
        if self._borrowed is None:
            raise RuntimeError("drafter: no target is bound; call bind(target) before propose(root)")
        config, device = self.config, self.fc.weight.device
        tokens = torch.full((1, config.block_size), config.mask_token_id, device=device)
        tokens[0, 0] = root
        embedded = self._borrowed.embed(tokens)
        self._context = context = self._read(self._context)
        start = context.length
        by = self.angles(torch.arange(start, start + config.block_size, device=device))
        counts = {kind: _count(start, config.window(kind)) for kind in config.layer_types}
        masks = {kind: block_mask(config, kind, count, device) for kind, count in counts.items()}
        kept = zip(config.layer_types, context.layers or self._no_rows(), strict=True)
        rows = [Rows(*(part[:, :, : counts[kind]] for part in held)) for kind, held in kept]
        # The root's own row predicts nothing: the token after it is the first mask's.
        hidden = self(self.inputs(embedded), rows, by, masks)[0, 1:]
        return self.proposal(root, hidden, self._borrowed.logits(hidden.to(embedded.dtype)))

    def inputs(self, embeddings: Tensor) -> Tensor:
        """The target's embeddings of a block's tokens as `forward` reads them, [B, Q, D] in and out."""
        return embeddings.to(self.fc.weight.dtype)

    def proposal(self, root: int, hidden: Tensor, logits: Tensor) -> Tensor | Scores:
        """What a block proposes to follow its root: here the logits themselves, of independent positions.

        Args:
            hidden: the states of the block's masked rows, [block_size − 1, D].
            logits: the target's logits of them, [block_size − 1, vocab].
        """
        return logits

    def _no_rows(self) -> tuple[Rows, ...]:
        config = self.config
        nothing = self.fc.weight.new_empty(1, config.num_key_value_heads, 0, config.head_dim)
        return (Rows(nothing, nothing),) * config.num_hidden_layers


def _count(length: int, window: int | None) -> int:
    """Context rows that a layer keeps: a root sees `window − 1` rows before itself."""
    return length if window is None else min(length, window - 1)


def _appended(old: Rows, new: Rows, length: int, window: int | None) -> Rows:
    if window is None:
        return Rows(*(_grown(before, after, length) for before, after in zip(old, new, strict=True)))
    return Rows(*(_slid(before, after, window - 1) for before, after in zip(old, new, strict=True)))


def _grown(buffer: Tensor, new: Tensor, length: int) -> Tensor:
    """A buffer that holds `length` rows and then the new ones: the same one if they fit, else one twice as long."""
    end = length + new.shape[2]
    buffer = with_room(buffer, length, end)
    buffer[:, :, length:end] = new
    return buffer


def with_room(buffer: Tensor, length: int, end: int) -> Tensor:
    """A buffer [B, H, rows, width] with room for `end` rows, of which the first `length` are kept.

    It is the one given if that has room, else a new one at least twice as long.
    """
    if end <= buffer.shape[2]:
        return buffer
    with torch.inference_mode(False):  # rows made in that mode could not be written outside it
        longer = buffer.new_empty(*buffer.shape[:2], max(end, 2 * buffer.shape[2]), buffer.shape[3])
    longer[:, :, :length] = buffer[:, :, :length]
    return longer


def _slid(rows: Tensor, new: Tensor, limit: int) -> Tensor:
    """The last `limit` rows of both, in storage of exactly their size."""
    taken = min(new.shape[2], limit)
    kept = min(rows.shape[2], limit - taken)
    return torch.cat((rows[:, :, rows.shape[2] - kept :], new[:, :, new.shape[2] - taken :]), dim=2)


def _check_pairing(config: DFlashConfig, target: ModelConfig) -> None:
    if config.num_target_layers not in (None, target.num_hidden_layers):
        raise ValueError(
            f"drafter: made for a target of {config.num_target_layers} layers, this one has "
            f"{target.num_hidden_layers}; take the drafter of this target"
        )
    check_sizes(config, target)
    check_layer_ids(config.target_layer_ids, target.num_hidden_layers)


def check_sizes(config: DFlashConfig | ModelConfig, target: ModelConfig) -> None:
    """Raises ValueError unless a drafter has the width and the vocabulary of a target."""
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(
                f"drafter: {name} {ours} differs from the target's {theirs}; take the drafter of this target"
            )
