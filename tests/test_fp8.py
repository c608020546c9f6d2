"""Linear maps in eight bits: against sums by hand in float64, and models of them in every way that models are run."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from eight_bits import Block, Spread, by_hand, decoded, fill, in_eight_bits, nearest, rounded
from proposers import PROPOSERS, emitted
from test_engine import check_rounds
from tiny import EXPERTS, gap, random_tokens, seeded, tiny_model, tiny_raw
from torch import Tensor, nn

import ddtree.recorded_drafter
import qwen_gdn.block_products
import qwen_gdn.program_set
from ddtree import generate
from qwen_gdn import ModelConfig, QwenGDN, Topology, decode
from qwen_gdn.block_products import E4M3, Part, cut, expanded, laid_out, multiplies_blocks
from qwen_gdn.engine import Engine
from qwen_gdn.fp8 import FP8Linear, keep_in_eight_bits, quantised
from qwen_gdn.joined import ReadsOnce, join_projections
from qwen_gdn.recorded import Recorded, compiled, program_settings, unannounced
from tools.measure.exactness import Referee
from tools.measure.fidelity import with_expanded_weights
from tools.measure.floor import Floor
from tools.measure.instruments import random_weights
from tools.parity.shapes import random_model, tiny

GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DEVICES = pytest.mark.parametrize("device", GPU)
WIDTHS = {
    "cpu": [(64, 96), (80, 512)],
    "cuda": [(34_816, 5120), (5120, 17_408), (16_384, 5120), (5120, 6144), (14_336, 5120)],
}
BLOCKS: dict[str, Block] = {"cpu": (16, 32), "cuda": (128, 128)}
ROWS = {"cpu": (1, 2, 17), "cuda": (1, 2, 16, 17, 64, 2048)}
RECORDED = {"cpu": (1, 5), "cuda": (1, 17, 64, 128, 129)}


def linear_map(out: int, width: int, block: Block, device: str = "cpu", seed: int = 0) -> FP8Linear:
    """Random weights of spread about 0.02, some blocks far greater than others."""
    draw = torch.Generator(device).manual_seed(seed)
    weight = 0.02 * torch.randn(out, width, generator=draw, device=device)
    weight[: block[0]] *= 50
    weight[:, : block[1]] *= 0.01
    linear = FP8Linear(width, out, block).to(device)
    fill(linear, weight)
    return linear


def activations(rows: int, width: int, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> Tensor:
    """Rows of very different sizes, with a few outliers as activations have them."""
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, width, generator=draw, device=device) * torch.logspace(-3, 3, rows, device=device)[:, None]
    x[:, ::97] *= 30
    return x.to(dtype)


def rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_become_the_nearest_numbers(dtype: torch.dtype) -> None:
    x = activations(9, 96, dtype)
    x[3, :32], x[4, 5], x[5], x[6, 40] = 0, 1e30, 1e-30, 448
    pieces, scales = quantised(x, 32)
    assert pieces.dtype == E4M3 and scales.dtype == torch.float32 and scales.shape == (9, 3)
    numbers = decoded(pieces)
    found = (numbers * scales.double()[..., None]).flatten(1)
    assert torch.equal(found, rounded(x, 32))
    assert (found - x.double()).abs().max() <= (x.double().abs().max() / 16)
    assert float((numbers.abs().amax(2) == 448).sum()) == 26  # all pieces but the zeros


def test_numbers_by_hand_are_the_types() -> None:
    """The oracle's own table and rounding, against torch's casts."""
    codes = torch.arange(256, dtype=torch.uint8)
    known = codes.view(E4M3).double()
    assert torch.equal(decoded(codes), known) or torch.equal(decoded(codes).nan_to_num(9e9), known.nan_to_num(9e9))
    values = torch.cat(
        (torch.linspace(-448, 448, 9999), torch.linspace(-0.05, 0.05, 9999), known.nan_to_num(0).float() * 1.0625)
    )
    values = values.clamp(-448, 448)
    assert torch.equal(nearest(values.double()), values.to(E4M3).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@DEVICES
def test_products_are_those_by_hand(device: str, dtype: torch.dtype) -> None:
    """On a GPU at the 27B's shapes, joined ones among them; bfloat16 by the device's own product."""
    if device == "cuda" and dtype != torch.bfloat16:
        pytest.skip("the device multiplies for bfloat16 alone")
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 2e-6, torch.float64: 1e-12}[dtype]
    for out, width in WIDTHS[device]:
        linear = linear_map(out, width, BLOCKS[device], device)
        full = expanded(linear.weight, linear.weight_scale_inv, linear.block, dtype)
        for rows in ROWS[device]:
            x = activations(rows, width, dtype, device)
            wanted, found = by_hand(linear, x), linear(x[None])[0]
            assert found.dtype == dtype and found.shape == (rows, out)
            each = [gap(a, b) for a, b in zip(found, wanted, strict=True)]  # a small row counts as much as a great one
            assert max(each) <= tolerance, (out, width, rows)
            away = rms(found, x @ full.T)
            print(
                f"{device} {out} x {width}, {rows} rows: to the oracle {max(each):.1e}, to {dtype} weights {away:.1e}"
            )
            assert away <= 5e-2  # what three bits of mantissa cost


@pytest.mark.gpu
def test_a_hopper_multiplies_blocks() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch has this product for Hopper alone")
    assert multiplies_blocks(torch.device("cuda", torch.cuda.current_device()))


@DEVICES
def test_rows_do_not_see_each_other(device: str) -> None:
    out, width = WIDTHS[device][0]
    linear = linear_map(out, width, BLOCKS[device], device)
    x = activations(17, width, torch.bfloat16, device)
    whole = linear(x)
    x[3], x[9] = torch.nan, 1e30
    found = linear(x)
    others = [i for i in range(17) if i not in (3, 9)]
    assert torch.equal(found[others], whole[others])
    assert found[3].isnan().all() and not whole.isnan().any()


@DEVICES
def test_eager_compiled_and_recorded_products_agree(device: str) -> None:
    """On a GPU those in parts, at once and laid out among them, each beside one at full width."""
    for out, width in WIDTHS[device]:
        linear = linear_map(out, width, BLOCKS[device], device)
        linear.lay_out()
        other = 0.02 * torch.randn(96, width, generator=seeded(2)).to(device, torch.bfloat16)
        for rows in RECORDED[device]:
            x = activations(rows, width, torch.bfloat16, device)
            run = partial(compiled(_beside), linear, x[None], other)
            with program_settings(device):
                one = [part.clone() for part in run()]
            recorded = Recorded("products", [run], torch.device(device), unannounced)
            second = [part.clone() for part in recorded()]
            x.copy_(activations(rows, width, torch.bfloat16, device, seed=7))
            third = recorded()
            first = activations(rows, width, torch.bfloat16, device)
            for found, given in ((one, first), (second, first), (third, x)):
                each = [gap(a, b) for a, b in zip(found[0][0], by_hand(linear, given), strict=True)]
                assert max(each) <= 1e-2 and gap(found[0][0], linear(given)) <= 1e-2, (out, width, rows)
                exact = given.double() @ other.double().T
                assert max(gap(a, b) for a, b in zip(found[1][0], exact, strict=True)) <= 1e-2, (width, rows)


@pytest.mark.parametrize("laid", [False, True], ids=["as stored", "laid out"])
@pytest.mark.parametrize("units", [4, 12], ids=["a row of blocks is left", "a part for each of two"])
def test_products_in_parts_are_those_of_the_whole(units: int, laid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device's units are kept busy; here the parts are multiplied one after another."""
    _have_units(monkeypatch, units)
    linear = linear_map(80, 512, (16, 32))  # 5 by 16 blocks
    parts = {4: 3, 12: 2}[units]
    assert len(cut(5, 16, units)) == parts
    if laid:
        linear.lay_out()
    calls = _calls(monkeypatch)
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 2e-6)):
        for rows, cuts in ((1, 1), (17, parts), (128, parts), (129, 1)):
            x, other = activations(rows, 512, dtype), torch.randn(6, 512, generator=seeded(2)).to(dtype)
            calls.clear()
            with program_settings("cpu"):
                found, beside = compiled(_beside)(linear, x, other)
            assert set(calls) == {cuts}
            each = [gap(a, b) for a, b in zip(found, by_hand(linear, x), strict=True)]
            assert found.dtype == beside.dtype == dtype and max(each) <= tolerance
            assert gap(beside, x.double() @ other.double().T) <= tolerance


