"""The DFlash 2 drafter: against loops, in generation, from checkpoints, and what it refuses."""

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoints as ck
import pytest
import torch
from drafter_oracle import (
    VOCAB,
    StandIn,
    bound_drafter,
    close,
    dense_hidden,
    features_of,
    random_drafter,
    raw_config,
    raw_config2,
)
from proposers import small_model
from test_recorded_drafter import COURSE, uncompiled  # noqa: F401
from torch import Tensor

from ddtree import DFlash2Config, DFlash2Drafter, DFlashConfig, build_chain, build_tree, drafters, generate
from ddtree.dflash2 import PairScores
from ddtree.recorded_drafter import RecordedDrafter
from qwen_gdn import QwenGDN, decode
from qwen_gdn.engine import Engine
from weights import CheckpointError, load_drafter, load_target

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "pad_token_id": 248044,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "transformers_version": "5.15.0",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 248320,
}  # the config of the published drafter of the 27B

GENERATING: dict[str, Any] = {
    "hidden_size": 16, "vocab_size": 37, "intermediate_size": 24, "num_target_layers": None, "sliding_window": 16,
    "dflash": {
        "block_size": 6, "mask_token_id": 36, "target_layer_ids": [0], "selector_rank": 37, "selector_top_k": 37,
    },
}  # fmt: skip


def made(*, dflash: dict[str, Any] | None = None, **changes: Any) -> DFlash2Config:
    return DFlash2Config.from_dict(raw_config2(dflash=dflash, **changes))


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        drafters.from_dict(raw)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pair_scores(drafter: DFlash2Drafter, target: StandIn, features: Tensor, root: int, path: list[int]) -> Tensor:
    """By loops, the log-probabilities [vocab] after a path: −inf for what is no candidate."""
    config, weights = drafter.config, drafter.state_dict()
    tokens = [root] + [config.mask_token_id] * (config.block_size - 1)
    block = torch.stack([target.table[token] for token in tokens]).detach() * config.input_embedding_scale
    hidden = dense_hidden(weights, config, features[0], block)[1 + len(path)]
    logits = (target.head.detach() @ hidden) * config.output_multiplier
    if config.final_logit_softcapping is not None:
        logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
    before = weights["candidate_selector.predecessor_codebook"][[root, *path][-1]]
    projected = weights["candidate_selector.hidden_projection.weight"] @ hidden
    scores = torch.full((config.vocab_size,), -math.inf, dtype=torch.float64)
    for token in sorted(range(config.vocab_size), key=lambda t: -float(logits[t]))[: config.selector_top_k]:
        after = weights["candidate_selector.successor_codebook"][token]
        scores[token] = logits[token] + sum(before[r] * projected[r] * after[r] for r in range(config.selector_rank))
    return scores.log_softmax(-1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dflash": {"conv_kernel_size": 4, "conv_group_size": 3, "selector_top_k": VOCAB}, "sliding_window": 4},
        {"output_multiplier": 0.5, "final_logit_softcapping": 4.0, "input_embedding_scale": 2.0},
    ],
    ids=["plain", "long taps, all tokens", "factors"],
)
def test_log_probabilities_after_any_path_equal_loops_in_float64(changes: dict[str, Any]) -> None:
    drafter, target = bound_drafter(made(**changes))
    assert isinstance(drafter, DFlash2Drafter)
    for rows in (0, 9):
        drafter.reset()
        drafter.observe(features_of(rows))
        scores = drafter.propose(7)
        assert isinstance(scores, PairScores)
        path: list[int] = []
        while len(path) < scores.depth:
            tokens, log_probs = scores.children(tuple(path))
            assert log_probs == sorted(log_probs, reverse=True)
            ours = torch.full((VOCAB,), -math.inf, dtype=torch.float64)
            ours[tokens] = torch.tensor(log_probs, dtype=torch.float64)
            wanted = pair_scores(drafter, target, features_of(rows), 7, path)
            assert torch.equal(ours.isfinite(), wanted.isfinite())
            assert torch.allclose(ours, wanted, rtol=1e-6, atol=1e-6)  # handed over in float32
            path.append(tokens[len(path) % len(tokens)])


