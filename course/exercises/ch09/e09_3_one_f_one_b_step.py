"""09.3: the step of a rank under 1F1B, as three loops over its own stage."""

import weakref

import torch
from torch import nn

from course.check.edits import exercise
from course.check.exercise import DTYPE, random
from course.check.listen import listen
from lib import comm
from lib.pipeline.schedules.one_f_one_b import one_f_one_b

ROWS, D = 3, 5
ORDER, LOSS, WAITED, ALL, SOME = "order of work", "the loss", "waited for", "every message", "not every message"
FEW = """If this is about a microbatch that does not exist: there are {} of them here and {} ranks, and more stages
below rank {} than that. Warmup and cooldown have min(m, p - 1 - r) microbatches."""
LEAF = """If this is about the gradient of the tensor that came in: comm.recv gives a tensor without history. Declare it
a leaf, x.requires_grad_(), before your stage computes with it."""
HELD, ONE, SEVERAL = "microbatches held after their backward", "at most one, in a variable", "several"


def inputs(generator, n):
    def batch(count):
        return [(random(generator, ROWS, D), random(generator, ROWS, D)) for _ in range(count)]

    # All but the first have fewer microbatches than ranks: one less, far fewer, and a single one.
    batches = [batch(count) for count in (n + 2, *range(n - 1, 0, -1))]
    return [{"weight": random(generator, D, D), "batches": batches} for _ in range(n)]


