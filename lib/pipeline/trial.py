"""A schedule tried on a real model: a few steps in stages, and the same steps in one process.

The problem: a schedule that runs may still train something else. The idea: the same model, the same batches, the same
optimizer, once in stages and once in one process that has never heard of them. Losses, gradients and weights must be
the same to rounding.

    ranks = run(in_stages, 4, one_f_one_b(4, 8), model, batch)
    largest_difference(merged(ranks).gradients, in_one(model, batch).gradients)

`rehearse` says how long a schedule takes, this what it computes, and how much memory that needs.
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

RATE = 1e-2  # of AdamW


class Trained(NamedTuple):
    """What some steps came to: the loss of each, the gradients of the last one by name, and the weights after it."""

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
    """Some steps of AdamW in stages; this rank's gradients and weights.

    Args:
        model: makes the whole model, the same one on every rank.
        batch: from a step's number to its inputs and targets, int[B, T] each.
    """
    stages = stages_of(model(), schedule, world.rank)
    mine = parameters_of(stages)
    optimizer = torch.optim.AdamW(mine.values(), lr=RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        share = partial(loss_term, count=(targets != -100).sum())
        result = execute(schedule, stages, world, inputs, targets, share)
        losses.append(result.loss.item())
        optimizer.step()
    return _trained(losses, mine)


def in_one(model: Callable[[], GPT], batch: Callable[[int], tuple[Tensor, Tensor]], steps: int = 3) -> Trained:
    """The same steps in one process."""
    serial = model()
    optimizer = torch.optim.AdamW(serial.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = mean_loss(serial(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return _trained(losses, dict(serial.named_parameters()))


def _trained(losses: list[float], named: Mapping[str, nn.Parameter]) -> Trained:
    return Trained(losses, {n: p.grad for n, p in named.items()}, {n: p.detach() for n, p in named.items()})


def merged(ranks: Iterable[Trained]) -> Trained:
    """What all ranks have, in one. Each knows the losses; a tied weight is given as the first of its ranks has it."""
    losses, gradients, weights = zip(*ranks, strict=True)
    return Trained(losses[0], ChainMap(*gradients), ChainMap(*weights))


def peak_bytes(
    world: Group, schedule: Schedule, piece: Callable[[], nn.Module], x: Tensor, recompute: bool = False
) -> int:
    """The most that activations and messages take on this rank in a step, in bytes; its batch is not counted.

    Args:
        piece: makes the module of a stage, from x[b, T, D] to y[b, T, D].
        x: [B, T, D], the batch and what the last stage compares with.
        recompute: as in `Stage`.
    """
    stages = {s: Stage(piece(), recompute=recompute) for s, r in enumerate(schedule.rank_of) if r == world.rank}

    def step() -> None:
        share = lambda y, target: nn.functional.mse_loss(y, target) * (len(target) / len(x))  # noqa: E731
        execute(schedule, stages, world, x, x, share)

    step()  # gradients are there from now on
    comm.barrier(world)
    with MemoryTracker(*(stage.module for stage in stages.values())) as memory:
        memory.count_as("activation", x)  # there before and after
        before = memory.live["activation"]
        step()
    return memory.peak_by_kind["activation"] - before
