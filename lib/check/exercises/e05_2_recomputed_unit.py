"""05.2: a unit that gathers its parameters, computes, frees them, and does all again in backward."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist

from lib.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random, shards_of
from lib.check.listen import Heard, listen, raw
from lib.memory import MemoryTracker
from lib.mesh import Group

ROWS, WIDTH, HIDDEN = 2, 11, 31
SIZES = (HIDDEN * WIDTH, HIDDEN, WIDTH * HIDDEN)  # of the matrix up, its bias, and the matrix down
KEPT_BYTES = 8 * (sum(SIZES) // 2)  # half a unit, much more than input and output
SHARDS, FULL = "the shard, and the input", "more than half of the unit"


def compute(full: Tensor, x: Tensor) -> Tensor:
    up, bias, down = full[: sum(SIZES)].split(SIZES)
    return torch.relu(x @ up.view(HIDDEN, WIDTH).T + bias) @ down.view(WIDTH, HIDDEN).T


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    shards = shards_of(random(generator, sum(SIZES)), n)
    return [
        {"x": random(generator, ROWS, WIDTH), "shard": shard, "gradient": random(generator, ROWS, WIDTH)}
        for shard in shards
    ]


@raw
def body(answer: Callable, group: Group, given: Data) -> Data:
    x, shard = (given[name].clone().requires_grad_() for name in ("x", "shard"))
    waits: list[int] = []
    heard, memory = listen(on_wait=lambda: waits.append(1)), MemoryTracker()
    memory.count_as("parameter", shard)
    with memory:
        y = answer.apply(x, shard, compute)
        lost = heard.collectives > len(waits)  # the buffer of a call without wait() also stays
        keeps_much = saves_much(y) or lost or not falls(lambda: memory.live["activation"], KEPT_BYTES)
        result = y.detach().clone()
        y.backward(given["gradient"])
    return {
        "y": result,
        "gradient of x": x.grad,
        "gradient of the shard": shard.grad,
        "the shard, afterwards": shard.detach(),
        "kept for backward": FULL if keeps_much else SHARDS,
        "what was sent": amount(heard, group.size),
        "calls without wait": max(0, heard.collectives - len(waits)),
    }


def saves_much(y: Tensor) -> bool:
    """Whether a large tensor is in the context of the function, where falls() would wait for it in vain."""
    kept = [*getattr(y.grad_fn, "saved_tensors", ()), *getattr(y.grad_fn, "__dict__", {}).values()]
    return any(torch.is_tensor(x) and x.nbytes > KEPT_BYTES for x in kept)


def falls(live_bytes: Callable[[], int], most: int) -> bool:
    """Whether it is at most that, immediately or soon: gloo's thread frees a tensor some time after wait()."""
    until_s = time.monotonic() + 0.5
    while live_bytes() > most and time.monotonic() < until_s:
        time.sleep(0.005)
    return live_bytes() <= most


def amount(heard: Heard, n: int) -> str:
    halves = heard.sent_bytes(n) / ((n - 1) / n * 8 * sum(SIZES))
    kinds = Counter(kind for kind, _ in heard.calls)
    return f"{MORE}: {dict(sorted(kinds.items()))}" if halves > 3.3 else AS_NEEDED


def reference(given: list[Data]) -> list[Data]:
    n, found = len(given), []
    full = torch.cat([g["shard"] for g in given]).requires_grad_()
    for g in given:
        x = g["x"].clone().requires_grad_()
        y = compute(full, x)
        y.backward(g["gradient"])  # adds to the gradient of the others
        right = {"y": y.detach(), "gradient of x": x.grad, "the shard, afterwards": g["shard"]}
        found.append(right | {"kept for backward": SHARDS, "what was sent": AS_NEEDED, "calls without wait": 0})
    return [f | {"gradient of the shard": g} for f, g in zip(found, (full.grad / n).chunk(n), strict=True)]


# ---- right programs -------------------------------------------------------------------------------------------------


def gathered(shard: Tensor, wait: bool = True) -> Tensor:
    full = torch.zeros(dist.get_world_size(), len(shard), dtype=shard.dtype)
    work = dist.all_gather(list(full), shard.detach(), async_op=True)
    if wait:
        work.wait()
    return full.flatten()


def scattered(gradient: Tensor, shard: Tensor) -> Tensor:
    mine, n = torch.empty_like(shard), dist.get_world_size()
    dist.reduce_scatter(mine, list(gradient.chunk(n)))
    return mine / n