class Stage(nn.Module):
    """tanh(x Wᵀ)."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


def named(batch, what):
    return f"{len(batch)} microbatches: {what}"


class Watch:
    """The order of work of a stage, and the most microbatches that were held after their backward."""

    def __init__(self, stage):
        self.order, self.graphs, self.most = [], [], 0
        stage.register_forward_hook(self.forward)
        stage.weight.register_hook(self.backward)

    def forward(self, stage, given, y):
        mark = type("Mark", (), {})()
        y.grad_fn.metadata["mark"] = mark  # lives as long as the graph, which holds the tensor that came in
        self.graphs.append(weakref.ref(mark))
        self.notes("F")

    def backward(self, gradient):
        self.notes("B")

    def notes(self, op):
        held = sum(graph() is not None for graph in self.graphs[: self.order.count("B")])
        self.most = max(self.most, held)
        self.order.append(op)


def body(answer, group, given):
    found = {}
    for batch in given["batches"]:
        stage, heard = Stage(given["weight"]), listen()
        watch = Watch(stage)
        xs, targets = ([x.clone() for x in one] for one in zip(*batch, strict=True))
        try:
            loss = answer(stage, xs, targets, group)
        except (IndexError, ValueError) as error:
            if "NoneType" in str(error):
                error.add_note(LEAF)
            elif isinstance(error, IndexError) and len(batch) < group.size - 1 - group.rank:
                error.add_note(FEW.format(len(batch), group.size, group.rank))
            raise
        gradient = torch.zeros_like(stage.weight) if stage.weight.grad is None else stage.weight.grad
        facts = {
            "gradient of the weight": gradient,
            LOSS: "None" if loss is None else loss,
            ORDER: " ".join(watch.order),
            HELD: SEVERAL if watch.most > 1 else ONE,
            WAITED: SOME if heard.unfinished else ALL,
        }
        found |= {named(batch, what): fact for what, fact in facts.items()}
    return found


def reference(given):
    stages, found = [Stage(g["weight"]) for g in given], [{} for _ in given]
    for batch in given[0]["batches"]:
        x, targets = (torch.cat(one) for one in zip(*batch, strict=True))
        loss = nn.functional.mse_loss(nn.Sequential(*stages)(x), targets)
        gradients = torch.autograd.grad(loss, [stage.weight for stage in stages])
        rows = one_f_one_b(len(given), len(batch)).actions
        for rank, (facts, gradient, row) in enumerate(zip(found, gradients, rows, strict=True)):
            right = {
                "gradient of the weight": gradient,
                LOSS: loss.item() if rank == len(given) - 1 else "None",
                ORDER: " ".join(action.op.value for action in row),
                HELD: ONE,
                WAITED: ALL,
            }
            facts |= {named(batch, what): fact for what, fact in right.items()}
    return found


def one_f_one_b_step(stage, inputs, targets, group):
    rank, last, m = group.rank, group.size - 1, len(inputs)
    warmup, kept, sends, total = min(last - rank, m), [], [], 0.0

    def forward(k):
        nonlocal total
        x = inputs[k]
        if rank > 0:
            x = comm.recv(torch.empty_like(x), group, rank - 1).wait()
        x.requires_grad_()  # a leaf: here this rank's graph begins
        y = stage(x)
        if rank < last:
            sends.append(comm.send(y.detach(), group, rank + 1))
        else:
            y = (y - targets[k]).square().mean() / m
            total += y.item()
        kept.append((x, y))

    def backward():
        x, y = kept.pop(0)
        gradient = None  # the last rank begins with its loss
        if rank < last:
            gradient = comm.recv(torch.empty_like(y), group, rank + 1).wait()
        y.backward(gradient)
        if rank > 0:
            sends.append(comm.send(x.grad, group, rank - 1))

    for k in range(warmup):
        forward(k)
    for k in range(warmup, m):
        forward(k)
        backward()
    for _ in range(warmup):
        backward()
    for send in sends:
        send.wait()
    return total if rank == last else None


def by_its_list(stage, inputs, targets, group):
    """Follows the list of the library, with messages in one call where two ranks have both."""
    rank, last, m = group.rank, group.size - 1, len(inputs)
    kept, sends, loss = {}, [], torch.zeros((), dtype=DTYPE)
    for _, op, k in one_f_one_b(group.size, m).actions[rank]:
        if op.value == "F":
            x = inputs[k].clone()
            if rank > 0:
                x = comm.exchange({}, {rank - 1: x}, group).wait()[rank - 1]
            y = stage(x.requires_grad_())
            kept[k] = x, y
            if rank < last:
                sends.append(comm.exchange({rank + 1: y.detach()}, {}, group))
            continue
        x, y = kept.pop(k)
        if rank < last:
            y.backward(comm.exchange({}, {rank + 1: y.detach()}, group).wait()[rank + 1])
        else:
            term = nn.functional.mse_loss(y, targets[k]) / m
            term.backward()
            loss += term.detach()
        if rank > 0:
            sends.append(comm.exchange({rank - 1: x.grad}, {}, group))
    for send in sends:
        send.wait()
    return loss if rank == last else None


MISTAKES = """
in order of work:
min(last - rank, m), [] => m, []
    The order is that of GPipe: all forwards, then all backwards, so every rank keeps all m microbatches.
        Only the warmup runs ahead. From then on run a backward after each forward.
min(last - rank, m), [] => 0, []
    There is no warmup: each microbatch goes down and up again before the next one starts, so one rank computes at a
    time.
        Begin with p - 1 - r forwards on rank r.
min(last - rank, m), [] => min(last - rank + 1, m), []
    Your warmup is one forward too long, so a rank keeps one microbatch more than 1F1B needs.
        The first forward of the steady state comes on top of the warmup: rank r begins with p - 1 - r.
min(last - rank, m), [] => min(last, m), []
    Your warmup is as long on every rank as on the first, so every rank keeps p microbatches.
        The nearer a rank is to the loss, the sooner its first gradient comes: rank r begins with p - 1 - r.
min(last - rank, m), [] => min(max(last - rank - 1, 0), m), []
    Your warmup is one forward too short: the rank waits for its first gradient, and has nothing to do meanwhile.
        Until the first gradient is back, p - 1 - r stages are below this rank: it can run a forward for each.
min(last - rank, m), [] => m if m <= last else last - rank, []
    With fewer microbatches than ranks your order is that of GPipe: all forwards, then all backwards.
        The last rank still runs each backward right after its forward: the warmup is min(m, p - 1 - r).
