"""05.2: a unit that gathers its parameters, computes, frees them, and does all again in backward."""

import time

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, after_backward, drawn, random, shards_of
from course.check.kept import saved_bytes
from course.check.listen import listen, raw
from lib import cost
from lib.memory import MemoryTracker

ROWS, WIDTH, HIDDEN = 2, 11, 31
SIZES = (HIDDEN * WIDTH, HIDDEN, WIDTH * HIDDEN)  # of the matrix up, its bias, and the matrix down
SHARDS, FULL = "the shard, and the input", "more than half of the unit"
UNIT_BYTES = 8 * sum(SIZES)
KEPT_BYTES = UNIT_BYTES / 2  # much more than the shard, input and output
FORWARD, BACKWARD = "what forward sends", "what backward sends"
AGAIN = "the unit is gathered again in backward"
FACTS = {"kept for backward": SHARDS, FORWARD: AS_NEEDED, BACKWARD: AS_NEEDED, "calls without wait": 0, AGAIN: True}


def compute(full, x):
    up, bias, down = full[: sum(SIZES)].split(SIZES)
    return torch.relu(x @ up.view(HIDDEN, WIDTH).T + bias) @ down.view(WIDTH, HIDDEN).T


def inputs(generator, n):
    both = {name: (ROWS, WIDTH) for name in ("x", "gradient")}
    shards = shards_of(random(generator, sum(SIZES)), n)
    return [own | {"shard": shard} for own, shard in zip(drawn(generator, n, {}, both), shards, strict=True)]


@raw
def body(answer, group, given):
    x, shard = (given[name].clone().requires_grad_() for name in ("x", "shard"))
    heard, memory, n = listen(), MemoryTracker(), group.size
    memory.count_as("parameter", shard)
    with memory:
        y = answer.apply(x, shard, compute)
        forward = heard.calls_if_more(n, 1.1 * cost.wire_bytes("all_gather", UNIT_BYTES, n))
        heard.forget()
        frees = soon(lambda: memory.live["activation"] <= KEPT_BYTES)
        # The buffer of a call without wait() also stays.
        keeps_much = saved_bytes(y) > KEPT_BYTES or heard.unfinished or not frees
        found = after_backward(y, given["gradient"], x=x, **{"the shard": shard})
    return found | {
        "the shard, afterwards": shard.detach(),
        "kept for backward": FULL if keeps_much else SHARDS,
        FORWARD: forward,
        AGAIN: heard.sent_bytes(n) > 1.5 * cost.wire_bytes("reduce_scatter", UNIT_BYTES, n),
        BACKWARD: heard.calls_if_more(n, 2.1 * cost.wire_bytes("all_gather", UNIT_BYTES, n)),
        "calls without wait": heard.unfinished,
    }


def soon(holds):
    """Whether it does, immediately or after a while: gloo's thread frees a tensor some time after wait()."""
    until_s = time.monotonic() + 1
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.005)
    return holds()


def reference(given):
    full, found = torch.cat([g["shard"] for g in given]).requires_grad_(), []
    for g in given:  # backward adds to the gradient of the others
        x = g["x"].clone().requires_grad_()
        found.append(after_backward(compute(full, x), g["gradient"], x=x) | {"the shard, afterwards": g["shard"]})
    of_shards = (full.grad / len(given)).chunk(len(given))
    return [one | {"gradient of the shard": shard} for one, shard in zip(found, of_shards, strict=True)]


class ShardedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, compute):
        ctx.save_for_backward(x, shard)
        ctx.compute = compute
        return compute(gathered(shard), x)

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        full = gathered(shard).requires_grad_()
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.compute(full, x)
        of_full, of_x = torch.autograd.grad(y, (full, x), gradient)
        n, mine = dist.get_world_size(), torch.empty_like(shard)
        dist.reduce_scatter(mine, list(of_full.chunk(n)))
        return of_x, mine / n, None


def gathered(shard):
    n = dist.get_world_size()
    parts = [torch.empty_like(shard) for _ in range(n)]
    dist.all_gather(parts, shard.detach())
    return torch.cat(parts)


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until torch 2.13


def gathered_flat(shard):
    full = shard.new_empty(dist.get_world_size() * len(shard))
    all_gather(full, shard.detach())
    return full


