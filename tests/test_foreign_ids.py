"""Ids that a tokenizer or vocabulary lacks: written as nothing, or refused in one line; never an index error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scribe
import torch
from proposers import Scripted, emitted, small_model
from torch import Tensor

from ddtree import DraftTree, NoDrafts, Scores, Session, generate, make_sampler, stream
from ddtree.run import main
from qwen_gdn import Context, ContextSampler, History, QwenGDN, Topology, decode
from weights import load_tokenizer

MODEL = small_model()
PROMPT = [5, 30, 11, 2]
TRUTH = list(decode(MODEL, PROMPT, max_new_tokens=30))
BEYOND = (-1, 37, 2**31, 2**62)


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A target whose text is ids beyond its tokenizer, as a padded vocabulary has them."""
    return scribe.write_scribe(tmp_path)


def padding_writer() -> QwenGDN:
    """A model that writes nothing but ids from 20 on, of which its tokenizer here has none."""
    model = small_model(3)
    assert model.lm_head is not None
    with torch.no_grad():
        model.lm_head.weight[:20] = 0.0
        model.lm_head.weight[20:] *= 50
    return model


class Few:
    """A spelling of twenty ids, the others being padding."""

    strip = 0

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        return b"x" if token < 20 else b""


@pytest.mark.parametrize("drafts", ["none", "beyond the tokenizer"])
def test_written_ids_beyond_the_tokenizer_are_ids_without_text(drafts: str) -> None:
    class Padding(Scripted):
        def draft(self, coming: list[int]) -> Tensor:
            return torch.arange(37.0).expand(3, -1)

    model = padding_writer()
    wanted = list(decode(model, PROMPT, max_new_tokens=15))
    assert max(wanted) >= 20
    drafter = NoDrafts() if drafts == "none" else Padding([])
    events = stream(model, drafter, Few(), PROMPT, max_new_tokens=15, stop=["xyz"])  # type: ignore[arg-type]
    assert "".join(event.text for event in events) == "x" * sum(token < 20 for token in wanted)
    assert events.ids == wanted


def test_a_session_goes_on_from_ids_beyond_its_tokenizer() -> None:
    model = padding_writer()
    session = Session(model, NoDrafts(), load_tokenizer("bundled"))
    list(session.turn(PROMPT, max_new_tokens=9))
    ids = [*session.ids, 36, 1]
    turn = session.turn(ids, max_new_tokens=9)
    list(turn)
    assert turn.ids == list(decode(model, ids, max_new_tokens=9))


def test_the_command_writes_padding_as_nothing(
    padded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = load_tokenizer(padded).last_id
    assert last + 1 < scribe.VOCAB
    for bias in (last + 1, scribe.VOCAB - 1):
        asked = ["--target", str(padded), "--prompt", "n", "--max-new-tokens", "3", "--logit-bias", f"{bias}=1e6"]
        assert main(asked) == 0
        assert capsys.readouterr().out == ""
    assert main([*asked[:-1], f"{scribe.VOCAB}=1"]) == 2
    assert "is outside the vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize("token", BEYOND)
def test_stop_ids_that_no_token_has_stop_nothing(token: int) -> None:
    for run in (decode(MODEL, PROMPT, max_new_tokens=30, stop_ids=[token]), written(NoDrafts(), stop_ids=[token])):
        assert list(run) == TRUTH


def written(drafter: Any, **how: Any) -> list[int]:
    return emitted(generate(MODEL, drafter, PROMPT, max_new_tokens=30, **how))


class Given(Scripted):
    """Proposes what it was made with."""

    def __init__(self, given: Tensor | Scores) -> None:
        super().__init__([])
        self.given = given

    def draft(self, coming: list[int]) -> Tensor | Scores:
        return self.given


class OneChild:
    """Scores that know one token."""

    depth = 3

    def __init__(self, token: int) -> None:
        self.token = token

    def children(self, path: Any, /) -> tuple[list[int], list[float]]:
        return [self.token], [0.0]


def built(token: int) -> Callable[..., DraftTree]:
    return lambda root, scores, budget: DraftTree(torch.tensor([root, token]), Topology([-1, 0]))


def drawn(token: int) -> Callable[[Tensor], Tensor]:
    return lambda logits: torch.full((len(logits),), token)


def reading(token: int) -> ContextSampler:
    """A penalising sampler that is called with a context of that token."""
    sampler = make_sampler(presence_penalty=1.0)
    assert isinstance(sampler, ContextSampler)
    return sampler


REFUSED: dict[str, Callable[[int], object]] = {
    "a prompt": lambda token: generate(MODEL, NoDrafts(), [1, token], max_new_tokens=3),
    "a plain prompt": lambda token: decode(MODEL, [1, token], max_new_tokens=3),
    "earlier ids": lambda token: decode(MODEL, [1], max_new_tokens=3, earlier_ids=[token]),
    "tokens of a forward": lambda token: MODEL(torch.tensor([[1, token]]), MODEL.new_cache(5)),
    "tokens of a window": lambda token: MODEL(torch.tensor([1, token]), MODEL.new_cache(5).branch(Topology([-1, 0]))),
    "a conversation": lambda token: Session(MODEL, NoDrafts(), load_tokenizer("bundled")).turn(
        [1, token], max_new_tokens=3
    ),
    "path-dependent scores": lambda token: written(Given(OneChild(token))),
    "a builder's tree": lambda token: written(Given(torch.zeros(3, 37)), build=built(token)),
    "a sampler's draw": lambda token: written(NoDrafts(), sampler=drawn(token)),
    "a plain sampler's draw": lambda token: list(decode(MODEL, PROMPT, max_new_tokens=3, sampler=drawn(token))),
    "a logit bias": lambda token: written(NoDrafts(), sampler=make_sampler(logit_bias={token: 1.0})),
    "the context of a penalty": lambda token: reading(token)(
        torch.zeros(1, 37), Context(History(torch.tensor([token])), torch.tensor([token]), Topology([-1]))
    ),
}


@pytest.mark.parametrize("token", BEYOND)
@pytest.mark.parametrize("what", REFUSED)
def test_ids_beyond_the_vocabulary_are_refused_in_one_line(what: str, token: int) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refusal:
        REFUSED[what](token)
    assert str(token) in str(refusal.value)


def test_draft_logits_wider_than_the_vocabulary_are_refused_only_where_they_win() -> None:
    """A drafter with a wider, padded head is a drafter of this target as long as it drafts its tokens."""
    wide = torch.zeros(3, 50)
    wide[:, 37:] = -torch.inf
    assert written(Given(wide)) == TRUTH
    with pytest.raises(ValueError, match=r"drafted token 49 is outside the target's vocabulary \[0, 37\)"):
        written(Given(torch.arange(50.0).expand(3, -1)))
    assert written(Given(torch.zeros(3, 9))) == TRUTH, "a narrower one drafts what it can"
