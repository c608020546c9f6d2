"""Crop: any promised length is reached exactly, any other is refused, whatever came before."""

import pytest
import torch
from tiny import (
    SMALL,
    filled,
    memory_of,
    randint,
    random_tokens,
    random_topology,
    same_bits,
    seeded,
    tiny_model,
    worst_gap,
)


@pytest.mark.case(11)
def test_crop_within_rollback_equals_a_fresh_prefill_and_beyond_it_is_refused() -> None:
    model = tiny_model(0, dtype=torch.float64)
    tokens = random_tokens(seeded(1), 1, 32)
    for kept in range(20, 27):
        cache, wanted = model.new_cache(64, rollback=6), model.new_cache(64)
        model(tokens[:, :20], cache)
        model(tokens[:, 20:26], cache)
        cache.crop(kept)
        model(tokens[:, :kept], wanted)
        assert cache.length == kept and worst_gap(memory_of(cache), memory_of(wanted)) <= 1e-10
        ours, theirs = (model(tokens[:, kept : kept + 3], c).final for c in (cache, wanted))
        assert worst_gap([ours, *memory_of(cache)], [theirs, *memory_of(wanted)]) <= 1e-10


@pytest.mark.case(11)
def test_a_crop_that_cannot_be_exact_names_both_numbers_and_the_remedy() -> None:
    model = tiny_model(0)
    for rollback, floor in ((0, 26), (3, 23)):
        cache = filled(model, 26, rollback=rollback)
        before = memory_of(cache)
        with pytest.raises(ValueError, match=rf"(?s)13.*{floor}.*new_cache\(.*rollback=13\)"):
            cache.crop(13)
        for wrong in (-1, 27):
            with pytest.raises(ValueError, match=rf"{wrong}.*26"):
                cache.crop(wrong)
        assert cache.length == 26 and same_bits(memory_of(cache), before)
        cache.crop(26)
        assert cache.length == 26 and same_bits(memory_of(cache), before)


@pytest.mark.case(12)
def test_feeding_after_a_crop_never_remembers_what_was_cropped() -> None:
    """Prefix A, then B taken back, then C: equal to A and C alone, with any reset in between."""
    model, draw = tiny_model(0, dtype=torch.float64), seeded(2)
    a, b, c = (random_tokens(draw, 1, n) for n in (7, 5, 6))
    wanted = model.new_cache(64)
    model(torch.cat((a, c), dim=1), wanted)
    cache = model.new_cache(64, rollback=5)
    for parts, length in (((a, b), 7), ((c,), None)):
        for part in parts:
            model(part, cache)
        if length is not None:
            cache.crop(length)
    assert worst_gap(memory_of(cache), memory_of(wanted)) <= 1e-10
    for rollback in (0, 5):
        cache = filled(model, 9, rollback=rollback)
        cache.crop(0)
        assert (cache.length, cache.crop_floor) == (0, 0)
        model(torch.cat((a, c), dim=1), cache)
        assert worst_gap(memory_of(cache), memory_of(wanted)) <= 1e-10


@pytest.mark.case(12)
@pytest.mark.parametrize("rollback", [0, 1, 5, 16])
def test_random_histories_keep_the_floor_law_and_equal_a_fresh_prefill(rollback: int) -> None:
    model, draw = tiny_model(1, dtype=torch.float64, layer_types=SMALL), seeded(rollback)
    cache, tokens = model.new_cache(400, rollback=rollback), torch.zeros(1, 0, dtype=torch.long)
    for step in range(60):
        floor, action = cache.crop_floor, randint(draw, 0, 3)
        if action == 0:
            more = random_tokens(draw, 1, randint(draw, 1, 2 * rollback + 3))
            model(more, cache)
            tokens = torch.cat((tokens, more), dim=1)
        elif action == 1:
            topology = random_topology(draw, 12, 6)
            nodes, path = random_tokens(draw, 1, 12), topology.path(randint(draw, 0, 11))
            model(nodes, cache.branch(topology))
            cache.commit(path)
            tokens = torch.cat((tokens, nodes[:, path]), dim=1)
        elif action == 2:
            length = randint(draw, floor, cache.length) if step % 20 else 0
            cache.crop(length)
            tokens = tokens[:, :length]
            assert cache.crop_floor == (floor if length else 0)
        elif floor > 1:
            with pytest.raises(ValueError, match="crop"):
                cache.crop(randint(draw, 1, floor - 1))
        cache.check()
        assert cache.length == tokens.shape[1] and 0 <= cache.crop_floor <= cache.length
        assert cache.crop_floor <= max(floor, cache.length - rollback)
        assert cache.crop_floor == cache.length or rollback
        if tokens.shape[1]:
            wanted = model.new_cache(400)
            model(tokens, wanted)
            assert worst_gap(memory_of(cache), memory_of(wanted)) <= 1e-10


def test_every_promised_length_is_reached_after_one_long_prefill_and_after_many_short_ones() -> None:
    model, tokens = tiny_model(1, dtype=torch.float64, layer_types=SMALL), random_tokens(seeded(3), 1, 40)
    for cuts in ([40], [1] * 40, [7, 33], [39, 1]):
        cache = model.new_cache(64, rollback=6)
        for part in tokens.split(cuts, dim=1):
            model(part, cache)
        for length in range(40, 33, -1):
            one, wanted = cache.fork(), model.new_cache(64)
            one.crop(length)
            model(tokens[:, :length], wanted)
            assert worst_gap(memory_of(one), memory_of(wanted)) <= 1e-10
