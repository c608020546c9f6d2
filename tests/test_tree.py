"""The tree builder against brute force over every prefix, its edges, and the accept walk."""

import copy
import random
from functools import cache
from math import inf, log, nan

import pytest
import torch

from ddtree.ranking import ranked
from ddtree.scores import rank
from ddtree.tree import DraftTree, accept, build_chain, build_spine, build_tree
from qwen_gdn.topology import Topology


def every_prefix(children, depth):
    """All prefixes of positive probability, best first; `children` maps a path to {token: log-probability}."""
    found = []

    def visit(path, ranks, score):
        if len(path) == depth:
            return
        family = sorted((-lp, token) for token, lp in children(path).items())
        for place, (cost, token) in enumerate(family):
            if cost != inf:
                found.append((-(score - cost), (*ranks, place), (*path, token)))
                visit((*path, token), (*ranks, place), score - cost)

    visit((), (), 0.0)
    return [path for _, _, path in sorted(found)]


def drafted(tree):
    """The path of every drafted node, in the order of the nodes."""
    tokens = tree.tokens.tolist()
    paths = [tuple(tokens[i] for i in tree.topology.path(node)[1:]) for node in range(len(tree.topology))]
    assert paths[0] == ()
    return paths[1:]


def rows_as_dicts(logits, keep=None):
    """Children by position, from a log-softmax of each row by itself."""
    rows = [dict(enumerate(torch.log_softmax(row.float(), -1).tolist())) for row in logits]
    if keep is not None:
        rows = [dict(sorted(row.items(), key=lambda item: (-item[1], item[0]))[:keep]) for row in rows]
    return lambda path: rows[len(path)]


def quantised_logits(seed, depth=4, vocab=5):
    """A few distinct values, so that ties abound; some rows with impossible tokens."""
    rng = random.Random(seed)
    depth, vocab = rng.randint(1, depth), rng.randint(1, vocab)
    levels = rng.choice([[0.0], [0.0, 1.0], [0.0, 0.5, 1.0], [-2.0, 0.0, 3.0, 40.0]])
    rows = [[rng.choice(levels) for _ in range(vocab)] for _ in range(depth)]
    for row in rows:
        for token in range(1, vocab):
            if rng.random() < 0.15:
                row[token] = -inf
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    return torch.tensor(rows, dtype=dtype)


class PathScores:
    """Random log-probabilities for each path, with ties, in no order, as lists or tensors; counts its calls."""

    def __init__(self, seed, depth, vocab):
        self.seed, self.depth, self.vocab = seed, depth, vocab
        self.asked = []

    @cache  # noqa: B019
    def table(self, path):
        rng = random.Random(f"{self.seed} {path}")
        tokens = rng.sample(range(self.vocab), rng.randint(0, self.vocab))
        values = [rng.choice([0.0, -0.5, -0.5, -1.0, -1.5, -inf]) for _ in tokens]
        return dict(zip(tokens, values, strict=True))

    def children(self, path):
        self.asked.append(path)
        tokens, values = list(self.table(path)), list(self.table(path).values())
        if len(path) % 2:
            return torch.tensor(tokens, dtype=torch.int64), torch.tensor(values)
        return tokens, values


class Fixed:
    """The same answer for every path."""

    def __init__(self, tokens, log_probs, depth=3):
        self.depth, self.answer = depth, (tokens, log_probs)

    def children(self, path):
        return self.answer


@pytest.mark.case(29)
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_trees_of_logits_equal_brute_force_over_all_prefixes(first):
    for seed in range(first, first + 50):
        logits = quantised_logits(seed)
        prefixes = every_prefix(rows_as_dicts(logits), len(logits))
        budget = random.Random(seed).choice([1, 2, 3, 7, 20, 60, 1000])
        tree = build_tree(9, logits, budget)
        assert drafted(tree) == prefixes[:budget], (logits, budget)
        assert tree.tokens[0] == 9


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_trees_of_path_dependent_scores_equal_brute_force_over_all_prefixes(first):
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        scores = PathScores(seed, rng.randint(0, 4), rng.randint(1, 5))
        prefixes = every_prefix(scores.table, scores.depth)
        budget = rng.choice([0, 1, 2, 3, 7, 20, 60, 1000])
        assert drafted(build_tree(3, scores, budget)) == prefixes[:budget], (seed, budget)


