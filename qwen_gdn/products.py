"""Products of a few rows with a large weight, in the form in which the library computes them fastest.

They take what reading the weight takes, if the library picks a kernel that reads well. It picks by shape, and for some
shapes an equal product in another form is up to a tenth faster. Programs therefore take the form that was fastest for
their number of rows on the first device and in the first dtype that had such a product.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tuning import replayed

FEW = 256  # rows up to which forms are compared; beyond, arithmetic takes longer than reading
GAIN = 0.99  # of the usual form's time that another must stay below to be taken
ROTATED = 4  # weights of a shape that are read in turn, so that none is still in a cache

Form = Callable[[Tensor, Tensor], Tensor]
"""x [rows, in] and a weight [out, in] to x Wᵀ, [rows, out]."""


def usual(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def turned(x: Tensor, weight: Tensor) -> Tensor:
    """(W xᵀ)ᵀ, which leaves its rows side by side."""
    return (weight @ x.mT).mT


def halved(x: Tensor, weight: Tensor) -> Tensor:
    """The upper and the lower half of the weight in one batched product."""
    halves = weight.unflatten(0, (2, -1))
    return torch.bmm(x.expand(2, *x.shape), halves.mT).transpose(0, 1).flatten(1)


FORMS: tuple[Form, ...] = (usual, turned, halved)
_chosen: dict[tuple[int, int, int], int] = {}


class LinearMap(nn.Linear):
    """A linear map without bias whose product is a `product`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ of x [..., in] and a weight [out, in]; where it is compiled, in the form chosen for its rows."""
    if not torch.compiler.is_compiling():
        return F.linear(x, weight)
    rows = x.flatten(0, -2)
    form = FORMS[chosen_form(rows.shape[0], weight.shape[0], weight.shape[1])]
    out: Tensor = form(rows, weight).unflatten(0, x.shape[:-1])
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # more choices leave what is compiled alone
def chosen_form(rows: int, outputs: int, inputs: int) -> int:
    """The form's place among `FORMS`; the usual one until `choose_forms` has compared them."""
    return _chosen.get((rows, outputs, inputs), 0)


def choose_forms(weights: Iterable[Tensor], rows: int) -> None:
    """Compares the forms for so many rows and every shape of weights on CUDA in half precision, unless it has been.

    To be called on a stream that can be captured.
    """
    alike: dict[tuple[int, int, int], list[Tensor]] = {}
    for weight in weights:
        if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and rows <= FEW:
            alike.setdefault((rows, *weight.shape), []).append(weight)
    for key, some in alike.items():
        if key not in _chosen:
            _chosen[key] = fastest(some[:ROTATED], rows)


def fastest(weights: Sequence[Tensor], rows: int, time: Callable[[Callable[[], object]], float] = replayed) -> int:
    """The place among `FORMS` of what takes least for weights of one shape; 0 unless another gains enough."""
    like = weights[0]
    x = torch.linspace(-1, 1, rows * like.shape[1], device=like.device).to(like.dtype).view(rows, -1)
    forms = FORMS if len(like) % 2 == 0 else FORMS[:2]
    taken = [time(lambda form=form: [form(x, weight) for weight in weights]) for form in forms]  # type: ignore[misc]
    best = taken.index(min(taken))
    return best if taken[best] < GAIN * taken[0] else 0