def unit(keep=False, gathers=1, reduce=scattered, of_x=lambda g: g, gather=gathered):
    class ShardedUnit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard, compute):
            full = gather(shard)
            ctx.compute = compute
            ctx.save_for_backward(x, shard, *[full] * keep)
            return compute(full, x)

        @staticmethod
        def backward(ctx, gradient):
            x, shard, *full = ctx.saved_tensors
            full = full or [gather(shard) for _ in range(gathers)]
            both = [z.detach().requires_grad_() for z in (full[0], x)]
            with torch.enable_grad():
                y = ctx.compute(*both)
            of_full, of_x_here = torch.autograd.grad(y, both, gradient)
            return of_x(of_x_here), reduce(of_full, shard), None

    return ShardedUnit


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until torch 2.13


class UnitWithFlatCalls(torch.autograd.Function):
    """By calls that take one tensor, a sum of one's own, and the gradients by a function."""

    @staticmethod
    def forward(x, shard, compute):
        return compute(UnitWithFlatCalls.whole(shard), x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.inputs = inputs

    @staticmethod
    def whole(shard):
        full = shard.new_empty(dist.get_world_size() * len(shard))
        all_gather(full, shard.detach())
        return full

    @staticmethod
    def backward(ctx, gradient):
        x, shard, compute = ctx.inputs
        _, back = torch.func.vjp(compute, UnitWithFlatCalls.whole(shard), x.detach())
        of_full, of_x = back(gradient)
        got = torch.empty_like(of_full)
        dist.all_to_all_single(got, of_full)
        return of_x, got.view(-1, len(shard)).mean(0), None


# ---- wrong programs -------------------------------------------------------------------------------------------------


def mine(full: Tensor) -> Tensor:
    return full.chunk(dist.get_world_size())[dist.get_rank()].clone()


def all_reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x / dist.get_world_size()


def into_the_shard(gradient: Tensor, shard: Tensor) -> Tensor:
    dist.reduce_scatter(shard.detach(), list(gradient.chunk(dist.get_world_size())))
    return shard.detach() / dist.get_world_size()


EXERCISE = Exercise(
    id="05.2",
    title="ShardedUnit",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(unit(), UnitWithFlatCalls),
    timeout_s=20,
    mistakes=(
        Mistake(
            "The gradients are right, but between forward and backward the full unit stays in memory: you gather only "
            "in forward, and save the result. Save x and the shard, and gather again in backward.",
            unit(keep=True),
            about=("gradient", "kept"),
        ),
        Mistake(
            "You gather three times: backward computes forward again and then needs the same parameters for the "
            "gradients. Gather once in backward, and use it for both.",
            unit(gathers=2),
        ),
        Mistake(
            "The gradients are right, but an all-reduce gives every rank the gradient of all shards, for twice the "
            "bytes. Each rank needs its own shard: reduce-scatter.",
            unit(reduce=lambda g, shard: mine(all_reduced(g))),
        ),
        Mistake(
            "The gradient of the shard is n times too large: it is the sum over the ranks, not the mean. Divide by n.",
            unit(reduce=lambda g, shard: scattered(g, shard) * dist.get_world_size()),
            about=("gradient",),
        ),
        Mistake(
            "The gradient of the shard is n times too small: you divided by n twice. ReduceOp.AVG divides already.",
            unit(reduce=lambda g, shard: scattered(g, shard) / dist.get_world_size()),
            about=("gradient",),
        ),
        Mistake(
            "The gradient of the shard covers only the rows of this rank: you cut your own gradient and sent nothing. "
            "Rows of the other ranks went through the same weights: reduce-scatter it.",
            unit(reduce=lambda g, shard: mine(g)),
            about=("gradient",),
        ),
        Mistake(
            "Backward returns no gradient of x, so the layers before this unit get none. autograd.grad takes several "
            "tensors: compute both gradients in one call.",
            unit(of_x=lambda g: None),
            about=("gradient",),
        ),
        Mistake(
            "You averaged the gradient of x over the ranks. Each rank has different rows: x is not shared, only the "
            "parameters are.",
            unit(of_x=all_reduced),
            about=("gradient",),
        ),
        Mistake(
            "You divided the gradient of x by n. That mean is over rows of all ranks, and x has only this rank's: "
            "divide the gradient of the shard alone.",
            unit(of_x=lambda g: g / dist.get_world_size()),
            about=("gradient",),
        ),
        Mistake(
            "You do not wait for a collective that you started with async_op=True: its buffer may not be filled when "
            "you read it. Keep the returned work and call wait() first.",
            unit(gather=lambda shard: gathered(shard, wait=False)),
            about=("without wait",),
        ),
        Mistake(
            "The shard is overwritten: you received its gradient in the memory of the parameter. torch.distributed "
            "writes into the tensor that it is given: allocate a new tensor for the output.",
            unit(reduce=into_the_shard),
            about=("afterwards",),
        ),
    ),
)
