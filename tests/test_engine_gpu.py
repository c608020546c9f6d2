"""The engine's recorded graphs on a GPU: the eager model's tokens, two synchronisations a round, nothing grown.

Every check takes a device, so that its code runs on a CPU as well (there uncompiled, and without graphs).
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from drafter_oracle import raw_config2
from proposers import PROPOSERS, Moody, emitted
from test_engine import check_rounds
from test_moe import by_hand, mixture, rows
from tiny import EXPERTS, gap, random_tokens, seeded

import ddtree.recorded_drafter
import qwen_gdn.program_set
from ddtree import (
    DFlash2Drafter,
    DFlashConfig,
    DFlashDrafter,
    MTPDrafter,
    NoDrafts,
    Proposer,
    build_chain,
    build_tree,
    drafters,
    generate,
    make_sampler,
)
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn import QwenGDN, decode
from qwen_gdn.engine import Engine
from qwen_gdn.mtp import MTP
from qwen_gdn.recorded import Recorded, applied, compiled, unannounced
from tools.measure.exactness import Referee
from tools.measure.instruments import random_weights, synchronisations
from tools.parity.shapes import random_model, tiny

GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DEVICES = pytest.mark.parametrize("device", GPU)
MIXTURES = pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
DRAFTER = {
    "hidden_size": 32, "vocab_size": 97, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "block_size": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 24,
    "use_sliding_window": True, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [5, 1]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cpu" in request.node.name:
        for module in (qwen_gdn.program_set, ddtree.recorded_drafter):
            monkeypatch.setattr(module, "compiled", lambda function: function)


def mid(device: str, dtype: torch.dtype = torch.float32, **changes: Any) -> QwenGDN:
    """Eight layers; on a GPU wide enough that its kernels are those of real models."""
    raw = tiny() | changes
    if device == "cuda":
        raw |= {
            "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128,
            "vocab_size": 997, "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        }  # fmt: skip
    return random_model(raw, 0.05, device=device).to(dtype)


def drafter_of(target: QwenGDN) -> DFlashDrafter:
    vocab = target.config.vocab_size
    raw = DRAFTER | {"hidden_size": target.config.hidden_size, "vocab_size": vocab}
    raw["dflash_config"] = {"mask_token_id": vocab - 1, "target_layer_ids": [5, 1]}
    drafter: DFlashDrafter = random_weights(DFlashDrafter, DFlashConfig.from_dict(raw), target.device, target.dtype)
    return drafter


def dflash2_of(target: QwenGDN) -> RecordedDrafter:
    c = target.config
    table = {"mask_token_id": c.vocab_size - 1, "target_layer_ids": [5, 1], "block_size": 8, "selector_top_k": 8}
    raw = raw_config2(hidden_size=c.hidden_size, vocab_size=c.vocab_size, num_target_layers=None, dflash=table)
    drafter = random_weights(drafters.build, drafters.from_dict(raw), target.device, target.dtype)
    assert isinstance(drafter, DFlash2Drafter)
    return RecordedDrafter(drafter)


def mtp_of(target: QwenGDN) -> MTPDrafter:
    return MTPDrafter(random_weights(MTP, target.config, target.device, target.dtype), depth=4)


@DEVICES
@MIXTURES
def test_recorded_forwards_and_commits_follow_the_model(device: str, changes: dict[str, Any]) -> None:
    model, twin = (random_model(tiny() | changes, 0.05, device=device) for _ in range(2))
    check_rounds(Engine(twin, sizes=(8, 32)), model, trees=12)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_mixtures_are_what_their_equations_say(device: str, dtype: torch.dtype) -> None:
    layer = mixture(count=16, chosen=3, inner=32, dtype=dtype).to(device)
    exact, tolerance = copy.deepcopy(layer).cpu().double(), {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for count in (1, 16, 300):
        x = rows(count, seed=count).to(device, dtype)
        run = partial(applied, layer, x) if device == "cpu" else partial(compiled(applied), layer, x)
        recorded = Recorded("experts", [run], x.device, unannounced)
        for seed in (count, 7):  # a replay reads what is now there, whose experts are others
            x.copy_(rows(count, seed=seed))
            assert gap(recorded().cpu(), by_hand(exact, x.cpu().double())) <= tolerance


@DEVICES
def test_tokens_are_the_eager_models(device: str) -> None:
    """Tree, chain, plain and mixed rounds, budgets from round to round, two caches in turn."""
    model, twin = mid(device), mid(device)
    engine, referee = Engine(twin, sizes=(16, 32, 64)), Referee(model)
    proposer = RecordedDrafter(drafter_of(model))
    draw, budgets = seeded(1), cycle((15, 0, 31, 7, 63, 1))
    prompts = 50 if device == "cuda" else 2
    for number in range(prompts):
        prompt = random_tokens(draw, 5 + 7 * (number % 9), vocab=model.config.vocab_size).tolist()
        wanted = list(decode(model, prompt, max_new_tokens=48))
        name, scripted = list(PROPOSERS.items())[number % len(PROPOSERS)]
        texts: list[list[int]] = [[], []]
        runs: list[Iterator[Any]] = [
            generate(engine, proposer, prompt, max_new_tokens=48, budget=next(budgets)),
            generate(
                engine,
                scripted([*prompt, *wanted], number),
                prompt,
                max_new_tokens=48,
                budget=next(budgets),
                build=build_chain if number % 2 else build_tree,
            ),
        ]
        for _ in range(48):
            for run, text in zip(runs, texts, strict=True):
                text += emitted(filter(None, [next(run, None)]))
        plain = list(decode(engine, prompt, max_new_tokens=48))
        for what, text in (("drafter", texts[0]), (name, texts[1]), ("plain", plain)):
            tie = referee.judge(what, prompt, text, wanted)
            if tie is not None:
                print(f"prompt {number}, {what}: {tie}")


@DEVICES
@MIXTURES
@pytest.mark.parametrize("propose", [dflash2_of, mtp_of])
def test_what_other_drafters_lead_to_is_what_the_model_writes(
    device: str, changes: dict[str, Any], propose: Callable[[QwenGDN], Proposer]
) -> None:
    model, twin = (mid(device, **changes) for _ in range(2))
    engine, referee, proposer, draw = Engine(twin, sizes=(16,)), Referee(model), propose(model), seeded(4)
    prompts, count = (10, 48) if device == "cuda" else (1, 12)
    for number in range(prompts):
        prompt = random_tokens(draw, 5 + 7 * number, vocab=model.config.vocab_size).tolist()
        wanted = list(decode(model, prompt, max_new_tokens=count))
        for build in (build_tree, build_chain):
            rounds = list(generate(engine, proposer, prompt, max_new_tokens=count, budget=15, build=build))
            tie = referee.judge(f"prompt {number}", prompt, emitted(rounds), wanted)
            if tie is not None:
                print(f"prompt {number}, {build.__name__}: {tie}")


@DEVICES
def test_repeats_are_equal_bit_for_bit(device: str) -> None:
    engine = Engine(mid(device), sizes=(16, 32))
    proposer = RecordedDrafter(drafter_of(engine.model))
    states = []
    repeats, count = (5, 60) if device == "cuda" else (2, 20)
    for _ in range(repeats):
        cache = engine.new_cache(200)
        text = emitted(generate(engine, proposer, [5, 9, 1], max_new_tokens=count, budget=31, cache=cache))
        states.append([torch.tensor(text), *(t.clone() for layer in cache for t in layer.tensors())])
    for one, other in pairwise(states):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def waits(rounds: Iterator[Any], device: torch.device, count: int) -> int:
    """How often the host waits for the device in so many rounds, after three that prepare."""
    for _ in range(3):
        next(rounds)
    with synchronisations(device) as seen:
        for _ in range(count):
            next(rounds)
    return len(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [None, {}, {"top_k": 20, "top_p": 0.9}], ids=["greedy", "law", "cut"])
def test_a_round_waits_for_the_device_twice(settings: dict[str, Any] | None) -> None:
    engine = Engine(mid("cuda"), sizes=(16, 32))
    proposer = RecordedDrafter(drafter_of(engine.model))
    options = {} if settings is None else {"sampler": make_sampler(0.8, seed=1, **settings)}
    rounds = generate(engine, proposer, [5, 9, 1], max_new_tokens=90, budget=31, **options)
    assert waits(rounds, engine.device, 4) == 8
    steps = generate(engine, NoDrafts(), [5, 9, 1], max_new_tokens=90, **options)
    assert waits(steps, engine.device, 4) == 4


@pytest.mark.gpu
def test_bfloat16_differs_at_near_ties_alone() -> None:
    model, twin = mid("cuda", torch.bfloat16), mid("cuda", torch.bfloat16)
    engine, referee = Engine(twin, sizes=(16, 64)), Referee(model)
    draw = seeded(2)
    for number in range(20):
        prompt = random_tokens(draw, 9 + number, vocab=997).tolist()
        wanted = list(decode(model, prompt, max_new_tokens=40))
        text = Moody([*prompt, *wanted], number)
        found = emitted(generate(engine, text, prompt, max_new_tokens=40, budget=63 if number % 2 else 15))
        tie = referee.judge(f"prompt {number}", prompt, found, wanted)
        print(f"prompt {number}: {tie or 'the same'}")


@pytest.mark.gpu
def test_nothing_grows_from_round_to_round() -> None:
    engine = Engine(mid("cuda"), sizes=(32,))
    proposer = RecordedDrafter(drafter_of(engine.model))
    rounds = generate(engine, proposer, [5, 9, 1], max_new_tokens=300, budget=31)
    sizes = []
    for done, _ in zip(rounds, range(60), strict=False):
        del done
        sizes.append(torch.cuda.memory_allocated())
    assert max(sizes[10:]) <= min(sizes[10:]) + 2**20
