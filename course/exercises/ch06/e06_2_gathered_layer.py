"""06.2: a column-parallel layer that gathers its output, with both autograd functions, in raw torch.distributed."""

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, after_backward, drawn
from course.check.listen import listen, raw
from lib import cost

ROWS, WIDTH, EACH = 2, 15, 5  # of x; features of each layer; of one rank
LAYERS = ("the first weight", "the second weight")  # the second layer reads the gathered output of the first
FORWARD, BACKWARD = "what forward sends", "what backward sends"
FACTS = {FORWARD: AS_NEEDED, BACKWARD: AS_NEEDED, "calls without wait": 0}


def inputs(generator, n):
    first, second = LAYERS
    replicated = {"x": (ROWS, WIDTH), "gradient": (ROWS, n * EACH)}
    return drawn(generator, n, replicated, {first: (EACH, WIDTH), second: (EACH, n * EACH)})


@raw
def body(answer, group, given):
    heard, n = listen(), group.size
    x, *weights = (given[name].clone().requires_grad_() for name in ("x", *LAYERS))
    y = x
    for weight in weights:
        y = answer(torch.tanh(y), weight, group)
        if not torch.is_tensor(y) or y.shape != given["gradient"].shape:
            return {"y": y}
    forward = heard.calls_if_more(n, 1.05 * 2 * cost.wire_bytes("all_gather", y.nbytes, n))
    heard.forget()
    found = after_backward(y, given["gradient"], x=x, **dict(zip(LAYERS, weights, strict=True)))
    of_both = sum(cost.wire_bytes("all_reduce", z.nbytes, n) for z in (x, y))
    found |= {FORWARD: forward, BACKWARD: heard.calls_if_more(n, 1.05 * of_both)}
    return found | {"calls without wait": heard.unfinished}


def reference(given):
    x = given[0]["x"].clone().requires_grad_()
    weights = {name: torch.cat([g[name] for g in given]).requires_grad_() for name in LAYERS}
    y = x
    for weight in weights.values():
        y = torch.tanh(y) @ weight.T
    found = after_backward(y, given[0]["gradient"], x=x)
    of_ranks = zip(*(weight.grad.split(EACH) for weight in weights.values()), strict=True)
    return [found | {f"gradient of {k}": g for k, g in zip(LAYERS, both, strict=True)} for both in of_ranks]


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        n, r = dist.get_world_size(), dist.get_rank()
        return gradient.chunk(n, dim=1)[r]


def gathered_layer(x, weight, group):
    return Gather.apply(Copy.apply(x) @ weight.T)


def total(x):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def puts_its_own_back(x, weight, group):
    """Shards of the other ranks are constants; a hook is the backward of Copy."""
    inside = x.view_as(x)
    inside.register_hook(total)
    y = inside @ weight.T
    parts = [torch.zeros_like(y) for _ in range(group.size)]
    dist.all_gather(parts, y.detach(), async_op=True).wait()
    parts[group.rank] = y
    return torch.cat(parts, 1)


MISTAKES = """
in y, gradient:
gradient.chunk(n, dim=1)[r] => total(gradient).chunk(n, dim=1)[r]
    The gradients of a layer are n times too large: backward of Gather sums.
        After it all ranks compute the same, so each has the full gradient: take your columns. (Reduce-scatter where
        each rank uses the tensor differently.)
dist.all_reduce(gradient) =>
    The second layer is right, and all before it has only this rank's term of the gradient.
        Backward of Copy must sum.
Copy.apply(x) @ weight.T => Copy.apply(x @ weight.T)
    Copy comes after the matmul: it sums gradients of different columns, and that of x is summed nowhere.
        It belongs before the matmul, where all ranks have the same x.
gradient = gradient.clone() => gradient = gradient / dist.get_world_size()
    Backward of Copy takes the mean. Each rank has the term through its own outputs.
        Add them up.
return x.view_as(x) => return total(x)
    Copy also sums in forward. There x is replicated, so the result is n times x.
        Sum only its gradient.
in y: torch.cat(parts, dim=1) => torch.cat(parts).view(len(y), -1)
    The columns are in a wrong order. all_gather receives the tensors of the ranks in the order of ranks, and a view of
    that memory as [B, out] mixes rows.
        Concatenate them along dim 1.
gradient.chunk(n, dim=1)[r] => gradient.chunk(n, dim=1)[0]
    Backward of Gather returns the columns of rank 0 on all ranks.
        Each rank needs the columns that it computed.
in all:
Copy.apply(x) @ weight.T => (Copy.apply(x) @ weight.T).detach()
    y has no graph: dist.all_gather writes into new tensors, and autograd does not differentiate it.
        Use a Function.
dist.all_gather(parts, y) => parts = [y * (rank == dist.get_rank()) for rank in range(len(parts))]
torch.cat(parts, dim=1) => total(torch.cat(parts, dim=1))
    All values are right, but you send twice as many bytes as necessary in forward: an all-reduce of tensors that are
    mostly zero.
        An all-gather sends each shard once.
return x.view_as(x) => return total(x) / dist.get_world_size()
    All values are right, but you send more than two all-gathers in forward: an all-reduce of x for each layer, too.
        Before the matmul x is replicated: forward of Copy sends nothing.
gradient.chunk(n, dim=1)[r] => total(gradient).chunk(n, dim=1)[r] / n
    All values are right, but backward sends twice as many all-reduces as necessary: one of the gradient of the output
    for each layer, too, and that gradient is equal on all ranks already.
        Backward of Gather takes the columns of this rank, and sends nothing.
in without wait: dist.all_gather(parts, y) => dist.all_gather(parts, y, async_op=True)
    You do not wait for a collective that you started with async_op=True: its buffers may not be filled when you read
    them.
        Keep the returned work and call wait() first.
"""

EXERCISE = exercise(
    globals(), points=3, right=(gathered_layer, puts_its_own_back), edited=(gathered_layer, Copy, Gather)
)
