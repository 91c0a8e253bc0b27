"""07.2: a column-parallel layer that keeps only this rank's tokens, in torch.distributed itself."""

from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch import nn

from course.check.edits import exercise
from course.check.exercise import after_backward, drawn
from course.check.kept import kept_bytes, saved_bytes
from course.check.listen import listen, raw

FORWARD, BACKWARD, KEPT, WAITED = "sent in forward", "sent in backward", "kept for backward", "waited for"
UNITS = ("nothing", "1 unit", "2 units", "3 units", "4 units")
OWN, MORE = "this rank's tokens", "more than this rank's tokens"
ALL, SOME = "every call", "not every call"
FACTS = {FORWARD: UNITS[1], BACKWARD: UNITS[2], KEPT: OWN, WAITED: ALL}


def inputs(generator, n):
    rows, tokens, d, f = n, n, 2 * n, 3  # n divides each: along whichever dim one cuts, it gives something
    shapes = {"x": (rows, tokens, d), "W": (f, d), "b": (f,), "gradient": (rows, n * tokens, f)}
    return drawn(generator, n, {}, shapes)


@raw
def body(answer, group, given):
    if not hasattr(answer, "apply"):
        raise TypeError("GatheredLinear is to be a class, a torch.autograd.Function with forward and backward")
    x = given["x"].requires_grad_()
    W, b = (nn.Parameter(given[name]) for name in ("W", "b"))
    heard, y = listen(), watched(answer, x.shape).apply(x, W, b)
    if not torch.is_tensor(y) or y.shape != given["gradient"].shape:
        return {"y": y}
    kept = saved_bytes(y, W, b) + sum(kept_bytes({**getattr(answer, "__dict__", {})}).values())
    found = {FORWARD: units(heard, group.size, x, 1), KEPT: MORE if kept > x.nbytes else OWN}
    heard.forget()
    found |= after_backward(y, given["gradient"], x=x, W=W, b=b) | {BACKWARD: units(heard, group.size, x, 2)}
    if SEEN_BY.x is not None:
        found["gradient of x"] = SEEN_BY.x
    return found | {WAITED: SOME if heard.unfinished else ALL}


def units(heard, n, x, most):
    """In all-gathers of x, a rank's shard, rounded up; above `most`, with the calls that sent them."""
    count = heard.sent_bytes(n) / ((n - 1) * x.nbytes)
    words = next((words for units, words in enumerate(UNITS) if count < units + 0.1), "more than 4 units")
    calls = [call for call, _ in heard.calls] + ["a message"] * bool(heard.sent)
    return words if count < most + 0.1 else f"{words}: {', '.join(sorted(calls))}"


SEEN_BY = SimpleNamespace(x=None)  # the gradient of x that backward returned, of any shape


def watched(function, shape):
    """The same autograd function. It notes the gradient of x, and lets only one of the right shape pass."""
    SEEN_BY.x = None
    if not isinstance(function, type) or not issubclass(function, torch.autograd.Function):
        return function

    def backward(ctx, gradient):
        result = function.backward(ctx, gradient)
        of_x, *others = result if isinstance(result, tuple) else (result,)
        SEEN_BY.x = of_x
        return (of_x if getattr(of_x, "shape", None) == shape else None, *others)

    return type(function)(function.__name__, (function,), {"backward": staticmethod(backward)})


def reference(given):
    n, x = len(given), torch.cat([g["x"] for g in given], 1)
    of_x = sum(g["gradient"] @ g["W"] for g in given).chunk(n, 1)
    return [
        {
            "y": x @ g["W"].T + g["b"],
            "gradient of x": mine,
            "gradient of W": g["gradient"].flatten(0, 1).T @ x.flatten(0, 1),
            "gradient of b": g["gradient"].sum((0, 1)),
        }
        for mine, g in zip(of_x, given, strict=True)
    ]


class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W, b):
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, x)
        ctx.save_for_backward(x, W)
        return torch.cat(shards, dim=1) @ W.T + b

    @staticmethod
    def backward(ctx, dy):
        x, W = ctx.saved_tensors
        n = dist.get_world_size()
        shards = [torch.empty_like(x) for _ in range(n)]
        gathering = dist.all_gather(shards, x, async_op=True)
        parts = [part.contiguous() for part in (dy @ W).chunk(n, dim=1)]
        gathering.wait()
        dx = torch.empty_like(x)
        scattering = dist.reduce_scatter(dx, parts, async_op=True)
        tokens = torch.cat(shards, dim=1)
        dW = dy.flatten(0, 1).T @ tokens.flatten(0, 1)
        scattering.wait()
        return dx, dW, dy.sum((0, 1))


