"""A DFlash drafter whose block and context update are compiled programs, on CUDA recorded as graphs.

It proposes what the drafter itself would, to rounding. Rows of committed tokens wait for the next block, whose program
takes them in, or until they would fill one. Context rows lie at fixed addresses: those of a full layer in a buffer,
those of a sliding layer in a ring that holds its window and one block more, so that the padding of an update only ever
lands on rows that no block can see any more, or not yet.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qwen_gdn.joined import choose_products, join_projections
from qwen_gdn.layer_cache import storage_bytes
from qwen_gdn.model import LayerId
from qwen_gdn.prefix import attend, attend_seen
from qwen_gdn.recorded import Announce, Inputs, Recorded, applied, compiled, program_settings, unannounced
from qwen_gdn.rope import Rotation, rotation
from qwen_gdn.transfer import indices

from .contexts import check_crop
from .drafter import DFlashDrafter, Target
from .drafter_layers import DrafterAttention, DrafterLayer, Rows
from .scores import Scores

ROWS = 4096  # context rows of a full layer to begin with; the buffer doubles


class RecordedDrafter:
    """The proposer of a drafter, by programs. Each is prepared when it is first needed.

    Args:
        drafter: its projections are joined; its own context is not used.
        announce: entered with a program's name while it is prepared.
    """

    def __init__(self, drafter: DFlashDrafter, *, announce: Announce = unannounced) -> None:
        join_projections(drafter)
        self.drafter = drafter
        self._announce = announce
        self._target: Target | None = None
        self._programs: _Programs | None = None

    @property
    def layers(self) -> Sequence[LayerId]:
        """Ids of the target layers it reads, in the order of concatenation."""
        return self.drafter.layers

    @property
    def context_length(self) -> int:
        """Rows observed since the last reset, which is the position of the next root."""
        return 0 if self._programs is None else self._programs.observed

    def bind(self, target: Target) -> None:
        """Borrows the embedding and head of a target; ValueError if the two do not fit together."""
        self.drafter.bind(target)
        self._target = target

    def reset(self) -> None:
        """Forgets the context, not the target."""
        if self._programs is not None:
            self._programs.keep(0)

    @property
    def crop_floor(self) -> int:
        """The lowest length that `crop` reaches: 0 until a ring may have gone round, then the rows in the buffers."""
        now = self._programs
        return 0 if now is None or now.keeps_all else now.length

    def crop(self, length: int) -> None:
        """Forgets the rows from `length` on; ValueError, and no change, below `crop_floor` or past the end."""
        check_crop(length, self.crop_floor, self.context_length)
        if self._programs is not None:
            self._programs.keep(length)

    def snapshot(self) -> "_Held":
        """A copy of the context, for `restore`."""
        return _Held(0, (), ()) if self._programs is None else self._programs.held().copied()

    @torch.no_grad()
    def restore(self, kept: "_Held") -> None:
        """Takes on a context that `snapshot` returned; RuntimeError, and no change, if no target is bound."""
        if kept.observed:
            self._prepared(kept.observed).load(kept)
        else:
            self.reset()

    def replica(self) -> DFlashDrafter:
        """The drafter itself, eager, with a context of its own; programs hold the context of one sequence."""
        return self.drafter.replica()

    @torch.no_grad()
    def observe(self, features: Tensor) -> None:
        """Appends the rows of committed tokens, [1, T, len(layers) · D], to the context of every layer.

        Raises:
            ValueError: features have another shape. Nothing is changed.
            RuntimeError: no target is bound.
        """
        self.drafter.check_features(features)
        self._prepared(self.context_length + features.shape[1]).observe(features)

    @torch.no_grad()
    def propose(self, root: int) -> Tensor | Scores:
        """What the drafter's `proposal` makes of the block after `root`; RuntimeError if no target is bound."""
        block = self._prepared(self.context_length).propose(root)
        # What a proposal takes beyond the block is launched while the device is busy with that, so it needs no program.
        return self.drafter.proposal(root, *block)

    def _prepared(self, rows: int) -> "_Programs":
        """Programs whose buffers hold that many context rows, with the context in them."""
        if self._target is None:
            raise RuntimeError("drafter: no target is bound; call bind(target) first")
        now = self._programs
        if now is None or now.rows < rows or now.target is not self._target:
            size = ROWS if now is None else now.rows if rows <= now.rows else 2 * now.rows
            grown = _Programs(self.drafter, self._target, max(rows, size), self._announce)
            if now is not None:
                grown.load(now.held())
            self._programs = now = grown
        return now