def test_a_proposer_is_asked_once_per_node_and_never_below_its_depth():
    for seed in range(50):
        scores = PathScores(seed, 3, 4)
        tree = build_tree(0, scores, 7)
        assert len(scores.asked) == len(set(scores.asked)) <= 7
        assert set(scores.asked) <= {(), *drafted(tree)}
        assert max(map(len, scores.asked)) < 3


def test_logits_and_the_same_numbers_as_path_scores_give_the_same_tree():
    for seed in range(50):
        logits = quantised_logits(seed)
        rows = [torch.log_softmax(row.float(), -1) for row in logits]

        class Wrapped:
            depth = len(rows)

            def children(self, path, rows=rows):
                order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(len(path)))
                return order, rows[len(path)][order]

        for build in (build_tree, build_chain):
            ours, theirs = build(1, logits, 12), build(1, Wrapped(), 12)
            assert torch.equal(ours.tokens, theirs.tokens)
            assert ours.topology == theirs.topology


@pytest.mark.case(29)
def test_a_wide_vocabulary_with_ties_equals_brute_force():
    # Nothing beyond the `budget` first siblings can be reached, so the brute force may leave the rest out.
    for seed, budget in enumerate([1, 3, 7, 12]):
        noise = torch.randn(3, 5003, generator=torch.Generator().manual_seed(seed))
        logits = (noise * 4).round() / 2
        expected = every_prefix(rows_as_dicts(logits, keep=budget), 3)[:budget]
        assert drafted(build_tree(0, logits, budget)) == expected


@pytest.mark.case(29)
def test_every_tree_is_ordered_within_budget_and_has_distinct_siblings():
    for seed in range(200):
        logits = quantised_logits(seed, depth=6, vocab=9)
        budget = random.Random(seed).choice([0, 1, 2, 7, 33, 100])
        tree = build_tree(4, logits, budget)
        nodes = len(tree.topology)
        assert tree.tokens.shape == (nodes,)
        assert tree.tokens.dtype == torch.int64 and tree.tokens.device.type == "cpu"
        assert nodes - 1 <= budget
        assert all(parent < node for node, parent in enumerate(tree.topology.parents))
        places = list(zip(tree.topology.parents, tree.tokens.tolist(), strict=True))
        assert len(set(places)) == nodes
        assert tree.topology.max_depth <= min(len(logits), budget)


def test_smaller_budgets_give_prefixes_of_larger_trees():
    for seed in range(30):
        logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(seed))
        whole = drafted(build_tree(0, logits, 64))
        assert len(whole) == 64
        for budget in (1, 2, 7, 31, 63):
            assert drafted(build_tree(0, logits, budget)) == whole[:budget]


def test_a_tree_holds_the_chain_down_to_its_own_depth():
    for seed in range(100):
        logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(seed)) * 3
        tree, chain = build_tree(0, logits, 16), build_chain(0, logits, 16)
        assert set(drafted(chain)[: tree.topology.max_depth]) <= set(drafted(tree))


def test_a_chain_is_the_likeliest_token_of_each_row():
    for seed in range(50):
        logits = quantised_logits(seed, depth=6, vocab=6)
        likeliest = []
        for row in logits.float().tolist():
            likeliest.append(row.index(max(row)))
        for budget in (0, 1, 2, 7, 100):
            chain = build_chain(8, logits, budget)
            assert chain.tokens.tolist() == [8, *likeliest[:budget]]
            assert chain.topology == Topology.chain(1 + min(len(logits), budget))


def test_a_chain_of_path_scores_follows_the_best_child_and_ends_where_there_is_none():
    for seed in range(50):
        scores = PathScores(seed, 4, 3)
        path = ()
        while len(path) < 4 and (open_ := {t: lp for t, lp in scores.table(path).items() if lp > -inf}):
            path = (*path, min(open_, key=lambda t: (-open_[t], t)))
        assert build_chain(1, scores, 9).tokens.tolist() == [1, *path]


A, B, C = 2, 0, 1  # token ids in another order than their probabilities
MARGINALS = [{A: 0.6, B: 0.3, C: 0.1}, {A: 0.5, B: 0.4, C: 0.1}]
HAND_LOGITS = torch.tensor([[log(row[token]) for token in range(3)] for row in MARGINALS])


