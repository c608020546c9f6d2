"""The drafter as a job for the training loop: initial weights, batches of blocks, and chain lengths as it learns."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ddtree.drafter import DFlashDrafter
from ddtree.drafter_config import DFlashConfig
from qwen_gdn import QwenGDN
from tools.training.data import generator
from tools.training.drafting import Sequences, chain_length, draft_loss, make_blocks, with_features
from tools.training.generated import read_continued
from tools.training.machine import Progress
from tools.training.optim import Optimiser
from tools.training.shapes import Shape

MUON_RATE = 0.02
ADAM_RATE = 3e-3
_HOST_BYTES = 2**30
_DEVICE_SHARE = 0.6


@torch.no_grad()
def initialise(drafter: DFlashDrafter, seed: int) -> None:
    """Random weights: matrices of σ 0.02, those that write to the residual stream less by the square root of their
    number; norms stay at 1.
    """
    draws = generator(torch.device("cpu"), seed)
    depth = 2 * drafter.config.num_hidden_layers
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            sigma = 0.02 / depth**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * sigma)


class DrafterJob:
    """Learns to name the next tokens of what the frozen target wrote.

    Args:
        target: frozen, on its device.
        training, evaluation: files of continued prompts; the latter greedy ones.
    """

    name = "drafter"

    def __init__(
        self,
        target: QwenGDN,
        config: DFlashConfig,
        shape: Shape,
        *,
        training: Sequence[Path],
        evaluation: Sequence[Path],
        seed: int,
    ) -> None:
        self.target = target
        self.drafter = DFlashDrafter(config)
        initialise(self.drafter, seed)
        self.drafter.to(target.device, target.dtype)
        self.optimiser = Optimiser(self.drafter.named_parameters(), muon=MUON_RATE, adam=ADAM_RATE)
        self._evaluation = {
            f.stem.removeprefix("eval-"): with_features(target, config, read_continued(f)) for f in evaluation
        }
        self._files = _load(target, config, training)
        self.sequences = sum(len(one.tokens) for one in self._files)
        self._chances = torch.tensor([float(len(one.tokens)) for one in self._files])
        self._loss = draft_loss
        self._shape = shape
        self._seed = seed

    def compile(self) -> None:
        """Compiles network, head and loss as one."""
        self._loss = torch.compile(draft_loss, dynamic=False)

    def loss(self, step: int) -> Tensor:
        on_host = generator(torch.device("cpu"), self._seed, step)
        sequences = self._files[int(self._chances.multinomial(1, generator=on_host))]
        device, config = self.target.device, self.drafter.config
        draws = generator(device, self._seed, step)
        rows = torch.randint(len(sequences.tokens), (self._shape.drafter_batch,), generator=draws, device=device)
        order = torch.randperm(sequences.anchors(config.block_size), generator=draws, device=device)
        anchors = sequences.prompt + order[: self._shape.anchors]
        room = self._shape.window + self._shape.continuation
        blocks = make_blocks(self.target, self.drafter, sequences, rows, anchors, room)
        return self._loss(self.target, self.drafter, blocks)

    def evaluate(self) -> Mapping[str, float]:
        """Mean accepted tokens a round of a chain, for each evaluation file."""
        return {name: chain_length(self.target, self.drafter, one) for name, one in self._evaluation.items()}


def _load(target: QwenGDN, config: DFlashConfig, files: Sequence[Path]) -> list[Sequences]:
    """The training sequences with the target's states, as many files as fit into memory."""
    room = _room(target.device)
    loaded: list[Sequences] = []
    progress = Progress("features")
    for i, file in enumerate(files):
        one = with_features(target, config, read_continued(file))
        room -= one.features.nbytes
        if room < 0 and loaded:
            print(f"features of {len(files) - i} of {len(files)} files do not fit into memory", file=sys.stderr)
            break
        loaded.append(one)
        progress.show(i + 1, len(files), f"{sum(len(s.tokens) for s in loaded)} sequences")
    return loaded


def _room(device: torch.device) -> int:
    """Bytes that features may take."""
    if device.type == "cuda":
        return int(_DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])
    return _HOST_BYTES
