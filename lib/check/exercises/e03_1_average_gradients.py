"""03.1: replace each gradient by its mean over the ranks, where ranks lack the gradients of different parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lib import comm
from lib.check.exercise import Data, Exercise, Mistake, random
from lib.mesh import Group

SHAPES = ((3, 4), (2, 3), (2, 3), (2, 3), (4,))  # a layer, three experts, a bias
USED = ((0, 1, 4), (0, 3, 4))  # on even and on odd ranks: one expert each
NOBODYS, ALL_ZERO = 2, 4  # an expert that no rank used; a bias that all used and whose gradient is zero


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    # Real ranks have equal weights; different ones on each rank show who touches them.
    drawn = [{name: [random(generator, *s) for s in SHAPES] for name in ("weights", "gradients")} for _ in range(n)]
    for rank, given in enumerate(drawn):
        given["gradients"][ALL_ZERO].zero_()
        given["gradients"] = [g if i in USED[rank % 2] else None for i, g in enumerate(given["gradients"])]
    return drawn


def body(answer: Callable, group: Group, given: Data) -> Data:
    params = [nn.Parameter(w.clone()) for w in given["weights"]]
    for p, g in zip(params, given["gradients"], strict=True):
        p.grad = None if g is None else g.clone()
    answer(params, group)
    return {
        "gradients": [p.grad for i, p in enumerate(params) if i != NOBODYS],
        "weights": [p.detach() for p in params],
        "the grad of a parameter that no rank used": "None" if params[NOBODYS].grad is None else "a tensor",
    }


def reference(given: list[Data]) -> list[Data]:
    n, by_parameter = len(given), zip(*(g["gradients"] for g in given), strict=True)
    used = [[g for g in of_ranks if g is not None] for of_ranks in by_parameter]
    right = {
        "gradients": [sum(some) / n for some in used if some],
        "the grad of a parameter that no rank used": "None",
    }
    return [right | {"weights": g["weights"]} for g in given]


# ---- right programs -------------------------------------------------------------------------------------------------


def each(params: list[nn.Parameter], make: Callable) -> None:
    """Where this rank has a gradient."""
    for p in params:
        if p.grad is not None:
            p.grad = make(p)


def each_used(params: list[nn.Parameter], group: Group, make: Callable, op: str = "max") -> None:
    """Where any rank has a gradient, or with `op="min"` all ranks."""
    used = comm.all_reduce(torch.tensor([float(p.grad is not None) for p in params]), group, op=op)
    for p, anywhere in zip(params, used, strict=True):
        if anywhere:
            p.grad = make(p)


def mine(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def averages(params, group):
    each_used(params, group, lambda p: comm.all_reduce(mine(p), group, op="mean"))


def averages_by_torch_distributed(params, group):
    used = [None] * dist.get_world_size()
    dist.all_gather_object(used, [p.grad is not None for p in params])
    for p, by_ranks in zip(params, zip(*used, strict=True), strict=True):
        if any(by_ranks):
            p.grad = mine(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def averages_in_one_message(params, group):
    used = torch.tensor([float(p.grad is not None) for p in params])
    flat = comm.all_reduce(torch.cat([*(mine(p).flatten() for p in params), used]), group) / group.size
    *pieces, used = flat.split([*(p.numel() for p in params), len(params)])
    for p, piece, anywhere in zip(params, pieces, used, strict=True):
        p.grad = piece.view_as(p) if anywhere else None


# ---- wrong programs -------------------------------------------------------------------------------------------------


def skips_its_own(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group, op="mean"))


def keeps_none(params, group):
    means = [comm.all_reduce(mine(p), group, op="mean") for p in params]
    for p, mean in zip(params, means, strict=True):
        p.grad = None if p.grad is None else mean


def all_must_use(params, group):
    each_used(params, group, lambda p: comm.all_reduce(p.grad, group, op="mean"), op="min")


def asks_rank_0(params, group):
    used = comm.broadcast(torch.tensor([float(p.grad is not None) for p in params]), group, src=0)
    for p, on_rank_0 in zip(params, used, strict=True):
        if on_rank_0:
            p.grad = comm.all_reduce(mine(p), group, op="mean")


def none_where_zero(params, group):
    for p in params:
        mean = comm.all_reduce(mine(p), group, op="mean")
        p.grad = mean if mean.any() else None


def divides_by_users(params, group):
    for p in params:
        users = comm.all_reduce(torch.tensor(float(p.grad is not None)), group)
        p.grad = comm.all_reduce(mine(p), group) / users if users else None


def trains_the_unused(params, group):
    for p in params:
        p.grad = comm.all_reduce(mine(p), group, op="mean")


def sums(params, group):
    each_used(params, group, lambda p: comm.all_reduce(mine(p), group))


def divides_twice(params, group):
    each_used(params, group, lambda p: comm.all_reduce(mine(p), group, op="mean") / group.size)


def forgets_to_assign(params, group):
    for p in params:
        comm.all_reduce(mine(p), group, op="mean")


def broadcasts(params, group):
    each_used(params, group, lambda p: comm.broadcast(mine(p), group, src=0))


def writes_into_weights(params, group):
    def write(p):
        p.data = comm.all_reduce(mine(p), group, op="mean")
        return p.grad

    each_used(params, group, write)


def averages_weights(params, group):
    for p in params:
        p.data = comm.all_reduce(p.data, group, op="mean")


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
            "You averaged gradients of different parameters. Each rank skips the parameters that it did not use, and "
            "the all-reduces of two experts, of the same shape, met each other: collectives match by order. All ranks "
            "must call all_reduce for the same parameters.",
            skips_its_own,
        ),
        Mistake(
            "Your gradients are n times too large: you summed and did not divide by the number of ranks n. Use "
            'op="mean", or divide by group.size.',
            sums,
        ),
        Mistake('Your gradients are n times too small: you divided twice. op="mean" divides already.', divides_twice),
        Mistake(
            "A rank that did not use a parameter still has None there, and the other ranks have the mean. Their "
            "optimizers then take different steps: give the mean to every rank.",
            keeps_none,
        ),
        Mistake(
            "You divided by the number of ranks that used the parameter. A rank that did not use it has the gradient "
            "0, and counts: the mean is over all n ranks.",
            divides_by_users,
        ),
        Mistake(
            "You averaged the gradients that all ranks have, and no others. One rank that has a gradient is enough: "
            "every rank must step with it.",
            all_must_use,
        ),
        Mistake(
            "You averaged the gradients that rank 0 has, and no others. Ask all ranks: what rank 0 did not use, "
            "another rank may have used.",
            asks_rank_0,
        ),
        Mistake(
            "A parameter that all ranks used has None, because its mean is zero. A gradient of zeros is a gradient: "
            "AdamW then moves the weight by its moments. Ask the ranks whether they have one; the values cannot tell.",
            none_where_zero,
        ),
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
            "A parameter that no rank used now has a gradient. Leave p.grad alone where it is None on all ranks: AdamW "
            "would decay a weight that was never trained.",
            trains_the_unused,
            about=("no rank",),
        ),
    ),
)
