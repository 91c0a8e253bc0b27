"""03.7: a program whose replicas are equal after one step and differ after two: find the mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import mse_loss

from course.check.exercise import Data, Exercise, Mistake, everywhere, random
from course.exercises.ch03.e03_4_accumulate import model_of
from lib import comm
from lib.mesh import Group

STEPS = 3


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    weights = [random(generator, 5, 4), random(generator, 5), random(generator, 2, 5), random(generator, 2)]

    def batch() -> tuple:
        return random(generator, 6, 4), random(generator, 6, 2)

    return [{"weights": weights, "batches": [batch() for _ in range(STEPS)]} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    """The weights after one step, after two, and after three, each from the start."""
    found = {}
    for steps in range(1, STEPS + 1):
        model = model_of(given["weights"])
        answer(model, given["batches"][:steps], group)
        found[f"weights after step {steps}"] = [p.detach() for p in model.parameters()]
    return found


def reference(given: list[Data]) -> list[Data]:
    model, found = model_of(given[0]["weights"]), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for k in range(STEPS):
        optimizer.zero_grad()
        for g in given:
            x, y = g["batches"][k]
            (mse_loss(model(x), y) / len(given)).backward()
        optimizer.step()
        found[f"weights after step {k + 1}"] = [p.detach().clone() for p in model.parameters()]
    return everywhere(found, given)


# ---- programs -------------------------------------------------------------------------------------------------------


def program(model, batches, group, reset=True, after=None, fill=False, give=False):
    """The program of the task, with a place for each repair."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.01)
    sizes = [p.numel() for p in params]
    bucket = torch.zeros(sum(sizes), dtype=params[0].dtype)

    def point_into_bucket():
        for p, piece in zip(params, bucket.split(sizes), strict=True):
            p.grad = piece.view_as(p)

    point_into_bucket()
    for x, y in batches:
        mse_loss(model(x), y).backward()
        if fill:
            bucket = torch.cat([p.grad.flatten() for p in params])
        bucket.copy_(comm.all_reduce(bucket, group, op="mean"))
        if give:
            point_into_bucket()
        optimizer.step()
        if after is not None:
            for p in params:
                p.data = after(p.data, group)
        if reset:
            optimizer.zero_grad()


def train_replicas(model, batches, group):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, group, op="mean")
        optimizer.step()


EXERCISE = Exercise(
    id="03.7",
    title="train_replicas",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(train_replicas, partial(program, fill=True, give=True)),
    mistakes=(
        Mistake(
            "The replicas still differ from step 2 on: from then on nothing of a rank's gradient is in the bucket. "
            "After step 1, where is the memory that backward writes to? Compare p.grad.data_ptr() with "
            "bucket.data_ptr() at the start of each step.",
            program,
        ),
        Mistake(
            "The replicas are equal, but the mean of the previous step is still in the bucket, and backward adds to "
            "it. Write zeros into the bucket before each backward.",
            partial(program, reset=False),
        ),
        Mistake(
            "You broadcast weights after each step. The replicas are equal, and follow rank 0, which from step 2 on "
            "uses its own gradient alone. Repair the gradient.",
            partial(program, after=comm.broadcast),
        ),
        Mistake(
            "You average the weights after each step. The replicas are equal, but from step 2 on each rank takes an "
            "AdamW step with its own gradient, and AdamW is not linear: a mean of steps is not the step of the mean "
            "gradient. Repair the gradient.",
            partial(program, after=partial(comm.all_reduce, op="mean")),
        ),
        Mistake(
            "The replicas now differ from step 1 on: each p.grad is the rank's own gradient, and the optimizer does "
            "not read the bucket. Either backward writes into the bucket, or its pieces are copied to p.grad after the "
            "all-reduce.",
            partial(program, fill=True),
        ),
    ),
)