def laid_out_model(monkeypatch: pytest.MonkeyPatch, seed: int = 0, *, joined: bool = True) -> QwenGDN:
    """A model whose weights are all cut."""
    _have_units(monkeypatch, 40)
    monkeypatch.setattr(qwen_gdn.block_products, "_LEAST_PART", 4)
    model = in_eight_bits(tiny_model(seed, dtype=torch.float64), (2, 2))
    if joined:
        join_projections(model)
    return model


def laid(model: QwenGDN) -> dict[str, tuple[FP8Linear, Tensor]]:
    """The maps of which programs read laid-out scales, joined ones in place of their members."""
    maps = dict(model.named_modules())
    for name, part in model.named_modules():
        if isinstance(part, ReadsOnce):
            maps |= {f"{name}.{'+'.join(joint.names)}": joint.linear for joint in part.joints}
    return {name: (part, part._laid) for name, part in maps.items() if getattr(part, "_laid", None) is not None}


def test_scales_that_have_changed_are_laid_out_again_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording goes on reading that place, also where a model reads a state after that."""
    model = laid_out_model(monkeypatch)
    before = laid(model)
    assert any("+" in name for name in before) and not any(name.endswith("in_proj_qkv") for name in before)
    addresses = {name: tensor.data_ptr() for name, (_, tensor) in before.items()}
    model.load_state_dict(laid_out_model(monkeypatch, 1).state_dict())
    after = laid(model)
    assert {name: tensor.data_ptr() for name, (_, tensor) in after.items()} == addresses
    for part, tensor in after.values():
        assert torch.equal(tensor, laid_out(part.weight_scale_inv, part.block))


def test_a_program_follows_a_state_that_is_read_after_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = laid_out_model(monkeypatch, 0), laid_out_model(monkeypatch, 1)
    engine = Engine(model, sizes=(8,))
    for _ in range(2):
        tokens, topology = random_tokens(seeded(2), 1, 8), Topology.chain(8)
        with torch.no_grad():
            wanted = model(tokens).final
        assert gap(engine(tokens, engine.new_cache(40).branch(topology)).final, wanted) <= 1e-10
        model.load_state_dict(other.state_dict())


def test_moving_nothing_leaves_what_programs_read_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = laid_out_model(monkeypatch)
    before = {name: tensor.data_ptr() for name, (_, tensor) in laid(model).items()}
    assert {name: tensor.data_ptr() for name, (_, tensor) in laid(model.to("cpu").double()).items()} == before
    assert not laid(model.to("meta"))


def test_an_engine_made_in_inference_mode_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = laid_out_model(monkeypatch, joined=False)
    with torch.inference_mode():
        Engine(model)
    Engine(model)


def test_a_gradient_is_refused() -> None:
    linear, x = linear_map(64, 96, (16, 32)), activations(3, 96, torch.float32).requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"no gradient.*eight_bits=.expand"):
        linear(x)
    with torch.no_grad():
        assert not linear(x).requires_grad
    model = in_eight_bits(tiny_model()).requires_grad_(True)
    with pytest.raises(RuntimeError, match="no gradient"):
        model(random_tokens(seeded(1), 1, 8))


@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 3, 96)])
def test_rows_may_have_any_shape(shape: tuple[int, ...]) -> None:
    linear = linear_map(64, 96, (16, 32))
    x = torch.randn(shape, generator=seeded(1))
    found = linear(x)
    assert found.shape == (*shape[:-1], 64)
    assert gap(found.view(-1, 64), by_hand(linear, x.view(-1, 96))) <= 2e-6


@pytest.mark.parametrize("x", [torch.zeros(2, 192), torch.zeros(2, 96, dtype=torch.int64)], ids=["width", "type"])
def test_rows_of_another_kind_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"96 floating-point columns was given torch\.\w+ of shape \[2, \d+\]"):
        linear_map(64, 96, (16, 32))(x)


def test_autocast_leaves_sums_in_float32() -> None:
    linear, x = linear_map(64, 96, (16, 32)), activations(5, 96, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert gap(linear(x), by_hand(linear, x)) <= 2e-6


def _beside(linear: FP8Linear, x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    return linear.beside(x, other)


def _have_units(monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """As if the CPU multiplied by itself, in so many units, which are a constant of what is compiled."""
    torch._dynamo.reset()
    monkeypatch.setattr(qwen_gdn.block_products, "_units", torch.compiler.assume_constant_result(lambda *_: units))


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes down how many parts each program multiplies."""
    calls: list[int] = []
    parted = qwen_gdn.block_products._from_bounds

    def watched(bounds: list[int]) -> list[Part]:
        calls.append(len(bounds) // 4)
        return parted(bounds)

    monkeypatch.setattr(qwen_gdn.block_products, "_from_bounds", watched)
    return calls


@pytest.mark.parametrize("seed", range(20))
def test_parts_cover_a_weight_once(seed: int) -> None:
    rng = random.Random(seed)
    tall, wide, units = rng.randint(1, 300), 4 * rng.randint(1, 40), rng.choice((0, 1, 7, 132))
    covered = torch.zeros(tall, wide, dtype=torch.int64)
    parts = cut(tall, wide, units)
    for part in parts:
        part.of(covered).add_(1)
        assert part.left % 4 == 0 and part.right % 4 == 0  # scales come in fours
    assert (covered == 1).all()
    if len(parts) > 1:  # no more parts than units are free, after whole rounds of all of them
        last = [part for part in parts if part.bottom == tall]
        assert sum(part.bottom - part.top for part in last) <= units and last[0].top % units == 0


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to bfloat16": lambda module: module.to(torch.bfloat16),
    "double": lambda module: module.double(),
    "half": lambda module: module.half(),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_cast_reaches_numbers_or_scales(change: str) -> None:
    model = in_eight_bits(tiny_model())
    before = {name: p.clone() for name, p in model.named_parameters() if "proj" in name}
    for name, parameter in CHANGES[change](model).named_parameters():
        if name.endswith("_scale_inv") or name.removesuffix("weight") + "weight_scale_inv" in before:
            assert parameter.dtype == before[name].dtype, name
            same = parameter.view(torch.uint8) == before[name].view(torch.uint8)
            assert same.all() and not parameter.requires_grad, name


def test_a_weight_is_expanded_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_gdn.block_products, "_STRIPE", 50)  # three blocks of rows, the last part a shorter one
    linear, x = linear_map(112, 96, (16, 32)), activations(5, 96, torch.float32)
    seen = []
    watched = lambda part, *rest: seen.append(len(part)) or expanded(part, *rest)  # noqa: E731
    monkeypatch.setattr(qwen_gdn.block_products, "expanded", watched)
    assert gap(linear(x), by_hand(linear, x)) <= 2e-6 and seen == [48, 48, 16]


