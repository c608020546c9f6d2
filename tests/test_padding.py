"""Left padding: equal to the texts without it, whatever stands at padding; any other mask is refused."""

import pytest
import torch
from tiny import EXPERTS, TOLERANCE, gap, random_tokens, same_bits, seeded, tiny_model
from torch import Tensor

from qwen_gdn import Topology

LENGTHS = [9, 1, 4]
SHAPES = pytest.mark.parametrize("shape", [{}, EXPERTS], ids=["dense", "experts"])
BOTH = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def padded(texts: list[Tensor], pads: Tensor) -> tuple[Tensor, Tensor]:
    """The texts [1, T] right-aligned over `pads` [B, T], and their mask."""
    tokens, mask = pads.clone(), torch.zeros_like(pads)
    for row, text in enumerate(texts):
        tokens[row, pads.shape[1] - text.shape[1] :] = text[0]
        mask[row, pads.shape[1] - text.shape[1] :] = 1
    return tokens, mask


@pytest.mark.case(7)
@SHAPES
@BOTH
@pytest.mark.parametrize("memory", [False, True], ids=["no cache", "ragged cache"])
@pytest.mark.parametrize("more", [0, 1, 3, 5])
def test_left_padding_equals_the_text_without_it(
    more: int, memory: bool, dtype: torch.dtype, shape: dict[str, object]
) -> None:
    """Several rows and one, padded further than any needs to be, by random ids and by ids that are none."""
    model, draw = tiny_model(2, dtype=dtype, **shape), seeded(more)
    texts = [random_tokens(draw, 1, n) for n in LENGTHS]
    alone = [model(text, capture=(0, "final")) for text in texts]
    for rows in ([0, 1, 2], [2]):
        width = max(LENGTHS[row] for row in rows) + more
        pads = random_tokens(draw, len(rows), width)
        results = []
        for filler in (pads, torch.full_like(pads, -100)):
            tokens, mask = padded([texts[row] for row in rows], filler)
            cache = model.new_cache(20, batch=len(rows), ragged=True) if memory else None
            results.append(model(tokens, cache, mask=mask.bool(), capture=(0, "final")))
            assert cache is None or cache.lengths.tolist() == [LENGTHS[row] for row in rows]
        for place, row in enumerate(rows):
            for ours, theirs in zip(
                (results[0].final, *results[0].captured), (alone[row].final, *alone[row].captured), strict=True
            ):
                assert gap(ours[place : place + 1, width - LENGTHS[row] :], theirs) <= TOLERANCE[dtype]
                assert not ours[place, : width - LENGTHS[row]].any()
        assert same_bits([results[0].final, *results[0].captured], [results[1].final, *results[1].captured])


@pytest.mark.case(7)
def test_a_continuation_equals_that_of_the_text_without_padding() -> None:
    model, draw = tiny_model(3), seeded(0)
    texts = [random_tokens(draw, 1, n) for n in (15, 6, 3)]
    cache = model.new_cache(20, batch=3, ragged=True)
    steps = [[7, 2, 1], [0, 1, 2], [8, 3, 0]]
    taken = [0, 0, 0]
    for step in steps:
        parts = [text[:, start : start + n] for text, start, n in zip(texts, taken, step, strict=True)]
        pads = random_tokens(draw, 3, max(step) + 1) if step[0] == 7 else torch.full((3, max(step) + 1), -100)
        tokens, mask = padded(parts, pads)
        final = model(tokens, cache, mask=mask).final
        taken = [a + b for a, b in zip(taken, step, strict=True)]
        for row, count in enumerate(step):
            whole = model(texts[row][:, : taken[row]]).final
            assert count == 0 or gap(final[row : row + 1, -count:], whole[:, -count:]) <= TOLERANCE[torch.float32]
    assert cache.lengths.tolist() == [15, 6, 3]