def test_states_equal_loops_in_float64() -> None:
    drafter, target = bound_drafter(made(dflash={"conv_kernel_size": 3}))
    states: list[Tensor] = []
    drafter.norm.register_forward_hook(lambda module, args, out: states.append(out[0]))
    drafter.observe(features_of(11))
    drafter.propose(3)
    block = torch.stack([target.table[token] for token in [3, *[VOCAB - 1] * 4]]).detach()
    assert close(states[0], dense_hidden(drafter.state_dict(), drafter.config, features_of(11)[0], block), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_drafter_of_any_dtype_serves_a_float32_target(dtype: torch.dtype) -> None:
    drafter, target = random_drafter(made(), dtype), StandIn(torch.float32)
    drafter.bind(target)
    drafter.observe(features_of(20, dtype=torch.float32))
    scores = drafter.propose(1)
    assert isinstance(drafter, DFlash2Drafter) and isinstance(scores, PairScores)
    tokens, log_probs = scores.children(())
    wanted = pair_scores(drafter.double(), target.double(), features_of(20), 1, [])
    tolerance = 0.3 if dtype == torch.bfloat16 else 1e-4
    assert tokens[0] == int(wanted.argmax())
    assert abs(log_probs[0] - float(wanted.max())) <= tolerance


def test_a_new_drafter_is_a_dflash_drafter_whose_convolutions_change_nothing() -> None:
    torch.manual_seed(0)
    ours = drafters.build(made()).double()
    plain = drafters.build(DFlashConfig.from_dict(raw_config2() | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"block_size": 5, "mask_token_id": VOCAB - 1, "target_layer_ids": [4, 1, 6]},
    })).double()  # fmt: skip
    plain.load_state_dict({name: value for name, value in ours.state_dict().items() if name in plain.state_dict()})
    target = StandIn()
    for drafter in (ours, plain):
        drafter.bind(target)
        drafter.observe(features_of(6))
    logits, scores = plain.propose(4), ours.propose(4)
    assert isinstance(logits, Tensor)
    assert build_chain(4, scores, 4).tokens.tolist() == [4, *logits.argmax(-1).tolist()]


def test_every_parameter_learns_through_the_network_and_the_selector() -> None:
    drafter, target = bound_drafter(made())
    assert isinstance(drafter, DFlash2Drafter)
    context = drafter.project(drafter.context(features_of(6)), drafter.angles(torch.arange(6)))
    block = drafter.inputs(target.embed(torch.tensor([[3, 40, 40, 40, 40]])).detach())
    hidden = drafter(block, context, drafter.angles(torch.arange(6, 11)), {"sliding_attention": None})[0, 1:]
    unary, candidates = target.logits(hidden).topk(5)
    drafter.candidate_selector(3, hidden, unary, candidates).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in drafter.parameters())


def test_children_are_ranked_by_probability_then_token_without_the_impossible() -> None:
    candidates = torch.tensor([[9, 4, 6], [2, 8, 5]])
    first = torch.tensor([-1.0, -1.0, -2.0])
    second = torch.tensor([[-3.0, -math.inf, -0.1], [-0.5, -0.7, -0.5], [-0.2, -0.4, -0.3]])
    scores = PairScores(candidates, torch.stack((first.expand(3, 3), second)))
    assert scores.depth == 2
    assert scores.children(()) == ([4, 9, 6], [-1.0, -1.0, -2.0])
    assert scores.children((4,)) == ([2, 5, 8], [-0.5, -0.5, pytest.approx(-0.7)])
    assert scores.children((9,)).tokens == [5, 2]
    assert scores.children((6,)).tokens == [2, 5, 8]
    with pytest.raises(ValueError, match="token 7 is no candidate of position 0"):
        scores.children((7,))
    with pytest.raises(ValueError, match="depth is 2"):
        scores.children((4, 2))


