"""The target as a job for the training loop: initial weights, next-token loss, and its losses on unseen text."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_gdn import ModelConfig, QwenGDN
from tools.training.data import Windows, generator, read_tokens, take
from tools.training.optim import Optimiser
from tools.training.shapes import Shape
from tools.training.tokens import Size, read_sizes

MUON_RATE = 0.02
ADAM_RATE = 3e-3
_EVALUATED_WINDOWS = 2048
_DT_RANGE = (0.001, 0.1)
_DECAY_RATES = (1.0, 16.0)
_OUTPUTS = ("linear_attn.out_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")


@torch.no_grad()
def initialise(model: QwenGDN, seed: int) -> None:
    """Random weights. Matrices have σ 0.02, those that write to the residual stream less by the square root of
    their number; decay rates and step sizes are log-uniform, so that heads remember from a few to thousands of
    tokens. Norms and the convolution keep what their modules start with.
    """
    draws = generator(torch.device("cpu"), seed)

    def between(low: float, high: float, like: Tensor) -> Tensor:
        uniform = torch.rand(like.shape, generator=draws)
        return torch.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))

    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(between(*_DECAY_RATES, parameter).log())
        elif name.endswith("dt_bias"):
            step = between(*_DT_RANGE, parameter)
            parameter.copy_(step + torch.log(-torch.expm1(-step)))  # softplus inverted
        elif name.endswith("conv1d.weight"):
            bound = parameter.shape[-1] ** -0.5
            parameter.copy_((2 * torch.rand(parameter.shape, generator=draws) - 1) * bound)
        elif parameter.dim() == 2:
            sigma = 0.02 / (2 * len(model.layers)) ** 0.5 if name.endswith(_OUTPUTS) else 0.02
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * sigma)


class TargetJob:
    """Next-token training on windows of the packed corpus."""

    name = "target"

    def __init__(self, config: ModelConfig, shape: Shape, tokens: Path, device: torch.device, seed: int) -> None:
        model = QwenGDN(config)
        initialise(model, seed)
        self.model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.optimiser = Optimiser(self.model.named_parameters(), muon=MUON_RATE, adam=ADAM_RATE)
        self._windows = Windows(read_tokens(tokens, "train", device), shape.length, shape.batch, seed)
        self._token_nats = token_nats
        self._sizes = read_sizes(tokens)
        self._unseen = {split: read_tokens(tokens, split, device) for split in ("heldout", "unseen")}
        self._shape = shape

    def compile(self) -> None:
        """Compiles each kind of layer once, and the head with the loss."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self._token_nats = torch.compile(token_nats, dynamic=False)

    def loss(self, step: int) -> Tensor:
        return self._nats(self._windows.batch(step)).mean()

    def _nats(self, windows: Tensor) -> Tensor:
        """The mean loss of each window, int64 [B, T + 1] -> float32 [B]."""
        return self._token_nats(self.model, self.model(windows[:, :-1]).final, windows[:, 1:])

    def evaluate(self) -> Mapping[str, float]:
        """Mean loss in nats a token and in bits a byte, for each split that has text."""
        figures = {}
        for split, stream in self._unseen.items():
            if len(stream) > self._shape.length:
                nats = self._mean_nats(stream)
                figures[f"{split}_nats_per_token"] = nats
                figures[f"{split}_bits_per_byte"] = bits_per_byte(nats, self._sizes[split])
        return figures

    def _mean_nats(self, stream: Tensor) -> float:
        """Over windows side by side. Batches have the shape of training, so nothing is compiled anew."""
        length, batch = self._shape.length, self._shape.batch
        count = min((len(stream) - 1) // length, _EVALUATED_WINDOWS)
        starts = torch.arange(-(-count // batch) * batch, device=stream.device) % count * length
        nats = [self._nats(take(stream, part, length + 1)).detach() for part in starts.split(batch)]
        return float(torch.cat(nats)[:count].mean())


def token_nats(model: QwenGDN, hidden: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy of each window, float32 [B] in nats: hidden [B, T, D] against the ids that follow."""
    logits = model.logits(hidden).float()
    nats = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    return nats.view_as(following).mean(dim=1)


def bits_per_byte(nats_per_token: float, size: Size) -> float:
    """The loss in a unit that does not depend on the tokenizer."""
    return nats_per_token / math.log(2) * size.tokens / size.bytes
