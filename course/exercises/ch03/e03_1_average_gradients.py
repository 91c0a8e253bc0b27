"""03.1: replace each gradient by its mean over the ranks, where ranks lack the gradients of different parameters."""

import torch
from torch import distributed as dist
from torch import nn

from course.check.edits import exercise
from course.check.exercise import random
from lib import comm

SHAPES = ((3, 4), (4,), (2, 3), (2, 3), (2, 3), (5,))  # a layer and its bias, three experts, a norm
USED = ((0, 1, 2, 5), (0, 1, 4, 5))  # on even and on odd ranks: one expert each
FACTS = {"a parameter that no rank used": "None"}
NOBODYS, ALL_ZERO = 3, 1  # an expert that no rank used; a bias that all used and whose gradient is zero


def inputs(generator, n):
    # Real ranks have equal weights; different ones on each rank show who touches them.
    drawn = [{name: [random(generator, *s) for s in SHAPES] for name in ("weights", "gradients")} for _ in range(n)]
    for rank, given in enumerate(drawn):
        given["gradients"][ALL_ZERO].zero_()
        given["gradients"] = [g if i in USED[rank % 2] else None for i, g in enumerate(given["gradients"])]
    return drawn


def body(answer, group, given):
    params = [nn.Parameter(w.clone()) for w in given["weights"]]
    for p, g in zip(params, given["gradients"], strict=True):
        p.grad = None if g is None else g.clone()
    answer(params, group)
    return {
        "gradients": [p.grad for i, p in enumerate(params) if i != NOBODYS],
        "weights": [p.detach() for p in params],
        "a parameter that no rank used": "None" if params[NOBODYS].grad is None else "a tensor",
    }


def reference(given):
    used = [[g for g in of_ranks if g is not None] for of_ranks in zip(*(g["gradients"] for g in given), strict=True)]
    means = [sum(some) / len(given) for some in used if some]
    return [{"gradients": means, "weights": g["weights"]} for g in given]


def average_gradients(params, group):
    here = torch.tensor([float(p.grad is not None) for p in params])
    num_ranks = comm.all_reduce(here, group)  # that used each parameter
    for p, used in zip(params, num_ranks > 0, strict=True):
        if used:
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = comm.all_reduce(mine, group, op="mean")


def by_torch_distributed(params, group):
    used = [None] * dist.get_world_size()
    dist.all_gather_object(used, [p.grad is not None for p in params])
    for p, by_ranks in zip(params, zip(*used, strict=True), strict=True):
        if any(by_ranks):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def in_one_message(params, group):
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    used = torch.tensor([float(p.grad is not None) for p in params])
    flat = comm.all_reduce(torch.cat([*(g.flatten() for g in own), used]), group) / group.size
    *pieces, used = flat.split([*(p.numel() for p in params), len(params)])
    for p, piece, anywhere in zip(params, pieces, used, strict=True):
        p.grad = piece.view_as(p) if anywhere else None


MISTAKES = """
if used: => if p.grad is not None:
    You averaged gradients of different parameters. Each rank skips those that it did not use, and the all-reduces of
    two experts of one shape met: collectives match by order.
        All ranks must call all_reduce for the same ones.
op="mean" => op="sum"
    Your gradients are n times too large: you summed and did not divide.
        Use op="mean", or divide by group.size.
comm.all_reduce(mine, group, op="mean") => comm.all_reduce(mine, group, op="mean") / group.size
    Your gradients are n times too small: you divided twice.
        op="mean" divides already.
comm.all_reduce(mine, group, op="mean") => [comm.all_reduce(mine, group, op="mean"), None][p.grad is None]
    A rank that did not use a parameter still has None there, and the other ranks have the mean. Their optimizers then
    take different steps.
        Give the mean to every rank.
comm.all_reduce(mine, group, op="mean") => comm.all_reduce(mine, group) / used
num_ranks > 0 => num_ranks
    You divided by the number of ranks that used the parameter.
        The others have gradient 0: the mean is over all n.
num_ranks > 0 => num_ranks == group.size
    You averaged only the gradients that all ranks have.
        One rank that has one is enough: every rank must step with it.
comm.all_reduce(here, group) => comm.broadcast(here, group, src=0)
    You averaged only the gradients that rank 0 has.
        Ask all ranks: what rank 0 did not use, another may have used.
comm.all_reduce(mine, group, op="mean") => mean if (mean := comm.all_reduce(mine, group, op="mean")).any() else None
    A parameter that all ranks used has None, because its mean is zero. A gradient of zeros is a gradient: AdamW then
    moves the weight by its moments.
        Ask the ranks whether they have one; the values cannot tell.
p.grad = comm.all_reduce(mine, => comm.all_reduce(mine,
    Each rank still has its own gradients. all_reduce returns a new tensor.
        Assign the result to p.grad.
comm.all_reduce(mine, group, op="mean") => comm.broadcast(mine, group, src=0)
    All ranks have the gradient of rank 0: a broadcast copies one rank's tensor. The mean needs all.
        Use all_reduce.
in weights:
p.grad = comm.all_reduce(mine, => p.data = comm.all_reduce(mine,
    You wrote the averaged gradients into the weights.
        Only p.grad may change here; the optimizer moves the weights.
if used: => if True:
p.grad = comm.all_reduce(mine, => p.data = comm.all_reduce(p.data,
    You averaged the weights.
        Average their gradients: p.grad, not p.data.
in a parameter that no rank used: if used: => if True:
    A parameter that no rank used has a gradient.
        Leave None alone: AdamW would decay a weight that was never trained.
"""

EQUIVALENT = """
comm.all_reduce(here, group)  # that => (2 * (comm.all_reduce(here, group)))  # that
or comm.all_reduce(here, group)  # that => (100 * (comm.all_reduce(here, group)))  # that
or comm.all_reduce(here, group)  # that => comm.all_reduce(here, group, op="mean")  # that
    The count is only compared with 0.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(average_gradients, by_torch_distributed, in_one_message),
    tolerances={"weights": 0},
)