def test_a_weight_without_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="300 rows and 256 columns is not made of whole blocks of 128 by 128"):
        FP8Linear(256, 300, (128, 128))


def test_states_are_read_whole_and_never_cast() -> None:
    model, other = in_eight_bits(tiny_model(0)), in_eight_bits(tiny_model(1))
    model.load_state_dict(other.state_dict())
    tokens = random_tokens(seeded(1), 1, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens).final, other(tokens).final)
    with pytest.raises(ValueError, match=r"^out_proj.weight is torch.float32 and would be cast to torch.float8"):
        nn.ModuleDict({"out_proj": linear_map(32, 32, (16, 16))}).load_state_dict(
            {"out_proj.weight": torch.ones(32, 32)}
        )


MAP = "layers.0.linear_attn.out_proj.weight"
STATES: dict[str, tuple[Callable[[], QwenGDN], Callable[[dict[str, Tensor]], object], str]] = {
    "numbers of full width": (
        lambda: in_eight_bits(tiny_model()),
        lambda state: [state.update({MAP: state[MAP].float()})],
        rf"{MAP} is torch.float32 and would be cast to torch.float8_e4m3fn",
    ),
    "into maps of full width": (
        tiny_model,
        lambda state: None,
        r"is torch.float8_e4m3fn and would be cast to torch.flo",
    ),
    "no scales": (
        lambda: in_eight_bits(tiny_model()),
        lambda state: state.pop(MAP + "_scale_inv"),
        rf"{MAP} is given without (model\.)?{MAP}_scale_inv",
    ),
    "scales alone": (
        lambda: in_eight_bits(tiny_model()),
        lambda state: state.pop(MAP),
        rf"{MAP}_scale_inv is given without (model\.)?{MAP};",
    ),
}


