"""The hybrid text model: embedding, layers, final norm, head. It knows caches and topologies, never drafts."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import GatedAttention
from .cache import Branch, HybridCache
from .checked import checked_count, shown
from .config import LayerType, ModelConfig
from .deltanet import GatedDeltaNet
from .fp8 import check_state
from .lanes import FreshAttention, FreshDelta, Memory, Pass, Step
from .layer_cache import KVCache, LayerCache, LayerLayout, empty_delta_cache
from .mlp import MLP
from .moe import SparseMoE
from .norms import RMSNorm
from .padding import LeftPadding
from .ragged import Appending, RaggedBranch, RaggedCache
from .rope import rotation

CacheOrBranch = HybridCache | Branch | RaggedCache | RaggedBranch
LayerId = int | Literal["embedding", "final"]


class Hidden(NamedTuple):
    """What a forward returns.

    final: [B, T, D] after the final norm.
    captured: the asked layers' outputs (the residual stream, before any further norm), each [B, T, D].
    """

    final: Tensor
    captured: tuple[Tensor, ...]


class DecoderLayer(nn.Module):
    """Pre-norm residual wiring; the layer's kind supplies the mixer alone, under the checkpoint's name for it."""

    def __init__(self, config: ModelConfig, kind: LayerType) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer_name, mixer = _MIXERS[kind]
        self.add_module(self.mixer_name, mixer(config))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _feed_forward(config)

    def forward(self, x: Tensor, lane: Any, step: Step) -> Tensor:
        x, update = self.updated(x, lane, step)
        return x + update

    def updated(self, x: Tensor, lane: Any, step: Step) -> tuple[Tensor, Tensor]:
        """What `forward` returns as two summands, for who adds them in the same pass that reads their sum."""
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x), lane, step)
        return x, self.mlp(self.post_attention_layernorm(x))


def _feed_forward(config: ModelConfig) -> MLP | SparseMoE:
    if config.experts is not None:
        return SparseMoE(config.hidden_size, config.experts)
    assert config.intermediate_size is not None
    return MLP(config.hidden_size, config.intermediate_size)


_MIXERS: dict[LayerType, tuple[str, type[GatedDeltaNet] | type[GatedAttention]]] = {
    "linear_attention": ("linear_attn", GatedDeltaNet),
    "full_attention": ("self_attn", GatedAttention),
}


class QwenGDN(nn.Module):
    """A Qwen3.5/3.6/3.8 hybrid, dense or with experts. Parameters carry the checkpoint's names below its prefix.

    Three ways to call it, all through the same layers:
        model(tokens)                    no memory before or after; differentiable
        model(tokens, cache)             tokens follow the committed ones and are committed
        model(tokens, cache.branch(t))   tokens are the nodes of a tree; committed memory is only read
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.register_load_state_dict_pre_hook(check_state)  # type: ignore[no-untyped-call]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(
        self,
        tokens: Tensor,
        memory: CacheOrBranch | None = None,
        *,
        mask: Tensor | None = None,
        capture: Sequence[LayerId] = (),
    ) -> Hidden:
        """Runs the layers over new tokens.

        Args:
            tokens: integers [B, T], or [T] for a batch of one. For a branch T is its number of nodes (a ragged one's
                greatest; what stands past a row's own nodes is not used).
            memory: the cache to extend, the branch to fill, or None.
            mask: for rows of different lengths: bool, or 0 and 1, of the tokens' shape; 0 at padding, which stands on
                the left and may be any integer. Results are those without padding, and 0 at padding. Into a cache
                padding needs a ragged one, where a row of padding alone sits the forward out.
            capture: layer ids (0-based; id L is the output of layer L) whose outputs to return, in this order;
                `"embedding"` is what the first layer reads, `"final"` the state after the final norm.

        Raises:
            ValueError: tokens, memory, mask or layer ids are not what the model can take. Nothing is changed.
            RuntimeError: a window is open, or the branch is closed or was run before. Nothing is changed.
        """
        padding = None if mask is None else LeftPadding(mask, tokens)
        tokens = self.checked_tokens(tokens if padding is None else padding.aligned(tokens))
        capture = self.checked_layers(capture)
        if memory is not None:
            self.check_memory(memory)
        own = [tokens.shape[1]] * len(tokens) if padding is None else padding.counts
        hidden = self._over(tokens, _taking(memory, own, tokens.shape[1]), capture)
        if padding is None:
            return hidden
        return Hidden(padding.restored(hidden.final), tuple(map(padding.restored, hidden.captured)))

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [..., D] -> [..., vocab]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden, head.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings: integers [...] -> [..., D]."""
        return F.embedding(tokens, self.embed_tokens.weight)

    @overload
    def new_cache(self, capacity: int, batch: int = 1, rollback: int = 0) -> HybridCache: ...

    @overload
    def new_cache(self, capacity: int, batch: int = 1, *, ragged: Literal[True]) -> RaggedCache: ...

    @overload
    def new_cache(
        self, capacity: int, batch: int = 1, rollback: int = 0, ragged: bool = False
    ) -> HybridCache | RaggedCache: ...

    def new_cache(
        self, capacity: int, batch: int = 1, rollback: int = 0, ragged: bool = False
    ) -> HybridCache | RaggedCache:
        """Empty memory for `batch` sequences of up to `capacity` tokens, on the model's device.

        Args:
            rollback: how many of the last tokens `crop` must be able to take back; costs their factors.
            ragged: whether each row has a length of its own; such a cache has no rollback.

        Raises:
            ValueError: a number is negative, or capacity or batch is 0, or a ragged cache is to roll back.
        """
        for name, value, least in (("capacity", capacity, 1), ("batch", batch, 1), ("rollback", rollback, 0)):
            checked_count(f"new_cache: {name}", value, least)
        if ragged and rollback:
            raise ValueError(f"new_cache: a ragged cache keeps no log to roll back by, got rollback {rollback}; pass 0")
        kinds = self.config.layer_types
        with torch.inference_mode(False):  # rows made in that mode could not be written outside it
            layers = [self._empty_layer(kind, capacity, batch, rollback > 0) for kind in kinds]
            return RaggedCache(layers, batch, capacity) if ragged else HybridCache(layers, capacity, rollback)

    def check_memory(self, memory: object) -> None:
        """Raises ValueError if this is no cache or branch, or one of another architecture or dtype."""
        if not isinstance(memory, CacheOrBranch):
            needs = "a cache made by new_cache or a branch of one"
            raise ValueError(f"memory must be {needs}, got {type(memory).__name__} {shown(memory)}")
        if memory.layout != self._layout():
            raise ValueError("the cache is one of another architecture or dtype; make it with this model's new_cache")

    def _over(self, tokens: Tensor, memory: Memory | None, capture: Sequence[LayerId]) -> Hidden:
        """`forward` over tokens [B, T] that fit the memory."""
        if memory is None:
            return self._run(tokens, self._fresh_pass(tokens.shape[1]), capture)
        # Autocast would round the delta rule, and leave rows of another dtype than the cache's.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            view = memory.begin(*tokens.shape)
            hidden = self._run(tokens, view, capture)
            memory.finish(view)
            return hidden

    def _run(self, tokens: Tensor, view: Pass[Any], capture: Sequence[LayerId]) -> Hidden:
        c = self.config
        step = Step(rotation(view.positions, c.rotary_dim, c.rope_theta, self.dtype), view.mask, view.causal)
        x = self.embed(tokens.to(self.device))
        kept: dict[LayerId, Tensor] = {"embedding": x} if "embedding" in capture else {}
        for i, (layer, lane) in enumerate(zip(self.layers, view.lanes, strict=True)):
            x = layer(x, lane, step)
            if i in capture:
                kept[i] = x
        final = self.norm(x)
        kept["final"] = final
        return Hidden(final, tuple(kept[i] for i in capture))

    def _fresh_pass(self, count: int) -> Pass[Any]:
        lanes = (FreshDelta() if kind == "linear_attention" else FreshAttention() for kind in self.config.layer_types)
        return Pass(torch.arange(count, device=self.device), mask=None, causal=True, lanes=tuple(lanes))

    def _layout(self) -> tuple[LayerLayout, ...]:
        """What `HybridCache.layout` is for a cache of this model."""
        c, dtype = self.config, self.dtype
        attention = (dtype, c.num_key_value_heads, c.head_dim)
        state = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        delta = (dtype, *state, c.linear_conv_kernel_dim - 1, c.conv_dim)
        return tuple(attention if kind == "full_attention" else delta for kind in c.layer_types)

    def _empty_layer(self, kind: LayerType, capacity: int, batch: int, logged: bool) -> LayerCache:
        c, like = self.config, self.embed_tokens.weight.detach()
        if kind == "full_attention":
            shape = (batch, c.num_key_value_heads, capacity, c.head_dim)
            return KVCache(like.new_zeros(shape), like.new_zeros(shape))
        return empty_delta_cache(c, batch, like, logged)

    def checked_tokens(self, tokens: Tensor) -> Tensor:
        """The tokens as [B, T], on whichever device they are; ValueError says what is wrong with them."""
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be an int64 or int32 tensor [B, T], got {type(tokens).__name__}")
        if tokens.dim() == 1:
            tokens = tokens[None]
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32) or tokens.numel() == 0:
            raise ValueError(
                f"tokens must be int64 or int32 of shape [B, T] with T > 0, got {tokens.dtype} {list(tokens.shape)}"
            )
        # On a device the check would cost a synchronisation; there the embedding's own assertion stands guard.
        if tokens.device.type == "cpu":
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise ValueError(f"token id {wrong} is outside the vocabulary [0, {self.config.vocab_size})")
        return tokens

    def checked_layers(self, capture: Sequence[LayerId]) -> tuple[LayerId, ...]:
        """The layer ids, if there are such layers; ValueError names the first that is none."""
        return checked_layers(capture, len(self.layers))


def _taking(memory: CacheOrBranch | None, own: Sequence[int], width: int) -> Memory | None:
    """The memory as a forward takes it in whose rows of `width` tokens the first `own` of each are not padding."""
    if isinstance(memory, RaggedCache):
        return Appending(memory, own)
    if min(own) == 0:
        raise ValueError(f"mask: row {own.index(0)} has no token of its own, which only a ragged cache can take")
    if memory is not None and min(own) < width:
        raise ValueError(
            f"mask: padding goes into a cache made with new_cache(..., ragged=True) alone, got {shown(memory)}"
        )
    return memory


def checked_layers(layers: Sequence[LayerId], count: int, what: str = "capture") -> tuple[LayerId, ...]:
    """The ids of layers of a model that has `count` of them; ValueError names the first that is none."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ValueError(
            f"{what}: needs a sequence of layer ids in [0, {count}), 'embedding' or 'final', got {shown(layers)}"
        )
    ids = tuple(layers)
    for i in ids:
        if i not in ("embedding", "final") and not (isinstance(i, int) and not isinstance(i, bool) and 0 <= i < count):
            raise ValueError(f"{what}: layer id {shown(i)} is neither 'final' nor in [0, {count}), nor 'embedding'")
    return ids
