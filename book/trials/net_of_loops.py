"""The model that the loops of `loops.py` train, its optimizers, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

D = 4  # width of the model


class Largest(nn.Module):
    """Adds an embedding of the largest element, which is rescaled in forward if it is long."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(D, D, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.argmax(-1))


class Net(nn.Module):
    """A list of layers, and a head; biases are marked, as in Mamba's code. A layer may write its weights in forward."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        first = Largest() if writes else nn.Linear(D, D)
        self.blocks = nn.ModuleList([first, nn.LayerNorm(D), nn.Linear(D, D)])
        self.head = nn.Linear(D, 2)
        for name, p in self.named_parameters():
            p._no_weight_decay = name.endswith("bias")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def by_marks(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """AdamW in two groups, by an attribute of parameters; with an eps that does not enlarge roundings."""
    marked: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for _, p in named:
        marked[getattr(p, "_no_weight_decay", False)].append(p)
    groups = [{"params": marked[is_marked], "weight_decay": 0.1 * (not is_marked)} for is_marked in marked]
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-2)


OPTIMIZERS: dict[str, Callable] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": by_marks,
}


def rows_of(number: int, rank: int, broken: bool = False) -> Tensor:
    """Three rows of this rank for the backward of this number; NaN on rank 0 if they are `broken`."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(3, D, dtype=torch.float64, generator=generator)
    return x * torch.nan if broken and rank == 0 else x
