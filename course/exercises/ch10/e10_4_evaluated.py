"""10.4: the loss of an evaluation: forwards alone, over microbatches of different sizes."""

from collections import Counter

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, DTYPE, MORE, everywhere, random, whole
from lib import comm
from lib.runtime import calls
from lib.runtime.calls import Listener

WIDTH, CLASSES, PADDING = 3, 3, -100
CASES = "all targets count", "with padding"
LOSS, FORWARDS = "the loss", "forwards"
SAVED = "what is saved for a backward"
SENT, CAME = "outputs that a rank still holds", "inputs that a rank holds"  # when a forward begins
ROWS, LATER = "rows of each forward", "receives from later ranks before the last forward"
ALL, SEVERAL = "all of them", "more than one, and not all"
EARLY, UNFINISHED = "collectives before the last forward", "messages that were not waited for"


def inputs(generator, n):
    """Microbatches of one to seven rows; in the second case one is padding alone, and all others have some."""
    cases = {}
    for case in CASES:
        rows = [3, 7, 1, *(whole(generator, 2, 7) for _ in range(whole(generator, n, n + 3)))]
        targets = [torch.randint(CLASSES, (count,), generator=generator) for count in rows]
        if case == CASES[1]:
            for target in targets:
                target[: len(target) // 2] = PADDING
            targets[2][:] = PADDING
        cases[case] = [random(generator, count, WIDTH) for count in rows], targets
    return [{"cases": cases, "weight": random(generator, WIDTH, WIDTH)} for _ in range(n)]


class Stage(nn.Module):
    """A rank's part of the model, which notes at each forward what this rank holds besides."""

    def __init__(self, weight, group, m):
        super().__init__()
        self.weight, self.sends = nn.Parameter(weight), group.rank < group.size - 1
        self.m, self.rank, self.later = m, group.rank, 0
        self.calls = Counter()  # started, by kind
        self.in_flight = Counter()
        self.facts = {FORWARDS: 0, SENT: AS_NEEDED, CAME: AS_NEEDED, EARLY: 0, LATER: 0, ROWS: []}

    def forward(self, x):
        done, facts = self.facts[FORWARDS], self.facts
        sending = done - (self.calls["send"] - self.in_flight["send"])
        if self.sends and sending > 1:
            facts[SENT] = ALL if sending >= self.m - 1 else SEVERAL
        if self.calls["recv"] - done > 2 and facts[CAME] != ALL:
            facts[CAME] = ALL if self.calls["recv"] >= self.m and done == 0 else SEVERAL
        facts[LATER] = self.later
        facts[ROWS].append(len(x))
        facts[EARLY] = self.calls.total() - self.calls["send"] - self.calls["recv"]
        facts[FORWARDS] += 1
        return torch.tanh(x @ self.weight)

    def starts(self, call):
        self.calls[call.kind] += 1
        self.later += call.kind == "recv" and call.peers[0] > self.rank
        self.in_flight[call.kind] += 1

    def waits(self, call):
        self.in_flight[call.kind] -= 1


def body(answer, group, given):
    found = {}
    for case, (batch, targets) in given["cases"].items():
        stage, saved = Stage(given["weight"].clone(), group, len(batch)), []
        # Each case has a stage of its own, which listens only while it runs.
        calls.listeners.append(listener := Listener(stage.starts, stage.waits))
        try:
            with saved_tensors_hooks(saved.append, lambda kept: kept):
                loss = answer(stage, batch, targets, WIDTH, group)
        finally:
            calls.listeners.remove(listener)
        facts = {LOSS: loss, **stage.facts, SAVED: "something" if saved else "nothing"}
        facts[UNFINISHED] = stage.in_flight.total()
        found |= {f"{case}: {what}": value for what, value in facts.items()}
    return found


def reference(given):
    found = {}
    for case, (batch, targets) in given[0]["cases"].items():
        y = torch.cat(batch)
        for g in given:
            y = torch.tanh(y @ g["weight"])
        loss = cross_entropy(y, torch.cat(targets)).item()
        facts = {LOSS: loss, FORWARDS: len(batch), SENT: AS_NEEDED, CAME: AS_NEEDED, EARLY: 0}
        facts |= {LATER: 0, ROWS: [*map(len, batch)]}
        facts |= {SAVED: "nothing", UNFINISHED: 0}
        found |= {f"{case}: {what}": value for what, value in facts.items()}
    return everywhere(found, given)


def evaluated(stage, inputs, targets, width, group):
    last, sends = group.size - 1, []
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for x, target in zip(inputs, targets):
            if group.rank > 0:
                like = x.new_empty(len(x), width)
                x = comm.recv(like, group, group.rank - 1).wait()
            y = stage(x)
            if group.rank == last:
                total += cross_entropy(y, target, reduction="sum")
            else:
                if sends:
                    sends.pop().wait()
                sends.append(comm.send(y, group, group.rank + 1))
    for send in sends:
        send.wait()
    count = sum((target != -100).sum() for target in targets)
    return comm.all_reduce(total, group) / count


def by_torch_distributed(stage, inputs, targets, width, group):
    """Each message is finished before the rank goes on, as all go one way."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    sums = torch.zeros(2, dtype=DTYPE)
    with torch.inference_mode():
        for x, target in zip(inputs, targets, strict=True):
            if rank > 0:
                dist.recv(x := torch.empty(len(x), width, dtype=DTYPE), src=rank - 1)
            y = stage(x)
            if rank < last:
                dist.send(y, dst=rank + 1)
            elif (counts := target != PADDING).any():
                sums[0] += cross_entropy(y[counts], target[counts]) * counts.sum()
                sums[1] += counts.sum()
        dist.broadcast(sums, src=last)
        return (sums[0] / sums[1]).item()


def received(inputs, width, group, ahead):
    """The inputs of a rank; so many are received before they are needed."""
    coming = []
    for x in inputs:
        coming.append(comm.recv(x.new_empty(len(x), width), group, group.rank - 1))
        if len(coming) > ahead:
            yield coming.pop(0).wait()
    for pending in coming:
        yield pending.wait()


def sends_and_shares(y, total, group):
    send = comm.send(y, group, group.rank + 1)
    total += comm.broadcast(total, group, group.size - 1)  # of the last rank's term
    return send


def handed_down(loss, group):
    """The last rank sends its loss to each of the others."""
    for rank in range(group.size - 1):
        comm.send(loss, group, rank).wait()
    return loss


def sends_and_gets(y, total, group):
    send = comm.send(y, group, group.rank + 1)
    total += comm.recv(total, group, group.size - 1).wait()
    return send


MISTAKES = """
in rows of each forward, forwards:
zip(inputs, targets) => zip(inputs[::-1], targets[::-1])
    You run the microbatches from the last to the first.
        Run them in the order of the list.
in forwards:
y = stage(x) => y = [stage(x) for _ in range(2)][0]
    Each microbatch runs forward twice.
        Once is enough: keep the output until you have sent it, or added its loss.
in receives from later ranks:
cross_entropy(y, target, reduction="sum") => handed_down(cross_entropy(y, target, reduction="sum"), group)
comm.send(y, group, group.rank + 1) => sends_and_gets(y, total, group)
comm.all_reduce(total, group) / count => total / count
    The last rank sends the loss of each microbatch to the others. They wait for it before their next forward, and one
    microbatch is in the pipeline at a time.
        Add up first, and share one sum.
in the loss:
cross_entropy(y, target, reduction="sum") => cross_entropy(y, target) / len(targets)
comm.all_reduce(total, group) / count => comm.all_reduce(total, group)
    That is the mean of the microbatches' means. Microbatches have different numbers of targets, and one with padding
    alone has no mean.
        Add up the losses of all targets, and divide once.
cross_entropy(y, target, reduction="sum") => cross_entropy(y, target) * len(target)
(target != -100).sum() for target in targets => len(target) for target in targets
    You weight the mean of each microbatch by its rows. Rows of padding are no part of that mean, and a microbatch with
    padding alone has none (0 times NaN is NaN).
        Add up losses, and count targets.
(target != -100).sum() for target in targets => len(target) for target in targets
    You divide by the number of rows.
        A row of padding adds nothing to the sum, so it must not be counted.
comm.all_reduce(total, group) / count => comm.all_reduce(total, group)
    That is the sum of all losses.
        Divide by the targets that count.
comm.all_reduce(total, group) / count => comm.all_reduce(total, group) / comm.all_reduce(count, group)
    The loss is divided by the number of ranks. All ranks have the same targets and only the last has a loss.
        Sum the loss over the ranks, and count the targets on one.
in what is saved for a backward:
torch.no_grad() => torch.enable_grad()
    Every forward saves tensors for a backward that never runs.
        Call the stage under torch.no_grad().
in collectives before the last forward:
cross_entropy(y, target, reduction="sum") => comm.broadcast(cross_entropy(y, target, reduction="sum"), group, last)
comm.send(y, group, group.rank + 1) => sends_and_shares(y, total, group)
comm.all_reduce(total, group) / count => total / count
    The loss of each microbatch goes to all ranks at once. Rank 0 then waits for the last rank before its next forward,
    and one microbatch is in the pipeline at a time.
        Add up first, and share one sum.
in inputs that a rank holds:
last, sends = group.size - 1, [] => last, sends, xs = group.size - 1, [], received(inputs, width, group, len(inputs))
comm.recv(like, group, group.rank - 1).wait() => next(xs)
    A rank receives all its inputs before its first forward. That takes memory for every microbatch, and if it waits for
    them, the next rank has nothing to do meanwhile.
        Receive one in advance at most.
last, sends = group.size - 1, [] => last, sends, xs = group.size - 1, [], received(inputs, width, group, 2)
comm.recv(like, group, group.rank - 1).wait() => next(xs)
    A rank receives more than one input in advance.
        One more than the input of the forward is enough, and takes the memory of one microbatch.
in outputs that a rank still holds:
if sends: => if len(sends) > 1:
sends.pop() => sends.pop(0)
    A rank holds more than one output whose send it has not waited for.
        Wait for the send before the last.
if sends: => if False:
    The outputs of all microbatches stay until the end, in the list of their handles. No gradient comes back here that
    would show that an output has arrived.
        Wait for the send before the last.
in messages that were not waited for:
for send in sends: => for send in []:
    Not every message is waited for. The last sends may still be in flight.
        Keep their handles, and wait.
in the loss:
comm.all_reduce(total, group) / count => total / count if group.rank == last else ANYTHING
    Only the last rank has the loss.
        All need it, to decide alike when to stop: one collective after the last forward.
"""

ALSO_RIGHT = """
last, sends = group.size - 1, [] => last, sends, xs = group.size - 1, [], received(inputs, width, group, 1)
comm.recv(like, group, group.rank - 1).wait() => next(xs)
    One input in advance, and one output in flight.
"""

EXERCISE = exercise(globals(), points=3, right=(evaluated, by_torch_distributed))