@pytest.mark.parametrize("prefix", ["", "model."], ids=["itself", "a part"])
@pytest.mark.parametrize(("make", "change", "fault"), STATES.values(), ids=STATES)
def test_a_state_that_would_part_numbers_from_scales_is_refused_before_anything_is_read(
    prefix: str, make: Callable[[], QwenGDN], change: Callable[[dict[str, Tensor]], object], fault: str
) -> None:
    """Also where what is missing may be."""
    model, given = make(), in_eight_bits(tiny_model(1)).state_dict()
    change(given)
    before = {name: p.clone() for name, p in model.named_parameters()}
    whole = nn.ModuleDict({"model": model}) if prefix else model
    with pytest.raises(ValueError, match=fault):
        whole.load_state_dict({prefix + name: tensor for name, tensor in given.items()}, strict=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("names", [("0", "1"), ("0", "2"), ("0", "3")], ids=["broken blocks", "a bias", "no map"])
def test_maps_are_replaced_all_or_none(names: tuple[str, str]) -> None:
    whole = nn.Sequential(
        nn.Linear(32, 32, bias=False), nn.Linear(30, 32, bias=False), nn.Linear(32, 32), nn.LayerNorm(32)
    )
    with pytest.raises(ValueError, match=r"whole blocks|no linear map without bias"):
        keep_in_eight_bits(whole, names, (16, 16))
    assert not any(isinstance(part, FP8Linear) for part in whole)


@pytest.mark.parametrize("kinds", [("full", (16, 16)), ((16, 16), (8, 8)), ((8, 8), "full")], ids=str)
def test_groups_of_any_kinds_are_read_in_their_order(kinds: tuple[object, object]) -> None:
    """Of the two maps that a feed-forward part reads into."""
    model = tiny_model(dtype=torch.float64)
    mlps = [layer.mlp for layer in model.layers]
    for mlp in mlps:
        for name, block in zip(mlp.reads, kinds, strict=True):
            if block != "full":
                plain = getattr(mlp, name)
                keep_in_eight_bits(mlp, [name], block)  # type: ignore[arg-type]
                fill(getattr(mlp, name), plain.weight)
    tokens, wanted = random_tokens(seeded(1), 1, 20), by_hand_model(model)
    with torch.no_grad():
        final = wanted(tokens).final
        join_projections(model)
        assert isinstance(mlps[0].joints[0].linear, FP8Linear)  # what is beside it runs at the same time
        assert gap(model(tokens).final, final) <= 1e-10


def by_hand_model(model: QwenGDN) -> QwenGDN:
    """A copy whose eight-bit linear maps are computed by hand."""
    twin = copy.deepcopy(model)
    for name, part in list(twin.named_modules()):
        if isinstance(part, FP8Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, Spread(part))
    return twin


@pytest.mark.parametrize("changes", [{}, EXPERTS | {"shared_expert_intermediate_size": 16}], ids=["dense", "experts"])
def test_a_model_in_eight_bits_is_the_one_by_hand(changes: dict[str, object]) -> None:
    """Float64: no rounding tells the two apart, joined or not."""
    model = in_eight_bits(tiny_model(dtype=torch.float64, **changes))
    assert model.dtype == torch.float64
    tokens, wanted = random_tokens(seeded(1), 1, 20), by_hand_model(model)
    with torch.no_grad():
        final = wanted(tokens).final
        assert gap(model(tokens).final, final) <= 1e-10
        join_projections(model)
        assert gap(model(tokens).final, final) <= 1e-10


def test_maps_of_either_kind_are_joined_with_their_own() -> None:
    apart, model = (in_eight_bits(tiny_model()) for _ in range(2))
    join_projections(model)
    ours, theirs = model.state_dict(), apart.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in theirs)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in apart.parameters())
    assert [joint.names for joint in model.layers[0].linear_attn._joined] == [
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_b", "in_proj_a"),
    ]


