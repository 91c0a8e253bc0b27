"""03.2: the mean gradient over all samples, where ranks have different numbers of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from course.check.exercise import ANYTHING, Data, Exercise, Mistake, everywhere, random
from lib import comm
from lib.mesh import Group


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    counts = [2 + 3 * r for r in range(n)]
    if n == 4:
        counts[1] = 0  # a rank without samples
    return [{"sum": random(generator, 4, 3) * count, "count": count} for count in counts]


def body(answer: Callable, group: Group, given: Data) -> Data:
    return {"gradient": answer(given["sum"].clone(), given["count"], group)}


def reference(given: list[Data]) -> list[Data]:
    total, count = torch.stack([g["sum"] for g in given]).sum(0), sum(g["count"] for g in given)
    return everywhere({"gradient": total / count}, given)


def everyones(count, group, op="sum"):
    return comm.all_reduce(torch.tensor(float(count), dtype=torch.float64), group, op=op)


def right(g, count, group):
    return comm.all_reduce(g, group) / everyones(count, group)


def right_by_weights(g, count, group):
    share = count / comm.all_gather(torch.tensor([float(count)], dtype=torch.float64), group).sum()
    return comm.all_reduce(g / max(count, 1) * share, group)


def divided_by(factor: Callable) -> Callable:
    """The sum over all ranks, divided by a factor and by this rank's count."""

    def program(g, count, group):
        total = comm.all_reduce(g, group)
        return total / (factor(group) * count) if count else ANYTHING

    return program


EXERCISE = Exercise(
    id="03.2",
    title="global_gradient",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(right, right_by_weights),
    mistakes=(
        Mistake(
            "That is the mean of the ranks' means: a sample of a rank with few of them counts too much. Add up the "
            "sums and the counts, then divide once.",
            lambda g, count, group: comm.all_reduce(g / max(count, 1), group, op="mean"),
        ),
        Mistake(
            "Everything is nan: the rank without samples divided zero by zero, and the all-reduce gave its nan to "
            "all. Divide once, by the count of all ranks.",
            lambda g, count, group: comm.all_reduce(g / count, group, op="mean"),
        ),
        Mistake(
            "You divided each rank's sum by its own count and added the results. Divide by the count of all ranks, "
            "after adding up.",
            lambda g, count, group: comm.all_reduce(g / max(count, 1), group),
        ),
        Mistake(
            "The gradient is n times too large: you divided by the mean of the counts. Divide by their sum.",
            lambda g, count, group: comm.all_reduce(g, group) / everyones(count, group, op="mean"),
        ),
        Mistake(
            "The gradient is n times too small: you averaged the sums over the ranks. Add them up.",
            lambda g, count, group: comm.all_reduce(g, group, op="mean") / everyones(count, group),
        ),
        Mistake(
            "You divided the sum over all ranks by this rank's own count, so each rank has a different gradient. "
            "All-reduce the count as well.",
            divided_by(lambda group: 1),
        ),
        Mistake(
            "You divided by the number of ranks times this rank's own count. This is the count of all ranks only if "
            "all counts are equal: all-reduce the count as well.",
            divided_by(lambda group: group.size),
        ),
        Mistake(
            "That is the mean over this rank's own samples. Nothing was sent.",
            lambda g, count, group: g / count if count else ANYTHING,
        ),
        Mistake(
            "That is the sum over all samples, not yet divided by their number.",
            lambda g, count, group: comm.all_reduce(g, group),
        ),
    ),
)
