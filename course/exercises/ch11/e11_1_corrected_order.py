"""11.1: interleaved 1F1B with half of the warmup is right on three ranks and wrong on two, where messages cross."""

import math
import queue
import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import random
from course.check.listen import listen
from lib import comm
from lib.mesh import Group
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.interleaved import interleaved, warmup
from lib.pipeline.schedules.one_f_one_b import in_turns
from lib.runtime import spy
from lib.runtime.transfer import Pending

UNFINISHED = "messages that were not waited for"
HELD, NONE, SOME = "tensors that are sent after the next work", "none", "some"
SIZES = ((6, 2), (12, 2), (6, 3))  # microbatches, stages on each rank
THREE, ENDS, YES, NO = "on three ranks", "whether the step ends", "yes", "no"
OF_THREE, AWAIT_S = (6, 2), 3


def inputs(generator, n):
    def drawn(count):
        return [random(generator, 3) for _ in range(count)]

    cases = [{"weights": drawn(n * v), "batch": drawn(m)} for m, v in SIZES]
    m, v = OF_THREE
    return [{"cases": cases, "three": {"weights": drawn(3 * v), "batch": drawn(m)}}] * n


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
        heard = listen(on_start=stages.sends.append)
        answer(group, orders_of(group.size, *size), stages.forward, stages.backward, like)
        found[f"{UNFINISHED}: {size[0]} microbatches, {size[1]} stages"] = heard.unfinished
        found[f"{HELD}: {size[0]} microbatches, {size[1]} stages"] = SOME if stages.held else NONE
        found |= named(group.rank, group.size, *size, stages.order, stages.gradients)
    return found | (on_three_ranks(answer, given["three"]) if group.rank == 0 else {})


class InThreads:
    """Three ranks as threads of this process, in place of the process group: who is next to whom shows with three."""

    def __init__(self):
        self.here, self.sent, self.failed = threading.local(), defaultdict(queue.Queue), threading.Event()

    def rank(self):
        return self.here.rank

    def size(self):
        return 3

    def send(self, tensors, dst, tag):
        if dst not in range(3):
            raise ValueError(f"there is no rank {dst}")
        self.sent[self.here.rank, dst, tag].put(tensors[0].detach().clone())
        return Pending(lambda: None)

    def recv(self, tensors, src, tag):
        came = self.sent[src, self.here.rank, tag]
        return Pending(lambda: tensors[0].copy_(self.next(came)))

    def next(self, came):
        for _ in range(100 * AWAIT_S):
            try:
                return came.get(timeout=0.01)
            except queue.Empty:
                if self.failed.is_set():
                    break
        raise TimeoutError("no message")

    def message(self, kind, x, group, peer, function):
        """In place of that of `lib.comm`."""
        if kind == "send":
            return self.send([x], peer, 0)
        came = self.recv([x], peer, 0)
        return Pending(lambda: (came.wait(), x)[1])

    @contextmanager
    def instead(self):
        """It is the process group of torch, until the end."""
        world, message = dist.distributed_c10d._world, comm.message
        before, world.default_pg, comm.message = world.default_pg, self, self.message
        try:
            yield
        finally:
            world.default_pg, comm.message = before, message

    def run(self, program):
        """Whether `program(rank)` ends on all three."""

        def of_rank(rank):
            self.here.rank, spy._inside.call = rank, True  # it records nothing here
            try:
                program(rank)
            except Exception:
                self.failed.set()

        with self.instead():
            ranks = [threading.Thread(target=of_rank, args=[rank], daemon=True) for rank in range(3)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
        return not self.failed.is_set()


def on_three_ranks(answer, given):
    stages = [Stages(given["weights"], given["batch"]) for _ in range(3)]
    orders = orders_of(3, *OF_THREE)

    def program(rank):
        like = torch.empty(3, dtype=torch.float64)
        answer(Group("world", (0, 1, 2), rank), orders, stages[rank].forward, stages[rank].backward, like)

    ends = InThreads().run(program)
    gradients = [stages[s % 3].gradients[s] for s in range(len(given["weights"]))]
    return {f"{THREE}: {ENDS}": YES if ends else NO} | ({f"{THREE}: gradients": gradients} if ends else {})


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
        self.sends, self.outputs, self.held = [], 0, False

    def begins(self, action, sends):
        self.order.append(action)
        self.held = self.held or len(self.sends) < self.outputs
        self.outputs += sends

    def forward(self, stage, k, x):
        self.begins(f"{stage}F{k}", stage < self.last)
        self.kept[stage, k] = x = self.batch[k] if stage == 0 else x.clone()
        return None if stage == self.last else self.weights[stage] * x

    def backward(self, stage, k, g):
        self.begins(f"{stage}B{k}", stage > 0)
        x = self.kept.pop((stage, k))
        g = self.weights[stage] * x if stage == self.last else g
        self.gradients[stage] += g * x
        return None if stage == 0 else g * self.weights[stage]


def reference(given):
    n, found = len(given), [{} for _ in given]
    for case, size in zip(given[0]["cases"], SIZES, strict=True):
        weights = with_gradients(**case)
        for rank, order in enumerate(orders_of(n, *size)):
            work = [f"{stage}{op}{k}" for op, stage, k in order]
            found[rank] |= named(rank, n, *size, work, [w.grad for w in weights])
            found[rank][f"{UNFINISHED}: {size[0]} microbatches, {size[1]} stages"] = 0
            found[rank][f"{HELD}: {size[0]} microbatches, {size[1]} stages"] = NONE
    of_three = [w.grad for w in with_gradients(**given[0]["three"])]
    return [found[0] | {f"{THREE}: {ENDS}": YES, f"{THREE}: gradients": of_three}, *found[1:]]


def with_gradients(weights, batch):
    weights = [w.clone().requires_grad_() for w in weights]
    for x in batch:
        (math.prod([x, *weights]).square().sum() / 2).backward()
    return weights


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


def late(action, orders, sends, *message):
    """The message of the first action is kept for later."""
    if action == orders[0][0]:
        return message
    sends.append(comm.send(*message))


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

in on three ranks:
comm.recv(like, group, source % p) => comm.recv(like, group, 1 - r)
comm.send(y, group, target % p) => comm.send(y, group, 1 - r)
    On two ranks all is right. On three ranks the step does not end: a peer does not exist, or a message does not come.
        Stage s is on rank s mod p: compute the peer from the number of the stage.

in tensors that are sent after the next work:
r, p, sends = group.rank, group.size, [] => r, p, sends, held = group.rank, group.size, [], None
here.pop(action, None)) => here.pop(action, None)); held = held and sends.append(comm.send(*held))
sends.append(comm.send(y, group, target % p)) => held = late(action, orders, sends, y, group, target % p)
    A tensor is not sent when it is computed, but after the next work: the other rank waits for it.
        Start each send right after the forward or backward that gives the tensor.
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