class _Held(NamedTuple):
    """The rows of a context as they lie in the programs' buffers, of a full layer just those that count.

    waiting: features of the rows after these, which are not in the buffers yet; none or one tensor.
    """

    length: int
    layers: tuple[Rows, ...]
    waiting: tuple[Tensor, ...]

    @property
    def observed(self) -> int:
        return self.length + sum(features.shape[1] for features in self.waiting)

    @property
    def nbytes(self) -> int:
        return storage_bytes([*(part for rows in self.layers for part in rows), *self.waiting])

    def copied(self) -> "_Held":
        """The same in storage of its own."""
        layers = tuple(Rows(*(part.clone() for part in rows)) for rows in self.layers)
        return _Held(self.length, layers, tuple(features.clone() for features in self.waiting))


class _Block(NamedTuple):
    """States [block_size − 1, D] of the masked rows of a block, and the target's logits of them."""

    hidden: Tensor
    logits: Tensor


class _Programs:
    """Context rows of every layer, for blocks that start at up to `rows`, and the programs over them.

    length: rows in the context.
    waiting: rows observed after these. Their features lie where the programs that take them in find them.
    """

    def __init__(self, drafter: DFlashDrafter, target: Target, rows: int, announce: Announce) -> None:
        config, like = drafter.config, drafter.fc.weight.detach()
        self.drafter, self.target = drafter, target
        self.windows = [config.window(kind) for kind in config.layer_types]
        self.causal = [config.causal(kind) for kind in config.layer_types]
        self.rows = rows if None in self.windows else sys.maxsize  # rings do not fill up
        self.block_size = config.block_size
        lengths = [(rows if window is None else window) + config.block_size for window in self.windows]
        shapes = [(1, config.num_key_value_heads, length, config.head_dim) for length in lengths]
        with torch.inference_mode(False):  # rows made in that mode could not be written outside it
            self.kept = [Rows(like.new_zeros(shape), like.new_zeros(shape)) for shape in shapes]
            self._features = like.new_zeros(1, config.block_size, like.shape[1])
            number = torch.zeros(1, dtype=torch.int64)
            self._inputs = Inputs((number, number, number), like.device)
        self.length = self.waiting = 0
        self._observe = Recorded("the drafter's context update", [self._launch_observe], like.device, announce)
        self._propose = Recorded("the drafter's block", [self._launch_propose], like.device, announce)

    @property
    def observed(self) -> int:
        return self.length + self.waiting

    @property
    def keeps_all(self) -> bool:
        """Whether no row can have been written over yet, by rows behind it or by their padding."""
        rings = (kept.keys.shape[2] for kept, window in zip(self.kept, self.windows, strict=True) if window)
        return all(self.length + self.block_size <= size for size in rings)

    def keep(self, length: int) -> None:
        """Forgets what was observed from `length` on."""
        self.waiting = max(length - self.length, 0)
        self.length = min(length, self.length)

    def held(self) -> _Held:
        """Everything, where it lies."""
        pairs = zip(self.kept, self.windows, strict=True)
        layers = tuple(
            Rows(*(part[:, :, : self.length if window is None else None] for part in rows)) for rows, window in pairs
        )
        return _Held(self.length, layers, (self._features[:, : self.waiting],) if self.waiting else ())

    def load(self, held: _Held) -> None:
        """Takes on what these or other programs of the drafter held."""
        for mine, theirs in zip(self.kept, held.layers, strict=True):
            for rows, kept in zip(mine, theirs, strict=True):
                rows[:, :, : kept.shape[2]] = kept
        for features in held.waiting:
            self._features[:, : features.shape[1]] = features
        self.length, self.waiting = held.length, held.observed - held.length

    def observe(self, features: Tensor) -> None:
        """Takes in rows that follow those observed."""
        count = features.shape[1]
        if self.waiting + count > self.block_size:
            self._catch_up()
        if count > self.block_size:  # a prompt's window; too long for padding to stay out of sight
            with program_settings(features.device.type):
                self._append(features.to(self._features.dtype), indices([self.length], features.device), _same)
            self.length += count
        else:
            self._features[:, self.waiting : self.waiting + count].copy_(features)
            self.waiting += count

    def _catch_up(self) -> None:
        if self.waiting:
            self._inputs.fill(self.length, self.observed, 0)
            self._observe()
            self.length, self.waiting = self.observed, 0

    def propose(self, root: int) -> _Block:
        self._inputs.fill(self.length, self.observed, root)
        block = _Block(*(part.clone() for part in self._propose()))
        self.length, self.waiting = self.observed, 0
        return block

    def _launch_observe(self) -> None:
        choose_products(self.drafter, self._features.device, rows=self._features.shape[1])
        self._append(self._features, self._inputs.parts[0], compiled)

    def _append(self, features: Tensor, start: Tensor, through: Callable[[Callable[..., Any]], Any]) -> None:
        drafter, config = self.drafter, self.drafter.config
        context = through(_context)(drafter, features)
        positions = start + torch.arange(features.shape[1], device=features.device)
        by = through(rotation)(positions, config.head_dim, config.rope_theta, context.dtype)
        attentions = [cast(DrafterLayer, block).self_attn for block in drafter.blocks]
        for attention, kept, window in zip(attentions, self.kept, self.windows, strict=True):
            through(_extend)(attention, context, by, kept, positions, window is not None)

    def _launch_propose(self) -> _Block:
        self._launch_observe()
        drafter, config = self.drafter, self.drafter.config
        _, start, root = self._inputs.parts
        masks = torch.full((config.block_size - 1,), config.mask_token_id, device=root.device)
        embedded = self.target.embed(torch.cat((root, masks))[None])
        x = drafter.inputs(embedded)
        positions = start + torch.arange(config.block_size, device=root.device)
        by = compiled(rotation)(positions, config.head_dim, config.rope_theta, x.dtype)
        for block, rows, window, causal in zip(drafter.blocks, self.kept, self.windows, self.causal, strict=True):
            x = compiled(_block)(block, x, by, rows, start, window, causal)
        hidden = compiled(applied)(drafter.norm, x)[0, 1:]
        return _Block(hidden, self.target.logits(hidden.to(embedded.dtype)))


