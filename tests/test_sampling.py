"""Samplers against exact laws enumerated here, alone and through draft trees; their edges and their generator."""

import copy
import math
import pickle
from functools import cache
from math import inf, nan, nextafter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ddtree.sampling import FEW, draw, make_sampler, nucleus, tempered
from ddtree.tree import accept, build_tree
from qwen_gdn import greedy

DRAWS = 100_000
VOCAB = 8
ROOT = 3
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 0.8
SETTINGS = [(temperature, top_k) for temperature in (0.7, 1.0) for top_k in (0, 4)]
DRAFTERS = ["good", "never the likeliest", "one token, the least likely"]
LAWS = 30  # how many laws this file tests, at most
THRESHOLD = 1e-3 / LAWS
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, CUDA])]


def law(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Probabilities after temperature, top-k and top-p, in that order, in plain float64 arithmetic."""

    def normalised(weights):
        return [weight / sum(weights) for weight in weights]

    peak = max(logits)
    p = normalised([math.exp((x - peak) / temperature) for x in logits])
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept = order[: top_k or None]
    p = normalised([p[token] if token in kept else 0.0 for token in range(len(p))])
    mass, nucleus_ = 0.0, []
    for token in kept:
        assert abs(mass - top_p) > 1e-4 or top_p == 1, "a table that sits on the edge tests rounding, not the law"
        if mass < top_p:
            nucleus_.append(token)
        mass += p[token]
    return normalised([p[token] if token in nucleus_ else 0.0 for token in range(len(p))])


def fit(counts, probabilities):
    """The p-value of counts under a law; cells that expect fewer than 5 are one cell, impossible ones must be empty."""
    total = sum(counts)
    cells = [(seen, p * total) for seen, p in zip(counts, probabilities, strict=True)]
    if any(seen for seen, expected in cells if expected == 0):
        return 0.0
    common = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if 0 < cell[1] < 5]
    if rare:
        common.append((sum(seen for seen, _ in rare), sum(expected for _, expected in rare)))
    return float(chisquare([seen for seen, _ in common], [expected for _, expected in common]).pvalue)


def pair_law(temperature, top_k, top_p):
    rows = [law(row, temperature, top_k, top_p) for row in TABLE.tolist()]
    return [p * q for first, p in enumerate(rows[ROOT]) for q in rows[first]]


def draft(drafter, temperature, top_k):
    """A tree of depth 2 below the root."""

    def row(last):
        likely = TABLE[last].argsort(descending=True)
        if drafter == "good":
            return TABLE[last]
        proposed = torch.full((VOCAB,), -inf)
        if drafter == "never the likeliest":  # the three after it, the last of them first
            return proposed.index_copy(0, likely[1:4], torch.tensor([0.0, 1.0, 2.0]))
        possible = sum(p > 0 for p in law(TABLE[last].tolist(), temperature, top_k, 0.8))
        return proposed.index_fill(0, likely[possible - 1], 0.0)

    first = row(ROOT)
    tree = build_tree(ROOT, torch.stack((first, row(int(first.argmax())))), 6)
    assert tree.topology.max_depth == 2
    return tree


def walk(tree, draws):
    """`accept` for many rows of draws at once: [rows, N] -> emitted tokens [rows, depth + 1], -1 after the bonus."""
    child = torch.full((len(tree.topology), VOCAB), -1)
    for node, parent in enumerate(tree.topology.parents[1:], start=1):
        child[parent, tree.tokens[node]] = node
    node = torch.zeros(len(draws), dtype=torch.int64)
    emitted = []
    for _ in range(tree.topology.max_depth + 1):
        token = draws.gather(1, node.clamp(min=0).unsqueeze(1)).squeeze(1)
        emitted.append(torch.where(node < 0, -1, token))
        node = torch.where(node < 0, -1, child[node.clamp(min=0), token])
    return torch.stack(emitted, 1)


@cache
def rounds(drafter, temperature, top_k):
    """A tree, draws at each of its nodes in DRAWS independent rounds, int64 [DRAWS, N], and their sampler."""
    tree = draft(drafter, temperature, top_k)
    sampler = make_sampler(temperature, top_k=top_k, top_p=0.8, seed=1)
    return tree, sampler(TABLE[tree.tokens].repeat(DRAWS, 1)).view(DRAWS, -1), sampler


def fit_pairs(tree, draws, sampler, expected):
    """How well the first two tokens emitted fit; where a round gives only one, the root of the next one draws."""
    emitted = walk(tree, draws)
    first, second = emitted[:, 0], emitted[:, 1]
    second = torch.where(second < 0, sampler(TABLE[first]), second)
    return fit(torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).tolist(), expected)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("temperature", "top_k"), SETTINGS)
def test_pairs_drawn_through_a_tree_have_the_targets_law(drafter, temperature, top_k):
    tree, draws, sampler = rounds(drafter, temperature, top_k)
    assert fit_pairs(tree, draws, sampler, pair_law(temperature, top_k, 0.8)) > THRESHOLD


# Where the first drafted child is the target's likeliest token, one percent more of it drowns in 100,000 draws.
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
@pytest.mark.parametrize(("temperature", "top_k"), SETTINGS)
def test_emitting_the_first_drafted_child_once_in_a_hundred_is_caught(drafter, temperature, top_k):
    tree, draws, sampler = rounds(drafter, temperature, top_k)
    planted = torch.rand(DRAWS, generator=torch.Generator().manual_seed(2)) < 0.01
    biased = draws.clone()
    biased[planted, 0] = tree.tokens[tree.topology.parents.index(0)]
    assert fit_pairs(tree, biased, sampler, pair_law(temperature, top_k, 0.8)) < THRESHOLD


def test_the_vectorised_walk_is_the_accept_walk():
    lengths = set()
    for drafter in DRAFTERS:
        tree, draws, _ = rounds(drafter, 1.0, 0)
        draws = draws[:300]
        for row, emitted in zip(draws, walk(tree, draws).tolist(), strict=True):
            path, bonus = accept(tree, row)
            lengths.add(len(path))
            assert [*tree.tokens[path[1:]].tolist(), bonus] == [token for token in emitted if token >= 0]
    assert lengths == {1, 2, 3}


@pytest.mark.case(35)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("top_p", [0.75, 1.0])
def test_siblings_in_any_order_leave_the_law_of_fixed_logits_alone(temperature, top_p):
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    tree = build_tree(0, torch.tensor([[1.0, 2.0, -inf]]), 2)
    assert tree.tokens.tolist() == [0, 1, 0] and tree.topology.max_depth == 1
    sampler = make_sampler(temperature, top_p=top_p, seed=3)
    draws = sampler(torch.tensor(logits).repeat(DRAWS * 4, 1)).view(DRAWS, 4)
    first, second = walk(tree, draws[:, :3]).unbind(1)
    pairs = first * 3 + torch.where(second < 0, draws[:, 3], second)  # the fourth draw is the next round's
    counts = torch.bincount(pairs, minlength=9).tolist()
    p = law(logits, temperature, top_p=top_p)
    assert fit(counts, [a * b for a in p for b in p]) > THRESHOLD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [97, 1536])
def test_a_whole_vocabulary_is_drawn_by_its_softmax(vocab, dtype):
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2).to(dtype)
    tokens = make_sampler(1.3, seed=4)(logits.repeat(6000, 1))
    counts = torch.bincount(tokens, minlength=vocab).tolist()
    assert fit(counts, law(logits.tolist(), 1.3)) > THRESHOLD


def test_rows_of_one_call_and_calls_in_a_row_are_independent():
    sampler = make_sampler(1.0, seed=6)
    once = sampler(TABLE[ROOT].repeat(DRAWS, 1))
    again = sampler(TABLE[ROOT].repeat(DRAWS, 1))
    p = law(TABLE[ROOT].tolist())
    product = [a * b for a in p for b in p]
    neighbours = torch.bincount(once[::2] * VOCAB + once[1::2], minlength=64).tolist()
    successive = torch.bincount(once * VOCAB + again, minlength=64).tolist()
    assert fit(neighbours, product) > THRESHOLD
    assert fit(successive, product) > THRESHOLD


def test_the_chi_square_sees_a_wrong_law():
    tokens = make_sampler(0.97, seed=1)(TABLE[ROOT].repeat(DRAWS, 1))
    counts = torch.bincount(tokens, minlength=VOCAB).tolist()
    assert fit(counts, law(TABLE[ROOT].tolist(), 0.97)) > THRESHOLD > fit(counts, law(TABLE[ROOT].tolist(), 1.0))


def test_only_what_the_cuts_keep_is_ever_drawn():
    sampler = make_sampler(1.0, top_k=4, top_p=0.8, seed=2)
    for row in TABLE:
        kept = {token for token, p in enumerate(law(row.tolist(), 1.0, 4, 0.8)) if p}
        assert set(sampler(row.repeat(3000, 1)).tolist()) == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [9, 3000])
def test_exactly_k_tokens_stay_and_ties_go_to_the_lower_id(vocab, dtype):
    logits = torch.zeros(vocab, dtype=dtype)
    logits[[2, 8]] = 1.0
    for top_k, kept in ((2, {2, 8}), (3, {2, 8, 0}), (5, {2, 8, 0, 1, 3})):
        assert set(make_sampler(2.0, top_k=top_k, seed=0)(logits.repeat(400, 1)).tolist()) == kept


def test_a_nucleus_is_the_shortest_run_whose_mass_reaches_top_p():
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        width = int(torch.randint(1, 40, (1,), generator=generator))
        # Sixty-fourths are exact, so equal entries and masses that equal top_p are what they seem.
        parts = torch.bincount(torch.randint(0, width, (64,), generator=generator), minlength=width)
        top_p = int(torch.randint(1, 65, (1,), generator=generator)) / 64
        weights, columns, _ = nucleus((parts / 64).unsqueeze(0), top_p, FEW)
        expected, mass = {}, 0
        for column in sorted(range(width), key=lambda c, parts=parts: (-int(parts[c]), c)):
            if mass < top_p * 64:
                expected[column] = int(parts[column]) / 64
            mass += int(parts[column])
        kept = weights[0] > 0
        assert dict(zip(columns[0, kept].tolist(), weights[0, kept].tolist(), strict=True)) == expected


@pytest.mark.case(38)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nucleus_of_next_to_no_mass_is_the_likeliest_token(dtype):
    weights, columns, _ = nucleus(torch.tensor([[0.3, 0.4, 0.3]], dtype=dtype), 1e-17, FEW)
    assert columns[weights > 0].tolist() == [1]


def test_rounding_does_not_widen_a_nucleus_that_is_full_on_paper():
    for peak in (0.0, 0.5, 1.0, 3.0):
        for dtype in (torch.float32, torch.float64):
            logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().to(dtype) + peak
            weights, *_ = nucleus(tempered(logits.unsqueeze(0), 1.0), 0.8, FEW)
            assert (weights[0] > 0).sum() == 2


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.95])
def test_a_wide_nucleus_is_found_whole(top_p):
    flat = torch.full((2, 5000), 1 / 5000)
    flat[1] = torch.nn.functional.one_hot(torch.tensor(4321), 5000)
    assert nucleus(flat, top_p, FEW)[2].squeeze(1).tolist() == [round(top_p * 5000) > FEW, False]
    weights, columns, short = nucleus(flat, top_p, 5000)
    assert not short.any()
    assert (weights[0] > 0).sum() == round(top_p * 5000)
    assert columns[0, : round(top_p * 5000)].tolist() == list(range(round(top_p * 5000)))
    assert columns[1, weights[1] > 0].tolist() == [4321]


def test_a_nucleus_wider_than_a_first_look_is_drawn_from_whole():
    logits = torch.zeros(4000, 1000)
    drawn = make_sampler(1.0, top_p=0.5, seed=0)(logits)
    assert drawn.max() < 500 and len(drawn.unique()) > 480


def test_a_draw_inverts_the_cumulative_weights():
    weights = torch.tensor([[0.0, 3.0, 0.0, 1.0, 4.0, 0.0]])
    grid = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    uniform = torch.cartesian_prod(grid, grid)
    columns = draw(weights.expand(len(uniform), -1), uniform)
    assert torch.bincount(columns, minlength=6).tolist() == [0, 1536, 0, 512, 2048, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_no_uniform_number_draws_a_weight_of_zero(device):
    ends = torch.tensor([0.0, 2**-53, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    uniform = torch.cartesian_prod(ends, ends)
    for width in (1, 5, 8, 700, 1024):
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            weights = torch.rand(width, generator=generator)
            weights[torch.rand(width, generator=generator) < 0.7] = 0.0
            weights[seed % width] = 0.3
            columns = draw(weights.expand(len(uniform), -1).to(device), uniform.to(device)).cpu()
            assert bool((weights[columns] > 0).all())


GREEDY = [{"temperature": 0.0}, {}, {"temperature": 5.0, "top_k": 1}, {"temperature": 0, "top_p": 0.1}]


@pytest.mark.case(38)
@pytest.mark.parametrize("settings", GREEDY, ids=str)
def test_temperature_zero_and_top_k_one_take_the_likeliest_token(settings):
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)).round()
    expected = [row.index(max(row)) for row in logits.tolist()]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tokens = make_sampler(**settings)(logits.to(dtype))
        assert tokens.tolist() == expected
        assert tokens.dtype == torch.int64


@pytest.mark.case(38)
@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 1e-4])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_temperatures_near_zero_equal_greedy(temperature, cuts):
    sampler, likeliest = make_sampler(temperature, seed=0, **cuts), make_sampler()
    for scale in (1.0, 1e4):
        logits = torch.randn(100, 400, generator=torch.Generator().manual_seed(2)) * scale
        logits[:, 0] = -inf
        logits.scatter_add_(1, logits.argmax(1, keepdim=True), torch.full((100, 1), 0.1))  # a clear winner
        assert torch.equal(sampler(logits), likeliest(logits))


@pytest.mark.case(35)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_tree_walked_near_temperature_zero_emits_what_greedy_does(drafter):
    tree = draft(drafter, 1.0, 0)
    logits = TABLE[tree.tokens]
    assert accept(tree, make_sampler(1e-6, top_p=0.8, seed=0)(logits)) == accept(tree, make_sampler()(logits))


@pytest.mark.case(38)
@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 100.0, 1e300])
@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 6}, {"top_p": 1e-9}, {"top_p": 0.999}, {"top_k": 60, "top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_impossible_tokens_are_never_drawn_and_one_is_always_left(temperature, cuts, dtype):
    logits = torch.full((200, 8), -inf)
    logits[:, [3, 5]] = 1.0
    logits[100:, 5] = -inf
    tokens = make_sampler(temperature, seed=0, **cuts)(logits.to(dtype))
    assert set(tokens[:100].tolist()) == ({3} if cuts.get("top_p", 1) <= 0.5 else {3, 5})
    assert set(tokens[100:].tolist()) == {3}


@pytest.mark.case(38)
def test_heat_flattens_to_uniform():
    tokens = make_sampler(1e300, seed=0)(TABLE[ROOT].repeat(DRAWS, 1))
    assert fit(torch.bincount(tokens, minlength=VOCAB).tolist(), [1 / VOCAB] * VOCAB) > THRESHOLD


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[3e38, -3e38, 3e38, 0.0]]).repeat(200, 1)
    assert set(make_sampler(1e-6, seed=0)(logits).tolist()) == {0, 2}


@pytest.mark.case(38)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_drawn_with_float32_probabilities(dtype):
    logits = torch.randn(500, 3000, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert tempered(logits, 0.9).dtype == torch.float32
    assert tempered(logits.double(), 0.9).dtype == torch.float64
    for settings in ({}, {"top_k": 40}, {"top_p": 0.8}, {"top_k": 300, "top_p": 0.9}):
        low, high = make_sampler(0.9, seed=1, **settings), make_sampler(0.9, seed=1, **settings)
        assert torch.equal(low(logits), high(logits.float()))


@pytest.mark.case(38)
@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": nan}, "temperature must be finite and at least 0, got nan"),
        ({"temperature": inf}, "temperature must be finite and at least 0, got inf"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1.1"),
        ({"top_p": -1.0}, "top_p must lie in"),
        ({"top_p": nan}, "top_p must lie in"),
        ({"top_k": -1}, r"top_k must be an int of at least 0 \(0 keeps every token\), got -1"),
        ({"top_k": 2.5}, "top_k must be an int"),
        ({"seed": 2**64}, r"seed must be an int and lie in \[-2\^63, 2\^64\), got 18446744073709551616"),
        ({"temperature": "1"}, "temperature must be finite and at least 0, got '1'"),
        ({"temperature": None}, "temperature must be finite and at least 0, got None"),
        ({"temperature": True}, "temperature must be finite and at least 0, got True"),
        ({"top_p": "x"}, r"top_p must lie in \(0, 1\], got 'x'"),
        ({"top_p": True}, r"top_p must lie in \(0, 1\], got True"),
        ({"top_k": True}, "top_k must be an int of at least 0 .*, got True"),
        ({"seed": "x"}, "seed must be an int and lie in .*got 'x'"),
        ({"seed": 1.5}, "seed must be an int and lie in .*got 1.5"),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_settings_out_of_range_are_refused_when_the_sampler_is_made(settings, fault, temperature):
    with pytest.raises(ValueError, match=fault) as caught:
        make_sampler(**{"temperature": temperature, **settings})
    assert "\n" not in str(caught.value)


def test_settings_may_be_numbers_of_any_library():
    sampler = make_sampler(np.float32(0.5), top_p=np.float64(0.9), seed=1)
    assert sampler(torch.zeros(2, 9)).shape == (2,)


def rounded_apart(sums):
    """A running sum as a parallel scan may give it: those after the widest step are a last bit apart."""

    def cumsum(weights, dim, dtype):
        return torch.tensor([sums], dtype=dtype) if weights.shape[dim] == len(sums) else weights.to(dtype)

    return cumsum


@pytest.mark.parametrize(
    ("weights", "sums", "share", "column"),
    [
        # A column without weight has a sum above that of the one before it, and the share falls just between.
        ([0.5, 0.0, 0.5], [0.5, nextafter(0.5, 1), 1.0], 0.5 * (1 + 1e-12), 2),
        # Columns without weight at the end push the total above the sum at the last column that has some.
        ([0.0, 1.0, 0.0], [0.0, 1.0, nextafter(1.0, 2)], nextafter(1.0, 0), 1),
    ],
)
def test_rounding_of_a_parallel_sum_never_draws_a_column_without_weight(monkeypatch, weights, sums, share, column):
    monkeypatch.setattr(torch.Tensor, "cumsum", rounded_apart(sums))
    drawn = draw(torch.tensor([weights]), torch.tensor([[share, 0.0]], dtype=torch.float64))
    assert drawn.tolist() == [column]


SAMPLERS = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5}]


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
@pytest.mark.parametrize("row", [[0.0, nan, 1.0], [-inf, -inf, -inf], [0.0, inf, 0.0]], ids=str)
def test_a_row_without_a_law_is_named(settings, row):
    logits = torch.zeros(4, 900)
    logits[2] = torch.tensor(row).repeat(300)
    sampler = make_sampler(**settings, seed=0)
    with pytest.raises(ValueError, match=r"row 2 is (nan|-?inf), it must be finite"):
        sampler(logits)
    assert sampler(logits[:2]).shape == (2,)


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_logits_must_be_rows_over_a_vocabulary(settings):
    sampler = make_sampler(**settings)
    for shape in ((5,), (1, 2, 3), (2, 0)):
        with pytest.raises(ValueError, match=r"logits must be \[N, vocab\]"):
            sampler(torch.zeros(shape))
    nothing = sampler(torch.zeros(0, 5))
    assert nothing.shape == (0,) and nothing.dtype == torch.int64


@pytest.mark.case(38)
def test_top_k_beyond_the_vocabulary_keeps_everything():
    logits = TABLE.repeat(100, 1)
    everything = make_sampler(1.0, seed=8)(logits)
    for top_k in (VOCAB, VOCAB + 50):
        assert torch.equal(make_sampler(1.0, top_k=top_k, seed=8)(logits), everything)


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_global_random_state_is_neither_read_nor_moved(settings):
    logits = TABLE.repeat(50, 1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = make_sampler(**settings, seed=9)(logits)
    make_sampler(**settings)(logits)
    make_sampler(**settings, device="cpu")(logits)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(make_sampler(**settings, seed=9)(logits), first)
    assert torch.equal(make_sampler(**settings, seed=9, device="cpu")(logits), first)


def test_without_a_seed_no_two_samplers_agree():
    logits = TABLE.repeat(50, 1)
    torch.manual_seed(0)
    one = make_sampler(1.0)(logits)
    torch.manual_seed(0)
    assert not torch.equal(make_sampler(1.0)(logits), one)
    assert not torch.equal(make_sampler(1.0, seed=1)(logits), make_sampler(1.0, seed=2)(logits))


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_a_copied_sampler_goes_on_where_the_original_stands(settings):
    logits = TABLE.repeat(50, 1)
    sampler = make_sampler(**settings, seed=4)
    unused = pickle.loads(pickle.dumps(sampler))
    first = sampler(logits)
    assert torch.equal(unused(logits), first)
    copies = [pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)]
    second = sampler(logits)
    assert all(torch.equal(copied(logits), second) for copied in copies)


def test_a_sampler_shows_its_settings():
    shown = repr(make_sampler(0.7, top_k=20, top_p=0.8, seed=3))
    assert all(part in shown for part in ("temperature=0.7", "top_k=20", "top_p=0.8", "seed=3"))
    assert make_sampler() is greedy


def test_a_gradient_on_the_logits_does_not_reach_the_sampler():
    for settings in SAMPLERS:
        assert not make_sampler(**settings, seed=0)(TABLE.clone().requires_grad_()).requires_grad


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("settings", SAMPLERS[1:], ids=str)
def test_on_a_gpu_the_law_is_the_same(settings):
    logits = TABLE[ROOT].cuda().repeat(DRAWS, 1)
    top_k, top_p = settings.get("top_k", 0), settings.get("top_p", 1.0)
    for device in (None, "cpu", "cuda"):
        counts = torch.bincount(make_sampler(**settings, seed=1, device=device)(logits), minlength=VOCAB)
        assert fit(counts.tolist(), law(TABLE[ROOT].tolist(), 1.0, top_k, top_p)) > THRESHOLD