@pytest.mark.parametrize("kind", ["weight", "weight_scale_inv"])
def test_replaced_numbers_or_scales_are_read_where_they_are(kind: str) -> None:
    """The last of a group alone, which leaves every other address."""
    model, wanted = (in_eight_bits(tiny_model()) for _ in range(2))
    join_projections(model)
    for both in (model, wanted):
        for part in both.modules():
            if isinstance(part, ReadsOnce):
                linears = (getattr(part, name) for name in reversed(part.reads))
                held = getattr(next(linear for linear in linears if isinstance(linear, FP8Linear)), kind)
                held.data = (held.float() * 0.5).to(held.dtype)
    tokens = random_tokens(seeded(1), 1, 8)
    with torch.no_grad():
        assert gap(model(tokens).final, wanted(tokens).final) <= 2e-6


def test_caches_trees_and_commits_follow_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    _run_uncompiled(monkeypatch)
    model, twin = (in_eight_bits(tiny_model(dtype=torch.float64)) for _ in range(2))
    check_rounds(Engine(twin, sizes=(8, 32)), model, trees=8)


def _run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (qwen_gdn.program_set, ddtree.recorded_drafter):
        monkeypatch.setattr(module, "compiled", lambda function: function)


def test_an_engine_writes_the_eager_models_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    _run_uncompiled(monkeypatch)
    model, twin = (in_eight_bits(tiny_model(dtype=torch.float64)) for _ in range(2))
    engine, referee, draw, length = Engine(twin, sizes=(16, 64)), Referee(model), seeded(3), 12
    for number, (name, scripted) in enumerate(list(PROPOSERS.items())[::3]):
        prompt = random_tokens(draw, 5 + 7 * number, vocab=model.config.vocab_size).tolist()
        wanted = list(decode(model, prompt, max_new_tokens=length))
        text = scripted([*prompt, *wanted], number)
        found = emitted(generate(engine, text, prompt, max_new_tokens=length, budget=63 if number % 2 else 15))
        plain = list(decode(engine, prompt, max_new_tokens=length))
        for what, one in ((name, found), ("plain", plain)):
            tie = referee.judge(what, prompt, one, wanted)
            print(f"prompt {number}, {what}: {tie or 'the same'}")


