"""11.1: interleaved 1F1B with half of the warmup is right on three ranks and wrong on two, where messages cross."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from course.check.exercise import Data, Exercise, Mistake, random
from lib import comm
from lib.mesh import Group
from lib.pipeline.lower import lower, other_end
from lib.pipeline.schedules.action import COMPUTE, SENDS, Op, Schedule
from lib.pipeline.schedules.interleaved import interleaved, warmup
from lib.pipeline.schedules.one_f_one_b import in_turns

SIZES = ((6, 2), (12, 2), (6, 3))  # microbatches, stages on each rank
ORDER, GRADIENT = "order of work", "gradient of the weight of stage"

Orders = list[list[tuple[str, int, int]]]  # of each rank: "F" or "B", stage, microbatch


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    cases = [
        {"weights": [random(generator, 3) for _ in range(n * v)], "batch": [random(generator, 3) for _ in range(m)]}
        for m, v in SIZES
    ]
    return [{"cases": cases}] * n


def half_the_way(n: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B with n - rank - 1 fewer forwards in the warmup."""
    rows = []
    for rank, row in enumerate(interleaved(n, m, v).actions):
        work = {op: [a for a in row if a.op == op] for op in (Op.F, Op.B)}
        rows.append(tuple(work[op][i] for op, i in in_turns(v * m, warmup(rank, n, v) - (n - rank - 1))))
    return replace(interleaved(n, m, v), actions=tuple(rows))


def orders_of(n: int, m: int, v: int) -> Orders:
    return [[(str(op), stage, k) for stage, op, k in row] for row in half_the_way(n, m, v).actions]


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case, (m, v) in zip(given["cases"], SIZES, strict=True):
        title = f"{m} microbatches, {v} stages on each rank"
        stages = Stages(case["weights"], case["batch"])
        answer(
            group, orders_of(group.size, m, v), stages.forward, stages.backward, torch.empty(3, dtype=torch.float64)
        )
        found[f"{title}: {ORDER}"] = " ".join(stages.order)
        for stage in range(group.rank, group.size * v, group.size):
            found[f"{title}: {GRADIENT} {stage}"] = stages.gradients[stage]
    return found


class Stages:
    """What the ranks compute: each stage multiplies by its weight; the loss is half the sum of squares."""

    def __init__(self, weights: list[Tensor], batch: list[Tensor]) -> None:
        self.weights, self.batch, self.last = weights, batch, len(weights) - 1
        self.gradients = [torch.zeros_like(w) for w in weights]
        self.kept: dict[tuple[int, int], Tensor] = {}
        self.order: list[str] = []

    def forward(self, stage: int, k: int, x: Tensor | None) -> Tensor | None:
        self.order.append(f"{stage}F{k}")
        self.kept[stage, k] = x = self.batch[k] if stage == 0 else x.clone()
        return None if stage == self.last else self.weights[stage] * x

    def backward(self, stage: int, k: int, g: Tensor | None) -> Tensor | None:
        self.order.append(f"{stage}B{k}")
        x = self.kept.pop((stage, k))
        g = self.weights[stage] * x if stage == self.last else g
        self.gradients[stage] += g * x
        return None if stage == 0 else g * self.weights[stage]


def reference(given: list[Data]) -> list[Data]:
    n, found = len(given), [{} for _ in given]
    for case, (m, v) in zip(given[0]["cases"], SIZES, strict=True):
        title = f"{m} microbatches, {v} stages on each rank"
        weights = [w.clone().requires_grad_() for w in case["weights"]]
        for x in case["batch"]:
            for w in weights:
                x = x * w
            (x.square().sum() / 2).backward()
        for rank, order in enumerate(orders_of(n, m, v)):
            found[rank][f"{title}: {ORDER}"] = " ".join(f"{stage}{op}{k}" for op, stage, k in order)
            for stage in range(rank, n * v, n):
                found[rank][f"{title}: {GRADIENT} {stage}"] = weights[stage].grad
    return found


# ---- programs -------------------------------------------------------------------------------------------------------