@pytest.mark.case(29)
def test_two_rows_by_hand_come_best_first():
    paths = drafted(build_tree(0, HAND_LOGITS, 7))
    assert paths[0] == (A,)
    assert set(paths[1:3]) == {(B,), (A, A)}  # 0.3 both, up to rounding
    assert paths[3:] == [(A, B), (B, A), (B, B), (C,)]


@pytest.mark.case(29)
@pytest.mark.parametrize(("budget", "nodes"), [(0, 0), (1, 1), (2, 2), (7, 7), (12, 12), (100, 12)])
def test_a_budget_is_filled_as_far_as_there_are_prefixes(budget, nodes):
    tree = build_tree(7, HAND_LOGITS, budget)
    assert len(drafted(tree)) == nodes
    assert tree.tokens[0] == 7
    again = build_tree(7, HAND_LOGITS, budget)
    assert torch.equal(again.tokens, tree.tokens) and again.topology == tree.topology


def greedy_chain(children, depth):
    """The likeliest child of each step; ties go to the lower token."""
    path = ()
    while len(path) < depth:
        likely = [(-lp, token) for token, lp in children(path).items() if lp != -inf]
        if not likely:
            break
        path = (*path, min(likely)[1])
    return [path[: i + 1] for i in range(len(path))]


@pytest.mark.case(26)
@pytest.mark.parametrize("seed", range(60))
def test_a_spine_is_the_greedy_chain_and_then_the_best_of_all_other_prefixes(seed):
    logits = quantised_logits(seed)
    scripted = PathScores(seed, depth=seed % 4, vocab=4)
    cases = [(logits, rows_as_dicts(logits), len(logits)), (scripted, scripted.table, scripted.depth)]
    for scores, children, depth in cases:
        for budget in (0, 1, 2, 3, 5, 9, 200):
            chain = greedy_chain(children, min(depth, budget))
            rest = [path for path in every_prefix(children, min(depth, budget)) if path not in chain]
            tree = build_spine(6, scores, budget)
            assert drafted(tree) == (chain + rest)[:budget]
            assert tree.tokens[0] == 6


@pytest.mark.parametrize("build", [build_tree, build_chain, build_spine])
def test_a_tree_knows_the_scores_of_its_paths(build):
    scripted = PathScores(5, depth=3, vocab=4)
    logits = quantised_logits(8)
    for scores, children in ((scripted, scripted.table), (logits, rows_as_dicts(logits))):
        tree = build(6, scores, 9)
        sums = [0.0]
        for path in drafted(tree):
            sums.append(sum(children(path[:i])[token] for i, token in enumerate(path)))
        assert tree.log_probs == pytest.approx(sums, abs=1e-12) and len(tree.log_probs) > 2
        tokens, topology = tree  # it is a pair as every tree
        twin = copy.deepcopy(tree)
        assert twin.log_probs == tree.log_probs and twin.topology == topology and twin.tokens.equal(tokens)


@pytest.mark.case(29)
def test_equal_scores_come_by_depth_of_probability_then_by_rank():
    assert drafted(build_tree(0, torch.zeros(2, 2), 100)) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_among_certain_tokens_the_parent_comes_before_the_child_and_low_ids_first():
    certain = Fixed([5, 3], [0.0, -0.0], depth=2)
    assert drafted(build_tree(0, certain, 100)) == [(3,), (3, 3), (3, 5), (5,), (5, 3), (5, 5)]


def test_ties_across_the_last_place_take_the_lower_id():
    for width in (10, 5000):
        row = torch.zeros(1, width)
        row[0, 7] = 1.0
        assert drafted(build_tree(0, row, 4)) == [(7,), (0,), (1,), (2,)]


@pytest.mark.case(29)
def test_impossible_tokens_are_never_drafted():
    logits = torch.tensor([[-inf, 0.0, -inf, 1.0], [0.0, -inf, -inf, -inf]])
    assert sorted(drafted(build_tree(0, logits, 100))) == [(1,), (1, 0), (3,), (3, 0)]
    assert drafted(build_tree(0, Fixed([1, 2], [-inf, -inf]), 5)) == []


def test_underflowing_probabilities_are_still_ranked():
    logits = torch.tensor([[0.0, -500.0, -400.0]])
    assert drafted(build_tree(0, logits, 3)) == [(0,), (2,), (1,)]


