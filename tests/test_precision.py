"""The process's switch for reduced-precision products: off inside the delta rule, untouched outside."""

from collections.abc import Iterator

import pytest
import torch

from qwen_gdn import Topology, delta_chunked, delta_commit, delta_recurrent, delta_tree
from qwen_gdn.precision import exact_products

SWITCHES = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for switch in SWITCHES:
        switch.fp32_precision = "none"


def read() -> list[str]:
    """The general switch, the CUDA library's and the CPU library's."""
    return [switch.fp32_precision for switch in SWITCHES]


def older() -> str:
    return torch.get_float32_matmul_precision()


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_precision_is_off_inside_and_put_back_after(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    before = read()
    assert exact_products(read)()[1:] == ["ieee", "ieee"] and exact_products(older)() == "highest"
    assert read() == before and older() == precision


@pytest.mark.parametrize(("which", "precision"), [(0, "tf32"), (0, "bf16"), (1, "tf32"), (2, "tf32"), (2, "bf16")])
def test_switches_set_through_the_newer_interface_are_put_back_too(which: int, precision: str) -> None:
    SWITCHES[which].fp32_precision = precision
    before = read()
    assert precision in before[1:]
    assert not {"tf32", "bf16"} & set(exact_products(read)()[1:])
    assert read() == before
    SWITCHES[0].fp32_precision = "ieee"
    assert which > 0 or read() == ["ieee", "ieee", "ieee"]  # the others follow the general one as before


def test_an_error_inside_puts_it_back() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    torch.set_float32_matmul_precision("high")
    with pytest.raises(KeyboardInterrupt):
        exact_products(fail)()
    assert older() == "high"


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif("not torch.cuda.is_available()")])],
)
def test_the_delta_rule_is_exact_with_the_switch_on(device: str) -> None:
    draws = torch.Generator().manual_seed(3)
    B, T, heads, K = 1, 128, 2, 128
    q, k, v = (torch.randn(B, T, heads, K, generator=draws, dtype=torch.float64) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    gates = {
        "log_decay": -torch.rand(B, T, heads, generator=draws, dtype=torch.float64),
        "beta": torch.rand(B, T, heads, generator=draws, dtype=torch.float64),
    }
    wanted, state = delta_recurrent(q, k, v, **gates, state=None)
    small = [x.float().to(device) for x in (q, k, v)]
    rounded = {name: x.float().to(device) for name, x in gates.items()}
    if device == "cpu":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    else:
        torch.set_float32_matmul_precision("medium")
    chunked, final = delta_chunked(*small, **rounded, state=None)
    tree, factors = delta_tree(*small, **rounded, state=None, topology=Topology.chain(T))
    committed = delta_commit(torch.zeros_like(final), factors, range(T))
    for got, right in ((chunked, wanted), (tree, wanted), (final, state), (committed, state)):
        assert float((got.cpu().double() - right).abs().max() / right.abs().max()) <= 5e-6
