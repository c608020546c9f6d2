"""What a trace says of a generation, against what its rounds told and against counting by brute force."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import Any

import pytest
import torch
from proposers import Branching, Empty, Moody, Random, Right, Scattered, Wrong
from tiny import raising_at
from traced import MODEL, PROMPT, Nasty, Skipping, Traced, traced

import ddtree.report
from ddtree import DraftTree, Verified, build_chain, build_spine, build_tree, generate, stream
from ddtree.report import Meter
from ddtree.trace import Recorder, lines
from qwen_gdn import HybridCache, decode
from weights.stops import StoppedText

MAKERS = [Right, Scattered, Random, Branching, Moody, Wrong, Empty]
BUILDS = [build_tree, build_spine, build_chain]


def parsed(found: Traced) -> dict[str, list[dict[str, Any]]]:
    """The objects of the JSON lines by their kind."""
    objects: dict[str, list[dict[str, Any]]] = {"run": [], "round": [], "pieces": [], "end": []}
    for line in lines(found.trace):
        objects[json.loads(line)["kind"]].append(json.loads(line))
    return objects


def walk(told: Verified) -> Iterator[tuple[int, list[int], int | None]]:
    """The nodes that the target's draws came to, their children in order, and the child that was drawn."""
    node: int | None = 0
    parents, tokens = told.tree.topology.parents, told.tree.tokens.tolist()
    while node is not None:
        family = [i for i in range(1, len(parents)) if parents[i] == node]
        after = next((i for i in family if tokens[i] == told.draws[node]), None)
        yield node, family, after
        node = after


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_rounds_are_what_the_loop_told_of_them(maker: type, build: Any) -> None:
    found = traced(maker, build=build)
    rounds = parsed(found)["round"]
    assert [each["index"] for each in rounds] == list(range(len(found.told) + 1))
    assert (rounds[0]["nodes"], rounds[0]["path"], rounds[0]["log_probs"]) == ([], [], None)
    assert (rounds[0]["length"], rounds[0]["origins"]) == (None, ["plain"])
    for each, told in zip(rounds[1:], found.told, strict=True):
        assert each["nodes"] == told.tree.tokens.tolist() and each["parents"] == list(told.tree.topology.parents)
        assert each["draws"] == list(told.draws) and each["tokens"] == list(told.tokens)
        assert (each["budget"], each["length"]) == (9, told.length)
        path = [node for node, _, _ in walk(told)]
        assert each["path"] == path and each["accepted"] == len(path) - 1
        assert each["log_probs"] == pytest.approx(list(told.tree.log_probs), abs=1e-6)
        assert each["expected"] == pytest.approx(math.fsum(math.exp(p) for p in told.tree.log_probs) - 1, abs=1e-4)
        straight = [0]
        while below := [i for i, parent in enumerate(each["parents"]) if parent == straight[-1]]:
            straight.append(below[0])
        kinds = ["spine" if node in straight else "branch" for node in path[1:]] + ["bonus"]
        assert each["origins"] == (["plain"] if len(each["nodes"]) == 1 else kinds[: len(told.tokens)])


