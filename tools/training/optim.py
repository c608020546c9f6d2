"""Muon for the layers' matrices and AdamW for the rest, with float32 master copies of every parameter.

The model's own parameters may be bf16: a step adds to the master and writes the rounded value back. Nothing here
waits for the device. Muon: Keller Jordan et al., 2024; AdamW: arXiv 1711.05101 (here without weight decay).
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Quintic whose iteration carries singular values from (0, 1] to about 1 (Muon, Keller Jordan et al., 2024).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_SIDE = 16


def orthogonalise(matrices: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1, by five Newton–Schulz steps.

    Args:
        matrices: float32 [N, rows, columns]; the products run in bf16 on a GPU.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    X = matrices.transpose(1, 2) if tall else matrices
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + 1e-7)
    if X.device.type == "cuda":
        X = X.bfloat16()
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = X @ X.transpose(1, 2)
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return (X.transpose(1, 2) if tall else X).float()


class _Muon:
    """The matrices of one shape, stacked."""

    def __init__(self, parameters: Sequence[nn.Parameter], momentum: float) -> None:
        self._parameters = parameters
        self._mu = momentum
        self.master = torch.stack([p.detach().float() for p in parameters])
        self.momentum = torch.zeros_like(self.master)
        rows, columns = self.master.shape[1:]
        self._scale = max(1.0, rows / columns) ** 0.5

    def step(self, rate: float) -> None:
        gradient = torch.stack([_gradient(p) for p in self._parameters]).float()
        self.momentum.mul_(self._mu).add_(gradient)
        # Nesterov: the gradient looked at once more from where the momentum leads
        update = orthogonalise(gradient.add(self.momentum, alpha=self._mu))
        self.master.add_(update, alpha=-rate * self._scale)
        self.written()

    def state(self) -> dict[str, Tensor]:
        return {"master": self.master, "momentum": self.momentum}

    def written(self) -> None:
        """Rounds the master into the model's parameters."""
        _write(self._parameters, self.master.unbind())


class _Adam:
    """All other parameters, laid end to end."""

    def __init__(self, parameters: Sequence[nn.Parameter], betas: tuple[float, float], eps: float) -> None:
        self._parameters = parameters
        self._betas = betas
        self._eps = eps
        self.master = torch.cat([p.detach().float().flatten() for p in parameters])
        self.mean = torch.zeros_like(self.master)
        self.square = torch.zeros_like(self.master)

    def step(self, rate: float, count: int) -> None:
        gradient = torch.cat([_gradient(p).float().flatten() for p in self._parameters])
        first, second = self._betas
        self.mean.lerp_(gradient, 1 - first)
        self.square.lerp_(gradient.square(), 1 - second)
        scale = (self.square / (1 - second**count)).sqrt_().add_(self._eps)
        self.master.addcdiv_(self.mean, scale, value=-rate / (1 - first**count))
        self.written()

    def state(self) -> dict[str, Tensor]:
        return {"master": self.master, "mean": self.mean, "square": self.square}

    def written(self) -> None:
        parts = self.master.split([p.numel() for p in self._parameters])
        _write(self._parameters, [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)])


class Optimiser:
    """Muon on every matrix with both sides of at least 16 but embedding and head, AdamW on all others.

    Args:
        named: parameters under their names in a checkpoint.
        muon, adam: peak learning rates.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        muon: float,
        adam: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        rest: list[nn.Parameter] = []
        for name, parameter in named:
            inner = not name.startswith(("embed_tokens.", "lm_head."))
            matrix = inner and parameter.dim() == 2 and min(parameter.shape) >= _LEAST_SIDE
            (shapes.setdefault(tuple(parameter.shape), []) if matrix else rest).append(parameter)
        self._rates = muon, adam
        self._muons = [_Muon(parameters, momentum) for _, parameters in sorted(shapes.items())]
        self._adam = _Adam(rest, betas, eps=1e-8)
        self._parameters = [*rest, *(p for parameters in shapes.values() for p in parameters)]
        self.steps = 0

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at `factor` times the peak rates; takes the gradients and clears them."""
        self.steps += 1
        muon, adam = self._rates
        for group in self._muons:
            group.step(factor * muon)
        self._adam.step(factor * adam, self.steps)
        for parameter in self._parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything that a continued run needs; tensors are the live ones."""
        parts = {f"muon.{i}": group.state() for i, group in enumerate(self._muons)} | {"adam": self._adam.state()}
        named = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        return named | {"steps": torch.tensor(self.steps)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continues from what `state` returned, parameters included.

        Raises:
            ValueError: it belongs to a model of other shapes. Nothing is changed.
        """
        ours = self.state()
        if {n: t.shape for n, t in ours.items()} != {n: t.shape for n, t in state.items()}:
            raise ValueError("checkpoint: it was written for a model of other shapes; use another output folder")
        for name, tensor in ours.items():
            tensor.copy_(state[name])
        self.steps = int(state["steps"])
        for group in self._muons:
            group.written()
        self._adam.written()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient; zeros where the loss does not reach the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _write(parameters: Sequence[nn.Parameter], masters: Sequence[Tensor]) -> None:
    for parameter, master in zip(parameters, masters, strict=True):
        parameter.copy_(master)
