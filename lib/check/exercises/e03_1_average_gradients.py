"""03.1: replace each gradient by its mean over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import nn

from lib import comm
from lib.check.exercise import DTYPE, Data, Exercise, Mistake, means_of, random
from lib.mesh import Group

SHAPES = ((3, 4), (4,), (2, 3))


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    # Real ranks have equal weights; different ones on each rank show who touches them.
    return [{name: [random(generator, *s) for s in SHAPES] for name in ("weights", "gradients")} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    params = [nn.Parameter(w.clone()) for w in given["weights"]]
    frozen = nn.Parameter(torch.ones(2, dtype=DTYPE))
    for p, g in zip(params, given["gradients"], strict=True):
        p.grad = g.clone()
    answer([params[0], frozen, *params[1:]], group)
    return {
        "gradients": [p.grad for p in params],
        "weights": [p.detach() for p in params],
        "the grad of a frozen parameter": "None" if frozen.grad is None else "a tensor",
    }


def reference(given: list[Data]) -> list[Data]:
    means = means_of("gradients", given)
    return [{"gradients": means, "weights": g["weights"], "the grad of a frozen parameter": "None"} for g in given]


# ---- right programs -------------------------------------------------------------------------------------------------


def each(params: list[nn.Parameter], make: Callable) -> None:
    for p in params:
        if p.grad is not None:
            p.grad = make(p)


def averages(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group, op="mean"))


def averages_by_torch_distributed(params, group):
    for p in params:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def averages_in_one_message(params, group):
    grads = [p.grad for p in params if p.grad is not None]
    flat = comm.all_reduce(torch.cat([g.flatten() for g in grads]), group) / group.size
    for g, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(piece.view_as(g))


# ---- wrong programs -------------------------------------------------------------------------------------------------


def sums(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group))


def divides_twice(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group, op="mean") / group.size)


def forgets_to_assign(params, group):
    each(params, lambda p: (comm.all_reduce(p.grad, group, op="mean"), p.grad)[1])


def broadcasts(params, group):
    each(params, lambda p: comm.broadcast(p.grad, group, src=0))


def writes_into_weights(params, group):
    for p in params:
        if p.grad is not None:
            p.data = comm.all_reduce(p.grad, group, op="mean")


def averages_weights(params, group):
    for p in params:
        p.data = comm.all_reduce(p.data, group, op="mean")


def trains_the_frozen(params, group):
    for p in params:
        p.grad = comm.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, group, op="mean").detach()


EXERCISE = Exercise(
    id="03.1",
    title="average_gradients",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(averages, averages_by_torch_distributed, averages_in_one_message),
    mistakes=(
        Mistake(
            "Your gradients are n times too large: you summed and did not divide by the number of ranks n. Use "
            'op="mean", or divide by group.size.',
            sums,
        ),
        Mistake('Your gradients are n times too small: you divided twice. op="mean" divides already.', divides_twice),
        Mistake(
            "Each rank still has its own gradient. all_reduce returns a new tensor and leaves its argument alone: "
            "assign the result to p.grad.",
            forgets_to_assign,
        ),
        Mistake(
            "All ranks have the gradient of rank 0. A broadcast copies one rank's tensor; the mean needs all of them: "
            "use all_reduce.",
            broadcasts,
        ),
        Mistake(
            "You wrote the averaged gradients into the weights. Only p.grad may change here; the optimizer moves the "
            "weights.",
            writes_into_weights,
            about=("weights",),
        ),
        Mistake(
            "You averaged the weights. Average their gradients: p.grad, not p.data.",
            averages_weights,
            about=("weights",),
        ),
        Mistake(
            "A parameter that took no part now has a gradient. Leave p.grad alone where it is None: AdamW would decay "
            "a weight that was never trained.",
            trains_the_frozen,
            about=("frozen",),
        ),
    ),
)