def test_a_tree_is_that_of_the_same_scores_checked_and_ranked_one_by_one() -> None:
    class Plain:
        def __init__(self, scores: PairScores) -> None:
            self.scores, self.depth = scores, scores.depth

        def children(self, path: tuple[int, ...], /) -> tuple[list[int], list[float]]:
            tokens, log_probs = self.scores.children(path)
            return tokens[::-1], log_probs[::-1]

    draw = torch.Generator().manual_seed(4)
    for number in range(20):
        candidates = torch.stack([torch.randperm(9, generator=draw)[:4] for _ in range(3)])
        steps = torch.randint(3, (3, 4, 4), generator=draw)  # few values, so that many are equal
        steps[0] = steps[0, :1]
        scores = PairScores(candidates, steps.float().log_softmax(-1))
        ours, theirs = build_tree(1, scores, 4 * number), build_tree(1, Plain(scores), 4 * number)
        assert torch.equal(ours.tokens, theirs.tokens) and ours.topology.parents == theirs.topology.parents


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused_when_the_tree_is_built(bad: float) -> None:
    drafter, target = bound_drafter(made())
    with torch.no_grad():
        target.head[3] = bad
    with pytest.raises(ValueError, match="position 0 needs a finite score"):
        build_tree(1, drafter.propose(1), 8)


def test_one_transfer_brings_all_that_a_tree_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _ = bound_drafter(made())
    moved: list[torch.Size] = []
    move = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda x: (moved.append(x.shape), move(x))[1])
    assert len(build_tree(3, drafter.propose(3), 20).tokens) == 21
    assert moved == [(4, 6, 5)]


@pytest.mark.parametrize("build", [build_tree, build_chain])
@pytest.mark.parametrize("budget", [1, 4, 15])
def test_generation_equals_plain_decoding_in_float64(build: Any, budget: int) -> None:
    model = small_model()
    wanted = list(decode(model, [4, 8, 1], max_new_tokens=50))
    drafter = knowing(model, wanted)
    rounds = list(generate(model, drafter, [4, 8, 1], max_new_tokens=50, budget=budget, build=build))
    assert [token for done in rounds for token in done.tokens] == wanted
    assert sum(done.accepted for done in rounds) > 8  # else hardly a draft would have been kept
    assert any(done.accepted < done.drafted for done in rounds)
    assert drafter.context_length == len(wanted) + 2


@torch.no_grad()
def knowing(model: QwenGDN, written: list[int]) -> DFlash2Drafter:
    """A drafter whose states are about the mask's embedding, and whose pairs are the bigrams of a text."""
    torch.manual_seed(2)
    drafter = drafters.build(made(**GENERATING, num_attention_heads=2, num_key_value_heads=1)).double()
    assert isinstance(drafter, DFlash2Drafter)
    for name, parameter in drafter.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.05)
        elif "_conv" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
    state = drafter.norm(model.embed(torch.tensor([36])))[0]
    drafter.candidate_selector.hidden_projection.weight.copy_((state / state.square().sum()).expand(37, -1))
    drafter.candidate_selector.predecessor_codebook.copy_(torch.eye(37))
    for token, after in pairwise(written):
        drafter.candidate_selector.successor_codebook[after, token] += 20
    return drafter


@pytest.mark.usefixtures("uncompiled")
def test_programs_propose_the_drafters_own_scores() -> None:
    check_course(torch.float64, 1e-6)


def test_compiled_programs_propose_the_drafters_own_scores() -> None:
    check_course(torch.float32, 1e-5, layers=1)


def check_course(dtype: torch.dtype, tolerance: float, layers: int = 2) -> None:
    kinds = {"num_hidden_layers": layers, "layer_types": ["sliding_attention"] * layers}
    config = made(sliding_window=6, output_multiplier=0.9, input_embedding_scale=1.3, **kinds)
    theirs, _ = bound_drafter(config, dtype)
    drafter, target = bound_drafter(config, dtype)
    ours = RecordedDrafter(drafter)
    ours.bind(target)
    for number, rows in enumerate(COURSE):
        features = features_of(rows, seed=number, dtype=dtype)
        ours.observe(features)
        theirs.observe(features)
        mine, wanted = ours.propose(number), theirs.propose(number)
        ours.propose(number + 1)  # must change nothing that was proposed before
        assert isinstance(mine, PairScores) and isinstance(wanted, PairScores)
        for path in ((), tuple(build_chain(number, wanted, 3).tokens.tolist()[1:])):
            a, b = (dict(zip(*scores.children(path), strict=True)) for scores in (mine, wanted))
            assert a.keys() == b.keys(), number
            assert all(abs(a[token] - b[token]) <= tolerance * max(1, abs(b[token])) for token in b), number


