"""The soak passes on sound code, catches planted faults within a bounded number of operations, and repeats them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

import qwen_gdn.cache
import qwen_gdn.engine
import qwen_gdn.lanes
import qwen_gdn.layer_cache
import qwen_gdn.static_cache
from qwen_gdn import DeltaCache, HybridCache, KVCache
from tools import soak


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


SOUND = {
    "eager": ["--operations", "100", "--seeds", "2", "--compare-every", "3"],
    "programs": ["--operations", "50", "--seeds", "2", "--compare-every", "3", "--engine", "programs"],
    "experts in float64": [
        "--operations",
        "60",
        "--seeds",
        "1",
        "--model",
        "experts",
        "--dtype",
        "float64",
        "--compare-every",
        "3",
    ],
}


@pytest.mark.parametrize("arguments", SOUND.values(), ids=SOUND)
def test_sound_code_goes_through(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(arguments) == 0
    found = report(capsys)
    assert found["divergences"] == 0 and found["failures"] == []
    assert found["operations"] == int(arguments[1]) * int(arguments[3])
    assert 0 < found["worst"] < (1e-9 if found["dtype"] == "float64" else 1e-4)
    for seed in found["seeds"]:
        assert sum(seed["done"].values()) == seed["operations"] and seed["done"]["failures"] > 0
        assert len(seed["live"]) == 2 and len(set(seed["live"].values())) == 1
    kinds = {kind for seed in found["seeds"] for kind in seed["done"]}
    assert kinds >= {"prefill", "step", "verify", "commit", "crop", "fork", "generate", "refusal"}


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
    """Puts `wrapped(original, *arguments)` in the place of `owner.name`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapped(original, *args, **kwargs))


def commit_another_node(patch: pytest.MonkeyPatch) -> None:
    around(
        patch, qwen_gdn.lanes.TreeLanes, "committed", lambda committed, window, path: committed(window, [*path[:-1], 0])
    )


def commit_another_node_by_program(patch: pytest.MonkeyPatch) -> None:
    around(
        patch, qwen_gdn.engine._Window, "committed", lambda committed, window, path: committed(window, [*path[:-1], 0])
    )


def crop_but_the_state(patch: pytest.MonkeyPatch) -> None:
    around(patch, DeltaCache, "at", lambda at, layer, since: replace(at(layer, since), state=layer.state))


def crop_below_the_floor(patch: pytest.MonkeyPatch) -> None:
    def crop(original: Any, cache: Any, length: int) -> None:
        with suppress(ValueError):
            original(cache, length)

    around(patch, HybridCache, "crop", crop)