class UnitWithFlatCalls(torch.autograd.Function):
    """By calls that take one tensor, a sum of one's own, and the gradients by a function."""

    @staticmethod
    def forward(x, shard, compute):
        return compute(gathered_flat(shard), x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.inputs = inputs

    @staticmethod
    def backward(ctx, gradient):
        x, shard, compute = ctx.inputs
        _, back = torch.func.vjp(compute, gathered_flat(shard), x.detach())
        of_full, of_x = back(gradient)
        got = torch.empty_like(of_full)
        dist.all_to_all_single(got, of_full)
        return of_x, got.view(-1, len(shard)).mean(0), None


def averaged(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()


MISTAKES = """
in gradient, kept, again: ctx.compute = compute => ctx.compute, ctx.full = compute, gathered(shard)
return compute(gathered(shard), x) => return compute(ctx.full, x)
full = gathered(shard).requires_grad_() => full = ctx.full.requires_grad_()
    The gradients are right, but between forward and backward the full unit stays in memory: you gather only in forward,
    and save the result.
        Save x and the shard, and gather again in backward.
in gradient, kept, again: ctx.compute = compute => ctx.compute, ctx.full = compute, gathered(shard)
return compute(gathered(shard), x) => return compute(ctx.full, x)
or
ctx.compute = compute => ctx.compute, ctx.part = compute, gathered(shard)[:1]
return compute(gathered(shard), x) => return compute(gathered(shard), x)
    The gradients are right, and backward gathers the unit again, but between forward and backward more than half of it
    stays in memory all the same. A view keeps all the memory that it views.
        Save x and the shard, and nothing else that came from the gathered tensor.
full = gathered(shard).requires_grad_() => full, again = gathered(shard).requires_grad_(), gathered(shard)
    You gather twice in backward, which computes forward, then needs the same parameters.
        Gather once in it, use it twice.
return compute(gathered(shard), x) => return gathered(shard)[:0].sum() + compute(gathered(shard), x)
    You gather twice in forward.
        Gather once, and hand the full tensor to compute.
dist.reduce_scatter(mine, list(of_full.chunk(n))) => mean = averaged(of_full)
return of_x, mine / n => return of_x, mean.chunk(n)[dist.get_rank()]
    The gradients are right, but an all-reduce sends twice the bytes.
        A rank needs only its own shard: reduce-scatter.
in y:
return compute(gathered(shard), x) => return compute(gathered(shard.float()).double(), x)
    In forward the parameters are float32 on the way, and the shards are float64: half of their digits are lost.
        Gather in the dtype of the shard: torch.empty_like(shard) has it.
in gradient:
return of_x, mine / n, None => return of_x, mine, None
    The gradient of the shard is n times too large: it is the sum over the ranks, not the mean.
        Divide by n.
return of_x, mine / n, None => return of_x, mine / n / n, None
    The gradient of the shard is n times too small: you divided by n twice.
        ReduceOp.AVG divides already.
dist.reduce_scatter(mine, list(of_full.chunk(n))) =>
return of_x, mine / n => return of_x, of_full.chunk(n)[dist.get_rank()]
    The gradient of the shard covers only the rows of this rank: you cut your own gradient and sent nothing.
        Rows of the other ranks went through the same weights: reduce-scatter it.
return of_x, mine / n, None => return None, mine / n, None
    Backward returns no gradient of x: layers before get none. autograd.grad takes several tensors.
        Compute both.
return of_x, mine / n, None => return averaged(of_x), mine / n, None
    You averaged the gradient of x over the ranks. Each rank has different rows.
        Only the parameters are shared.
return of_x, mine / n, None => return of_x / n, mine / n, None
    You divided the gradient of x by n. x has only this rank's rows.
        Divide the gradient of the shard alone.
in without wait: list(of_full.chunk(n))) => list(of_full.chunk(n)), async_op=True)
    You do not wait for the reduce-scatter that you start with async_op=True: its output may not be filled.
        Keep the work, and call wait().
in without wait: dist.all_gather(parts, shard.detach()) => dist.all_gather(parts, shard.detach(), async_op=True)
    You do not wait for a collective with async_op=True: its buffer may not be filled.
        Keep the work, and call wait().
in afterwards:
n, mine = dist.get_world_size(), torch.empty_like(shard) => n, mine = dist.get_world_size(), shard.detach()
    The shard is overwritten: you received its gradient in the memory of the parameter. torch.distributed writes into
    the tensor that it is given.
        Allocate a new tensor for the output.
"""

EXERCISE = exercise(
    globals(), points=3, right=(ShardedUnit, UnitWithFlatCalls), edited=(ShardedUnit, gathered), timeout_s=20
)
