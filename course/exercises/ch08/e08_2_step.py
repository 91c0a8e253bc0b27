"""08.2: several microbatches forward and backward through a chain of stages, in torch.distributed itself."""

import re

import torch
from torch import distributed as dist
from torch import nn

from course.check.edits import exercise
from course.check.exercise import DTYPE, random
from course.check.listen import listen, raw

ROWS, D, MICROBATCHES = 3, 5, 4
LOSS, SENT, WAITED, BACK = "the loss", "what was sent", "waited for", "sent backward"
ASKS, AFTER = "inputs of the stage that ask for a gradient", "weights of the stage"
AS_NEEDED, MORE, AS_GIVEN, CHANGED = "as needed", "more", "as given", "others"
MERGED = "several microbatches in a message"
ALL, SOME = "every call", "not every call"
ORDER, HELD, START = "the order of forward and backward", "what a send holds up", "when a send starts"
AT_ONCE, LATER = "when its tensor is computed", "after the next microbatch"
NOTHING, THE_NEXT = "nothing", "the next microbatch"
LEAF = """If this is about the gradient of the tensor that came in: dist.recv fills a tensor without history. Declare it
a leaf before your stage computes with it."""
ENDS = """Only the last rank has a loss to begin with. The others begin at their output, with the gradient that came:
y.backward(gradient)."""


def inputs(generator, n):
    alike = {name: [random(generator, ROWS, D) for _ in range(MICROBATCHES)] for name in ("inputs", "targets")}
    return [alike | {"weight": random(generator, D, D), "bias": random(generator, D, 1)} for _ in range(n)]


