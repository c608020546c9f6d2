"""Decoding and speculative generation on a cache, closed at any turn."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from proposers import PROPOSERS

from ddtree import build_chain, build_tree, generate
from qwen_gdn import decode

from .held import Held, Plan, UnderWay, require
from .world import SCRIPTS, World


def plan_decode(world: World, held: Held) -> Plan:
    prompt, coming, taken = _text(world, held)

    def run() -> None:
        tokens = decode(world.model, prompt, max_new_tokens=len(coming), cache=held.cache)
        _take(held, prompt, coming, taken, ((token,) for token in tokens))
        tokens.close()  # type: ignore[attr-defined]

    return Plan(f"decode {len(coming)} after {len(prompt)}, closed after {taken}", run)


def plan_generate(world: World, held: Held) -> Plan:
    dice = world.dice
    prompt, coming, taken = _text(world, held)
    name, budget, window = dice.choice(SCRIPTS), dice.randint(0, 12), dice.randint(1, 10)
    build, shape = dice.choice(((build_tree, "tree"), (build_chain, "chain")))
    drafter: Any = PROPOSERS[name]([*held.tokens, *prompt, *coming], dice.getrandbits(20))
    drafter.seen = len(held.tokens)

    def run() -> None:
        rounds = generate(
            world.model,
            drafter,
            prompt,
            max_new_tokens=len(coming),
            budget=budget,
            build=build,
            cache=held.cache,
            prefill_window=window,
        )
        _take(held, prompt, coming, taken, (done.tokens for done in rounds))
        rounds.close()  # type: ignore[attr-defined]

    what = f"{shape}s of {budget} by {name!r}, windows of {window}"
    return Plan(f"generate {len(coming)} after {len(prompt)}, {what}, closed after {taken}", run)


def _text(world: World, held: Held) -> tuple[list[int], list[int], int]:
    """A prompt, what greedy decoding writes after it, and how many turns of that to take."""
    count = world.dice.randint(1, min(8, held.room))
    prompt = world.ids(world.dice.randint(1, min(12, held.room - count + 1)))
    coming = list(decode(world.oracle, [*held.tokens, *prompt], max_new_tokens=count))
    return prompt, coming, world.dice.randint(0, count + 1)


def _take(held: Held, prompt: list[int], coming: list[int], taken: int, turns: Iterator[Sequence[int]]) -> None:
    """Takes turns of a generation; before each the cache may be about to hold what is coming, and must not yet."""
    ahead, begin, written = [*prompt, *coming], len(held.tokens), list[int]()

    def expect() -> None:
        rest = ahead[len(held.tokens) - begin : -1]
        ends = range(1, len(rest) + 1) if written else (len(prompt),)
        held.under_way = UnderWay(rest, clean=(0,), loose=(0, *ends))

    expect()
    for tokens in islice(turns, taken):
        written += tokens
        held.append([*prompt, *written][len(held.tokens) - begin : -1])
        require(held.cache.length == len(held.tokens), f"after a turn the length is {held.cache.length}")
        expect()
    held.under_way, held.emitted = None, written
