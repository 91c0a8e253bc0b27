"""11.1: interleaved 1F1B with half of the warmup is right on three ranks and wrong on two, where messages cross."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import random
from course.check.listen import listen
from lib import comm
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.interleaved import interleaved, warmup
from lib.pipeline.schedules.one_f_one_b import in_turns

UNFINISHED = "messages that were not waited for"
SIZES = ((6, 2), (12, 2), (6, 3))  # microbatches, stages on each rank


def inputs(generator, n):
    def drawn(count):
        return [random(generator, 3) for _ in range(count)]

    return [{"cases": [{"weights": drawn(n * v), "batch": drawn(m)} for m, v in SIZES]}] * n


def half_the_way(n, m, v):
    """Interleaved 1F1B with n - rank - 1 fewer forwards in the warmup."""
    rows = []
    for rank, row in enumerate(interleaved(n, m, v).actions):
        work = {op: [a for a in row if a.op == op] for op in (Op.F, Op.B)}
        rows.append(tuple(work[op][i] for op, i in in_turns(v * m, warmup(rank, n, v) - (n - rank - 1))))
    return replace(interleaved(n, m, v), actions=tuple(rows))


def orders_of(n, m, v):
    """Of each rank: "F" or "B", stage, microbatch."""
    return [[(str(op), stage, k) for stage, op, k in row] for row in half_the_way(n, m, v).actions]


def body(answer, group, given):
    found = {}
    for case, size in zip(given["cases"], SIZES, strict=True):
        stages = Stages(case["weights"], case["batch"])
        like = torch.empty(3, dtype=torch.float64)
        heard = listen()
        answer(group, orders_of(group.size, *size), stages.forward, stages.backward, like)
        found[f"{UNFINISHED}: {size[0]} microbatches, {size[1]} stages"] = heard.unfinished
        found |= named(group.rank, group.size, *size, stages.order, stages.gradients)
    return found


def named(rank, n, m, v, order, gradients):
    """The results of a rank."""
    title = f"{m} microbatches, {v} stages on each rank"
    of_stages = {f"{title}: gradient of the weight of stage {s}": gradients[s] for s in range(rank, n * v, n)}
    return {f"{title}: order of work": " ".join(order)} | of_stages


class Stages:
    """What the ranks compute: each stage multiplies by its weight; the loss is half the sum of squares."""

    def __init__(self, weights, batch):
        self.weights, self.batch, self.last = weights, batch, len(weights) - 1
        self.gradients = [torch.zeros_like(w) for w in weights]
        self.kept, self.order = {}, []

    def forward(self, stage, k, x):
        self.order.append(f"{stage}F{k}")
        self.kept[stage, k] = x = self.batch[k] if stage == 0 else x.clone()
        return None if stage == self.last else self.weights[stage] * x

    def backward(self, stage, k, g):
        self.order.append(f"{stage}B{k}")
        x = self.kept.pop((stage, k))
        g = self.weights[stage] * x if stage == self.last else g
        self.gradients[stage] += g * x
        return None if stage == 0 else g * self.weights[stage]


def reference(given):
    n, found = len(given), [{} for _ in given]
    for case, size in zip(given[0]["cases"], SIZES, strict=True):
        weights = [w.clone().requires_grad_() for w in case["weights"]]
        for x in case["batch"]:
            (math.prod([x, *weights]).square().sum() / 2).backward()
        for rank, order in enumerate(orders_of(n, *size)):
            work = [f"{stage}{op}{k}" for op, stage, k in order]
            found[rank] |= named(rank, n, *size, work, [w.grad for w in weights])
            found[rank][f"{UNFINISHED}: {size[0]} microbatches, {size[1]} stages"] = 0
    return found


def corrected_order(group, orders, forward, backward, like):
    r, p, sends = group.rank, group.size, []
    last = max(stage for order in orders for _, stage, _ in order)

    def sent_by(rank):
        for op, stage, k in orders[rank]:
            target = stage + (1 if op == "F" else -1)
            if 0 <= target <= last and target % p == r:
                yield op, target, k

    coming, here = [sent_by(rank) for rank in range(p)], {}
    for action in orders[r]:
        op, stage, k = action
        step = 1 if op == "F" else -1
        source, target = stage - step, stage + step
        while 0 <= source <= last and action not in here:
            x = comm.recv(like, group, source % p).wait()
            here[next(coming[source % p])] = x
        work = forward if op == "F" else backward
        y = work(stage, k, here.pop(action, None))
        if 0 <= target <= last:
            sends.append(comm.send(y, group, target % p))
    for send in sends:
        send.wait()


def by_tags(group, orders, forward, backward, like, tag=lambda op, source, target, k: k):
    """A receive takes the next message of its tag."""
    n, last, sends = group.size, max(stage for row in orders for _, stage, _ in row), []
    for op, stage, k in orders[group.rank]:
        step = 1 if op == "F" else -1
        x, source, to = None, stage - step, stage + step
        if 0 <= source <= last:
            dist.recv(x := torch.empty_like(like), source % n, tag=tag(op, source, stage, k))
        y = (forward if op == "F" else backward)(stage, k, x)
        if 0 <= to <= last:
            sends.append(dist.isend(y, to % n, tag=tag(op, stage, to, k)))
    for send in sends:
        send.wait()


MISTAKES = """
here[next(coming[source % p])] = x => here[action] = x
    This is the result of the program in the task.
        On two ranks the ranks before and after are the same: its activations and gradients arrive in the order in which
        it sends them, and you receive in the order in which you need them.
partial(by_tags, tag=lambda op, source, target, k: target)
    You tag messages by the stage that receives them.
        An activation and a gradient for the same stage still cross.
partial(by_tags, tag=lambda op, source, target, k: source)
    You tag messages by the stage that sends them.
        Its activations and its gradients go to the same rank, and cross.

in messages that were not waited for: send.wait() => pass
    Your sends are started and not waited for: the step may end while one is in flight.
        Keep each handle, and wait for all of them at the end.
in order of work:
in orders[rank]: => in sorted(orders[rank], key=lambda action: action[0] == "B"):
in orders[r]: => in sorted(orders[r], key=lambda action: action[0] == "B"):
    All gradients are right, because all forwards now come before the first backward: no message crosses, and each rank
    keeps all microbatches.
        Keep the order of work.
"""

ALSO_RIGHT = """
x = comm.recv(like, group, source % p).wait() => dist.recv(x := torch.empty_like(like), source % p)
comm.send(y, group, target % p) => dist.isend(y, target % p)
    With torch.distributed.
"""
EQUIVALENT = """
stage for order in orders for => stage for order in [*(orders)][1:] for
or _, stage, _ in order) => _, stage, _ in [*(order)][1:])
or _, stage, _ in order) => _, stage, _ in [*(order)][:-1])
    The last stage is on the last rank, and occurs there many times.
"""

BY_DIRECTION = partial(by_tags, tag=lambda op, *which: op == "F")

EXERCISE = exercise(globals(), points=3, right=(corrected_order, by_tags, BY_DIRECTION), ranks=(2,))
