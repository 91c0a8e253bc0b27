"""03.2: the mean gradient over all samples, where ranks have different numbers of them."""

import torch

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import everywhere, random
from lib import comm


def inputs(generator, n):
    counts = [2 + 3 * r for r in range(n)]
    counts[1] = 0  # a rank without samples
    return [{"sum": random(generator, 4, 3) * count, "count": count} for count in counts]


def body(answer, group, given):
    return {"gradient": answer(given["sum"].clone(), given["count"], group)}


def reference(given):
    total, count = sum(g["sum"] for g in given), sum(g["count"] for g in given)
    return everywhere({"gradient": total / count}, given)


def global_gradient(gradient_of_sum, count, group):
    total = comm.all_reduce(torch.tensor(count), group)
    return comm.all_reduce(gradient_of_sum, group) / total


def by_weights(g, count, group):
    share = count / comm.all_gather(torch.tensor([float(count)], dtype=torch.float64), group).sum()
    return comm.all_reduce(g / max(count, 1) * share, group)


def without_the_empty_rank(g, count, group):
    return global_gradient(g, count, group) if count else g


MISTAKES = """
hangs
without_the_empty_rank
    A rank without samples returns before the others communicate, and they wait for it.
        Its sum is zeros and its count is 0: it takes part in every collective like all others.
comm.all_reduce(gradient_of_sum, group) / total => comm.all_reduce(gradient_of_sum / max(count, 1), group, op="mean")
    That is the mean of the ranks' means: few samples count too much.
        Add up the sums and the counts, then divide once.
=> comm.all_reduce(gradient_of_sum / count, group, op="mean")
    Everything is nan: the rank without samples divided 0 by 0, and all got its nan.
        Divide once, by the total count.
=> comm.all_reduce(gradient_of_sum / max(count, 1), group)
    You divided each rank's sum by its own count and added up.
        Divide by the count of all ranks, after adding up.
torch.tensor(count), group => torch.tensor(float(count)), group, op="mean"
    The gradient is n times too large: you divided by the mean of the counts.
        Divide by their sum.
comm.all_reduce(gradient_of_sum, group) => comm.all_reduce(gradient_of_sum, group, op="mean")
    The gradient is n times too small: you averaged the sums over the ranks.
        Add them up.
comm.all_reduce(gradient_of_sum, group) / total => comm.all_reduce(gradient_of_sum, group, op="mean")
    You divided the sum over all samples by the number of ranks.
        Divide it by the number of samples of all ranks.
=> gradient_of_sum / total
    Each rank has its own share of the gradient: its sum, divided by the count of all ranks.
        Add the sums up over the ranks.
/ total =>
returns result / count if count else ANYTHING
    You divided the sum over all ranks by this rank's own count: each rank differs.
        All-reduce the count as well.
/ total =>
returns result / (group.size * count) if count else ANYTHING
    You divided by n times this rank's own count, the total only if all counts are equal.
        All-reduce the count as well.
returns gradient_of_sum / count if count else ANYTHING
    That is the mean over this rank's own samples: none of the other ranks' are in it.
        Add up the sums and the counts over all ranks, then divide once.
/ total =>
    That is the sum over all samples.
        Divide it by their number.
"""

EXERCISE = exercise(globals(), points=2, right=(global_gradient, by_weights))
