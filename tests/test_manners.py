"""What a process that embeds the packages finds as it was: global settings, modes of modules, other models' work."""

import copy
import json
import locale
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_oracle import layered, random_drafter
from proposers import Scattered, emitted, small_model
from tiny import SMALL, tiny_model, tiny_raw

from ddtree import DFlash2Config, MTPDrafter, NoDrafts, Session, debug_numerics, generate, make_sampler, stream
from ddtree.run import main
from qwen_gdn import MTP, DeltaCache, KVCache, ModelConfig, Topology, decode, prefill
from qwen_gdn.engine import Engine
from weights import load_drafter, load_target, load_tokenizer

ROOT = Path(__file__).parents[1]
PROMPT = [5, 30, 11, 2]
# Made here: a module that is made anew draws its first weights from torch's generator, as all of torch's do.
DRAFTER = random_drafter(layered("s", "f"), torch.float32)
OWN = MTP(tiny_model(1).config)


def settings() -> dict[str, Any]:
    """Everything global that a library could change, in a form that compares."""
    return {
        "torch's generator": torch.get_rng_state().tolist(),
        "Python's generator": random.getstate(),
        "numpy's generator": str(np.random.get_state()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "precision of libraries": [
            part.fp32_precision for part in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
        ],
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic mode": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "anomaly mode": torch.is_anomaly_enabled(),
        "warnings": list(warnings.filters),
        "signal handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.getrecursionlimit()),
        "environment": dict(os.environ) | {"PYTEST_CURRENT_TEST": ""},
        "locale": locale.setlocale(locale.LC_ALL),
        "folder": os.getcwd(),
    }


def uses() -> dict[str, Callable[[], Iterator[object]]]:
    """What an embedder does, each as an iterator over steps between which it has the process to itself."""

    def loading() -> Iterator[object]:
        yield load_target("bundled")
        yield load_drafter("bundled")
        yield load_tokenizer("bundled").encode("a")

    def caches() -> Iterator[object]:
        model = tiny_model(1, layer_types=SMALL)
        cache = model.new_cache(30, rollback=4)
        yield prefill(model, torch.tensor([PROMPT]), cache)
        yield model(torch.tensor([1, 2, 3]), cache.branch(Topology([-1, 0, 0])))
        cache.commit([0, 1])
        yield cache.fork()
        yield cache.crop(5)

    def speculation(**how: Any) -> Iterator[object]:
        model = tiny_model(1, vocab_size=41, hidden_size=24)
        yield from generate(model, DRAFTER, PROMPT, max_new_tokens=12, **how)

    def programs() -> Iterator[object]:
        yield from generate(Engine(small_model(), sizes=(8,)), NoDrafts(), PROMPT, max_new_tokens=3)

    def conversation() -> Iterator[object]:
        session = Session(small_model(), Scattered([1] * 60), load_tokenizer("bundled"))
        yield from session.turn(PROMPT, max_new_tokens=8)
        yield from session.turn([*session.ids, 4], max_new_tokens=8)

    def own_module() -> Iterator[object]:
        yield from generate(tiny_model(1), MTPDrafter(OWN), PROMPT, max_new_tokens=8)

    def watched() -> Iterator[object]:
        model = small_model()
        with debug_numerics(model, NoDrafts()) as target:
            yield from generate(target, NoDrafts(), PROMPT, max_new_tokens=5)

    def text() -> Iterator[object]:
        target, tokenizer = load_target("bundled"), load_tokenizer("bundled")
        yield from stream(target, load_drafter("bundled"), tokenizer, tokenizer.encode("def f("), max_new_tokens=8)

    return {
        "loading": loading,
        "caches": caches,
        "plain decoding": lambda: iter(decode(small_model(), PROMPT, max_new_tokens=5)),
        "speculation": speculation,
        "sampling": lambda: speculation(sampler=make_sampler(0.9, top_p=0.9, presence_penalty=0.5, seed=1)),
        "sampling without a seed": lambda: speculation(sampler=make_sampler(0.9)),
        "programs": programs,
        "a session": conversation,
        "the target's own module": own_module,
        "watched numbers": watched,
        "streamed text": text,
    }


@pytest.fixture
def unusual() -> Iterator[None]:
    """Settings that nobody has by default, so that one who sets the usual ones is noticed too."""
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@pytest.mark.usefixtures("unusual")
@pytest.mark.parametrize("name", list(uses()))
def test_nothing_global_is_changed_nor_left_changed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "programs":
        monkeypatch.setattr("qwen_gdn.program_set.compiled", lambda function: function)
    work = uses()[name]
    before = settings()
    for _ in work():
        now = settings()
        assert now == before, [key for key in now if now[key] != before[key]]
    now = settings()
    assert now == before, [key for key in now if now[key] != before[key]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_default_dtype_of_the_process_changes_no_result(dtype: torch.dtype) -> None:
    def text() -> list[int]:
        model = load_target("bundled")
        assert model.dtype == torch.float32
        how = {"sampler": make_sampler(0.7, top_p=0.9, repetition_penalty=1.1, seed=2)}
        return emitted(generate(model, load_drafter("bundled"), PROMPT, max_new_tokens=12, **how))  # type: ignore[arg-type]

    wanted = text()
    torch.set_default_dtype(dtype)
    try:
        assert text() == wanted
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_importing_the_packages_changes_nothing() -> None:
    code = """
import locale, logging, os, random, signal, sys, warnings
import numpy, torch, torch._dynamo
from huggingface_hub import snapshot_download
import jinja2, safetensors.torch, sentencepiece, tokenizers, tqdm  # what others do is not ours
def state():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark, torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().sum().item(), random.getstate(),
        [signal.getsignal(n) for n in sorted(signal.valid_signals())], logging.root.level, list(logging.root.handlers),
        sys.excepthook, locale.setlocale(locale.LC_ALL), dict(os.environ))
before = state()
import ddtree, qwen_gdn, weights
[getattr(ddtree, name) for name in ddtree.__all__]
import ddtree.run, qwen_gdn.engine, ddtree.recorded_drafter
assert state() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_command_as_a_function_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = settings()
    assert main(["--prompt", "def f(", "--max-new-tokens", "4", "--temperature", "0.5"]) == 0
    assert main(["--prompt", ""]) == 2
    now = settings()
    assert now == before, [key for key in now if now[key] != before[key]]


@pytest.mark.parametrize("training", [True, False])
def test_modules_stay_in_the_mode_they_were_in(training: bool) -> None:
    model = tiny_model(1, vocab_size=41, hidden_size=24).train(training).requires_grad_(True)
    drafter = random_drafter(layered("s", "f"), torch.float32).train(training).requires_grad_(True)
    list(generate(model, drafter, PROMPT, max_new_tokens=12))
    for part in (*model.modules(), *drafter.modules()):
        assert part.training == training
    for parameter in (*model.parameters(), *drafter.parameters()):
        assert parameter.requires_grad and parameter.grad is None


def test_nothing_that_is_handed_out_or_kept_has_a_graph() -> None:
    model = tiny_model(1, vocab_size=41, hidden_size=24).requires_grad_(True)
    drafter = random_drafter(layered("s", "f"), torch.float32).requires_grad_(True)
    session = Session(model, drafter, load_tokenizer("bundled"), rollback=4)
    for _ in range(2):
        list(session.turn([*session.ids, *PROMPT], max_new_tokens=6))
    kept = [t for layer in session._cache for t in layer.tensors()]
    kept += [t for rows in drafter._context.layers for t in rows]
    kept += [t for each in session._store._kept.values() for layer in each.cache for t in layer.tensors()]
    assert kept and all(t.grad_fn is None and not t.requires_grad for t in kept)
    assert torch.is_grad_enabled()


def test_models_and_sessions_of_one_process_do_not_meet() -> None:
    """Two models of different shapes, two sessions of each and a plain decoding, their rounds dealt in turn."""
    models = [small_model(1), tiny_model(2, dtype=torch.float64)]
    prompts = [PROMPT, [9, 1, 7]]
    alone = [list(decode(model, prompt, max_new_tokens=20)) for model in models for prompt in prompts]
    tokenizer = load_tokenizer("bundled")
    turns = []
    for model in models:
        for prompt in prompts:
            truth = alone[len(turns)]
            session = Session(model, Scattered([*prompt, *truth], len(turns)), tokenizer)
            turns.append(session.turn(prompt, max_new_tokens=20, budget=5))
    going: list[Iterator[object]] = [*turns, decode(models[0], PROMPT, max_new_tokens=20)]
    while going:
        going = [run for run in going if next(run, None) is not None]
    assert [turn.ids for turn in turns] == alone


def test_configs_can_be_pickled_and_copied() -> None:
    published = ROOT / "tests" / "published"
    configs: list[Any] = [
        ModelConfig.from_dict(tiny_raw()),
        ModelConfig.from_dict(json.loads((published / "Qwen3.5-35B-A3B-FP8.json").read_text())),
        layered("s", "f"),
        DFlash2Config.from_dict(json.loads((published / "Qwen3.8-27B-DFlash2.json").read_text())),
    ]
    for config in configs:
        for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)):
            assert twin == config and type(twin) is type(config) and hash(twin) == hash(config)
    topology = Topology([-1, 0, 0])
    assert pickle.loads(pickle.dumps(topology)) == topology
    cache = tiny_model(1, layer_types=SMALL).new_cache(9)
    for twin in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        twin.check()
        assert [type(layer) for layer in twin] == [DeltaCache, KVCache, DeltaCache]


def test_the_packages_say_that_they_are_typed_and_the_wheel_too(tmp_path: Path) -> None:
    packages = ("qwen_gdn", "ddtree", "weights")
    assert all((files(package) / "py.typed").is_file() for package in packages)
    source = tmp_path / "source"
    heavy = shutil.ignore_patterns("*.safetensors", "__pycache__")
    for package in packages:
        shutil.copytree(ROOT / package, source / package, ignore=heavy)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, cwd=source, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in packages} <= held
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == set(packages)
    assert "weights/bundled/target/config.json" in held