@pytest.mark.usefixtures("uncompiled")
def test_a_generation_by_programs_alone_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import qwen_gdn.program_set

    monkeypatch.setattr(qwen_gdn.program_set, "compiled", lambda function: function)
    model = small_model()
    engine = Engine(small_model(), sizes=(8, 16))
    wanted = list(decode(model, [4, 8, 1], max_new_tokens=40))
    drafter = knowing(model, wanted)
    eager = list(generate(model, drafter, [4, 8, 1], max_new_tokens=40))
    programs = list(generate(engine, RecordedDrafter(copy.deepcopy(drafter)), [4, 8, 1], max_new_tokens=40))
    assert eager == programs
    assert [token for done in programs for token in done.tokens] == wanted


def test_the_published_config_is_accepted_and_gives_the_published_tensors() -> None:
    config = drafters.from_dict(PUBLISHED)
    assert isinstance(config, DFlash2Config)
    assert (config.block_size, config.conv_kernel_size, config.conv_group_size) == (8, 2, 16)
    assert (config.selector_rank, config.selector_top_k, config.is_causal) == (256, 16, False)
    assert (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping) == (1, 1, None)
    with torch.device("meta"):
        shapes = {name: list(p.shape) for name, p in drafters.build(config).named_parameters()}
    assert len(shapes) == 3 + 5 * (11 + 4) + 3
    for name in ("attention_conv", "mlp_conv"):
        assert shapes[f"layers.4.{name}.base_kernel"] == [2, 2, 5120]
        assert shapes[f"layers.4.{name}.kernel_projection.weight"] == [1280, 5120]
    assert shapes["candidate_selector.predecessor_codebook"] == [248320, 256]
    assert shapes["candidate_selector.successor_codebook"] == [248320, 256]
    assert shapes["candidate_selector.hidden_projection.weight"] == [256, 5120]


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_sizes_have_no_defaults_and_are_read_from_either_place(key: str) -> None:
    raw = raw_config2()
    flat = raw_config2(dflash={key: None}) | {key: raw["dflash_config"][key]}
    assert drafters.from_dict(flat) == drafters.from_dict(raw)
    assert f"{key} is missing" in refusal(raw_config2(dflash={key: None}))
    assert f"{key} must be of type int, got '2'" in refusal(raw_config2(dflash={key: "2"}))
    assert f"{key} must be of type int, got 'x'" in refusal(raw_config2(**{key: "x"}))
    assert f"{key} must be an integer from 1" in refusal(raw_config2(dflash={key: 0}))
    assert f"{key} must be an integer from 1" in refusal(raw_config2(dflash={key: 10**30}))
    assert f"{key} 2 is not supported" in refusal(raw_config(**{key: 2}))


@pytest.mark.parametrize("key", ["input_embedding_scale", "output_multiplier", "final_logit_softcapping"])
def test_factors_are_neutral_where_absent_and_refused_out_of_range(key: str) -> None:
    neutral = None if key == "final_logit_softcapping" else 1
    assert getattr(made(), key) == neutral
    assert getattr(made(**{key: None}), key) == neutral
    assert getattr(made(**{key: 3}), key) == getattr(made(dflash={key: 3.0}), key) == 3
    assert f"{key} must be a number from" in refusal(raw_config2(**{key: -1}))
    assert f"{key} must be a finite number" in refusal(raw_config2(**{key: math.inf}))
    assert f"{key} must be of type float" in refusal(raw_config2(**{key: "1"}))
    assert f"{key} must be of type float" in refusal(raw_config2(dflash={key: 2.0}, **{key: []}))
    if neutral is None:
        assert getattr(made(**{key: 0}), key) is None
    else:
        assert f"{key} must be a number from" in refusal(raw_config2(**{key: 0}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dflash": {"conv_group_size": 7}}, "hidden_size 24 is no multiple of conv_group_size 7"),
        ({"dflash": {"conv_kernel_size": 6}}, "conv_kernel_size must be an integer from 1 to 5"),
        ({"dflash": {"selector_top_k": 42}}, "selector_top_k must be an integer from 1 to 41"),
        ({"use_sliding_window": False}, "use_sliding_window is false"),
        ({"is_causal": 0}, "is_causal"),
        ({"dflash": {"markov_rank": 256}}, "markov_rank"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}}, "yarn"),
        ({"architectures": ["DSparkDraftModel"]}, "supported are DFlashDraftModel, DFlash2DraftModel"),
        ({"architectures": ["DFlashDraftModel", "DFlash2DraftModel"]}, "architectures"),
        ({"architectures": "DFlash2DraftModel"}, "architectures must be of type list"),
        ({"architectures": None}, "selector_rank 6 is not supported"),
    ],
)
def test_a_config_at_odds_with_itself_or_with_this_drafter_is_refused_by_name(
    changes: dict[str, Any], words: str
) -> None:
    assert words in refusal(raw_config2(**changes))