class _SeenFrom:
    """What a layer's block sees of rows at fixed addresses. A ring holds position p at row p modulo its size."""

    def __init__(self, rows: Rows, start: Tensor, window: int | None, causal: bool) -> None:
        self._rows, self._start, self._window, self._causal = rows, start, window, causal

    def attend(self, q: Tensor, own: Rows) -> Tensor:
        size, window = q.shape[2], self._window
        among = torch.ones(size, size, dtype=torch.bool, device=q.device)
        if self._causal:
            among = among.tril()
        keys, values = self._rows
        if window is None:
            return attend(q, *own, mask=among, keys=keys, values=values, length=self._start)
        inside = torch.arange(size, device=q.device)[:, None]
        among = among & ((inside - inside.t()).abs() < window)
        ring = torch.arange(keys.shape[2], device=q.device)
        behind = (self._start - 1 - ring) % keys.shape[2] + 1  # how far before the block's start a row lies
        seen = (behind <= self._start) & (behind + inside < window)
        return attend_seen(q, *own, mask=among, keys=keys, values=values, seen=seen)


def _context(drafter: DFlashDrafter, features: Tensor) -> Tensor:
    return drafter.context(features)


def _extend(
    attention: DrafterAttention, context: Tensor, by: Rotation, kept: Rows, positions: Tensor, ring: bool
) -> None:
    """Writes a layer's rows of the context to their places, in a ring the last that it has room for."""
    size = kept.keys.shape[2]
    where = positions[-size:] % size if ring else positions
    for rows, more in zip(kept, attention.project(context, by), strict=True):
        rows.index_copy_(2, where, more[:, :, -len(where) :])


def _block(
    layer: DrafterLayer, x: Tensor, by: Rotation, rows: Rows, start: Tensor, window: int | None, causal: bool
) -> Tensor:
    out: Tensor = layer(x, _SeenFrom(rows, start, window, causal), by)
    return out


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