in microbatches held:
x, y = kept.pop(0) => x, y = kept[sum(x.grad is not None for x, _ in kept)]
    All numbers and the order are right, but several microbatches are held after their backward: by a list or a
    dictionary, or by a graph that something else holds.
        Take each out when it runs backward, as kept.pop(0) does. Order alone saves no memory.
in gradient:
/ m => / 1
    The gradients are m times too large.
        The loss is the mean over the batch: each microbatch has 1/m of it.
kept.pop(0) => kept.pop()
    Backward runs through the newest microbatch first, and the gradient that arrives is of the oldest.
        Messages between two ranks arrive in the order in which they were sent: take the microbatches in this order.
y.backward(gradient) => stage.zero_grad(); y.backward(gradient)
    Only one microbatch is in the gradients: you empty or replace them at each backward.
        Backward must add to .grad here.
y.backward(gradient) => x.grad = torch.autograd.grad(y, x, gradient)[0]
    The gradients that you send are right, and the weight gets none: autograd.grad returns gradients and leaves none in
    .grad.
        Let y.backward(gradient) do both.
x = comm.recv(torch.empty_like(x), group, rank - 1).wait() => comm.recv(torch.empty_like(x), group, rank - 1).wait()
or
comm.send(y.detach(), group, rank + 1) => comm.send(x.detach(), group, rank + 1)
    Each stage computes with the inputs of the first: the tensor that was received is not used, or it is not the output
    that was sent.
        Only the first stage takes the inputs; on the others they show the shape of the tensor that comes.
kept.append((x, y)) => kept.append((x, y if rank == last else (y - targets[k]).square().mean() / m))
torch.empty_like(y) => torch.empty_like(x)
y.backward(gradient) => y.backward()
    Every stage compares its output with the targets.
        Only the last has a loss; the others begin with the gradient that was sent.
comm.send(x.grad, => comm.send(torch.ones_like(x),
or
y.backward(gradient) => y.backward(torch.ones_like(y))
    Stages before the last begin backward with ones.
        Send the gradient of the tensor that came in, which backward fills; the previous stage begins with that one.
in gradient, the loss:
total += y.item() => total += y.item() * m
    The gradients are right, and the loss is m times too large.
        It is the mean over the batch: each microbatch has 1/m of it.
total += y.item() => total = y.item()
    The gradients are right, and the loss covers only the last microbatch.
        Add up the losses of all.
in the loss:
return total if rank == last else None => return total
    Every rank returns a loss.
        Only the last rank has one: return None on the others.
in waited for:
send.wait() => pass
    Not every send is waited for: a message may still be in flight when the step ends.
        Keep the handle that send returns, and wait for all of them at the end.
in all:
hangs
sends.append(comm.send(y.detach(), group, rank + 1)) => comm.send(y.detach(), group, rank + 1).wait()
sends.append(comm.send(x.grad, group, rank - 1)) => comm.send(x.grad, group, rank - 1).wait()
    In the steady state two neighbours send at the same time, one an activation and one a gradient, and both wait.
        Start the send, go on, and wait for its handle at the end of the step.
hangs
min(last - rank, m), [] => last - rank, []
for k in range(warmup): => for k in range(min(warmup, m)):
x, y = kept.pop(0) => x, y = inputs[0], inputs[0]
y.backward(gradient) => x, y = kept.pop(0); y.backward(gradient)
    With fewer microbatches than ranks, a rank waits for the gradient of a microbatch that does not exist.
        The warmup has min(m, p - 1 - r) microbatches, and the cooldown as many.
hangs
for _ in range(warmup): => for _ in range(0):
    The cooldown is missing: the gradients of the last microbatches are never received, and their senders wait.
        After the last forward a rank still has as many backwards to run as its warmup had forwards.
"""

ALSO_RIGHT = """
comm.send(y.detach(), group, rank + 1) => comm.send(y, group, rank + 1)
total += y.item() => total = total + y.detach()
    What is sent has its graph, and the loss is a tensor.
"""

EXERCISE = exercise(globals(), points=3, right=(one_f_one_b_step, by_its_list))
