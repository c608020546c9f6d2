"""Forwards of several targets in one run: each beside its own floor, and beside the first target's times."""

from statistics import median
from typing import Any

import pytest
import torch
from tiny import EXPERTS

import qwen_gdn.program_set
from qwen_gdn.recorded import unannounced
from tools.measure.forwards import TURNS, measure
from tools.measure.gpu import Shape
from tools.parity.shapes import tiny

EIGHT_BITS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def shape(**changes: Any) -> Shape:
    return Shape(tiny() | changes, {}, sizes=(8, 16), prefixes=(5, 40), accepted=(), chunks=(), repeats=2)


def test_each_target_is_held_against_its_floor_and_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_gdn.program_set, "compiled", lambda function: function)
    shapes = {"full": shape(), "eight bits": shape(quantization_config=EIGHT_BITS), "experts": shape(**EXPERTS)}
    lines, kept = list[str](), list[int]()

    def keep(found: dict[str, Any]) -> None:
        kept.append(sum(len(each) for own in found["targets"].values() for each in own["prefixes"].values()))

    found = measure(shapes, torch.device("cpu"), torch.float32, unannounced, lines.append, keep)["targets"]
    assert list(found) == list(shapes) and kept == [*range(3, 3 * 2 * 3 + 1, 3)]
    first = found["full"]
    for name, own in found.items():
        assert list(own["prefixes"]) == [5, 40]
        for prefix, forwards in own["prefixes"].items():
            assert list(forwards) == ["plain", "verify 8", "verify 16"]
            for forward, one in forwards.items():
                assert one["bytes"] == own["always"] + one["experts"] * own["expert"]
                assert one["floors"] == pytest.approx(one["ms"] * own["bandwidth"] / 1e3 / one["bytes"])
                assert len(one["turns"]) == TURNS and one["ms"] == median(one["turns"])
                assert one["ratio"] == pytest.approx(one["ms"] / first["prefixes"][prefix][forward]["ms"])
                assert (one["experts"] > 0) == (name == "experts")
                if forward == "plain":
                    assert one["experts"] == (2 * 8 if name == "experts" else 0)  # two a token in each of eight layers
    assert found["eight bits"]["always"] < 0.5 * first["always"]
    assert all(any(line.startswith(name) for line in lines) for name in shapes)
