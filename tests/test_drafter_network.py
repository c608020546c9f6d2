"""The drafter as a network: its names, what each row sees, its dtypes, and the same layers in training."""

import pytest
import torch
from drafter_oracle import (
    KINDS,
    WIDTH,
    StandIn,
    bound_drafter,
    close,
    dense_hidden,
    dense_proposal,
    features_of,
    is_visible,
    layered,
    random_drafter,
)

import ddtree.drafter as drafter_module
from ddtree.drafter import DFlashDrafter

LAYER_NAMES = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def test_parameters_have_the_published_names_and_nothing_else() -> None:
    drafter = DFlashDrafter(layered("s", "f", "s"))
    blocks = {f"layers.{i}.{name}.weight" for i in range(3) for name in LAYER_NAMES}
    assert set(drafter.state_dict()) == blocks | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert drafter.fc.weight.shape == (WIDTH, 3 * WIDTH)
    assert drafter.get_parameter("layers.2.self_attn.k_norm.weight").shape == (8,)
    assert drafter.get_submodule("layers") is drafter.blocks
    assert drafter.layers == (4, 1, 6)


def test_a_drafter_built_on_meta_works_once_its_parameters_are_filled() -> None:
    whole, target = bound_drafter(layered("s", "f"))
    with torch.device("meta"):
        empty = DFlashDrafter(whole.config)
    assert not list(empty.buffers())
    empty.load_state_dict(whole.state_dict(), assign=True)
    empty.bind(target)
    for each in (whole, empty):
        each.observe(features_of(11))
    assert torch.equal(whole.propose(3), empty.propose(3))


@pytest.mark.case(44, 46)
@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("window", [1, 3, 5, 8])
def test_proposals_equal_a_dense_mask_reference(kinds: tuple[str, ...], causal: bool | None, window: int) -> None:
    config = layered(*kinds, window=window, is_causal=causal)
    for count in (0, 1, 3, 4, 7, 8, 30):
        drafter, target = bound_drafter(config)
        drafter.observe(features_of(count))
        expected = dense_proposal(drafter, target, features_of(count), root=5)
        assert close(drafter.propose(5), expected, 1e-10)


def test_masks_are_built_once_for_each_type_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _ = bound_drafter(layered("s", "f", "s", "s", "f"))
    built: list[str] = []
    mask = drafter_module.block_mask
    monkeypatch.setattr(drafter_module, "block_mask", lambda *args: (built.append(args[1]), mask(*args))[1])
    drafter.propose(1)
    assert sorted(built) == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_drafter_of_any_dtype_serves_a_float32_target(dtype: torch.dtype) -> None:
    drafter, target = random_drafter(layered("s", "f"), dtype), StandIn(torch.float32)
    drafter.bind(target)
    drafter.observe(features_of(20, dtype=torch.float32))
    proposal = drafter.propose(1)
    assert proposal.dtype == torch.float32
    expected = dense_proposal(drafter.to(torch.float32), target, features_of(20, dtype=torch.float32), 1)
    assert close(proposal, expected, 0.1 if dtype == torch.bfloat16 else 1e-5)


def test_blocks_side_by_side_in_training_equal_proposals_one_by_one_and_every_parameter_learns() -> None:
    drafter, target = bound_drafter(layered("s", "f", "s"))
    config, size = drafter.config, drafter.config.block_size
    rows, anchors = 20, torch.tensor([[3, 11, 17], [0, 8, 20]])
    features = torch.cat((features_of(rows, seed=1), features_of(rows, seed=2)))
    positions = (anchors[:, :, None] + torch.arange(size)).flatten(1)  # [B, 3 · size]

    def sees(kind: str, b: int, q: int, key: int) -> bool:
        """A row sees context before its own anchor, and its own block."""
        at, anchor = int(positions[b, q]), int(anchors[b, q // size])
        if key < rows:
            return key < anchor and is_visible(config, kind, at, key)
        same = (key - rows) // size == q // size
        return same and is_visible(config, kind, at, int(positions[b, key - rows]))

    count = positions.shape[1]
    masks = {
        kind: torch.tensor(
            [[[[sees(kind, b, q, k) for k in range(rows + count)] for q in range(count)]] for b in range(2)]
        )
        for kind in set(config.layer_types)
    }
    tokens = torch.full((2, 3, size), config.mask_token_id)
    tokens[:, :, 0] = torch.tensor([[1, 2, 3], [4, 5, 6]])
    context = drafter.project(drafter.context(features), drafter.angles(torch.arange(rows)))
    block = target.embed(tokens.flatten(1)).detach()
    hidden = drafter(block, context, drafter.angles(positions[:, None]), masks)
    for b in range(2):
        for i, anchor in enumerate(anchors[b].tolist()):
            drafter.reset()
            drafter.observe(features[b : b + 1, :anchor])
            alone = drafter.propose(int(tokens[b, i, 0]))
            together = target.logits(hidden[b, i * size + 1 : (i + 1) * size]).detach()
            assert close(together, alone, 1e-10)
    hidden.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in drafter.parameters())


def test_a_mask_of_one_row_serves_all_rows_and_none_shows_everything() -> None:
    drafter, _ = bound_drafter(layered("f", "f", is_causal=False))
    features, block = features_of(6), features_of(5)[:, :, :WIDTH]
    rows = drafter.project(drafter.context(features), drafter.angles(torch.arange(6)))
    by = drafter.angles(torch.arange(6, 11))
    open_view = drafter(block, rows, by, {"full_attention": None})
    one_row = drafter(block, rows, by, {"full_attention": torch.ones(1, 11, dtype=torch.bool)})
    assert close(one_row, open_view, 1e-12)
    assert close(open_view[0], dense_hidden(drafter.state_dict(), drafter.config, features[0], block[0]), 1e-10)
