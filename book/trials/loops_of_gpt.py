"""Loops of `loops.py` on a GPT in any layout, with `parallelize`.

`ParallelModel.backward` is forward, backward and finish together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from book.trials.loops import Alone, Loop, compare
from book.trials.net_of_loops import OPTIMIZERS
from lib import comm
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, GPTConfig, mean_loss
from lib.parallel import parallelize

CONFIG = GPTConfig(vocab_size=12, context=4, d_model=8, num_heads=2, num_layers=2)
BATCH = 12  # sequences


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the backward of this number."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, CONFIG.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def marked() -> GPT:
    """A GPT whose biases are marked, as in Mamba's code."""
    torch.manual_seed(0)
    model = GPT(CONFIG).double()
    for name, p in model.named_parameters():
        p._no_weight_decay = name.endswith("bias")
    return model


class GPTAlone(Alone):
    """In one process. Gradients of a NaN are left to `loops.py`: tokens cannot be broken."""

    def __init__(self, optimizer: str) -> None:
        self.model = self.module = marked()
        self.ranks, self.step_clears = range(1), True
        self.optimizer = OPTIMIZERS[optimizer](self.module.named_parameters())
        self._prepare()

    def loss(self, rank: int, broken: bool) -> Tensor:
        inputs, targets = batch_of(self.number)
        return mean_loss(self.model(inputs), targets)

    def weights(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.module.state_dict().items()}


class OnLayout(GPTAlone):
    """In a layout, on all of its ranks."""

    def __init__(self, world: Group, layout: Layout, optimizer: str) -> None:
        self.world, mesh = world, Mesh(MeshShape(**layout.sizes), world)
        self.model = parallelize(marked(), mesh, layout, OPTIMIZERS[optimizer])
        self.module = nn.ModuleList(stage.module for stage in self.model.stages.values())
        self.optimizer = self.model.optimizer
        self._prepare()

    def backward(self, how: str, clears: str | None = None, broken: bool = False) -> None:
        if clears:
            self.clear(clears)
        self.model.backward(*batch_of(self.number))
        self.number += 1

    def look(self) -> None:
        self.norms.append(self.model.evaluate(*batch_of(self.number)).item())

    def finish(self) -> None:
        """`backward` has."""

    def clip(self, max_norm: float) -> None:
        self.norms.append(self.model.clip(max_norm).item())

    def step(self) -> None:
        self.model.owner.step()

    def weights(self) -> dict[str, Tensor]:
        state, shapes = self.model.full_state_dict(), {key: shape for key, (_, shape) in self.model.serial.items()}
        full = {key: state.get(key, torch.empty(shape, dtype=torch.float64)) for key, shape in shapes.items()}
        return {key: comm.broadcast(x, self.world) for key, x in full.items()}

    def write(self, values: dict[str, Tensor]) -> None:
        self.model.load_full_state_dict(values)


def run_loop_of_gpt(world: Group, layout: Layout, optimizer: str, loop: Loop) -> float | str:
    """What `compare` says of a loop in a layout."""
    return compare(loop, GPTAlone(optimizer), OnLayout(world, layout, optimizer))