@pytest.mark.parametrize("scores", [torch.zeros(0, 5), torch.zeros(3, 0), Fixed([], []), Fixed([1], [0.0], depth=0)])
@pytest.mark.parametrize("build", [build_tree, build_chain, build_spine])
def test_nothing_proposed_is_the_root_alone(build, scores):
    tree = build(6, scores, 4)
    assert tree.tokens.tolist() == [6]
    assert tree.topology == Topology([-1])


@pytest.mark.parametrize("build", [build_tree, build_chain, build_spine])
@pytest.mark.parametrize(
    ("root", "scores", "budget", "fault"),
    [
        (0, torch.zeros(2, 3), -1, "budget must be an int of at least 0, got -1"),
        (0, torch.zeros(2, 3), 2.0, "budget must be an int of at least 0, got 2.0"),
        (-1, torch.zeros(2, 3), 2, "root token must be an int of at least 0, got -1"),
        (1.0, torch.zeros(2, 3), 2, "root token must be an int of at least 0, got 1.0"),
        (True, torch.zeros(2, 3), 2, "root token must be"),
        (torch.tensor(1), torch.zeros(2, 3), 2, "root token must be"),
        (0, torch.zeros(3), 2, r"must be \[L, vocab\], got \[3\]"),
        (0, torch.zeros(1, 2, 3), 0, r"must be \[L, vocab\], got \[1, 2, 3\]"),
        (0, torch.tensor([[0.0, 1.0], [nan, 0.0]]), 2, "logits row 1 needs a finite logit"),
        (0, torch.tensor([[0.0, inf]]), 2, "logits row 0 needs"),
        (0, torch.full((1, 400), -inf), 1, "logits row 0 needs"),
        (0, Fixed([1, 2], [-1.0, nan]), 2, "at most 0, got nan"),
        (0, Fixed([1, 2], [2.5, -1.0]), 2, "at most 0, got 2.5; apply log_softmax"),
        (0, Fixed([1, -2], [-1.0, -0.5]), 2, "distinct and at least 0"),
        (0, Fixed([1, 2, 3], [-1.0, -2.0]), 2, r"1-D of one length, got \[3\] and \[2\]"),
        (0, Fixed([[1]], [[-1.0]]), 2, "1-D of one length"),
        (0, Fixed([1.5], [-1.0]), 2, "needs integer tokens with real log-probabilities, got torch.float32 and"),
        (0, torch.zeros(2, 3, dtype=torch.complex64), 2, "must be real numbers, got torch.complex64"),
        (0, torch.zeros(2, 3).numpy(), 2, "needs draft logits, a tensor .*got ndarray array"),
        (0, None, 2, "needs draft logits, a tensor .*got NoneType None"),
    ],
)
def test_bad_input_is_refused_with_what_was_got(build, root, scores, budget, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        build(root, scores, budget)
    assert "\n" not in str(caught.value)


def test_a_token_proposed_twice_is_refused():
    with pytest.raises(ValueError, match=r"children of \(\): tokens must be distinct"):
        build_tree(0, Fixed([4, 2, 4], [-1.0, -2.0, -3.0]), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_ranking_keeps_the_bits_of_log_softmax_and_its_ties(dtype):
    for vocab in (3, 400, 6000):
        logits = (torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 5).to(dtype)
        for row, (tokens, values) in zip(logits, rank(logits, 17), strict=True):
            log_probs = torch.log_softmax(row.float(), -1).tolist()
            expected = sorted(range(vocab), key=lambda token: (-log_probs[token], token))[:17]
            assert tokens == expected
            assert values == [log_probs[token] for token in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 127, 1024, 4099])
def test_ranked_equals_a_stable_sort(width, dtype):
    generator = torch.Generator().manual_seed(width)
    values = torch.randn(6, width, generator=generator).mul(2).round().div(2).to(dtype)
    values[1] = -inf
    values[2, width // 2] = nan
    values[3, width // 3 :] = -values[3, width // 3].abs() * 0.0  # -0 beside 0
    values[4, -1] = inf
    values[5, width // 128 * 128 - 1 :] = 9.0  # from the last column of the last whole block
    for k in (1, 2, 5, 4100):
        order = values.sort(dim=-1, descending=True, stable=True)
        found = ranked(values, k)
        assert torch.equal(found.columns, order.indices[:, :k])
        torch.testing.assert_close(found.values, order.values[:, :k], rtol=0, atol=0, equal_nan=True)


def test_a_negative_nan_is_found_in_a_wide_row():
    values = torch.zeros(2, 4000)
    values[1, 2222] = torch.tensor([-(2**22)], dtype=torch.int32).view(torch.float32)  # sign bit set
    assert values[1, 2222].isnan()
    assert ranked(values, 3).columns.tolist() == [[0, 1, 2], [2222, 0, 1]]


def test_logits_with_a_gradient_and_strided_rows_are_welcome():
    logits = torch.randn(8, 900, generator=torch.Generator().manual_seed(0))
    dense = build_tree(0, logits[:, ::2].contiguous(), 9)
    tree = build_tree(0, logits.clone().requires_grad_()[:, ::2], 9)
    assert torch.equal(tree.tokens, dense.tokens)
    assert torch.equal(build_tree(0, logits.T.contiguous().T, 9).tokens, build_tree(0, logits, 9).tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_ranking_is_as_exact_as_on_the_host():
    for width in (50, 6000, 248320):
        generator = torch.Generator().manual_seed(width)
        values = torch.randn(15, width, generator=generator).to(torch.bfloat16)
        on_host, on_gpu = ranked(values, 64), ranked(values.cuda(), 64)
        assert torch.equal(on_gpu.columns.cpu(), on_host.columns)
        logits = values.float().cuda()
        for row, (tokens, found) in zip(logits, rank(logits, 64), strict=True):
            assert found == torch.log_softmax(row, -1)[tokens].tolist()


HAND_TREE = DraftTree(torch.tensor([10, 1, 2, 1, 3, 1]), Topology([-1, 0, 0, 1, 1, 2]))


@pytest.mark.parametrize(
    ("draws", "path", "bonus"),
    [
        ([9, 1, 1, 1, 1, 1], [0], 9),  # nothing drafted fits
        ([1, 9, 7, 7, 7, 7], [0, 1], 9),
        ([1, 3, 7, 7, 8, 7], [0, 1, 4], 8),
        ([2, 7, 1, 7, 7, 6], [0, 2, 5], 6),  # a scattered path
        ([2, 1, 3, 1, 1, 1], [0, 2], 3),  # 3 is drafted, but under another parent
        ([10, 1, 1, 1, 1, 1], [0], 10),  # the root's own token is no child
    ],
)
def test_the_walk_follows_drawn_children_and_the_first_unmatched_draw_is_the_bonus(draws, path, bonus):
    for form in (draws, tuple(draws), torch.tensor(draws), torch.tensor(draws, dtype=torch.int32)):
        assert accept(HAND_TREE, form) == (path, bonus)


def test_walks_over_random_trees_equal_a_search_by_prefix():
    for seed in range(100):
        rng = random.Random(seed)
        tree = build_tree(0, quantised_logits(seed), 20)
        paths = {path: node for node, path in enumerate(drafted(tree), start=1)}
        draws = [rng.randint(0, 4) for _ in range(len(tree.topology))]
        node, emitted = 0, ()
        while True:
            emitted = (*emitted, draws[node])
            if emitted not in paths:
                break
            node = paths[emitted]
        path, bonus = accept(tree, draws)
        assert path == tree.topology.path(node)
        assert (*tree.tokens[path[1:]].tolist(), bonus) == emitted


@pytest.mark.parametrize("draws", [None, "abc", [1j] * 6, [True] * 6, [0.5] * 6, [[1], [2, 3]]], ids=str)
def test_draws_that_are_no_integers_are_refused_in_one_line(draws):
    with pytest.raises(ValueError, match=r"^accept: draws must be") as caught:
        accept(HAND_TREE, draws)
    assert "\n" not in str(caught.value)


def test_a_root_alone_emits_its_own_draw():
    assert accept(build_tree(5, torch.zeros(0, 3), 4), [2]) == ([0], 2)


@pytest.mark.parametrize("draws", [[], [1], [1] * 7, torch.ones(1, 6, dtype=torch.int64), torch.tensor(1)])
def test_anything_but_one_draw_per_node_is_refused(draws):
    with pytest.raises(ValueError, match=r"one target token per node, shape \[6\], got \["):
        accept(HAND_TREE, draws)