class WithoutContext(GatheredLinear):
    @staticmethod
    def forward(x, W, b):
        full = x.new_empty(len(x), dist.get_world_size() * x.shape[1], x.shape[2])
        dist.all_gather(list(full.chunk(dist.get_world_size(), 1)), x)
        return nn.functional.linear(full, W, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])


def all_reduced(x, op=dist.ReduceOp.SUM):
    dist.all_reduce(x, op)
    return x


def averaged(x):
    return all_reduced(x, dist.ReduceOp.AVG)


def mine(dy):
    """The part that is of this rank's tokens."""
    return dy.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


ALSO_RIGHT = """
dx = torch.empty_like(x) => parts, dx = torch.stack(parts), torch.empty(n, *x.shape, dtype=x.dtype)
dist.reduce_scatter(dx, parts, async_op=True) => dist.all_to_all_single(dx, parts, async_op=True)
return dx => return dx.sum(0)
    By an all-to-all, with a sum of its own.
"""

MISTAKES = """
in waited for: gathering.wait() =>
or scattering.wait() =>
    You started a call with async_op=True and did not wait for it. Until handle.wait() returns, its buffers hold
    anything.
        Keep the handle, and wait before you read them.
ctx.save_for_backward(x, W) => ctx.save_for_backward(x, W, *shards)
x, W = ctx.saved_tensors => x, W, *shards = ctx.saved_tensors
shards = [torch.empty_like(x) for _ in range(n)] =>
gathering = dist.all_gather(shards, x, async_op=True) =>
gathering.wait() =>
or ctx.save_for_backward(x, W) => ctx.x, ctx.W, ctx.shards = x, W, shards
x, W = ctx.saved_tensors => x, W, shards = ctx.x, ctx.W, ctx.shards
shards = [torch.empty_like(x) for _ in range(n)] =>
gathering = dist.all_gather(shards, x, async_op=True) =>
gathering.wait() =>
or ctx.save_for_backward(x, W) => ctx.save_for_backward(x, W); GatheredLinear.shards = shards
shards = [torch.empty_like(x) for _ in range(n)] => shards = GatheredLinear.shards
gathering = dist.all_gather(shards, x, async_op=True) =>
gathering.wait() =>
    All numbers are right, and every rank keeps all tokens for backward.
        Save this rank's, and gather again in backward.
dx = torch.empty_like(x) => dx = torch.cat(parts, dim=1)
dist.reduce_scatter(dx, parts, async_op=True) => dist.all_reduce(dx, async_op=True)
return dx => return dx.chunk(n, dim=1)[dist.get_rank()]
    All numbers are right, but backward sends 3 units: an all-reduce gives every rank the gradient of all tokens, and
    you keep yours.
        A reduce-scatter sends half of that.
dx = torch.empty_like(x) => terms = [torch.empty_like(dy @ W) for _ in range(n)]
dist.reduce_scatter(dx, parts, async_op=True) => dist.all_gather(terms, dy @ W, async_op=True)
return dx => return sum(terms).chunk(n, dim=1)[dist.get_rank()]
    All numbers are right, but backward sends every rank's gradient of all tokens to every rank.
        They are partial sums, and each rank needs the sum for its own tokens: reduce-scatter.
torch.empty_like(x) for _ in range(dist.get_world_size()) => torch.zeros_like(x) for _ in range(dist.get_world_size())
dist.all_gather(shards, x) => shards[dist.get_rank()] = x
torch.cat(shards, dim=1) @ W.T => all_reduced(torch.cat(shards, dim=1)) @ W.T
    All numbers are right, but forward sends 2 units: an all-reduce of zeros of all ranks but one.
        Use an all-gather.
dx = torch.empty_like(x) => dx = parts[dist.get_rank()]
scattering = dist.reduce_scatter(dx, parts, async_op=True) =>
scattering.wait() =>
    The gradient of x is this rank's partial sum: backward only cuts.
        Every rank used your tokens with its own columns of W, so there are n partial sums to add: reduce-scatter.
dx = torch.empty_like(x) => dx = torch.cat(parts, dim=1)
dist.reduce_scatter(dx, parts, async_op=True) => dist.all_reduce(dx, async_op=True)
    Backward adds up and does not cut: x has some of the tokens.
        A reduce-scatter along dim 1 does both.
dist.reduce_scatter(dx, parts, async_op=True) => dist.reduce_scatter(dx, parts, dist.ReduceOp.AVG, async_op=True)
    You averaged the gradient of x.
        Ranks used the same tokens with different columns: it is the sum, ReduceOp.SUM.
(dy @ W).chunk(n, dim=1) => dy.chunk(n, dim=1)
dx = torch.empty_like(x) => dx = torch.empty_like(parts[0])
return dx => return dx @ W
    You reduce-scattered the gradient of y, and multiplied by W afterwards. Each rank's gradient of y belongs to its own
    columns.
        Multiply by W first, then there are partial sums of one thing.
(dy @ W).chunk(n, dim=1) => (dy @ W).chunk(n, dim=0)
dx = torch.empty_like(x) => dx = torch.empty_like(parts[0])
    Backward cuts along dim 0, the sequences, where forward put tokens together.
        Use chunk(n, dim=1), contiguous.
dx = torch.empty_like(x) => copies = [torch.empty_like(dy @ W) for _ in range(n)]
dist.reduce_scatter(dx, parts, async_op=True) => dist.all_gather(copies, dy @ W, async_op=True)
return dx => return torch.cat(copies, dim=1)
    For the gradient of x, backward gathers.
        A gather's transpose is a reduce-scatter: gradients of copies are added up.
torch.cat(shards, dim=1) @ W.T => torch.cat(shards, dim=0) @ W.T
    Forward put the shards together along dim 0, as more sequences.
        They are shards of one: torch.cat(shards, dim=1).
tokens = torch.cat(shards, dim=1) => tokens = torch.cat(shards, dim=0)
    Backward put the gathered shards together along dim 0.
        The tokens are in the wrong order there, and the gradient of W pairs each with the gradient of a different
        token: dim=1, as in forward.
in gradient:
dy.flatten(0, 1).T @ tokens.flatten(0, 1) => mine(dy).flatten(0, 1).T @ x.flatten(0, 1)
dy.sum((0, 1)) => mine(dy).sum((0, 1))
    The gradients of W and b come from this rank's tokens alone. Their columns met all tokens.
        Gather x again for W, and add up all of dy for b.
dy.flatten(0, 1).T @ tokens.flatten(0, 1) => mine(dy).flatten(0, 1).T @ x.flatten(0, 1)
    The gradient of W comes from this rank's tokens alone. Its columns met all tokens.
        Gather x again.
dy.sum((0, 1)) => mine(dy).sum((0, 1))
    The gradient of b comes from this rank's tokens alone. It was added to all tokens.
        Add up dy over all of them.
dy.flatten(0, 1).T @ tokens.flatten(0, 1) => all_reduced(mine(dy).flatten(0, 1).T @ x.flatten(0, 1))
dy.sum((0, 1)) => all_reduced(mine(dy).sum((0, 1)))
or dy.flatten(0, 1).T @ tokens.flatten(0, 1) => averaged(mine(dy).flatten(0, 1).T @ x.flatten(0, 1))
dy.sum((0, 1)) => averaged(mine(dy).sum((0, 1)))
or dy.flatten(0, 1).T @ tokens.flatten(0, 1) => all_reduced(mine(dy).flatten(0, 1).T @ x.flatten(0, 1))
or dy.flatten(0, 1).T @ tokens.flatten(0, 1) => averaged(mine(dy).flatten(0, 1).T @ x.flatten(0, 1))
    The gradient of W comes from this rank's tokens, and is combined over the ranks, as in data parallelism. There the
    replicas are equal, here each rank has its own columns: these gradients do not belong together.
        Take all tokens for it, gathered again, and send nothing.
return dx, dW, dy.sum((0, 1)) => return dx, all_reduced(dW), all_reduced(dy.sum((0, 1)))
    You summed the gradients of W and b.
        Each rank has its own columns and all tokens: these gradients are complete.
return dx, dW, dy.sum((0, 1)) => return dx, averaged(dW), averaged(dy.sum((0, 1)))
    You averaged the gradients of W and b over the ranks, as in data parallelism.
        Each rank has its own columns and all tokens: these gradients are complete.
return dx, dW, dy.sum((0, 1)) => return dx, all_reduced(dW), dy.sum((0, 1))
or return dx, dW, dy.sum((0, 1)) => return dx, averaged(dW), dy.sum((0, 1))
    You combined the gradient of W over the ranks.
        Each rank has its own columns and all tokens: this gradient is complete.
return dx, dW, dy.sum((0, 1)) => return dx, dW, None
    The gradient of b is missing.
        b was added to every token: add up dy over the sequences and the tokens.
in y: @ W.T + b => @ W.T
    The bias is not in the result.
        Add b, which belongs to this rank's columns.
"""

EXERCISE = exercise(globals(), points=2, right=(GatheredLinear, WithoutContext))
