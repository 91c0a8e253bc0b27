"""03.8: a loop that hangs because ranks have different numbers of batches: find the mistake in its report."""

import torch
from torch.nn.functional import mse_loss

from course.check.edits import exercise
from course.check.exercise import DTYPE, everywhere, random
from course.exercises.ch03.e03_4_accumulate import model_of
from lib import comm

LR = 0.1


def inputs(generator, n):
    weights = [random(generator, *shape) for shape in ((5, 4), (5,), (2, 5), (2,))]
    counts = [4, 2, 3, 0][:n] if n < 5 else [*range(n)]  # of four ranks, one has no batch at all
    return [
        {"weights": weights, "batches": [(random(generator, 6, 4), random(generator, 6, 2)) for _ in range(count)]}
        for count in counts
    ]


def body(answer, group, given):
    model = model_of(given["weights"])
    answer(model, given["batches"], group)
    return {"weights": [p.detach() for p in model.parameters()]}


def reference(given):
    model = model_of(given[0]["weights"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for k in range(max(len(g["batches"]) for g in given)):
        x, y = (
            torch.cat(one) for one in zip(*(g["batches"][k] for g in given if k < len(g["batches"])), strict=True)
        )
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return everywhere({"weights": [p.detach() for p in model.parameters()]}, given)


def train_uneven(model, batches, group):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max"))
    for k in range(steps):
        optimizer.zero_grad(set_to_none=False)
        here = k < len(batches)
        if here:
            x, y = batches[k]
            mse_loss(model(x), y).backward()
        # of the ranks that have a batch
        num_ranks = comm.all_reduce(torch.tensor(float(here)), group)
        for p in model.parameters():
            mine = p.grad if here else torch.zeros_like(p)
            p.grad = comm.all_reduce(mine, group) / num_ranks
        optimizer.step()


def in_one_message(model, batches, group):
    """The gradients of a sum and the number of samples travel together; the step ends when nobody has any."""
    params = list(model.parameters())
    for k in range(10**6):
        sums, count = [torch.zeros_like(p) for p in params], 0
        if k < len(batches):
            x, y = batches[k]
            sums = torch.autograd.grad(mse_loss(model(x), y) * len(x), params)
            count = len(x)
        flat = torch.cat([*(g.flatten() for g in sums), torch.tensor([count], dtype=DTYPE)])
        *pieces, total = comm.all_reduce(flat, group).split([*(p.numel() for p in params), 1])
        if not total:
            return
        with torch.no_grad():
            for p, piece in zip(params, pieces, strict=True):
                p -= LR * piece.view_as(p) / total


def fewest(batches, group):
    return int(comm.all_reduce(torch.tensor(len(batches)), group, op="min"))


def repeated(batches, group):
    """As often as the longest rank needs; a rank without batches has zeros."""
    most = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max"))
    nothing = [(torch.zeros(6, 4, dtype=DTYPE), torch.zeros(6, 2, dtype=DTYPE))]
    return [(batches or nothing)[k % max(len(batches), 1)] for k in range(most)]


def padded(batches, group):
    """As many as the longest rank has, the last one again and again; a rank without batches has zeros."""
    most = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max"))
    nothing = [(torch.zeros(6, 4, dtype=DTYPE), torch.zeros(6, 2, dtype=DTYPE))]
    return [*batches, *((batches or nothing)[-1:] * (most - len(batches)))]


MISTAKES = """
hangs
steps = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max")) => steps = len(batches)
    That is still the given loop: a rank with fewer batches leaves it, and the others wait for its all-reduce.
        All ranks must make the same number of steps. How do they find out how many?
steps = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max")) => steps = fewest(batches, group)
    All ranks stop with the one that has the fewest batches, and the rest of the samples is never used.
        Go on until the rank with the most is done: the others take part in its all-reduces with zeros.
steps = int( => batches = padded(batches, group); steps = int(
    A rank that has run out repeats its last batch until the others are done: those samples count too much.
        A rank without a batch adds nothing to the sum, and does not count in the mean.
steps = int( => batches = repeated(batches, group); steps = int(
    A rank that has run out begins again with its first batch: those samples count too much.
        A rank without a batch adds nothing to the sum, and does not count in the mean.
optimizer.zero_grad(set_to_none=False) => pass
x, y = batches[k] => x, y = batches[k]; optimizer.zero_grad()
p.grad if here else => p.grad if p.grad is not None else
or
optimizer.zero_grad(set_to_none=False) => pass
x, y = batches[k] => x, y = batches[k]; optimizer.zero_grad()
p.grad if here else => p.grad if p.grad is not None else
/ num_ranks => / group.size
    A rank that has run out sends the gradient of the step before once more: its p.grad is not empty.
        Without a batch, send zeros.
/ num_ranks => / group.size
    You divide by all ranks, also where some have no batch: the last steps are too short.
        Divide by the number of ranks that have one. An all-reduce of 0 or 1 tells it.
/ num_ranks =>
    The gradients are sums over the ranks, too large by as many as have a batch.
        Divide by the number of ranks that have one.
lr=0.1 => lr=0.01
or lr=0.1 => lr=0.001
    You train with another learning rate than 0.1.
        Pass lr=0.1: without lr=, SGD takes 0.001.
optimizer.zero_grad(set_to_none=False) =>
    Gradients are never emptied: backward adds to the mean of the step before.
        Empty them before each backward.
optimizer.step() => optimizer.step() if here else None
    A rank without a batch keeps its weights, while the others go on: the replicas differ at the end.
        It has the same mean as all: it steps too.
p.grad = comm.all_reduce(mine, group) / num_ranks => comm.all_reduce(mine, group)
    Each rank steps with its own gradient.
        all_reduce returns a new tensor: assign the mean to p.grad.
"""

EXERCISE = exercise(globals(), points=2, right=(train_uneven, in_one_message))
