"""11.1: interleaved 1F1B with half of the warmup is right on three ranks and wrong on two, where messages cross."""

import math
import re
from dataclasses import replace
from functools import partial

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import random, with_variants
from course.check.listen import listen
from course.exercises.ch11.in_threads import InThreads
from course.exercises.ch11.tagged import BY_DIRECTION, BY_LINK, by_tags, from_the_first, from_the_last, task_of_row
from lib import comm
from lib.mesh import Group
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.interleaved import interleaved, warmup
from lib.pipeline.schedules.one_f_one_b import in_turns

UNFINISHED = "messages that were not waited for"
HELD, NONE, SOME = "tensors that are sent after the next work", "none", "some"
SIZES = ((6, 2), (12, 2), (6, 3))  # microbatches, stages on each rank
THREE, ENDS, YES, NO = "on three ranks", "whether the step ends", "yes", "no"
OF_THREE = 6, 2
PLACED, AS_BOOK = "where the stages are", "stage s on rank s mod p"


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


def orders_of(n, m, v, rank_of):
    """Of each rank: "F" or "B", stage, microbatch."""
    orders = [[(str(op), stage, k) for stage, op, k in row] for row in half_the_way(n, m, v).actions]
    return sorted(orders, key=lambda order: rank_of(order[0][1], n))


def body(answer, group, given, rank_of=from_the_first):
    found = {}
    for case, size in zip(given["cases"], SIZES, strict=True):
        stages = Stages(case["weights"], case["batch"])
        like = torch.empty(3, dtype=torch.float64)
        heard = listen(on_start=stages.sends.append)
        answer(group, orders_of(group.size, *size, rank_of), stages.forward, stages.backward, like)
        found[f"{UNFINISHED}: {size[0]} microbatches, {size[1]} stages"] = heard.unfinished
        found[f"{HELD}: {size[0]} microbatches, {size[1]} stages"] = SOME if stages.held else NONE
        found |= named(group.rank, group.size, *size, rank_of, stages.order, stages.gradients)
    if group.rank > 0:
        return found
    ends, gradients = in_threads(answer, given["three"], 3, *OF_THREE, rank_of)
    return found | {f"{THREE}: {ENDS}": YES if ends else NO} | ({f"{THREE}: gradients": gradients} if ends else {})


def body_of_row(answer, group, given):
    """As `body`, where stages are dealt from the last rank. An answer for the book's ranks then sends to itself, which
    is an error: its result is what it computes on the book's ranks.
    """
    try:
        return body(answer, group, given, from_the_last)
    except Exception:
        ends, gradients = in_threads(answer, given["cases"][0], 2, *SIZES[0], from_the_first)
        if not ends:
            raise
        return {PLACED: AS_BOOK, "gradients there": gradients}


def in_threads(answer, given, n, m, v, rank_of):
    """Whether the answer ends on n ranks that are threads of this one, and its gradients: who is next to whom shows
    with three.
    """
    stages = [Stages(**given) for _ in range(n)]
    orders = orders_of(n, m, v, rank_of)

    def program(rank):
        like = torch.empty(3, dtype=torch.float64)
        answer(Group("world", tuple(range(n)), rank), orders, stages[rank].forward, stages[rank].backward, like)

    ends = InThreads(n).run(program)
    return ends, [stages[rank_of(s, n)].gradients[s] for s in range(n * v)]


def named(rank, n, m, v, rank_of, order, gradients):
    """The results of a rank."""
    title = f"{m} microbatches, {v} stages on each rank"
    stages = [s for s in range(n * v) if rank_of(s, n) == rank]
    of_stages = {f"{title}: gradient of the weight of stage {s}": gradients[s] for s in stages}
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


def reference(given, rank_of=from_the_first):
    n, found = len(given), [{} for _ in given]
    for case, size in zip(given[0]["cases"], SIZES, strict=True):
        weights = with_gradients(**case)
        for rank, order in enumerate(orders_of(n, *size, rank_of)):
            work = [f"{stage}{op}{k}" for op, stage, k in order]
            found[rank] |= named(rank, n, *size, rank_of, work, [w.grad for w in weights])
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


