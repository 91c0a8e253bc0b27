"""Batches for exercise 03.8, of which some are corrupt, and the weights that one process gets from them."""

import torch
from torch.nn.functional import mse_loss

from course.check.exercise import everywhere, random
from course.exercises.ch03.e03_4_accumulate import model_of

LR = 0.1
STEPS = 4
HUGE = 1e200  # its square is infinite, its gradient is not
# What is in a target of a corrupt batch, and step -> the ranks that have one. What ends in NaN has an epoch of its own.
EPOCHS = {
    "weights after a loss of NaN": (torch.nan, {1: {1}, 2: {0, 1}}),
    "weights after a step in which no loss is finite": (torch.nan, {1: {0, 1, 2, 3}}),
    "weights after an infinite loss": (HUGE, {3: {1}}),
}


def weights_from(generator):
    return [random(generator, *shape) for shape in ((5, 4), (5,), (2, 5), (2,))]


def batches_from(generator, count):
    return [(random(generator, 6, 4), random(generator, 6, 2)) for _ in range(count)]


def trained(weights, steps):
    """The weights after these steps, each with the batches of all ranks that have one."""
    model = model_of(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batches in filter(None, steps):
        x, y = map(torch.cat, zip(*batches, strict=True))
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def inputs_with_corrupt(generator, n):
    """All epochs for each rank."""
    weights = weights_from(generator)
    given = [{"weights": weights} | {epoch: batches_from(generator, STEPS) for epoch in EPOCHS} for _ in range(n)]
    for epoch, (corrupt, steps) in EPOCHS.items():
        for k, ranks in steps.items():
            for rank in ranks & {*range(n)}:
                _, y = given[rank][epoch][k]
                y[0, 0] = corrupt
    return given


def reference_without_corrupt(given):
    found = {}
    for epoch in EPOCHS:
        steps = zip(*(g[epoch] for g in given), strict=True)
        found[epoch] = trained(given[0]["weights"], map(usable, steps))
    return everywhere(found, given)


def usable(batches):
    """Those without a corrupt target."""
    return [(x, y) for x, y in batches if (y.abs() < HUGE).all()]
