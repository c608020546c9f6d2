"""Equal forms of a product: what they compute, and which is taken."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qwen_gdn import products
from qwen_gdn.joined import choose_products
from qwen_gdn.products import FORMS, LinearMap, chosen_form, fastest, product


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 2, 3), (5, 8, 4), (16, 6, 1)])
def test_every_form_computes_the_product(form: products.Form, rows: int, outputs: int, inputs: int) -> None:
    x, weight = drawn(rows, inputs), drawn(outputs, inputs)
    found = form(x, weight)
    assert found.shape == (rows, outputs)
    torch.testing.assert_close(found, torch.einsum("ri,oi->ro", x, weight), rtol=0, atol=1e-12)


@pytest.mark.parametrize("place", range(len(FORMS)))
def test_a_compiled_map_takes_the_chosen_form(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(at: int) -> products.Form:
        def form(x: Tensor, weight: Tensor) -> Tensor:
            calls.append(at)
            return FORMS[at](x, weight)

        return form

    linear = LinearMap(6, 4).double()
    monkeypatch.setitem(products._chosen, (10, 4, 6), place)
    monkeypatch.setattr(products, "FORMS", tuple(map(counted, range(len(FORMS)))))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as a trace finds it
    x = drawn(2, 5, 6)
    torch.testing.assert_close(linear(x), torch.einsum("abi,oi->abo", x, linear.weight), rtol=0, atol=1e-12)
    assert calls == [place]


def test_a_trace_keeps_the_form_that_it_met(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = torch.compile(product, backend="eager", fullgraph=True, dynamic=False)
    x, weight = drawn(3, 4), drawn(6, 4)
    monkeypatch.setitem(products._chosen, (3, 6, 4), 2)
    expected = torch.einsum("ri,oi->ro", x, weight)
    torch.testing.assert_close(traced(x, weight), expected, rtol=0, atol=1e-12)
    monkeypatch.setitem(products._chosen, (3, 6, 4), 99)  # no such form: only another trace would look for it
    torch.testing.assert_close(traced(x, weight), expected, rtol=0, atol=1e-12)


def test_the_fastest_form_is_taken_if_it_gains_enough() -> None:
    def clock(*taken: float) -> Callable[[Callable[[], object]], float]:
        left = iter(taken)

        def time(call: Callable[[], object]) -> float:
            call()
            return next(left)

        return time

    even, odd = [drawn(4, 3)], [drawn(5, 3)]
    assert fastest(even, 2, clock(1.0, 0.9, 0.8)) == 2
    assert fastest(even, 2, clock(1.0, 0.9, 1.1)) == 1
    assert fastest(even, 2, clock(1.0, 0.995, 0.992)) == 0
    assert fastest(odd, 2, clock(1.0, 0.9)) == 1


def test_nothing_is_compared_on_a_cpu() -> None:
    choose_products(nn.Sequential(LinearMap(4, 6)), torch.device("cpu"), rows=7)
    products.choose_forms([drawn(6, 4).bfloat16()], rows=7)
    assert chosen_form(7, 6, 4) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_forms_are_compared_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_chosen", {})
    weights = [torch.randn(256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    with torch.cuda.stream(torch.cuda.Stream()):
        products.choose_forms(weights, rows=16)
    assert products._chosen.keys() == {(16, 256, 512)}