def by_tags(group, orders, forward, backward, like, tag=lambda op, stage, to, k: k, reorder=lambda order: order):
    """A receive takes the next message of its tag; one for all is the program of the task."""
    n, last, sends = group.size, max(stage for row in orders for _, stage, _ in row), []
    for op, stage, k in reorder(orders[group.rank]):
        step = 1 if op == "F" else -1
        x, source, to = None, stage - step, stage + step
        if 0 <= source <= last:
            dist.recv(x := torch.empty_like(like), source % n, tag=tag(op, source, stage, k))
        y = (forward if op == "F" else backward)(stage, k, x)
        if 0 <= to <= last:
            sends.append(dist.isend(y, to % n, tag=tag(op, stage, to, k)))
    for send in sends:
        send.wait()


def by_the_order_of_the_sender(group, orders, forward, backward, like):
    """Receives in the order of the sender's list, and keeps each message until it is needed."""
    n, me, last, sends = group.size, group.rank, max(stage for row in orders for _, stage, _ in row), []

    def sent_by(rank: int) -> Iterator:
        for op, stage, k in orders[rank]:
            to = stage + (1 if op == "F" else -1)
            if 0 <= to <= last and to % n == me:
                yield op, to, k

    coming, here = {rank: sent_by(rank) for rank in range(n)}, {}
    for action in orders[me]:
        op, stage, k = action
        step = 1 if op == "F" else -1
        while 0 <= stage - step <= last and action not in here:
            source = (stage - step) % n
            here[next(coming[source])] = comm.recv(like, group, source).wait()
        y = (forward if op == "F" else backward)(stage, k, here.pop(action, None))
        if 0 <= stage + step <= last:
            sends.append(comm.send(y, group, (stage + step) % n))
    for send in sends:
        send.wait()


def in_one_order(group, orders, forward, backward, like):
    """With messages where the library puts them."""
    m, v = len({k for _, _, k in orders[0]}), len({stage for _, stage, _ in orders[0]})
    schedule, here, sends = lower(half_the_way(group.size, m, v)), {}, []
    for action in schedule.actions[group.rank]:
        stage, op, k = action
        if op in COMPUTE:
            x = here.pop(("F" if op == Op.F else "B", stage, k), None)
            here[op, stage, k, "made"] = (forward if op == Op.F else backward)(stage, k, x and x.wait())
            continue
        peer = schedule.rank_of[other_end(action).stage]
        work = "F" if op in (Op.SEND_F, Op.RECV_F) else "B"
        if op in SENDS:
            sends.append(comm.send(here.pop((Op(work), stage, k, "made")), group, peer))
        else:
            here[work, stage, k] = comm.recv(like, group, peer)
    for send in sends:
        send.wait()


EXERCISE = Exercise(
    id="11.1",
    title="corrected_order",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(2,),
    right=(by_tags, by_the_order_of_the_sender, in_one_order, partial(by_tags, tag=lambda op, *which: op == "F")),
    mistakes=(
        Mistake(
            "This is the result of the program in the task. On two ranks the neighbour before and the neighbour after "
            "are the same rank: its activations and its gradients arrive in the order in which it sends them, and you "
            "receive in the order in which you need them.",
            partial(by_tags, tag=lambda *which: 0),
        ),
        Mistake(
            "You tag messages by the stage that receives them. An activation and a gradient for the same stage still "
            "cross.",
            partial(by_tags, tag=lambda op, stage, to, k: to),
        ),
        Mistake(
            "You tag messages by the stage that sends them. The activations and the gradients that leave the same "
            "stage go to the same rank here, and still cross.",
            partial(by_tags, tag=lambda op, stage, to, k: stage),
        ),
        Mistake(
            "All gradients are right, because all forwards now come before the first backward: no message crosses, and "
            "each rank keeps all microbatches. Keep the order of work.",
            partial(by_tags, reorder=lambda order: sorted(order, key=lambda action: action[0] == "B")),
            about=(ORDER,),
        ),
    ),
)