def test_a_checkpoint_of_the_published_names_loads_and_drafts(tmp_path: Path) -> None:
    config = ck.drafter_config2()
    tensors = ck.drafter_tensors(config)
    ck.write(tmp_path / "d", config, tensors)
    drafter = load_drafter(tmp_path / "d")
    assert isinstance(drafter, DFlash2Drafter)
    ck.assert_holds(drafter, tensors)
    target = load_target(ck.write_target(tmp_path / "t"))
    rounds = list(generate(target, drafter, [5, 6, 7], max_new_tokens=12, budget=6))
    assert [token for done in rounds for token in done.tokens] == list(decode(target, [5, 6, 7], max_new_tokens=12))


def malformed() -> list[tuple[str, str]]:
    added = [f"layers.1.{name}" for name in (
        "attention_conv.base_kernel", "attention_conv.kernel_projection.weight",
        "mlp_conv.base_kernel", "mlp_conv.kernel_projection.weight",
    )]  # fmt: skip
    added += [f"candidate_selector.{name}" for name in (
        "predecessor_codebook", "successor_codebook", "hidden_projection.weight",
    )]  # fmt: skip
    return [(name, fault) for name in added for fault in ("missing", "shape", "rows", "nan", "quantised")]


@pytest.mark.parametrize(("name", "fault"), malformed())
def test_a_malformed_checkpoint_is_one_line_with_file_and_tensor(tmp_path: Path, name: str, fault: str) -> None:
    config = ck.drafter_config2()
    tensors = ck.drafter_tensors(config)
    whole = tensors.pop(name)
    if fault == "shape":
        tensors[name] = whole.unsqueeze(0)
    elif fault == "rows":  # of a codebook: those of another vocabulary
        tensors[name] = torch.cat((whole, whole[:1]))
    elif fault == "nan":
        tensors[name] = whole.clone()
        tensors[name].view(-1)[3] = math.nan
    elif fault == "quantised":
        tensors[name] = whole.to(torch.float8_e4m3fn)
    ck.write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(tmp_path)
    message = str(caught.value)
    assert "\n" not in message and str(tmp_path / "model.safetensors") in message and name in message


def test_tensors_of_one_generation_are_strange_to_the_other(tmp_path: Path) -> None:
    first, second = ck.drafter_config(), ck.drafter_config2()
    ck.write(tmp_path / "a", first, ck.drafter_tensors(second))
    with pytest.raises(CheckpointError, match=r"no place for: candidate_selector\."):
        load_drafter(tmp_path / "a")
    ck.write(tmp_path / "b", second, ck.drafter_tensors(first))
    with pytest.raises(CheckpointError, match=r"lacks .*attention_conv\.base_kernel"):
        load_drafter(tmp_path / "b")
    named = ck.drafter_tensors(second)
    named["candidate_selector.successor_codebook.weight"] = named.pop("candidate_selector.successor_codebook")
    ck.write(tmp_path / "c", second, named)
    with pytest.raises(CheckpointError, match=r"lacks candidate_selector\.successor_codebook"):
        load_drafter(tmp_path / "c")
