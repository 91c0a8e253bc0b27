"""Correctness test of a schedule on a real model: a few steps in stages, and the same steps in one process.

The problem: a schedule that runs may still compute wrong gradients. The idea: train the same model on the same batches
once in stages and once in one process. Losses, gradients and weights must be the same to rounding.

    ranks = run(in_stages, 4, one_f_one_b(4, 8), model, batch)
    largest_difference(merged(ranks).gradients, in_one(model, batch).gradients)

`rehearse` measures the time of a schedule; this file checks its results and measures its memory.
Read before: `lib/pipeline/execute.py`. Chapter 8.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lib import comm
from lib.memory import MemoryTracker
from lib.mesh import Group
from lib.model import GPT, loss_term, mean_loss
from lib.pipeline.execute import execute
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.stage import Stage, parameters_of, stages_of

RATE = 1e-2  # learning rate of AdamW


class Trained(NamedTuple):
    """Result of some steps: the loss of each, and gradients and weights after the last, by name."""

    losses: list[float]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def in_stages(
    world: Group,
    schedule: Schedule,
    model: Callable[[], GPT],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    steps: int = 3,
) -> Trained:
    """Run some steps of AdamW in stages; return the gradients and weights of this rank.

    Args:
        model: function that makes the full model, equal on every rank.
        batch: function from the number of a step to its inputs and targets, int[B, T] each.
    """
    stages = stages_of(model(), schedule, world.rank)

    def forward_and_back(inputs: Tensor, targets: Tensor) -> Tensor:
        share = partial(loss_term, count=(targets != -100).sum())
        return execute(schedule, stages, world, inputs, targets, share).loss

    return _trained(parameters_of(stages), forward_and_back, batch, steps)


def in_one(model: Callable[[], GPT], batch: Callable[[int], tuple[Tensor, Tensor]], steps: int = 3) -> Trained:
    """Run the same steps in one process."""
    serial = model()

    def forward_and_back(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = mean_loss(serial(inputs), targets)
        loss.backward()
        return loss

    return _trained(dict(serial.named_parameters()), forward_and_back, batch, steps)


def _trained(named: Mapping[str, nn.Parameter], forward_and_back: Callable, batch: Callable, steps: int) -> Trained:
    optimizer, losses = torch.optim.AdamW(named.values(), lr=RATE), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(forward_and_back(*batch(step)).item())
        optimizer.step()
    return Trained(losses, {n: p.grad for n, p in named.items()}, {n: p.detach() for n, p in named.items()})


def merged(ranks: Iterable[Trained]) -> Trained:
    """Merge the results of all ranks; a tied weight is taken from the first of its ranks."""
    losses, gradients, weights = zip(*ranks, strict=True)
    return Trained(losses[0], ChainMap(*gradients), ChainMap(*weights))


def peak_bytes(
    world: Group, schedule: Schedule, piece: Callable[[], nn.Module], x: Tensor, recompute: bool = False
) -> int:
    """Peak bytes of activations and messages on this rank in a step, without its batch.

    Args:
        piece: function that makes the module of a stage, x[b, T, D] → y[b, T, D].
        x: [B, T, D], the batch and the targets of the last stage.
        recompute: as in `Stage`.
    """
    stages = {s: Stage(piece(), recompute=recompute) for s in schedule.stages_on(world.rank)}

    def step() -> None:
        share = lambda y, target: nn.functional.mse_loss(y, target) * (len(target) / len(x))  # noqa: E731
        execute(schedule, stages, world, x, x, share)

    step()  # gradients are allocated from now on
    comm.barrier(world)
    with MemoryTracker(*(stage.module for stage in stages.values())) as memory:
        memory.count_as("activation", x)  # there before and after
        before = memory.live["activation"]
        step()
    return memory.peak_by_kind["activation"] - before
