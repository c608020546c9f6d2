"""How the figures read: lines of text, no arithmetic beyond units."""

from collections.abc import Iterator, Sequence

from tools.measure.acceptance import Forced, UseOfSet
from tools.measure.batch import Batched
from tools.measure.comparison import Set, Together
from tools.measure.exactness import NearTie
from tools.measure.parts import BuilderTimes, WindowBytes
from tools.measure.prompts import PromptSet
from tools.measure.speed import Outcome

KIB = 1024


def heading(prompts: PromptSet) -> Iterator[str]:
    lengths = sorted(map(len, prompts.prompts))
    span = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
    yield f"{prompts.name}: {len(lengths)} prompts of {span} tokens ({prompts.licence})"


def speed(outcome: Outcome) -> Iterator[str]:
    """One line a mode, then the fastest tree and chain, then the stages."""
    yield (
        f"  {'mode':<9} {'tok/s':>8} {'whole':>8}   {'x plain [low..high]':<20} {'x chain [low..high]':<20} "
        f"{'tau':>5} {'drafted':>8} {'forwards':>9}"
    )
    for each in outcome.speeds:
        yield (
            f"  {each.mode!s:<9} {each.decode.median:8.1f} {each.whole.median:8.1f}   {each.to_plain!s:<20} "
            f"{each.to_chain or ''!s:<20} {each.tau:5.2f} {each.drafted:8.1f} {each.forwards:9}"
        )
    to_plain = {each.mode: each.to_plain for each in outcome.speeds}
    yield (
        f"  fastest: {outcome.best_tree}, {to_plain[outcome.best_tree]} x plain; "
        f"{outcome.best_chain}, {to_plain[outcome.best_chain]} x plain; tree over chain {outcome.tree_over_chain}"
    )
    yield "  stages, ms a round:"
    for each in outcome.speeds:
        if each.stages:
            yield f"    {each.mode!s:<9} " + "  ".join(f"{name} {ms:.2f}" for name, ms in each.stages.items())
    yield from _ties(outcome.ties)


def acceptance(used: UseOfSet, forced: Sequence[Forced]) -> Iterator[str]:
    """Accepted length in use, then teacher-forced."""
    yield f"  in use; {used.looping} of {used.prompts} continuations loop"
    yield f"    {'mode':<9} {'tau':>5} {'without loops':>14} {'forwards':>9}"
    for each in used.modes:
        steady = "-" if each.steady is None else f"{each.steady:.2f}"
        yield f"    {each.mode!s:<9} {each.tau:5.2f} {steady:>14} {each.forwards:9}"
    yield from _ties(used.ties)
    yield from teacher_forced(forced)


def teacher_forced(forced: Sequence[Forced]) -> Iterator[str]:
    """One line a budget."""
    yield f"  teacher-forced, the same {forced[0].contexts} contexts for all"
    yield f"    {'budget':<7} {'chain':>6} {'tree':>6} {'below chain':>12} {'tree with chain':>16} {'below chain':>12}"
    for row in forced:
        yield (
            f"    {row.budget:<7} {row.chain:6.2f} {row.tree:6.2f} {row.tree_below:12} {row.spine:16.2f} "
            f"{row.spine_below:12}"
        )


def batch(found: Sequence[Batched], ties: Sequence[tuple[str, NearTie]]) -> Iterator[str]:
    """One line a mode."""
    yield f"  {'mode':<9} {'together, tok/s':<25} {'one by one, tok/s':<25} {'x one by one':<20} {'tau':>5}  forwards"
    for each in found:
        yield (
            f"  {each.mode!s:<9} {each.together!s:<25} {each.alone!s:<25} {each.gain!s:<20} {each.tau:5.2f}  "
            f"{each.forwards[0]} against {each.forwards[1]}"
        )
    yield from _ties(ties)


def comparison(found: Set) -> Iterator[str]:
    """One line a mode, fixed budgets in the order asked for."""
    how = f"temperature {found.plan.temperature:g}, {found.plan.seeds} seeds" if found.plan.temperature else "greedy"
    yield f"  {how}, {found.plan.count} tokens, {found.plan.alternations} alternations; best is {found.best.word}"
    yield (
        f"  {'mode':<9} {'tok/s [95 %]':<24} {'x plain':<19} {'x best':<19} {'tau':<19} {'drafted':>8} {'forwards':>9}"
    )
    for each in found.figures:
        yield (
            f"  {each.mode.word:<9} {each.speed!s:<24} {each.to_plain!s:<19} {each.to_best!s:<19} {each.tau!s:<19} "
            f"{each.drafted:8.1f} {each.forwards:9.0f}"
        )
    yield from _ties(found.measured.ties)


def together(found: Together) -> Iterator[str]:
    """Ratios over all sets."""
    yield f"all sets together; best is {found.best.word}"
    yield f"  {'mode':<9} {'x plain':<19} {'x best':<19}"
    for mode, to_plain in found.to_plain.items():
        yield f"  {mode.word:<9} {to_plain!s:<19} {found.to_best[mode]!s:<19}"


def window(found: WindowBytes) -> Iterator[str]:
    yield (
        f"window of {found.nodes} nodes: {found.measured / KIB:.2f} KiB a node = factors {found.factors / KIB:.2f} + "
        f"conv columns {found.columns / KIB:.2f} + KV rows {found.rows / KIB:.2f} "
        f"({found.stated / KIB:.2f}); a whole state is {found.state / KIB:.2f} KiB"
    )


def builder(times: BuilderTimes) -> Iterator[str]:
    yield f"tree of {times.nodes} nodes from logits [{times.positions}, {times.vocabulary}], ms:"
    yield (
        f"  heap and topology {times.search:.2f}   log-softmax {times.normaliser:.2f}   top-k {times.top_k:.2f}   "
        f"all of build_tree {times.whole:.2f}"
    )


def _ties(ties: Sequence[tuple[str, NearTie]]) -> Iterator[str]:
    for where, tie in ties:
        how = "a draw at rounding level" if tie.gap is None else f"float64 gap {tie.gap:.1e} of the logit scale"
        yield (
            f"  near-tie: {where} parts from plain decoding at token {tie.place} "
            f"({tie.tokens[0]} for {tie.tokens[1]}), {how}"
        )