@pytest.mark.case(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_padding_alone_and_padding_queries_are_finite(dtype: torch.dtype) -> None:
    model, draw = tiny_model(4, dtype=dtype), seeded(1)
    cache = model.new_cache(20, batch=3, ragged=True)
    tokens = random_tokens(draw, 3, 8)
    mask = torch.tensor([[0] * (8 - n) + [1] * n for n in (8, 0, 3)])
    for _ in range(2):
        assert model(tokens, cache, mask=mask).final.isfinite().all()
        cache.check()
    assert cache.lengths.tolist() == [16, 0, 6]


def test_gradients_flow_through_padding_as_without_it() -> None:
    model = tiny_model(5, dtype=torch.float64).requires_grad_(True)
    text, mask = random_tokens(seeded(2), 1, 5), torch.tensor([[0, 0, 1, 1, 1]])
    weight = model.layers[0].mlp.down_proj.weight
    grads = []
    for hidden in (model(text, mask=mask), model(text[:, 2:])):
        (grad,) = torch.autograd.grad(hidden.final.square().sum(), weight)
        grads.append(grad)
    assert gap(*grads) <= 1e-10


def test_a_mask_without_padding_goes_anywhere_but_padding_needs_a_ragged_cache() -> None:
    model, tokens = tiny_model(1), random_tokens(seeded(3), 2, 4)
    cache, plain = model.new_cache(20, batch=2), model.new_cache(20, batch=2)
    full = torch.ones(2, 4, dtype=torch.bool)
    assert same_bits([model(tokens, cache, mask=full).final], [model(tokens, plain).final])
    full[1, 0] = False
    tree = cache.branch(Topology.chain(4))
    ragged = model.new_cache(20, batch=2, ragged=True)
    for memory in (plain, tree, ragged.branch([Topology.chain(4)] * 2)):
        with pytest.raises(ValueError, match=r"padding goes into a cache made with new_cache\(\.\.\., ragged=True\)"):
            model(tokens, memory, mask=full)
    assert cache.length == plain.length == 4 and tree.nbytes == 0


TOKENS = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([[1, 1, 1, 0], [1, 1, 1, 1]], "row 0 has padding after a token of its own; .* 1 times 0 and then 3 times 1"),
        ([[1, 1, 1, 1], [0, 1, 0, 1]], "row 1 has padding after a token of its own"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], "row 1 has no token of its own, which only a ragged cache"),
        ([[0, 1, 1, 2], [1, 1, 1, 1]], r"bool \(or 0 and 1\) of the tokens' shape .*got torch.int64"),
        ([[0.0, 1.0, 1.0, 1.0]] * 2, "got torch.float32"),
        ([1, 1, 1, 1], r"got \[4\] for tokens \[2, 4\]"),
        ([[1] * 5] * 2, r"got \[2, 5\] for tokens \[2, 4\]"),
        ([[[[1] * 4] * 4]] * 2, r"got \[2, 1, 4, 4\] for tokens"),
    ],
)
@pytest.mark.parametrize("memory", [False, True], ids=["no cache", "cache"])
def test_any_other_mask_is_refused_in_one_line(mask: list[object], said: str, memory: bool) -> None:
    model = tiny_model(1)
    cache = model.new_cache(20, batch=2, ragged="ragged" not in said) if memory else None
    with pytest.raises(ValueError, match=said) as raised:
        model(TOKENS, cache, mask=torch.tensor(mask))
    assert "\n" not in str(raised.value)


def test_what_is_no_mask_or_no_batch_is_refused() -> None:
    model = tiny_model(1)
    with pytest.raises(ValueError, match=r"mask must be bool .*got \[\[1, 1, 1, 1\]\]"):
        model(TOKENS, mask=[[1, 1, 1, 1]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with T > 0"):
        model(TOKENS[:, :0], mask=TOKENS[:, :0].bool())
    assert gap(model(TOKENS[0], mask=torch.ones(4).bool()).final, model(TOKENS[:1]).final) == 0
    ragged = model.new_cache(20, batch=2, ragged=True)
    with pytest.raises(ValueError, match="no row has a token of its own"):
        model(TOKENS, ragged, mask=torch.zeros_like(TOKENS))
    with pytest.raises(ValueError, match="token id 98 is outside"):
        model(TOKENS + 90, ragged, mask=torch.ones_like(TOKENS))
    assert ragged.lengths.tolist() == [0, 0]
