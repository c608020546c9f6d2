"""Rotary, norms and the layout of gated attention: hand values, and what stays in float32."""

import pytest
import torch
from tiny import gap, memory_of, random_tokens, seeded, tiny_model
from torch import Tensor

from qwen_gdn import DeltaCache, ModelConfig, Topology
from qwen_gdn.attention import GatedAttention
from qwen_gdn.lanes import FreshAttention, Step
from qwen_gdn.norms import GatedRMSNorm, PlainRMSNorm, RMSNorm
from qwen_gdn.rope import rotate, rotation

X = torch.tensor([3.0, 4.0])
UNIT_RMS = torch.tensor([0.848528, 1.131371])


@pytest.mark.case(50)
def test_block_norms_scale_by_one_plus_weight_and_the_others_by_the_weight() -> None:
    with torch.no_grad():
        centred, plain = RMSNorm(2, 0.0), PlainRMSNorm(2, 0.0)
        centred.weight.zero_()
        torch.testing.assert_close(centred(X), UNIT_RMS, atol=1e-6, rtol=0)
        centred.weight.copy_(torch.tensor([0.5, -1.0]))
        torch.testing.assert_close(centred(X), UNIT_RMS * torch.tensor([1.5, 0.0]), atol=1e-6, rtol=0)
        plain.weight.copy_(torch.tensor([2.0, 0.0]))
        torch.testing.assert_close(plain(X), UNIT_RMS * torch.tensor([2.0, 0.0]), atol=1e-6, rtol=0)
        for gate, value in (("silu", 2 / (1 + torch.e**-2)), ("sigmoid", 1 / (1 + torch.e**-2))):
            gated = GatedRMSNorm(2, 0.0, gate)  # type: ignore[arg-type]
            gated.weight.zero_()
            assert gated(X, torch.ones(2)).tolist() == [0, 0]
            gated.weight.fill_(1.0)
            torch.testing.assert_close(gated(X, torch.full((2,), 2.0)), UNIT_RMS * value, atol=1e-5, rtol=0)


