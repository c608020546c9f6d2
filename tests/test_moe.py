"""Mixtures of experts: routing by hand, grouped products against one row after another, rows left to themselves."""

import copy
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from proposers import PROPOSERS, emitted
from tiny import EXPERTS, SMALL, gap, random_tokens, seeded, tiny_model
from torch import Tensor

from ddtree import build_chain, build_tree, generate
from qwen_gdn import decode
from qwen_gdn.config import ExpertsConfig
from qwen_gdn.moe import SparseMoE, gathered_products, plain_products, products

HIDDEN = 16
FORMS = {"products": products, "plain": plain_products, "gathered": gathered_products}


def mixture(count: int = 8, chosen: int = 2, inner: int = 24, dtype: torch.dtype = torch.float32) -> SparseMoE:
    layer = SparseMoE(HIDDEN, ExpertsConfig(count, chosen, inner, 20)).double()
    draw = seeded(count + inner)
    for parameter in layer.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return layer.to(dtype).requires_grad_(False)


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(1, count, HIDDEN, generator=seeded(seed), dtype=torch.float64)


def by_hand(layer: SparseMoE, x: Tensor) -> Tensor:
    """Token by token and expert by expert, from the equations."""
    outputs = []
    for row in x[0]:
        scores = (layer.gate.weight @ row).softmax(0)
        best = sorted(range(len(scores)), key=lambda e: -float(scores[e]))[: layer.chosen]
        shared = layer.shared_expert
        out = torch.sigmoid(layer.shared_expert_gate.weight[0] @ row) * (
            shared.down_proj.weight @ (F.silu(shared.gate_proj.weight @ row) * (shared.up_proj.weight @ row))
        )
        for e in best:
            inner = layer.experts.gate_up_proj[e] @ row
            half = len(inner) // 2
            out = out + scores[e] / scores[best].sum() * (
                layer.experts.down_proj[e] @ (F.silu(inner[:half]) * inner[half:])
            )
        outputs.append(out)
    return torch.stack(outputs)[None]


@pytest.mark.case(53)
@pytest.mark.parametrize(("count", "chosen", "inner"), [(8, 2, 24), (4, 4, 16), (5, 1, 7), (2, 2, 8)])
def test_a_layer_is_what_its_equations_say(count: int, chosen: int, inner: int) -> None:
    x = rows(33)
    wanted = by_hand(mixture(count, chosen, inner, torch.float64), x)
    assert gap(mixture(count, chosen, inner, torch.float64)(x), wanted) <= 1e-12
    assert gap(mixture(count, chosen, inner)(x.float()), wanted) <= 1e-5


@pytest.mark.case(53)
def test_shares_are_renormalised() -> None:
    """Logits 2, 1 and −5: of the two best, e / (e + 1) and its rest."""
    layer = mixture(3, 2, dtype=torch.float64)
    layer.gate.weight.zero_()[:, 0] = torch.tensor([1.0, 2.0, -5.0])
    shares, chosen = layer.route(F.one_hot(torch.tensor([0]), HIDDEN).double())
    assert chosen.tolist() == [[1, 0]]
    assert shares[0].tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)


@pytest.mark.case(53)
def test_the_router_computes_in_float32() -> None:
    """Two experts whose logits one bfloat16 cannot tell apart."""
    layer = mixture(2, 1).to(torch.bfloat16)
    layer.gate.weight.zero_()[:, :2] = torch.tensor([[1.0, 0.0], [1.0, 0.0078125]])
    _, chosen = layer.route(F.one_hot(torch.tensor([0]), HIDDEN).bfloat16() + 1e-2)
    assert chosen.tolist() == [[1]]


@pytest.mark.case(53)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [(0, 3, 0, 5), (9, 0, 0, 0), (0, 0, 0, 1), (70, 1, 70, 0)], ids=str)
def test_all_forms_of_the_product_agree(counts: tuple[int, ...], dtype: torch.dtype, form: str) -> None:
    """Experts without a token, and one with all of them; odd widths and those that the grouped product takes."""
    draw = seeded(sum(counts))
    for width, inner in ((16, 24), (10, 7)):
        x = torch.randn(sum(counts), width, generator=draw).to(dtype)
        weights = torch.randn(len(counts), inner, width, generator=draw).to(dtype)
        groups = [e for e, count in enumerate(counts) for _ in range(count)]
        wanted = torch.stack([weights[e].double() @ row.double() for e, row in zip(groups, x, strict=True)])
        ends = torch.tensor(counts).cumsum(0).int()
        found = FORMS[form](x, weights, ends)
        assert found.dtype == dtype
        assert gap(found.double(), wanted) <= {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 8e-3)


@pytest.mark.case(53)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    layer, x = mixture(dtype=dtype), rows(33).to(dtype)
    together = layer(x)
    alone = torch.cat([layer(x[:, t : t + 1]) for t in range(33)], dim=1)
    assert gap(together, alone) <= (1e-6 if dtype == torch.float32 else 1e-2)
    turned = torch.arange(32, -1, -1)
    assert gap(layer(x[:, turned]), together[:, turned]) <= (1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(layer(x), together)


@pytest.mark.case(53)
def test_rows_that_like_all_experts_alike_are_treated_alike() -> None:
    """A router of zeros ties every expert: whichever are taken, they are the same for every row."""
    layer = mixture()
    layer.gate.weight.zero_()
    shares, chosen = layer.route(rows(33)[0].float())
    assert (chosen == chosen[:1]).all() and len(set(chosen[0].tolist())) == 2
    assert torch.allclose(shares, torch.tensor(0.5))


def test_only_the_experts_in_use_are_read() -> None:
    layer, x = mixture(), rows(3).float()
    wanted = layer(x)
    unused = sorted(set(range(8)) - set(layer.route(x[0])[1].flatten().tolist()))
    assert unused
    for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
        weight[unused] = torch.nan
    assert torch.equal(layer(x), wanted)


def test_a_compiled_layer_is_the_layer() -> None:
    layer, x = mixture(), rows(5).float()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    assert gap(compiled(x), layer(x)) <= 1e-6


def test_a_mixture_trains() -> None:
    model = tiny_model(**EXPERTS).requires_grad_(True)
    model(random_tokens(seeded(1), 1, 40)).final.square().mean().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lm_head" not in name)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert gap(twin(random_tokens(seeded(2), 1, 9)).final, model(random_tokens(seeded(2), 1, 9)).final) <= 1e-6


@pytest.mark.parametrize("build", [build_tree, build_chain])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_generation_writes_what_plain_decoding_writes(dtype: torch.dtype, build: object) -> None:
    model, budgets = tiny_model(dtype=dtype, wild=4.0, layer_types=list(SMALL), **EXPERTS), cycle((15, 1, 31, 4))
    for number, proposer in enumerate(PROPOSERS.values()):
        prompt = random_tokens(seeded(number), 1, 7)[0].tolist()
        wanted = list(decode(model, prompt, max_new_tokens=24))
        text = proposer([*prompt, *wanted], number)
        budget = next(budgets)
        rounds = generate(model, text, prompt, max_new_tokens=24, budget=budget, build=build)  # type: ignore[arg-type]
        assert emitted(rounds) == wanted