def late(action, orders, sends, *message):
    """The message of the first action is kept for later."""
    if action == orders[0][0]:
        return message
    sends.append(comm.send(*message))


CROSSED = """
here[next(coming[source % p])] = x => here[action] = x
    This is the result of the program in the task.
        On two ranks the ranks before and after are the same: its activations and gradients arrive in the order in which
        it sends them, and you receive in the order in which you need them.
partial(by_tags, tag=lambda op, source, target, k: target)
    You tag messages by the stage that receives them.
        An activation and a gradient for the same stage still cross.
"""
BY_SENDER = """
partial(by_tags, tag=lambda op, source, target, k: source)
    You tag messages by the stage that sends them.
        Its activations and its gradients go to the same rank, and cross.
"""
MISTAKES = """
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

CROSSED_OF_ROW = """
partial(by_tags, tag=lambda op, source, target, k: target, rank_of=from_the_last)
    This is the result of the program in the task.
        On two ranks an activation and a gradient for the same stage come from the same rank with the same tag, and a
        receive takes the first that was sent. The tag must tell the microbatch or the direction.
partial(by_tags, tag=lambda op, source, target, k: k + target, rank_of=from_the_last)
    You tag messages by the sum of stage and microbatch.
        With three stages on each rank, messages that cross have the same sum. The microbatch alone tells them apart.
partial(by_tags, tag=lambda *which: 0, rank_of=from_the_last)
    This is the result without tags, or with one tag for messages that cross: a rank sends them in its own order, and
    you receive in the order in which you need them.
        Receive in the order of the sender, and keep what comes early; or give messages that cross different tags.
in where the stages are: here[next(coming[source % p])] = x => here[action] = x
    Your peers are those of the book's task, where stage s is on rank s mod p. On two ranks that is the rank itself.
        Here stage s is on rank p - 1 - s % p.
"""
OTHER_OF_ROW = """
in on three ranks:
partial(by_tags, tag=lambda op, source, target, k: target, rank_of=lambda stage, p: 1 - dist.get_rank())
    On three ranks the step does not end: a peer does not exist, or a message does not come.
        The peer follows from the number of the stage. Then compare the gradients on two ranks.
"""


def from_last(program):
    """A program for the book's ranks, for those of row A."""
    return replace(program, text=re.sub(r"(source|target) % p", r"p - 1 - \1 % p", program.text))


def row_a(book):
    """Where stages are dealt from the last rank, and the program has tags that are not enough."""
    by_sender = BY_SENDER.replace("source)", "source, rank_of=from_the_last)")
    mistakes = MISTAKES.replace("on rank s mod p", "on rank p - 1 - s % p").replace(f"in {THREE}:", "in all:")
    listed = by_sender + CROSSED_OF_ROW + mistakes + OTHER_OF_ROW
    made = exercise(
        globals() | {"MISTAKES": listed, "body": body_of_row},
        points=book.points,
        title=book.title,
        right=[partial(tagged, rank_of=from_the_last) for tagged in (by_tags, BY_DIRECTION, BY_LINK)],
        edited=(corrected_order,),
        reference=partial(reference, rank_of=from_the_last),
        ranks=book.ranks,
    )
    tagged, also = made.right[:3], made.right[3:]
    return replace(
        made,
        right=(*tagged, *map(from_last, (made.solution, *also))),
        mistakes=tuple(m if PLACED in m.about else replace(m, wrong=from_last(m.wrong)) for m in made.mistakes),
        task=task_of_row(),
    )


BOOK = exercise(
    globals() | {"MISTAKES": CROSSED + BY_SENDER + MISTAKES},
    points=3,
    right=(corrected_order, by_tags, BY_DIRECTION),
    ranks=(2,),
)
EXERCISE = with_variants(BOOK, row_a(BOOK))
