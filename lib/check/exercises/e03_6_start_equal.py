"""03.6: all ranks start from the weights and buffers of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import distributed as dist
from torch import nn

from lib import comm
from lib.check.exercise import DTYPE, Data, Exercise, Mistake, everywhere, random
from lib.mesh import Group


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    shapes = ((3, 2), (3,), (3,), (3,))
    return [
        {
            "parameters": [random(generator, *s) for s in shapes],
            "buffers": [random(generator, 3), random(generator, 3).abs(), torch.tensor(5 + 2 * rank)],
        }
        for rank in range(n)
    ]


def body(answer: Callable, group: Group, given: Data) -> Data:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(DTYPE)
    model[0].bias.requires_grad_(False)
    values = given["parameters"] + given["buffers"]
    with torch.no_grad():
        for x, value in zip((*model.parameters(), *model.buffers()), values, strict=True):
            x.copy_(value)
    answer(model, group)
    return {"parameters": [p.detach() for p in model.parameters()], "buffers": list(model.buffers())}


def reference(given: list[Data]) -> list[Data]:
    return everywhere(given[0], given)


# ---- programs -------------------------------------------------------------------------------------------------------


def start_equal(model, group, of=comm.broadcast, buffers=True, frozen=True):
    tensors = [p for p in model.parameters() if frozen or p.requires_grad]
    with torch.no_grad():
        for x in tensors + (list(model.buffers()) if buffers else []):
            x.copy_(of(x, group))


def start_equal_by_torch_distributed(model, group):
    for x in model.state_dict().values():
        dist.broadcast(x, src=0)


EXERCISE = Exercise(
    id="03.6",
    title="start_equal",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(start_equal, start_equal_by_torch_distributed),
    mistakes=(
        Mistake(
            "Nothing changed. broadcast returns a new tensor and does not write to its argument: copy the result into "
            "the parameter (x.copy_(...), under torch.no_grad()).",
            lambda model, group: [comm.broadcast(p, group) for p in model.parameters()],
        ),
        Mistake(
            "The parameters are equal, the buffers are not. The running means of a batch norm belong to the model too: "
            "model.buffers().",
            partial(start_equal, buffers=False),
        ),
        Mistake(
            "You averaged the weights of the ranks. They are equal now, and much smaller than any initialisation makes "
            "them: take those of rank 0.",
            partial(start_equal, of=partial(comm.all_reduce, op="mean"), buffers=False),
            about=("parameters",),
        ),
        Mistake(
            "All ranks have the weights of the last rank. Broadcast from src=0.",
            partial(start_equal, of=lambda x, group: comm.broadcast(x, group, src=group.size - 1)),
        ),
        Mistake(
            "The frozen parameter was left out. It is not trained, but the model uses it: take all parameters.",
            partial(start_equal, frozen=False),
            about=("parameters",),
        ),
    ),
)