class FeaturesFirst(nn.Module):
    """tanh(W xᵀ + b)ᵀ, as some kernels lay it out: its output is not contiguous."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x):
        return torch.tanh(self.weight @ x.T + self.bias).T


@raw
def body(answer, group, given):
    stage, asks, events = FeaturesFirst(given["weight"], given["bias"]), [], []
    heard = listen(
        on_start=lambda call: events.append("send") if call.kind == "send" else None,
        on_wait=lambda call: events.append("wait") if call.kind == "send" else None,
    )
    stage.register_forward_pre_hook(lambda module, given: asks.append(given[0].requires_grad))
    stage.register_forward_hook(lambda module, given, y: events.append("F"))
    stage.bias.register_hook(lambda gradient: events.append("B"))
    try:
        loss = answer(stage, given["inputs"], given["targets"])
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if "attribute 'backward'" in str(error):
            error.add_note(ENDS)
        elif "NoneType" in str(error) or "does not require grad" in str(error):
            error.add_note(LEAF)
        raise
    neighbours, nbytes = (group.rank > 0) + (group.rank < group.size - 1), given["inputs"][0].nbytes
    more = heard.sent_bytes(group.size) > neighbours * MICROBATCHES * nbytes
    merged = any(n_bytes > nbytes for _, n_bytes in heard.sent)
    unchanged = all(torch.equal(p, given[name]) for name, p in stage.named_parameters())
    found = {LOSS: "None" if loss is None else loss, AFTER: AS_GIVEN if unchanged else CHANGED}
    for name, p in stage.named_parameters():
        found[f"gradient of the {name}"] = torch.zeros_like(p) if p.grad is None else p.grad
    found |= {WAITED: SOME if heard.unfinished > 0 else ALL, SENT: MORE if more else MERGED if merged else AS_NEEDED}
    found |= {ORDER: " ".join(event for event in events if event in "FB"), HELD: held_up(events)}
    found[START] = start(events, group.rank > 0, group.rank < group.size - 1)
    found[BACK] = any(dst == group.rank - 1 for dst, _ in heard.sent)
    return found | ({ASKS: ALL if all(asks) else SOME} if group.rank else {})


def held_up(events):
    """Whether a send was waited for where this pass goes on: forward, or backward."""
    passes = " ".join(events)
    return THE_NEXT if re.search("wait.* F|B.*wait.* B", passes) else NOTHING


def start(events, sends_back, sends_on):
    """Whether each send starts before the next action."""
    passes = " ".join(event for event in events if event != "wait")
    late = (sends_on and re.search("F [FB]", passes)) or (sends_back and "B B" in passes)
    return LATER if late else AT_ONCE


def reference(given):
    stages = [FeaturesFirst(g["weight"], g["bias"]) for g in given]
    x, targets = (torch.cat(given[0][name]) for name in ("inputs", "targets"))
    loss = nn.functional.mse_loss(nn.Sequential(*stages)(x), targets)
    loss.backward()
    right = {LOSS: "None", AFTER: AS_GIVEN, WAITED: ALL, SENT: AS_NEEDED, HELD: NOTHING, START: AT_ONCE}
    right[ORDER] = " ".join("F" * MICROBATCHES + "B" * MICROBATCHES)
    ranks = [
        right | {BACK: r > 0} | {f"gradient of the {name}": p.grad for name, p in stage.named_parameters()}
        for r, stage in enumerate(stages)
    ]
    return [*ranks[:-1], ranks[-1] | {LOSS: loss.item()}]


def step(stage, inputs, targets):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, sends, total = [], [], 0
    for x, target in zip(inputs, targets):  # noqa: B905
        if rank > 0:
            x = torch.empty_like(x)  # a new tensor for each microbatch
            dist.recv(x, rank - 1)
        x.requires_grad_()  # a leaf: here this rank's graph begins
        y = stage(x)
        if rank == last:
            y = (y - target).square().mean() / len(inputs)
            total += y.item()
        else:
            sends.append(dist.isend(y.detach().contiguous(), rank + 1))
        kept.append((x, y))
    for x, y in kept:
        of_y = None
        if rank < last:
            of_y = torch.empty_like(x)
            dist.recv(of_y, rank + 1)
        y.backward(of_y)
        if rank > 0:
            sends.append(dist.isend(x.grad, rank - 1))
    for handle in sends:
        handle.wait()
    return total if rank == last else None


def hands_the_loss_round(stage, inputs, targets):
    loss = torch.tensor(step(stage, inputs, targets) or 0.0, dtype=DTYPE)
    dist.broadcast(loss, dist.get_world_size() - 1)
    return loss


def one_at_a_time(stage, inputs, targets):
    """Each microbatch down and up again before the next: no pipeline."""
    losses = [step(stage, [x], [target]) for x, target in zip(inputs, targets, strict=True)]
    for p in stage.parameters():
        p.grad /= len(inputs)
    return None if losses[0] is None else sum(losses) / len(inputs)


def one_f_one_b(stage, inputs, targets):
    """`step` in the order of 1F1B."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    kept, sends, total = [], [], 0

    def forward(k):
        nonlocal total
        x = torch.empty_like(inputs[k]) if rank > 0 else inputs[k]
        if rank > 0:
            dist.recv(x, rank - 1)
        y = stage(x.requires_grad_())
        if rank == last:
            y = (y - targets[k]).square().mean() / m
            total += y.item()
        else:
            sends.append(dist.isend(y.detach().contiguous(), rank + 1))
        kept.append((x, y))

    def backward():
        x, y = kept.pop(0)
        of_y = torch.empty_like(x) if rank < last else None
        if rank < last:
            dist.recv(of_y, rank + 1)
        y.backward(of_y)
        if rank > 0:
            sends.append(dist.isend(x.grad, rank - 1))

    ahead = min(last - rank, m)
    for k in range(m):
        forward(k)
        if k >= ahead:
            backward()
    while kept:
        backward()
    for handle in sends:
        handle.wait()
    return total if rank == last else None


