"""The training scripts at toy size: optimiser, budgets, blocks, generated text, resuming, and the one command."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn

from ddtree import DFlashDrafter, build_chain, generate
from ddtree.drafter_config import DFlashConfig
from qwen_gdn import QwenGDN, decode
from tools.measure.prompts import read_prompts
from tools.training.data import generator
from tools.training.drafter import initialise
from tools.training.drafting import chain_length, draft_logits, make_blocks, with_features
from tools.training.fit import fit
from tools.training.generated import Continued, continue_prompts, evaluation_batch, sample
from tools.training.optim import Optimiser, orthogonalise
from tools.training.schedule import Schedule
from tools.training.shapes import TOY, drafter_config
from tools.training.tokens import SEPARATOR
from weights import load_drafter, load_target, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def test_muon_steps_along_the_nearest_orthogonal_matrix_and_the_rest_as_adamw() -> None:
    draws = generator(CPU, 0)
    for shape in ((3, 24, 40), (2, 40, 24), (2, 32, 32)):
        found = orthogonalise(torch.randn(shape, generator=draws))
        values = torch.linalg.svdvals(found)
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
    gradient = torch.randn(1, 24, 40, generator=draws)
    U, _, Vh = torch.linalg.svd(gradient[0], full_matrices=False)
    cosine = torch.cosine_similarity(orthogonalise(gradient).flatten(), (U @ Vh).flatten(), dim=0)
    assert float(cosine) > 0.95

    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2))
    optimiser = Optimiser([("norm.weight", ours), ("layers.0.w", nn.Parameter(torch.eye(16)))], muon=0.02, adam=1e-2)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(20):
        for parameter in (ours, theirs):
            ((parameter - step / 7) ** 3).sum().backward()
        optimiser.step(1.0)
        reference.step()
        reference.zero_grad()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_bf16_weights_move_by_less_than_their_rounding_through_the_masters() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimiser = Optimiser([("norm.weight", weight), ("layers.0.w", nn.Parameter(torch.eye(16)))], muon=0.02, adam=1e-4)
    for _ in range(100):
        weight.sum().backward()
        optimiser.step(1.0)
    assert math.isclose(float(weight[0].detach()), 0.99, abs_tol=0.004)


class _Quadratic:
    """A job with both kinds of parameter; is interrupted at one step if asked."""

    name = "quadratic"

    def __init__(self, fails_at: int | None = None) -> None:
        self.matrix = nn.Parameter(torch.eye(16))
        self.vector = nn.Parameter(torch.ones(3))
        self.optimiser = Optimiser([("layers.0.w", self.matrix), ("norm.weight", self.vector)], muon=0.02, adam=3e-3)
        self._fails_at = fails_at

    def loss(self, step: int) -> Tensor:
        if step == self._fails_at:
            raise KeyboardInterrupt
        wanted = torch.randn(16, 16, generator=generator(CPU, step))
        return ((self.matrix - wanted) ** 2).mean() + (self.vector - wanted[0, :3]).square().sum()

    def evaluate(self) -> dict[str, float]:
        return {"norm": float(self.matrix.detach().norm())}


@pytest.mark.parametrize("checkpoint_every", [0.0, 1e9])
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(checkpoint_every: float, tmp_path: Path) -> None:
    schedule = Schedule(steps=12, warmup=3, checkpoint_every=checkpoint_every)
    whole, broken, resumed = _Quadratic(), _Quadratic(fails_at=7), _Quadratic()
    fit(whole, schedule, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt, match="saved at step 7"):
        fit(broken, schedule, tmp_path / "broken")
    figures = fit(resumed, schedule, tmp_path / "broken")
    assert figures["steps"] == 12
    assert torch.equal(whole.matrix, resumed.matrix) and torch.equal(whole.vector, resumed.vector)


@pytest.mark.parametrize("where", ["written", "state"])
def test_an_interrupt_amid_a_step_waits_for_its_end_and_amid_a_checkpoint_for_its_writing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(steps=12, warmup=3)
    whole, broken, resumed = (_Quadratic() for _ in range(3))
    fit(whole, schedule, tmp_path / "whole")
    part = broken.optimiser._adam
    happen, calls = getattr(part, where), iter(range(100))

    def interrupted() -> object:
        # twice, as people do who see no answer
        if next(calls) >= (5 if where == "written" else 0):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return happen()

    monkeypatch.setattr(part, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, schedule, tmp_path / "broken")
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fit(resumed, schedule, tmp_path / "broken")
    assert torch.equal(whole.matrix, resumed.matrix) and torch.equal(whole.vector, resumed.vector)


class _Diverging(_Quadratic):
    """Its loss, or only the gradient of it, is not a number at one step."""

    def __init__(self, at: int, *, silently: bool) -> None:
        super().__init__()
        self._at, self._silently = at, silently

    def loss(self, step: int) -> Tensor:
        if step == self._at and self._silently:
            return super().loss(step) + (self.vector - self.vector).square().sum().sqrt()
        return super().loss(step) * (math.nan if step == self._at else 1.0)


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("checkpoint_every", [0.0, 1e9])
def test_parameters_that_are_not_finite_are_never_saved(
    checkpoint_every: float, silently: bool, tmp_path: Path
) -> None:
    with pytest.raises(FloatingPointError, match="lower the learning rates"):
        fit(_Diverging(5, silently=silently), Schedule(steps=6, checkpoint_every=checkpoint_every), tmp_path)
    kept = tmp_path / "checkpoint.pt"
    assert kept.is_file() is (checkpoint_every == 0.0)
    assert fit(_Quadratic(), Schedule(steps=6), tmp_path)["steps"] == 6


def test_a_checkpoint_is_continued_with_its_own_settings_alone(tmp_path: Path) -> None:
    ours = {"shape": "toy", "seed": 0, "budget": "4 steps"}
    fit(_Quadratic(), Schedule(steps=4), tmp_path, ours)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    for name, value in (("shape", "bundled"), ("seed", 1), ("budget", "9 steps"), ("device", "cuda")):
        with pytest.raises(ValueError, match=rf"checkpoint\.pt was made with {name} .*, not {value}.*delete"):
            fit(_Quadratic(), Schedule(steps=9), tmp_path, ours | {name: value})
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert fit(_Quadratic(), Schedule(steps=4), tmp_path, ours)["steps"] == 4


@pytest.mark.parametrize("cut", [0, 1, 500, -1])
def test_a_damaged_checkpoint_is_named_with_a_remedy(cut: int, tmp_path: Path) -> None:
    fit(_Quadratic(), Schedule(steps=2), tmp_path)
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged .*delete .*checkpoint\.pt"):
        fit(_Quadratic(), Schedule(steps=2), tmp_path)
    torch.save({"step": 2}, file)
    with pytest.raises(ValueError, match="is damaged"):
        fit(_Quadratic(), Schedule(steps=2), tmp_path)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["seconds", "steps", "warmup", "decay"])
def test_a_schedule_that_never_ends_or_never_begins_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be finite and above 0"):
        Schedule(**({"seconds": 1.0} if name in ("warmup", "decay") else {}) | {name: value})  # type: ignore[arg-type]


def test_a_budget_of_seconds_ends_a_run_and_its_rate_falls_to_zero(tmp_path: Path) -> None:
    schedule = Schedule(seconds=0.3, warmup=4, decay=0.5)
    assert fit(_Quadratic(), schedule, tmp_path)["seconds"] >= 0.3
    rates = [schedule.rate(step, spent) for step, spent in ((0, 0.0), (9, 0.5), (99, 0.75), (99, 1.0))]
    assert rates == [0.25, 1.0, 0.5, 0.0]


def _pair(dtype: torch.dtype, window: int = 12) -> tuple[QwenGDN, DFlashDrafter]:
    target = tiny_model(1, dtype=dtype, wild=3.0)
    raw = drafter_config(TOY, target.config.vocab_size, mask=96) | {"num_target_layers": 8, "sliding_window": window}
    drafter = DFlashDrafter(DFlashConfig.from_dict(raw))
    initialise(drafter, 0)
    drafter.to(dtype).requires_grad_(False).bind(target)
    return target, drafter


@pytest.mark.parametrize("prompt", [3, 30])
def test_blocks_trained_at_many_anchors_are_those_that_the_drafter_proposes_one_by_one(prompt: int) -> None:
    target, drafter = _pair(torch.float64)
    tokens = torch.randint(96, (2, prompt + 20), generator=generator(CPU, prompt)).short()
    sequences = with_features(target, drafter.config, Continued(tokens, prompt))
    anchors = torch.tensor([0, 5, 6, 16]) + sequences.prompt
    blocks = make_blocks(target, drafter, sequences, torch.tensor([1, 0]), anchors, room=40)
    found = draft_logits(target, drafter, blocks)
    for i, row in enumerate((1, 0)):
        for j, anchor in enumerate((anchors + sequences.start).tolist()):
            captured = target(tokens[row : row + 1, :anchor].int(), capture=drafter.layers).captured
            drafter.reset()
            drafter.observe(torch.cat(captured, dim=-1))
            wanted = drafter.propose(int(tokens[row, anchor]))
            assert torch.allclose(found[i, j], wanted, atol=1e-10)
            assert blocks.following[i, j].tolist() == tokens[row, anchor + 1 : anchor + 4].tolist()


def test_the_estimated_chain_length_is_that_of_decoding() -> None:
    target, drafter = _pair(torch.float64)
    prompts = torch.randint(96, (4, 9), generator=generator(CPU, 5))
    continued = evaluation_batch(target, prompts, 24 + 3)
    for row, prompt in zip(continued.tokens, prompts, strict=True):
        assert row[9:].tolist() == list(decode(target, prompt, max_new_tokens=27))
    rounds: list[int] = []
    for prompt in prompts:
        steps = list(generate(target, drafter, prompt, max_new_tokens=24, budget=3, build=build_chain))
        rounds += [step.accepted + 1 for step in steps[1:]]
    # A round that starts at the last emitted token has nothing left to emit in decoding, but counts as an anchor.
    sequences = with_features(target, drafter.config, continued)
    assert abs(chain_length(target, drafter, sequences) - sum(rounds) / len(rounds)) <= 4 * 3 / len(rounds)


def test_rows_are_sampled_at_their_own_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(40_000, 3)
    temperatures = torch.tensor([0.0, 0.5]).repeat(20_000)
    drawn = sample(logits, temperatures, generator(CPU, 1)).view(-1, 2)
    assert bool((drawn[:, 0] == 2).all())
    share = torch.bincount(drawn[:, 1], minlength=3) / 20_000
    assert torch.allclose(share, torch.softmax(logits[0] / 0.5, dim=0), atol=0.01)
    target = tiny_model(0)
    prompts = torch.ones(2, 4, dtype=torch.long)
    first, second = (continue_prompts(target, prompts, torch.ones(2), 6, generator(CPU, 2)).tokens for _ in range(2))
    assert torch.equal(first, second)


def _train(out: Path, *options: str) -> str:
    command = [sys.executable, "tools/train_pair.py", "--toy", "--device", "cpu", "--out", str(out), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return f"{done.returncode}\n{done.stderr}"


def test_one_command_trains_a_pair_that_loads_and_runs_and_a_second_call_continues_it(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    for name, count in (("seen", None), ("unseen", 3)):
        (source / name).mkdir(parents=True)
        for file in sorted((ROOT / "qwen_gdn").glob("*.py"))[:count]:
            (source / name / file.name).write_text(f"{file.read_text(encoding='utf-8')}\n# {name}\n")
    options = ("--source", str(source), "--license", "Apache-2.0", "--unseen", "unseen")
    assert _train(run).startswith("2\ntrain_pair.py: no sources")
    assert _train(run, *options, "--until", "target").startswith("0\n== corpus")
    stages = _train(run, *options)
    assert stages.startswith("0\n== generated") and "== target" not in stages

    pair = run / "pair"
    target, drafter = load_target(pair / "target"), load_drafter(pair / "drafter")
    tokenizer = load_tokenizer(pair / "target")
    prompt = tokenizer.encode("def f(n):")
    rounds = list(generate(target, drafter, prompt, max_new_tokens=8))
    assert [token for one in rounds for token in one.tokens] == list(decode(target, prompt, max_new_tokens=8))
    assert target.config.eos_token_ids == tuple(tokenizer.encode(SEPARATOR, parse_special=True))
    assert tokenizer.vocab_size == target.config.vocab_size
    card = (pair / "CARD.md").read_text(encoding="utf-8")
    assert "| seen | unversioned | Apache-2.0 |" in card and "--until target" in card
    assert read_prompts(run / "prompts" / "unseen-8.json", tokenizer.encode).prompts[0]