@pytest.mark.parametrize("maker", MAKERS)
def test_texts_join_to_the_decoding_and_pieces_spell_every_id(maker: type) -> None:
    for length in range(30, 33):
        found = traced(maker, count=length)
        objects = parsed(found)
        texts = [text for each in objects["round"] for text in each["texts"]]
        assert "".join(texts) + objects["end"][0]["rest"] == Nasty().text(found.ids)
        assert len(texts) == length == len(found.ids)
        used = {t for told in found.told for t in (*told.tree.tokens.tolist(), *told.draws)} | {found.ids[0]}
        assert {int(token) for token in objects["pieces"][0]["pieces"]} == used
        for token, text in objects["pieces"][0]["pieces"].items():
            whole = Nasty().piece(int(token), skip_special=False)
            assert text == (whole.decode() if int(token) < len(Nasty.SPELT) else str(whole)[2:-1])
    assert objects["run"][0]["prompt"] == Nasty().text(PROMPT)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_totals_are_those_of_counting(maker: type, build: Any) -> None:
    found = traced(maker, count=60, build=build)
    totals = parsed(found)["end"][0]["totals"]
    depths, ranks = Counter[tuple[int, bool]](), Counter[tuple[int, bool]]()
    bins: dict[int, list[tuple[float, bool]]] = {}
    for told in found.told:
        steps = list(walk(told))
        for depth, (_, family, after) in enumerate(steps, 1):
            if family:
                depths[depth, after is not None] += 1
            for rank, child in enumerate(family):
                ranks[rank, child == after] += 1
        for node in range(1, len(told.tree.topology)):
            share = math.exp(round(told.tree.log_probs[node], 6))
            place = next(i for i in range(10) if share < (i + 1) / 10 or i == 9)
            bins.setdefault(place, []).append((share, node in [at for at, _, _ in steps]))
    for key, counts in (("by_depth", depths), ("by_rank", ranks)):
        assert len(totals[key]) == len({value for value, _ in counts})
        for each in totals[key]:
            true, tried = counts[each["value"], True], sum(counts[each["value"], hit] for hit in (True, False))
            assert (each["accepted"], each["tried"], each["rate"]) == (true, tried, float(Fraction(true, tried)))
    assert [round(each["low"] * 10) for each in totals["calibration"]] == sorted(bins)
    for each in totals["calibration"]:
        members = bins[round(each["low"] * 10)]
        assert each["high"] == pytest.approx(each["low"] + 0.1)
        assert (each["nodes"], each["accepted"]) == (len(members), sum(hit for _, hit in members))
        assert each["rate"] == pytest.approx(each["accepted"] / each["nodes"])
        assert each["predicted"] == pytest.approx(math.fsum(share for share, _ in members) / len(members))
    lengths = [len(told.path) for told in found.told]
    assert totals["accepted_lengths"] == {str(n): lengths.count(n) for n in sorted(set(lengths))}
    assert totals["mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    predicted = [math.fsum(math.exp(p) for p in told.tree.log_probs) for told in found.told]
    assert totals["expected_length"] == pytest.approx(sum(predicted) / len(predicted), abs=1e-4)
    assert (totals["rounds"], totals["tokens"]) == (len(lengths), 60)
    assert totals["tokens_per_forward"] == 60 / (len(lengths) + 1) and totals["target_forwards"] == len(lengths) + 1
    assert sum(totals["origins"].values()) == 60 and set(totals["origins"]) == {"plain", "spine", "branch", "bonus"}


def test_times_of_rounds_add_up_to_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on whenever it is read: another process may hold up the end, which is no round's."""
    clock = count(0.0, 1e-4)
    monkeypatch.setattr(ddtree.report, "perf_counter", lambda: next(clock))
    end, rounds = parsed(found := traced(Scattered))["end"][0], parsed(found)["round"]
    assert sum(each["seconds"] for each in rounds) == pytest.approx(end["figures"]["seconds"], abs=1e-3)
    for name in ("prefill", "draft", "build", "verify", "sample", "commit"):
        whole = sum(each["stages"].get(name, 0) for each in rounds)
        assert whole == pytest.approx(end["figures"]["stage_seconds"][name], abs=1e-4) and whole > 0
    assert all(sum(each["stages"].values()) <= each["seconds"] + 1e-5 for each in rounds)
    assert "prefill" in rounds[0]["stages"] and not any("prefill" in each["stages"] for each in rounds[1:])


def test_a_round_that_a_stop_cuts_shows_the_whole_path_and_the_tokens_that_were_written() -> None:
    truth = list(decode(MODEL, PROMPT, max_new_tokens=40))
    stop = next(token for i, token in enumerate(truth) if i > 4 and token not in truth[:i] and i % 10 not in (0, 1))
    found = traced(Right, stop_ids=[stop])
    last = parsed(found)["round"][-1]
    assert last["tokens"][-1] == stop and found.trace.end.finish_reason == "stop"
    assert len(last["tokens"]) == len(last["texts"]) == len(last["origins"]) < len(last["path"])
    assert (last["accepted"], set(last["origins"])) == (len(last["path"]) - 1, {"spine"})


def test_lines_are_ascii_without_anything_that_ends_a_script() -> None:
    found = traced(Scattered)
    for line in lines(found.trace):
        assert line.isascii() and line.isprintable() and "<" not in line
    run = parsed(found)["run"][0]
    assert (run["settings"], run["prompt_tokens"], run["version"]) == ({"budget": 9, "<b>": "</script>"}, 4, 1)


def test_a_builder_that_knows_no_probabilities_or_odd_ones_is_traced_too() -> None:
    def bare(root: int, scores: Any, budget: int) -> DraftTree:
        return DraftTree(*build_tree(root, scores, budget))

    def impossible(root: int, scores: Any, budget: int) -> DraftTree:
        tree = build_tree(root, scores, budget)
        tree.log_probs = (*tree.log_probs[:-1], -math.inf)
        return tree

    objects = parsed(traced(Right, build=bare))
    # Near the end nothing can be drafted any more, which the loop itself says.
    drafted = [each for each in objects["round"] if len(each["nodes"]) > 1]
    assert drafted and all(each["log_probs"] is None and each["expected"] is None for each in drafted)
    assert objects["end"][0]["totals"]["calibration"] == []
    assert any(each["log_probs"][-1] is None for each in parsed(traced(Right, build=impossible))["round"][1:])


def test_rounds_of_generate_are_traced_without_a_stream() -> None:
    truth = list(decode(MODEL, PROMPT, max_new_tokens=20))
    meter = Meter(torch.device("cpu"))
    recorder = Recorder(Nasty(), torch.tensor(PROMPT), meter)
    made = generate(
        MODEL,
        Scattered([*PROMPT, *truth], 3),
        PROMPT,
        max_new_tokens=20,
        budget=9,
        on_stage=meter.stage,
        on_round=recorder.on_round,
    )
    rounds = list(recorder.rounds(made))
    found, other = recorder.trace(), traced(Scattered, count=20).trace
    assert [each.tokens for each in found.rounds] == [list(done.tokens) for done in rounds]
    assert [each.nodes for each in found.rounds] == [each.nodes for each in other.rounds]
    assert found.end.finish_reason == "interrupted" and other.end.finish_reason == "length"


def test_a_generation_that_does_not_tell_of_its_rounds_is_refused() -> None:
    recorder = Recorder(Nasty(), PROMPT, Meter(torch.device("cpu")))
    with pytest.raises(RuntimeError, match=r"pass on_round=recorder\.on_round"):
        list(recorder.rounds(generate(MODEL, Empty([*PROMPT, *range(9)]), PROMPT, max_new_tokens=5)))


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("site", [(StoppedText, "push"), (HybridCache, "commit"), (Recorder, "on_round")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_there_is_of_a_generation_that_breaks_off_is_traced(
    error: type[BaseException], site: tuple[Any, str], place: int
) -> None:
    """A round whose text could not be given out is committed, and traced; one that could not be committed is not."""
    truth = list(decode(MODEL, PROMPT, max_new_tokens=40))
    meter = Meter(torch.device("cpu"))
    recorder = Recorder(Nasty(), PROMPT, meter)
    with raising_at(*site, place, error, after=True):
        events = stream(
            MODEL,
            Scattered([*PROMPT, *truth], 3),
            Skipping(),
            PROMPT,
            max_new_tokens=40,
            budget=9,
            on_round=lambda verified: recorder.on_round(verified),
        )
        with pytest.raises(error, match="injected") as caught:
            list(recorder.events(events))
    ids = events.ids
    for _ in range(2):  # it can be asked for again
        found = recorder.trace(caught.value if error is RuntimeError else None)
        assert [token for each in found.rounds for token in each.tokens] == ids == truth[: len(ids)]
        assert "".join(text for each in found.rounds for text in each.texts) + found.end.rest == Nasty().text(ids)
        assert len(found.rounds) == place + 1
        assert place == 0 or found.rounds[-1].nodes
    ended = ("failed", "RuntimeError: injected") if error is RuntimeError else ("interrupted", None)
    assert (found.end.finish_reason, found.end.error) == ended


def test_tracing_changes_no_token() -> None:
    for maker in MAKERS:
        assert traced(maker).ids == list(decode(MODEL, PROMPT, max_new_tokens=40))
