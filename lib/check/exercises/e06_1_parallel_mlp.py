"""06.1: a column-parallel layer, GELU, a row-parallel layer: the output of the full MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist
from torch.nn.functional import gelu, linear, pad

from lib import comm, cost
from lib.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, everywhere, random
from lib.check.listen import listen
from lib.mesh import Group

WIDTH, HIDDEN = 6, 8  # of x; of each rank: gathering them sends more than a sum of y
ARGUMENTS = ("x", "up", "up_bias", "down", "down_bias")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    replicated = {"x": random(generator, 2, WIDTH), "down_bias": random(generator, WIDTH)}
    shapes = {"up": (HIDDEN, WIDTH), "up_bias": (HIDDEN,), "down": (WIDTH, HIDDEN)}
    return [replicated | {name: random(generator, *shape) for name, shape in shapes.items()} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard, n = listen(), group.size
    y = answer(*(given[name].clone() for name in ARGUMENTS), group)
    much = heard.sent_bytes(n) > 1.2 * cost.wire_bytes("all_reduce", given["x"].nbytes, n)
    return {"y": y, "what was sent": MORE if much else AS_NEEDED}


def reference(given: list[Data]) -> list[Data]:
    terms = [gelu(g["x"] @ g["up"].T + g["up_bias"]) @ g["down"].T for g in given]
    return everywhere({"y": sum(terms) + given[0]["down_bias"], "what was sent": AS_NEEDED}, given)


# ---- right programs -------------------------------------------------------------------------------------------------


def mlp(x, up, up_bias, down, down_bias, group, act=gelu, inside=0, outside=1, op="sum", before=False, ends=True):
    hidden = x @ up.T + up_bias
    term = act(comm.all_reduce(hidden, group) if before else hidden) @ down.T + inside * down_bias
    return (comm.all_reduce(term, group, op) if ends else term) + outside * down_bias


def mlp_by_torch_distributed(x, up, up_bias, down, down_bias, group):
    y = linear(gelu(linear(x, up, up_bias)), down, down_bias if dist.get_rank() == 0 else None)
    dist.all_reduce(y)
    return y


def mlp_in_two_halves(x, up, up_bias, down, down_bias, group):
    hidden = torch.einsum("bd,fd->bf", x, up).add(up_bias)
    term = torch.einsum("bf,df->bd", gelu(hidden), down).flatten()
    term = pad(term, (0, -len(term) % group.size))
    full = comm.all_gather(comm.reduce_scatter(term, group), group)
    return full[: x.numel()].view(x.shape) + down_bias


# ---- wrong programs -------------------------------------------------------------------------------------------------


def but(**wrong) -> Callable:
    return lambda *given: mlp(*given, **wrong)


def gathers_the_hidden_features(x, up, up_bias, down, down_bias, group):
    hidden = comm.all_gather(gelu(x @ up.T + up_bias), group, dim=1)
    return hidden @ comm.all_gather(down, group, dim=1).T + down_bias


EXERCISE = Exercise(
    id="06.1",
    title="parallel_mlp",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(mlp, mlp_by_torch_distributed, mlp_in_two_halves),
    mistakes=(
        Mistake(
            "The bias of the second layer is in the sum once per rank. It is replicated: add it once, after the "
            "all-reduce.",
            but(inside=1, outside=0),
            about=("y",),
        ),
        Mistake(
            "Each rank returns its partial sum, of the right shape: nothing was summed over the ranks. The second "
            "layer ends in an all-reduce.",
            but(ends=False),
            about=("y",),
        ),
        Mistake(
            "You took the mean of the partial sums. They are terms of one long dot product: add them up.",
            but(op="mean"),
            about=("y",),
        ),
        Mistake(
            "You summed over the ranks before GELU, and again at the end. After the first layer each rank has "
            "different hidden features, complete: nothing is to be summed there.",
            but(before=True),
            about=("y",),
        ),
        Mistake(
            "Your all-reduce is in the wrong place. Before GELU each rank has different hidden features, complete. "
            "Sum the partial sums after the second layer.",
            but(before=True, ends=False),
            about=("y",),
        ),
        Mistake("There is no GELU between the layers.", but(act=lambda hidden: hidden), about=("y",)),
        Mistake("The bias of the second layer is missing.", but(outside=0), about=("y",)),
        Mistake(
            "The bias of the first layer is missing. Each rank adds its shard, which belongs to its hidden features, "
            "before GELU.",
            lambda x, up, up_bias, *given: mlp(x, up, 0, *given),
            about=("y",),
        ),
        Mistake(
            "The output is right, but you send more than one all-reduce of it. No rank needs all hidden features, or "
            "full weights.",
            gathers_the_hidden_features,
        ),
    ),
)