def full_width(model: QwenGDN) -> QwenGDN:
    """A float32 copy whose weights are what the numbers in eight bits stand for."""
    return with_expanded_weights(copy.deepcopy(model), torch.float32).float()


@DEVICES
def test_no_way_of_running_is_farther_from_full_width_than_another(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where activations round to eight bits by chance: two ways differ by as much as either errs.

    So one is not held to another but both to float32 and expanded weights, where a wrong way is farther off.
    """
    if device == "cpu":
        _run_uncompiled(monkeypatch)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4, "head_dim": 128}
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    wide = sizes | heads | widths if device == "cuda" else {}  # as blocks of a device want it
    raw, block = tiny(4) | wide, (128, 128) if wide else (16, 16)
    model = in_eight_bits(random_model(raw, 0.02 if wide else 0.2, device=device), block).bfloat16()
    full, engine = full_width(model), Engine(copy.deepcopy(model), sizes=(16, 32))
    tokens, read = random_tokens(seeded(2), 1, 96).to(device), 64
    wanted = full(tokens).final[:, read:]
    caches = [engine.new_cache(96) for _ in range(3)] + [model.new_cache(96)]
    for cache in caches:
        model(tokens[:, :read], cache)
    one, tree, chain, eager = caches
    found = {
        "token by token": torch.cat([model(token, eager).final for token in tokens[:, read:].split(1, 1)], 1),
        "by steps of the engine": torch.cat([engine(token, one).final for token in tokens[:, read:].split(1, 1)], 1),
        "by a tree of 32": engine(tokens[0, read:], tree.branch(Topology.chain(32))).final,
        "by a tree of 16": engine(tokens[0, read : read + 16], chain.branch(Topology.chain(16))).final,
    }
    at_once = model(tokens).final[:, read:]
    for name, states in found.items():
        error, usual = (rms(some[:, : states.shape[1]], wanted[:, : states.shape[1]]) for some in (states, at_once))
        print(f"{device}, {name}: {error:.2e}, at once {usual:.2e}")
        assert 1e-3 < error <= 1.1 * usual


def test_layers_are_near_those_of_expanded_weights() -> None:
    """What activations in eight bits cost, layer by layer."""
    model = in_eight_bits(random_model(tiny(4), 0.02, device="cpu"))
    full = full_width(model)
    tokens = random_tokens(seeded(1), 1, 256, vocab=model.config.vocab_size)
    with torch.no_grad():
        found, wanted = (one(tokens, capture=(0, 1, 2, 3)) for one in (model, full))
        logits, others = (one.logits(hidden.final) for one, hidden in ((model, found), (full, wanted)))
    errors = [rms(a, b) for a, b in zip(found.captured, wanted.captured, strict=True)]
    top1 = float((logits.argmax(-1) == others.argmax(-1)).float().mean())
    listed = ", ".join(f"{error:.1e}" for error in errors)
    print(f"layers {listed}; logits {rms(logits, others):.1e}, top-1 {top1:.1%}")
    assert max(errors) <= 8e-2 and top1 >= 0.8


def test_random_weights_in_eight_bits_are_counted_as_such() -> None:
    """What `tools/bench.py --gpu` measures of a config that says so, and the floor beside it."""
    form = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    form["modules_to_not_convert"] = ["model.layers.0.mlp.up_proj", "lm_head"]
    config = ModelConfig.from_dict(tiny_raw(quantization_config=form))
    model = random_weights(QwenGDN, config, torch.device("cpu"), torch.bfloat16)
    twin = random_weights(QwenGDN, replace(config, quantization=None), torch.device("cpu"), torch.bfloat16)
    names = {name for name, part in model.named_modules() if isinstance(part, FP8Linear)}
    linears = {name for name, part in twin.named_modules() if name.endswith(("_proj", "_qkv", "_z"))}
    assert linears - names == {"layers.0.mlp.up_proj"} and names < linears
    for name in names:
        part, plain = model.get_submodule(name), twin.get_submodule(name)
        weight = expanded(part.weight, part.weight_scale_inv, part.block, torch.float32)
        assert 0.5 < float(weight.std() / plain.weight.float().std()) < 2 and part.weight_scale_inv.unique().numel() > 1
    saved = sum(twin.get_submodule(name).weight.numel() for name in names)
    scales = sum(4 * model.get_submodule(name).weight_scale_inv.numel() for name in names)
    assert Floor.of(twin, 1.0).always - Floor.of(model, 1.0).always == saved - scales
    assert model(random_tokens(seeded(1), 1, 9)).final.isfinite().all()