def test_norms_count_epsilon_inside_the_root() -> None:
    with torch.no_grad():
        torch.testing.assert_close(RMSNorm(2, 12.5)(X), X / 5.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_low_precision_are_computed_in_float32_and_cast_last(dtype: torch.dtype) -> None:
    x, gate = (torch.randn(5, 64, generator=seeded(i)).to(dtype) for i in range(2))
    with torch.no_grad():
        for norm, args in ((RMSNorm(64, 1e-6), (x,)), (GatedRMSNorm(64, 1e-6, "silu"), (x, gate))):
            norm.weight.copy_(torch.randn(64, generator=seeded(2)).to(dtype))
            wanted = norm(*(part.float() for part in args)).to(dtype)
            assert torch.equal(norm.to(dtype)(*args), wanted)


@pytest.mark.case(50)
def test_rotary_turns_leading_halves_and_passes_the_rest() -> None:
    theta = 10000.0
    head = torch.arange(1.0, 17.0, dtype=torch.float64).view(1, 1, 1, 16)
    turned = rotate(head, rotation(torch.tensor([7]), 4, theta, torch.float64)).flatten()
    assert torch.equal(turned[4:], head.flatten()[4:])
    for i, frequency in enumerate((1.0, theta**-0.5)):
        angle = torch.tensor(7 * frequency, dtype=torch.float64)
        a, b = head.flatten()[i], head.flatten()[i + 2]
        torch.testing.assert_close(turned[i], a * angle.cos() - b * angle.sin())
        torch.testing.assert_close(turned[i + 2], b * angle.cos() + a * angle.sin())


def test_position_zero_turns_nothing_and_products_depend_on_distance_alone() -> None:
    draw = seeded(1)
    q, k = (torch.randn(1, 2, 1, 16, generator=draw).double() for _ in range(2))

    def at(x: Tensor, position: int) -> Tensor:
        return rotate(x, rotation(torch.tensor([position]), 16, 1e7, torch.float64))

    assert torch.equal(at(q, 0), q)
    near, far = ((at(q, p + 11) * at(k, p)).sum() for p in (3, 100_000))
    torch.testing.assert_close(near, far, rtol=1e-9, atol=0)


def test_rotary_angles_are_exact_before_they_are_cast() -> None:
    exact = rotation(torch.tensor([200_001]), 64, 1e7, torch.float32)
    low = rotation(torch.tensor([200_001]), 64, 1e7, torch.bfloat16)
    assert low.cos.dtype == torch.bfloat16
    assert torch.equal(low.cos, exact.cos.bfloat16()) and torch.equal(low.sin, exact.sin.bfloat16())


@pytest.mark.case(50)
def test_query_and_gate_rows_alternate_head_by_head() -> None:
    """Row block h of q_proj is head h's query and then its gate, not all queries and then all gates."""
    attention = GatedAttention(ModelConfig(**_ATTENTION)).double()  # type: ignore[arg-type]
    seen: dict[str, Tensor] = {}
    attention.q_norm.register_forward_hook(lambda module, args, out: seen.update(q=args[0]))
    attention.o_proj.register_forward_hook(lambda module, args, out: seen.update(gated=args[0]))
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            parameter.fill_(1.0 if "v_proj" in name else 0.0)
        rows = attention.q_proj.weight.view(3, 2, 4, 8)  # [head, query or gate, head_dim, D]
        for head in range(3):
            rows[head, 0, :, 0] = float(head)
            rows[head, 1, :, 0] = 0.1 * (head + 1)
        x = torch.zeros(1, 2, 8, dtype=torch.float64)
        x[..., 0] = 1.0
        attention(x, FreshAttention(), Step(rotation(torch.arange(2), 2, 1e4, torch.float64), None, True))
    heads = torch.arange(3.0).double()
    assert torch.equal(seen["q"], heads.view(1, 1, 3, 1).expand(1, 2, 3, 4))
    gates = torch.sigmoid(0.1 * (heads + 1)).repeat_interleave(4)  # every value read is 1
    torch.testing.assert_close(seen["gated"], gates.expand(1, 2, 12))


_ATTENTION = {
    "vocab_size": 5,
    "hidden_size": 8,
    "intermediate_size": 8,
    "layer_types": ("full_attention",),
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rotary_dim": 2,
    "rope_theta": 1e4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "output_gate": "silu",
    "tie_word_embeddings": True,
}


@pytest.mark.case(52)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decay_parameters_gated_norm_and_state_stay_in_float32(dtype: torch.dtype) -> None:
    model = tiny_model(2)
    wanted = {n: p.clone() for n, p in model.named_parameters() if n.endswith(("A_log", "dt_bias", "attn.norm.weight"))}
    assert len(wanted) == 3 * 6
    for target in (dtype, torch.float16, dtype):
        model.to(target)
        kept = dict(model.named_parameters())
        assert all(kept[name].dtype == torch.float32 and torch.equal(kept[name], wanted[name]) for name in wanted)
        assert kept["layers.0.linear_attn.out_proj.weight"].dtype == target
    cache = model.new_cache(40, rollback=8)
    model(random_tokens(seeded(3), 1, 10), cache)
    model(random_tokens(seeded(4), 1, 3), cache.branch(Topology([-1, 0, 0])))
    cache.commit([0, 2])
    cache.crop(11)
    for kept_cache in (cache, cache.fork()):
        kept_cache.check()
        for layer in kept_cache:
            if isinstance(layer, DeltaCache):
                assert layer.state.dtype == torch.float32 and layer.columns.dtype == dtype
            else:
                assert layer.keys.dtype == layer.values.dtype == dtype


def test_float64_models_compute_in_float64_throughout() -> None:
    model = tiny_model(2, dtype=torch.float64)
    cache = model.new_cache(10)
    model(random_tokens(seeded(3), 1, 10), cache)
    assert {part.dtype for part in memory_of(cache)} == {torch.float64}


@pytest.mark.case(52)
def test_two_thousand_bfloat16_steps_show_no_growing_error() -> None:
    low = tiny_model(5, layer_types=["linear_attention"]).to(torch.bfloat16)
    exact = tiny_model(5, layer_types=["linear_attention"]).to(torch.bfloat16).double()
    tokens = random_tokens(seeded(6), 1, 2000)
    cache, truth = low.new_cache(2000), exact.new_cache(2000)
    errors = []
    for part in tokens.split(100, dim=1):
        for token in part.split(1, dim=1):
            low(token, cache)
        exact(part, truth)
        states = [(a.state, b.state) for a, b in zip(cache, truth, strict=True) if isinstance(a, DeltaCache)]  # type: ignore[union-attr]
        errors.append(max(gap(a, b) for a, b in states))
    early, late = sum(errors[:10]) / 10, sum(errors[10:]) / 10
    assert late <= 2 * early and max(errors) < 0.1


@pytest.mark.case(52)
def test_half_precision_with_a_residual_of_1e5_is_never_silently_wrong() -> None:
    """It overflows float16: what comes out is finite or visibly not a number, and check() sees a bad state."""
    model = tiny_model(7, layer_types=["linear_attention"]).half()
    model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] + 1e5, *args[1:]))
    cache = model.new_cache(8)
    hidden = model(random_tokens(seeded(8), 1, 4), cache)
    if not bool(hidden.final.isfinite().all()):
        with pytest.raises(ValueError, match="not finite"):
            cache.check()
