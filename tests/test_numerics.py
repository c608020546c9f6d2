"""Numbers that are not finite are named by stage and layer where one asks for it; otherwise nothing is looked at."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drafter_oracle import layered, random_drafter
from proposers import Right, Scattered, emitted, small_model
from tiny import EXPERTS, SMALL, memory_of, same_bits, tiny_model
from torch import Tensor, nn

import ddtree.run
from ddtree import (
    MTPDrafter,
    NoDrafts,
    Proposer,
    Session,
    build_chain,
    build_tree,
    debug_numerics,
    generate,
)
from ddtree.run import main
from qwen_gdn import MTP, DeltaCache, KVCache, NonFiniteError, QwenGDN, Topology, Watched, decode
from qwen_gdn.engine import Engine
from weights import load_tokenizer

PROMPT = [5, 30, 11, 2]


def poisoned(module: nn.Module, name: str, value: float = torch.nan) -> None:
    """Puts a value into the parameter, into one of the entries that every token meets."""
    parameter = module.get_parameter(name)
    with torch.no_grad():
        parameter.view(-1)[-1] = value


def weights_of_layers() -> list[tuple[str, str]]:
    """Kind of model and parameter, for every parameter of every layer."""
    kinds = {"dense": small(), "experts": small(**EXPERTS)}
    return [(kind, name) for kind, model in kinds.items() for name, _ in model.layers.named_parameters()]


def small(**changes: Any) -> QwenGDN:
    return tiny_model(3, dtype=torch.float64, layer_types=SMALL, vocab_size=37, **changes)


@pytest.mark.parametrize(("kind", "name"), weights_of_layers(), ids=lambda part: part)
def test_a_poisoned_weight_of_any_layer_is_named(kind: str, name: str) -> None:
    """By the module that holds it or the one that uses it, and by the layer in any case."""
    model = small(**(EXPERTS if kind == "experts" else {}))
    if "experts" in name:
        with torch.no_grad():
            model.layers.get_parameter(name).fill_(torch.nan)
    else:
        poisoned(model.layers, name)
    layer = name.split(".")[0]
    with pytest.raises(NonFiniteError, match=rf"^prefill of 4 tokens: model: layers\.{layer}\.[a-z_.0-9]+: nan at \["):
        list(decode(Watched(model), PROMPT, max_new_tokens=3))


STAGES: dict[str, Callable[[Any, Proposer], Iterator[object]]] = {
    "prefill of 4 tokens": lambda model, drafter: decode(model, PROMPT, max_new_tokens=9),
    "step of one token": lambda model, drafter: decode(model, PROMPT, max_new_tokens=9),
    "verify of a tree of 6 nodes": lambda model, drafter: generate(
        model, drafter, PROMPT, max_new_tokens=20, budget=5, build=build_tree
    ),
    "verify of a tree of 4 nodes": lambda model, drafter: generate(
        model, drafter, PROMPT, max_new_tokens=20, budget=3, build=build_chain
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_is_named_and_the_cache_stays(stage: str) -> None:
    model = small_model()
    truth = list(decode(model, PROMPT, max_new_tokens=30))
    run = STAGES[stage](Watched(model), Right([*PROMPT, *truth]))
    if not stage.startswith("prefill"):
        next(run)
    poisoned(model, "layers.1.mlp.down_proj.weight")
    with pytest.raises(NonFiniteError, match=rf"^{stage}: model: layers\.1\.mlp\.down_proj: nan at"):
        next(run)


def test_a_forward_that_raises_leaves_its_cache() -> None:
    model = small_model()
    watched = Watched(model)
    cache = watched.new_cache(20)
    watched(torch.tensor([PROMPT]), cache)
    before = memory_of(cache)
    poisoned(model, "norm.weight")
    branch = cache.branch(Topology([-1, 0]))
    with pytest.raises(NonFiniteError, match="verify of a tree of 2 nodes: model: norm"):
        watched(torch.tensor([1, 2]), branch)
    assert branch.nbytes == 0
    cache.discard()
    with pytest.raises(NonFiniteError, match="prefill of 2 tokens: model: norm"):
        watched(torch.tensor([1, 2]), cache)
    assert cache.length == 4 and same_bits(memory_of(cache), before)
    with pytest.raises(NonFiniteError, match="prefill of 2 tokens"):
        watched(torch.tensor([1, 2]))


def test_rows_of_different_lengths_are_watched_as_well() -> None:
    model = tiny_model(3, layer_types=SMALL)
    tokens, mask = torch.tensor([[1, 2, 3], [0, 4, 5]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    ours, theirs = (model.new_cache(9, batch=2, ragged=True) for _ in range(2))
    assert torch.equal(Watched(model)(tokens, ours, mask=mask).final, model(tokens, theirs, mask=mask).final)
    poisoned(model, "layers.2.mlp.down_proj.weight")
    with pytest.raises(NonFiniteError, match=r"^prefill of 3 tokens: model: layers\.2\.mlp\.down_proj"):
        Watched(model)(tokens, ours, mask=mask)
    assert ours.lengths.tolist() == [3, 2]
    layer = ours[0]
    assert isinstance(layer, DeltaCache)
    layer.state[1] = torch.nan
    with pytest.raises(NonFiniteError, match="verify of a tree of 2 nodes: cache: the state or factors of layer 0"):
        Watched(model)(tokens[:, :2], ours.branch([Topology([-1, 0])] * 2))


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
def test_head_and_embeddings_are_named(name: str) -> None:
    model = small_model()
    with torch.no_grad():
        model.get_parameter(name)[:, 3] = torch.inf
    said = "model: the head's logits" if "head" in name else "model: "
    with pytest.raises(NonFiniteError, match=said):
        list(decode(Watched(model), PROMPT, max_new_tokens=3))
    with pytest.raises(NonFiniteError, match="the head's logits" if "head" in name else "embeddings"):
        watched = Watched(model)
        watched.logits(watched.embed(torch.tensor([3])))


@pytest.mark.parametrize("part", ["state", "columns", "keys", "values"])
def test_a_number_in_the_memory_is_named_by_its_layer(part: str) -> None:
    model = small()
    at, layer = next((i, layer) for i, layer in enumerate(model.new_cache(9)) if hasattr(layer, part))
    assert isinstance(layer, KVCache | DeltaCache)
    for prompt, stage in (([7], "step of one token"), ([7, 8], "prefill of 2 tokens")):
        cache = model.new_cache(20)
        model(torch.tensor([PROMPT]), cache)
        getattr(cache[at], part)[0, 0, 0] = torch.nan
        with pytest.raises(NonFiniteError, match=f"^{stage}: cache: the .* of layer {at} are not finite"):
            list(decode(Watched(model), prompt, max_new_tokens=3, cache=cache))
    truth = [1] * 20
    rounds = generate(Watched(model), Right([7, *truth]), [7], max_new_tokens=9, cache=(cache := model.new_cache(20)))
    next(rounds)
    getattr(cache[at], part)[0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=f"^verify of a tree of .* nodes: cache: the .* of layer {at} are"):
        next(rounds)


@pytest.mark.parametrize("name", [*dict(random_drafter(layered("s", "f")).named_parameters())])
def test_a_poisoned_weight_of_a_drafter_is_named(name: str) -> None:
    drafter = random_drafter(layered("s", "f"))
    config = drafter.config
    target = tiny_model(1, dtype=torch.float64, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    poisoned(drafter, name)
    place = r"\.".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
    with debug_numerics(target, drafter) as watched, pytest.raises(NonFiniteError, match=f"^drafter: {place}[.:]"):
        list(generate(watched, drafter, PROMPT, max_new_tokens=9))


def test_a_poisoned_mtp_module_is_named() -> None:
    target = tiny_model(1, dtype=torch.float64)
    mtp = MTP(target.config).double().requires_grad_(False)
    for name, _ in mtp.named_parameters():
        drafter = MTPDrafter(mtp)
        kept = mtp.get_parameter(name).clone()
        poisoned(mtp, name)
        with debug_numerics(target, drafter) as watched, pytest.raises(NonFiniteError, match=r"^drafter: "):
            list(generate(watched, drafter, PROMPT, max_new_tokens=9))
        mtp.get_parameter(name).copy_(kept)


def test_scores_of_any_other_proposer_that_are_no_numbers_are_named_as_drafts() -> None:
    class Broken(Scattered):
        def draft(self, coming: list[int]) -> Tensor:
            return torch.full((2, self.vocab), torch.nan)

    with pytest.raises(ValueError, match="draft tree: logits row 0"):
        list(generate(small_model(), Broken([1] * 20), PROMPT, max_new_tokens=9))


def test_sound_models_write_the_same_and_are_left_as_they_were() -> None:
    model, drafter = (
        tiny_model(1, dtype=torch.float64, hidden_size=24, vocab_size=41),
        random_drafter(layered("s", "f")),
    )
    wanted = emitted(generate(model, drafter, PROMPT, max_new_tokens=20))
    with debug_numerics(model, drafter) as watched:
        assert emitted(generate(watched, drafter, PROMPT, max_new_tokens=20)) == wanted
        assert emitted(generate(watched, NoDrafts(), PROMPT, max_new_tokens=20)) == wanted
        session = Session(watched, drafter, load_tokenizer("bundled"))
        list(session.turn(PROMPT, max_new_tokens=20))
        assert session.ids == [*PROMPT, *wanted]
    hooks = [part._forward_hooks for network in (model, drafter) for part in network.modules()]
    assert not any(hooks)


def test_nothing_is_looked_at_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    looked: list[object] = []
    monkeypatch.setattr("qwen_gdn.watched._check", lambda *place: looked.append(place))
    list(generate(model, NoDrafts(), PROMPT, max_new_tokens=5))
    assert not looked
    list(generate(Watched(model), NoDrafts(), PROMPT, max_new_tokens=5))
    assert looked


def test_programs_cannot_be_watched() -> None:
    with pytest.raises(ValueError, match=r"takes a QwenGDN, got .*Engine"):
        Watched(Engine(small_model()))  # type: ignore[arg-type]


@pytest.fixture
def poisonous(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Loads a model of the command with a weight that is no number."""

    def poison(loader: str, name: str) -> None:
        load = getattr(ddtree.run, loader)

        def loaded(*args: Any, **how: Any) -> Any:
            model = load(*args, **how)
            poisoned(model, name)
            return model

        monkeypatch.setattr(ddtree.run, loader, loaded)

    return poison


@pytest.mark.parametrize(
    ("loader", "name", "said"),
    [
        ("load_target", "layers.6.mlp.up_proj.weight", "prefill of 2 tokens: model: layers.6.mlp.up_proj: nan at"),
        ("load_drafter", "layers.1.mlp.up_proj.weight", "drafter: layers.1.mlp.up_proj: nan at"),
    ],
)
@pytest.mark.parametrize("mode", ["tree", "chain"])
def test_the_command_names_them_in_one_line(
    loader: str, name: str, said: str, mode: str, poisonous: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    poisonous(loader, name)
    assert main(["--prompt", "import os", "--max-new-tokens", "4", "--mode", mode, "--debug-numerics"]) == 1
    err = capsys.readouterr().err
    assert f"error: {said}" in err and err.count("\n") == 1


def test_the_command_refuses_programs_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt", "x", "--engine", "graph", "--debug-numerics"]) == 2
    assert "leave out --engine graph" in capsys.readouterr().err


def test_the_command_writes_the_same_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    written = []
    for flags in ([], ["--debug-numerics"]):
        assert main(["--prompt", "import os\n", "--max-new-tokens", "8", *flags]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