def sends_at_the_end(stage, inputs, targets, forward=True, backward=True):
    """`step`, whose sends begin after all forwards, or after all backwards."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, sends, total = [], [], 0
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
        y = stage(x.requires_grad_())
        if rank == last:
            y = (y - target).square().mean() / len(inputs)
            total += y.item()
        elif not forward:
            sends.append(dist.isend(y.detach().contiguous(), rank + 1))
        kept.append((x, y))
    if rank < last and forward:
        sends += [dist.isend(y.detach().contiguous(), rank + 1) for _, y in kept]
    for x, y in kept:
        of_y = torch.empty_like(x) if rank < last else None
        if rank < last:
            dist.recv(of_y, rank + 1)
        y.backward(of_y)
        if rank > 0 and not backward:
            sends.append(dist.isend(x.grad, rank - 1))
    if rank > 0 and backward:
        sends += [dist.isend(x.grad, rank - 1) for x, _ in kept]
    for handle in sends:
        handle.wait()
    return total if rank == last else None


def then(more):
    """The right step, and more with the stage."""
    return lambda stage, *given: (step(stage, *given), more(stage))[0]


MISTAKES = """
in all:
one_at_a_time
    All numbers are right, and there is no pipeline: each microbatch goes down and up again before the next one starts,
    so only one rank computes at a time.
        Run all forwards first, then all backwards: two loops.
one_f_one_b
    All numbers are right, and you run 1F1B: backward of the first microbatches before forward of the last.
        That is chapter 9. Here all forwards come before the first backward.
in what a send holds up:
sends.append(dist.isend(y.detach().contiguous(), rank + 1)) => dist.send(y.detach().contiguous(), rank + 1)
or
sends.append(dist.isend(x.grad, rank - 1)) => dist.send(x.grad, rank - 1)
or
sends.append(dist.isend(y.detach().contiguous(), rank + 1)) => dist.send(y.detach().contiguous(), rank + 1)
sends.append(dist.isend(x.grad, rank - 1)) => dist.send(x.grad, rank - 1)
    You wait for a send before the next microbatch: until the neighbour receives, this rank computes nothing.
        Start it with dist.isend, keep the handle, and wait for all handles at the end.
in all:
lambda stage, *lists: step(stage, *([torch.cat(one)] for one in lists))
    All numbers are right, and the batch goes through the stages as one: each rank waits until the previous one has
    computed all of it, so there is no pipeline.
        Send each microbatch by itself, as soon as it is computed.
handle.wait() => pass
    All numbers are right, but you did not wait for every isend or irecv. Until handle.wait() returns, the tensor may
    not be freed or changed, and a step may not end.
        Keep the handles, and wait at the end.
in gradient:
x.requires_grad_() =>
x.grad => torch.zeros_like(x)
    Only the last stage is trained: zeros are sent backward.
        A tensor that dist.recv filled has no history and requires no gradient. Declare it a leaf before your stage
        computes with it.
in all:
y.backward(of_y) => x.grad = torch.autograd.grad(y, x, of_y)[0]
or
y.backward(of_y) => y.backward(of_y, inputs=[x] if rank < last else None)
or
y.backward(of_y) => y.backward(of_y, inputs=[x] if 0 < rank < last else None)
    The gradients that you send are right, and weights get none: autograd.grad returns gradients and leaves none in
    .grad.
        Let y.backward(gradient) do both, on every rank.
in gradient, sent backward:
for x, y in kept: => for x, y in kept if rank == last else []:
sends.append(dist.isend(x.grad, rank - 1)) => pass
    Only the last stage is trained, and no gradient is sent. Autograd does not record messages: the graph ends at a
    send.
        Send the gradient of the tensor that came in, and let backward start with it.
in gradient:
y.backward(of_y) => y.sum().backward()
    Stages before the last begin backward with ones.
        Begin with the gradient that the next stage sent.
kept.append((x, y)) => kept.append((x, y if rank == last else (y - target).square().mean() / len(inputs)))
y.backward(of_y) => y.backward()
    Every stage compares its output with the targets.
        Only the last has a loss; others begin with the gradient sent.
