"""15.17: a program under DistributedDataParallel, in which a token does not count alike on all ranks."""

import torch
from torch import distributed as dist
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, everywhere
from course.exercises.ch15.trained import changes, right_changes
from course.practise.foreign import ROWS, make_batches, make_model
from lib.doctor.numbers import watch

FORWARD = "sequences in one forward"
FACTS = {FORWARD: AS_NEEDED}


def inputs(generator, n):
    """Few tokens count in the first half of the sequences: ranks have different counts."""
    model, batches = make_model(generator), make_batches(generator, padded=True)
    runs = {"step 1": (batches[:1],), "both steps": (batches,)}
    return everywhere({"model": model, "runs": runs}, range(n))


def body(answer, group, given):
    found, _, rows = changes(answer, given, None)
    return found | {FORWARD: AS_NEEDED if rows <= ROWS // group.size else MORE}


reference = right_changes


def steps_under_ddp(model, batches, folder):
    rank, dp = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = watch(folder, ddp, optimizer)
    for x, y in batches:
        x, y = x.chunk(dp)[rank], y.chunk(dp)[rank]
        seen.batch(x, y)
        count = (y != -100).sum()
        dist.all_reduce(count)
        logs = ddp(x).flatten(0, 1)
        loss = nll_loss(logs, y.flatten(), reduction="sum") * dp / count
        optimizer.zero_grad()
        loss.backward()
        seen.backward(loss)
        optimizer.step()


def by_weighted_means(model, batches, folder):
    """The mean of this rank's tokens, with the weight of their number; the global batch says all counts."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x, y in batches:
        mine = y.chunk(dp)[rank]
        mean = nll_loss(ddp(x.chunk(dp)[rank]).flatten(0, 1), mine.flatten())
        optimizer.zero_grad()
        (mean * dp * (mine != -100).sum() / (y != -100).sum()).backward()
        optimizer.step()


def by_own_sums(model, batches, folder):
    """Without the means of DistributedDataParallel: a message for each gradient."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    for x, y in batches:
        logs = model(x.chunk(dp)[rank]).flatten(0, 1)
        model.zero_grad()
        (nll_loss(logs, y.chunk(dp)[rank].flatten(), reduction="sum") / (y != -100).sum()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.1 * p.grad


MISTAKES = """
nll_loss(logs, y.flatten(), reduction="sum") * dp / count => nll_loss(logs, y.flatten())
or nll_loss(logs, y.flatten(), reduction="sum") * dp / count => nll_loss(logs, y.flatten())
seen.backward(loss) => dist.all_reduce(loss)
    That is still the mean of the ranks' means: a token counts more on a rank that has fewer of them.
        Every term has the same denominator: the number of tokens that count in the global batch.
dist.all_reduce(count) =>
    You have the sum, and divide it by this rank's count: the mean of its tokens, and dp times that.
        Sum the count over the ranks before you divide.
reduction="sum") * dp / count => reduction="sum") / count
    Your gradients are dp times too small. The denominator is the global count, and then
    DistributedDataParallel divides by dp as well: it takes the mean of the gradients, not their sum.
        Multiply the loss by dp.
reduction="sum") * dp / count => reduction="sum") / dp / count
    Your gradients are dp² times too small: you divide by dp, and DistributedDataParallel does it again.
        Multiply the loss by dp: that undoes the division.
(y != -100).sum() => torch.tensor(y.numel())
    You divide by all tokens. A target of -100 adds nothing to the sum.
        Count the targets that are not -100.
dist.all_reduce(count) => dist.all_reduce(count); count = count / dp
    You divide by the mean count of a rank and multiply by dp as well. One of the two undoes the division by dp in
    DistributedDataParallel, both are once too many.
        The sum of this rank, times dp, divided by the global count.
nll_loss(logs, y.flatten(), reduction="sum") * dp / count => nll_loss(logs, y.flatten())
seen.backward(loss) => own = (y != -100).sum(); [p.grad.mul_(dp * own / count) for p in ddp.parameters()]
    You give each rank its weight after the sum. By then all ranks have the mean of all gradients, and each multiplies
    it by a different number: the copies of the model drift apart.
        The weight belongs to a term of the sum: multiply the loss, before backward.
in sequences in one forward: x, y = x.chunk(dp)[rank], y.chunk(dp)[rank] => x, y = x, y
    Each rank processes the global batch. Then the gradient is right, and dp ranks take as long as one.
        Leave each rank its own sequences, and correct the denominator.
in change: lambda model, batches, folder: None
    No weight of the given model has changed.
        Train the model itself, not a copy of it.
optimizer.zero_grad() =>
    Step 1 is right. In step 2 each gradient still contains the gradient of step 1.
        Clear the gradients in each step.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(steps_under_ddp, by_weighted_means, by_own_sums),
    ranks=(2, 4),
    tolerances={"change": 1e-6},  # a count in float32, as `1 / count` makes it, is right as well
)
