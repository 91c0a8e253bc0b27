"""A foreign program next to one process: a small model, its batches, and the page of `lib.doctor numbers` for both.

The programs here are written in plain PyTorch, and use nothing of this library except the lines of `watch`. One
process trains the same model on the same batches, so the page says where a program parts from it.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, nll_loss

from lib.doctor.numbers import compare_numbers, page_of_numbers, read_numbers, watch
from lib.launch import run
from lib.mesh import Group

VOCABULARY, WIDTH, LAYERS = 16, 8, 2
ROWS, CONTEXT = 24, 8
STEPS = 2
LR = 0.1
NO_TARGET = -100  # of a token that does not count, as in `nll_loss`
Batch = tuple[Tensor, Tensor]  # inputs and targets, [rows, context]


class ResidualBlock(nn.Module):
    """x plus an MLP of its layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class SmallModel(nn.Module):
    """Predicts each next token from the token before it.

    Tokens [rows, context] → logarithms of probabilities [rows, context, VOCABULARY].
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).log_softmax(-1)


def make_model(generator: torch.Generator) -> SmallModel:
    """A model in float64; norms and biases are not all 1 and 0, or some mistakes would not show."""
    model = SmallModel().double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.copy_(1 + 0.3 * drawn if name.endswith("norm.weight") else 0.5 * drawn)
    return model


def make_batches(generator: torch.Generator, padded: bool) -> list[Batch]:
    """A global batch for each step; if `padded`, few tokens count in the first half of the rows."""
    batches = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (ROWS, CONTEXT + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        if padded:
            targets[: ROWS // 2, 2:] = NO_TARGET
        batches.append((tokens[:, :-1].contiguous(), targets))
    return batches


def one_process(
    model: nn.Module, batches: Sequence[Batch], max_norm: float = math.inf, folder: str | None = None
) -> list[float]:
    """Train `model` in place, as one process does; the norm of the gradient of each step, before the clip."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=LR), []
    seen = watch(folder, model, optimizer, axes={})
    for x, y in batches:
        seen.batch(x, y)
        loss = nll_loss(model(x).flatten(0, 1), y.flatten(), ignore_index=NO_TARGET)
        optimizer.zero_grad()
        loss.backward()
        seen.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        seen.norm(norm)
        optimizer.step()
        norms.append(norm.item())
    return norms


def page_of_program(program: Callable, ranks: int = 2, padded: bool = False, max_norm: float | None = None) -> str:
    """What `python -m lib.doctor numbers` prints of a program on so many ranks, compared with one process.

    Args:
        program: (model, batches, folder), or with a `max_norm` (model, batches, max_norm, folder); it trains `model`.
        ranks: how many.
        padded: whether the batches have tokens that do not count.
        max_norm: to which gradients are clipped; None: they are not.
    """
    generator = torch.Generator().manual_seed(1)
    model, batches = make_model(generator), make_batches(generator, padded)
    given = (batches,) if max_norm is None else (batches, max_norm)
    with tempfile.TemporaryDirectory() as place:
        one, ours = (str(Path(place, name)) for name in ("one", "ours"))
        one_process(copy.deepcopy(model), *given, folder=one)
        run(_on_rank, ranks, program, model, given, ours)
        page = page_of_numbers(compare_numbers(read_numbers(one), read_numbers(ours)))
    return page.replace(f"{place}/", "")


def _on_rank(world: Group, program: Callable, model: nn.Module, given: tuple, folder: str) -> None:
    program(model, *given, folder)