y = stage(x) => y = x.output = stage(x)
y.backward(of_y) => y.backward(of_y, retain_graph=True)
x.grad => torch.autograd.grad(y, x.output, of_y)[0].contiguous()
    You send the gradient of your output.
        The previous stage needs that of the tensor it sent: of your *input*.
x = torch.empty_like(x) => came = torch.empty_like(x)
dist.recv(x, rank - 1) => dist.recv(came, rank - 1)
or
dist.isend(y.detach().contiguous(), rank + 1) => dist.isend(x.detach(), rank + 1)
    Each stage computes with the inputs of the first: the tensor that was received is not used, or it is not the output
    that was sent.
        Only the first stage takes the inputs; on the others they show the shape of the tensor that comes.
x = torch.empty_like(x) => x = kept[0][0] if kept else torch.empty_like(x)
x.grad => x.grad.clone()
or
x = torch.empty_like(x) => x = kept[0][0].detach() if kept else torch.empty_like(x)
    You receive every microbatch into the same tensor. The graphs of the earlier ones still need it for backward, and
    now hold the last microbatch; no error is raised.
        Receive each into a new tensor.
for x, y in kept: => for x, y in reversed(kept) if rank == last else kept:
    The last rank runs backward from the last microbatch to the first, the others from the first to the last. Messages
    arrive in the order in which they were sent, so each rank used a different microbatch's gradient.
        Use one order.
y.backward(of_y) => for _ in range(2): y.backward(of_y, retain_graph=True)
x.grad => x.grad / 2
or
y.backward(of_y) => for _ in range(2): y.backward(of_y, retain_graph=True)
    You run backward through the same graph twice, and .grad adds up: the gradients of the weights are twice too large.
        One backward gives those and the gradient of the tensor that came in.
in when a send starts:
sends_at_the_end
or lambda *given: sends_at_the_end(*given, backward=False)
or lambda *given: sends_at_the_end(*given, forward=False)
    You compute the next microbatch before you send the last one: the neighbour could compute meanwhile, and waits.
        Start each send right after its tensor is computed, inside the loop.
in gradient:
.mean() / len(inputs) => .sum() / len(inputs)
    Your gradients are b · D times too large: you add up the squares of a microbatch.
        The loss is the mean over all elements.
.mean() / len(inputs) => .mean()
    Your gradients are m times too large.
        The loss is the mean over the batch, so each microbatch counts 1/m.
y.backward(of_y) => stage.zero_grad(); y.backward(of_y)
    Only one microbatch is in the gradients: you empty or replace them at each backward.
        Backward must add to .grad here.
in gradient, the loss:
total += y.item() => total += y.item() * len(inputs)
    The gradients are right, and the loss is m times too large.
        It is the mean over all microbatches, not the sum of their means.
total += y.item() => total = y.item()
    The gradients are right, and the loss covers only the last microbatch.
        Add up the losses of all.
in the loss:
hands_the_loss_round
    Every rank returns the loss.
        Only the last rank has it: return None on the others. No rank has to send it.
in all:
then(lambda stage: torch.optim.SGD(stage.parameters(), lr=0.1).step())
    All gradients are right, but the weights changed.
        Leave them: an optimizer step is no part of this.
then(lambda stage: dist.broadcast(stage.weight.detach().clone(), 0))
    All numbers are right, but you send more than an activation forward and a gradient backward per microbatch.
        Look at the shape of what each rank sends, and how often.
"""

ALSO_RIGHT = """
dist.recv(x, rank - 1) => dist.irecv(x, rank - 1).wait()
for x, y in kept: => for x, y in reversed(kept):
dist.recv(of_y, rank + 1) => dist.irecv(of_y, rank + 1).wait()
total += y.item() => total = total + y.detach()
    The last microbatch first, its receives started, then awaited.
"""

EXERCISE = exercise(globals(), points=3, right=(step,))