def write_states_while_a_forward_runs(patch: pytest.MonkeyPatch) -> None:
    def mix(original: Any, lane: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(lane, *args, **kwargs)
        lane._layer.state.copy_(lane._next.state)
        return out

    around(patch, qwen_gdn.lanes.ChainDelta, "mix", mix)


def keep_what_a_failed_round_did(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def transaction(cache: HybridCache) -> Iterator[None]:
        yield

    patch.setattr(HybridCache, "transaction", transaction)


def read_one_bank_for_ever(patch: pytest.MonkeyPatch) -> None:
    def start(original: Any, cache: Any) -> Any:
        bank, _ = original(cache)
        return bank, bank

    around(patch, qwen_gdn.static_cache.StaticCache, "start", start)
    patch.setattr(qwen_gdn.static_cache.StaticDelta, "swapped", lambda delta: delta)


def write_rows_in_a_verify(patch: pytest.MonkeyPatch) -> None:
    def attend(original: Any, lane: Any, *args: Any) -> Any:
        lane._layer.keys[:, :, : lane._length] *= 1.0001
        return original(lane, *args)

    around(patch, qwen_gdn.lanes.TreeAttention, "attend", attend)


def share_rows_with_a_fork(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "clone", lambda layer: layer)


def commit_before_the_forward(patch: pytest.MonkeyPatch) -> None:
    def commit(original: Any, cache: Any, path: Any) -> None:
        with suppress(RuntimeError):
            original(cache, path)

    around(patch, HybridCache, "commit", commit)


def keep_a_tensor_of_every_commit(patch: pytest.MonkeyPatch) -> None:
    kept = list[torch.Tensor]()

    def close(original: Any, cache: Any, record: Any) -> None:
        kept.append(torch.zeros(1))
        original(cache, record)

    around(patch, HybridCache, "_close", close)


def keep_a_tensor_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    def close(original: Any, cache: Any, record: Any) -> None:
        cache.kept = (*getattr(cache, "kept", ()), torch.zeros(1))
        original(cache, record)

    around(patch, HybridCache, "_close", close)


def keep_memory_that_is_given_back(patch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    patch.setattr(qwen_gdn.engine.Engine, "_put_back", lambda engine, programs: kept.append(programs))


Plant = Callable[[pytest.MonkeyPatch], None]
UNCOMPARED = ["--compare-every", "1000"]  # told without a replay, which costs most of the time
PROGRAMS = ["--engine", "programs"]
# What to plant, how to look, within how many operations it is found, what is said; another seed than 0 that finds it.
PLANTED: list[tuple[Plant, list[str], int, str] | tuple[Plant, list[str], int, str, int]] = [
    (commit_another_node, [], 60, "differ from the replay's"),
    (commit_another_node_by_program, PROGRAMS, 60, "differ from the replay's"),
    (crop_but_the_state, [], 60, "differ from the replay's"),
    (crop_below_the_floor, UNCOMPARED, 60, "was not refused with a ValueError", 1),
    (write_states_while_a_forward_runs, UNCOMPARED, 60, "memory was changed, and no token committed"),
    (keep_what_a_failed_round_did, UNCOMPARED, 120, "", 7),
    (read_one_bank_for_ever, PROGRAMS, 60, "differ from the replay's"),
    (write_rows_in_a_verify, UNCOMPARED, 30, "memory was changed, and no token committed"),
    (share_rows_with_a_fork, UNCOMPARED, 60, "share storage", 2),
    (commit_before_the_forward, UNCOMPARED, 60, "was not refused with a RuntimeError"),
    (keep_a_tensor_of_every_commit, UNCOMPARED, 20, "bytes"),
    (keep_a_tensor_in_the_cache, UNCOMPARED, 20, "caches hold"),
    (keep_memory_that_is_given_back, [*PROGRAMS, *UNCOMPARED], 5, "bytes are alive with nothing held"),
]


@pytest.mark.parametrize(
    ("plant", "arguments", "within", "said", "first"),
    [(*row, 0)[:5] for row in PLANTED],
    ids=[row[0].__name__ for row in PLANTED],
)
def test_a_planted_fault_is_caught_and_told_so_that_it_can_be_repeated(
    plant: Plant,
    arguments: list[str],
    within: int,
    said: str,
    first: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one of a few seeds, in few operations; the printed command then ends in the same way."""
    plant(monkeypatch)
    for seed in range(first, first + 8):
        if soak.main([*arguments, "--operations", str(within), "--seeds", "1", "--seed", str(seed)]):
            break
    *lines, last = capsys.readouterr().out.splitlines()
    [failure] = json.loads(last)["failures"]
    assert said in failure["message"], failure
    told = next(line for line in lines if "DIVERGENCE" in line)
    assert f"seed {seed} at operation {failure['operation']}: {failure['message']}" in told
    [again] = [line.split("soak.py ")[1].split() for line in lines if "again:" in line]
    assert again[-1] == str(failure["operation"]) and len(failure["last"]) == min(failure["operation"], 12)
    assert soak.main(again) == 1
    assert report(capsys)["failures"] == [failure]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--operations", "0"], "--operations: must be an integer from 1"),
        (["--seeds", "x"], "--seeds: must be an integer from 1"),
        (["--engine", "graph"], "--engine: invalid choice: 'graph'"),
        (["--dtype", "bfloat16"], "--dtype: invalid choice: 'bfloat16'"),
        (["--operation", "3"], "unrecognized arguments: --operation 3"),
    ],
)
def test_bad_use_ends_with_code_two_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        soak.main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("soak: error: ") and err.count("\n") == 1
