"""Generations to trace, spelt by what is hardest to write into a page. No tests."""

from typing import Any, NamedTuple

import torch
from proposers import Scripted, small_model

from ddtree import Verified, build_tree, stream
from ddtree.report import Meter
from ddtree.trace import Recorder, Trace
from qwen_gdn import QwenGDN, decode

PROMPT = [5, 30, 11, 2]
MODEL = small_model(3)


class Nasty:
    """Every id is spelt by something that closes a script, hides, breaks a line, or is no whole character."""

    strip = 0
    SPELT = (
        "</script>", "<!--", "<b>", "&amp;", "&", '"', "'", "\\", "\\u003c", "\x00", "\x1b[31m", "\r", "\n", "\t",
        "\x7f", "\u2028", "\u202e", "é", "漢", "🙂", "", "`", "${x}", "{{ 7 * 7 }}", "{% raw %}", "]]>", " ", "  a",
        "-->", "a", "b", "\ufeff", "<script>alert(1)</script>",
    )  # fmt: skip
    PARTS = (b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99\x82")

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        assert not skip_special, "a trace shows every token"
        return self.SPELT[token].encode() if token < len(self.SPELT) else self.PARTS[token - len(self.SPELT)]

    def text(self, ids: list[int]) -> str:
        return b"".join(self.piece(i, skip_special=False) for i in ids).decode(errors="replace")


class Skipping(Nasty):
    """Spells for a stream, which leaves control tokens out; here there are none."""

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        return super().piece(token, skip_special=False)


class Traced(NamedTuple):
    """A trace, what the loop told of the rounds beside it, and the emitted ids."""

    trace: Trace
    told: list[Verified]
    ids: list[int]
    recorder: Recorder


def traced(
    maker: type[Scripted], *, count: int = 40, budget: int = 9, model: QwenGDN = MODEL, seed: int = 3, **more: Any
) -> Traced:
    """Writes `count` tokens after the prompt, drafted by a scripted proposer that knows them."""
    truth = list(decode(model, PROMPT, max_new_tokens=count))
    told: list[Verified] = []
    meter = Meter(torch.device("cpu"))
    recorder = Recorder(Nasty(), PROMPT, meter, {"budget": budget, "<b>": "</script>"})

    def on_round(verified: Verified) -> None:
        told.append(verified)
        recorder.on_round(verified)

    events = stream(
        model,
        maker([*PROMPT, *truth], seed),
        Skipping(),
        PROMPT,
        max_new_tokens=count,
        budget=budget,
        on_stage=meter.stage,
        on_round=on_round,
        **{"build": build_tree} | more,
    )
    list(recorder.events(events))
    return Traced(recorder.trace(), told, events.ids, recorder)
