"""What every part of a model puts out over some tokens, recorded by hooks, for ours and for transformers'.

A trace maps names to rows, one row a token, in the order of computation: `embedding`, then for each layer i
`layers.i.input_layernorm`, `layers.i.mixer`, `layers.i.post_attention_layernorm`, `layers.i.mlp` and `layers.i`
(the residual stream after it), then `norm` and `logits`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qwen_gdn import QwenGDN, Topology

Trace = dict[str, Tensor]

MIXER = {"linear_attention": "linear_attn", "full_attention": "self_attn"}
PARTS = ("input_layernorm", "mixer", "post_attention_layernorm", "mlp")


@torch.no_grad()
def run_ours(model: QwenGDN, tokens: Tensor, cuts: Sequence[int] | None = None) -> Trace:
    """Tokens [T] in one uncached forward, or through a cache in pieces of the given lengths (their sum is T)."""
    with _recorded(model.layers, model.norm) as seen:
        cache = model.new_cache(len(tokens)) if cuts else None
        parts = [model.logits(model(part[None], cache).final) for part in _pieces(tokens, cuts)]
    return _joined(seen, parts)


@torch.no_grad()
def run_theirs(model: Any, tokens: Tensor, cuts: Sequence[int] | None = None) -> Trace:
    """The same of a transformers model, through its own cache if cut."""
    cache, parts = None, []
    with _recorded(model.model.layers, model.model.norm) as seen:
        for part in _pieces(tokens, cuts):
            out = model(part[None].to(model.device), past_key_values=cache, use_cache=cuts is not None)
            cache = out.past_key_values
            parts.append(out.logits)
    return _joined(seen, parts)


@torch.no_grad()
def run_our_tree(model: QwenGDN, prefix: Tensor, nodes: Tensor, topology: Topology) -> Trace:
    """The nodes of a tree [N] in one forward over a branch, after a committed prefix [T]."""
    cache = model.new_cache(len(prefix) + topology.max_depth + 1)
    model(prefix[None], cache)
    with _recorded(model.layers, model.norm) as seen:
        logits = model.logits(model(nodes[None], cache.branch(topology)).final)
    return _joined(seen, [logits])


def run_their_paths(model: Any, prefix: Tensor, nodes: Tensor, topology: Topology) -> Trace:
    """The same rows from transformers, which knows no trees: every leaf's path is fed alone, after the prefix."""
    rows: Trace = {}
    for leaf in sorted(set(range(len(topology))) - set(topology.parents)):
        path = topology.path(leaf)
        for name, values in run_theirs(model, torch.cat((prefix, nodes[path]))).items():
            rows.setdefault(name, values.new_empty(len(topology), values.shape[1]))[path] = values[len(prefix) :]
    return rows


@contextmanager
def _recorded(layers: nn.ModuleList, norm: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """While open, outputs of all parts are appended under their names."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            seen.setdefault(name, []).append(out[0] if isinstance(out, tuple) else out)

        return hook

    def keep_embedding(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.setdefault("embedding", []).append(args[0])

    handles = [layers[0].register_forward_pre_hook(keep_embedding), norm.register_forward_hook(keep("norm"))]
    for i, layer in enumerate(layers):
        for part in PARTS:
            handles.append(_part(layer, part).register_forward_hook(keep(f"layers.{i}.{part}")))
        handles.append(layer.register_forward_hook(keep(f"layers.{i}")))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _part(layer: nn.Module, part: str) -> nn.Module:
    """A part of a layer; both sides name them as checkpoints do."""
    if part != "mixer":
        return layer.get_submodule(part)
    return next(child for name, child in layer.named_children() if name in MIXER.values())


def _pieces(tokens: Tensor, cuts: Sequence[int] | None) -> tuple[Tensor, ...]:
    return tokens.split(list(cuts)) if cuts else (tokens,)


def _joined(seen: dict[str, list[Tensor]], logits: list[Tensor]) -> Trace:
    return {name: torch.cat(parts, dim=1)[0] for name, parts in (seen | {"logits": logits}).items()}
