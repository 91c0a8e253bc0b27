"""12.1: linear layers whose weight gradients wait in one queue, at most so many at a time."""

from collections import defaultdict

import torch
from torch.nn.functional import gelu, linear
from torch.utils.flop_counter import FlopCounterMode

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, random, whole
from course.exercises.ch12.queued import at_each_step, queued
from lib.memory import MemoryTracker

ROWS, TOKENS, D, F = 2, 5, 5, 7  # of a microbatch; width of x, and between the two layers
SHAPES = {"up": (F, D), "up_bias": (F,), "down": (D, F), "down_bias": (D,)}
LIMITS = (1, 3, 99)
BEFORE, IN_ALL, DONE = "matmuls before finish", "matmuls in all", "after finish"
MOST = "pairs in the queue at any time"
WAIT, LEFT, HISTORY = "pairs kept before finish", "pairs kept after finish", "weights whose .grad has a history"


def inputs(generator, n):
    count = whole(generator, 4, 6)
    pieces = [tuple(random(generator, ROWS, TOKENS, D) for _ in range(2)) for _ in range(count)]  # x and ∂y
    weights = {name: random(generator, *shape) for name, shape in SHAPES.items()}
    back = [count - 1, *torch.randperm(count - 1, generator=generator).tolist()]  # not in the order of forward
    return [weights | {"microbatches": pieces, "back": back}]


def body(answer, group, given):
    found = {}
    for limit in LIMITS:
        found |= {f"limit {limit}: {what}": value for what, value in with_limit(answer, limit, given).items()}
    return found


def with_limit(answer, limit, given):
    """Forward of all microbatches through two layers, backward of all in a different order, and the rest."""
    weights = {name: given[name].clone().requires_grad_() for name in SHAPES}
    pieces = [(x.clone().requires_grad_(), gradient.clone()) for x, gradient in given["microbatches"]]
    up, up_bias, down, down_bias = weights.values()
    later, found, memory = answer(limit), {}, MemoryTracker()
    in_forward, most = {x.data_ptr() for x, _ in pieces}, 0

    def noted(x):
        in_forward.add(x.data_ptr())
        return x

    def look():
        nonlocal most
        most = max(most, queued(later, (ROWS * TOKENS * D, ROWS * TOKENS * F), in_forward))

    with memory, FlopCounterMode(display=False) as flops:
        ours = [*weights.values(), *(tensor for piece in pieces for tensor in piece)]
        results = [later.linear(noted(gelu(later.linear(x, up, up_bias))), down, down_bias) for x, _ in pieces]
        for m, y in enumerate(results):
            found[f"y of microbatch {m}"] = y.detach().clone()
        for done, m in enumerate(given["back"], 1):
            with at_each_step(later, look):
                results[m].backward(pieces[m][1])
            results[m] = y = None
            found[f"gradient of x, microbatch {m}"] = gradient_of(pieces[m][0])
            pieces[m][0].grad = None
            found |= {f"gradient of {name} after {done} backwards": gradient_of(w) for name, w in weights.items()}
        now = flops.get_total_flops()

        def pairs():
            """One tensor of a pair is an input of the check, the second has the width between the layers."""
            grads = [w.grad for w in weights.values() if w.grad is not None]
            memory.count_as("parameter", *ours, *found.values(), *grads)
            return round(memory.live["activation"] / (8 * ROWS * TOKENS * F))

        wait = pairs()
        later.finish()
        left = pairs()
    of_one = 2 * ROWS * TOKENS * D * F
    needed = 2 * len(pieces)  # of each pass: y, ∂x, ∂W
    early = max(needed - limit, 0)
    found |= {f"gradient of {name} {DONE}": gradient_of(w) for name, w in weights.items()}
    found[BEFORE] = AS_NEEDED if now <= (2 * needed + early) * of_one else MORE
    found[IN_ALL] = AS_NEEDED if flops.get_total_flops() <= 3 * needed * of_one else MORE
    history = sum(w.grad is not None and w.grad.requires_grad for w in weights.values())
    return found | {MOST: AS_NEEDED if most <= limit else MORE, WAIT: wait, LEFT: left, HISTORY: history}


def gradient_of(tensor):
    """None counts as zeros."""
    return torch.zeros_like(tensor).detach() if tensor.grad is None else tensor.grad.detach().clone()


def reference(given):
    weights, found = [given[0][name] for name in SHAPES], {}
    pieces, back = given[0]["microbatches"], given[0]["back"]
    terms, common = [], {}  # terms: the gradients of each pair, in the order of backward
    for m in back:
        x, gradient = pieces[m]
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
        y = linear(gelu(linear(leaves[0], *leaves[1:3])), *leaves[3:])
        of_x, *of_weights = torch.autograd.grad(y, leaves, gradient)
        common |= {f"y of microbatch {m}": y.detach(), f"gradient of x, microbatch {m}": of_x}
        zeros = [torch.zeros_like(w) for w in weights]
        pairs = zeros[:2] + of_weights[2:], of_weights[:2] + zeros[2:]
        terms += [dict(zip(SHAPES, of, strict=True)) for of in pairs]
    for limit in LIMITS:
        now = common | {
            BEFORE: AS_NEEDED,
            IN_ALL: AS_NEEDED,
            MOST: AS_NEEDED,
            WAIT: min(limit, len(terms)),
            LEFT: 0,
            HISTORY: 0,
        }
        for done in range(1, len(back) + 2):
            is_last = done > len(back)
            until, when = (len(terms), DONE) if is_last else (max(2 * done - limit, 0), f"after {done} backwards")
            for name, w in zip(SHAPES, weights, strict=True):
                now[f"gradient of {name} {when}"] = sum((of[name] for of in terms[:until]), torch.zeros_like(w))
        found |= {f"limit {limit}: {what}": value for what, value in now.items()}
    return [found]


class Later:
    def __init__(self, limit):
        self.limit, self.queue = limit, []

    def linear(self, x, weight, bias):
        x_only = x.detach()

        def defer(grad_y):
            if len(self.queue) == self.limit:
                self.compute_oldest()
            self.queue.append((weight, bias, x_only, grad_y))

        y = linear(x, weight.detach(), bias.detach())
        y.register_hook(defer)
        return y

    def compute_oldest(self):
        weight, bias, x, grad_y = self.queue.pop(0)
        rows = grad_y.flatten(0, -2)
        gradients = rows.T @ x.flatten(0, -2), rows.sum(0)
        for parameter, new in zip((weight, bias), gradients):
            old = parameter.grad
            parameter.grad = new if old is None else old + new

    def finish(self):
        while self.queue:
            self.compute_oldest()


class InFunctions(Later):
    """Its queue has functions."""

    def linear(self, x, weight, bias):
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return linear(x, weight, bias)

            @staticmethod
            def backward(ctx, dy):
                x = ctx.saved_tensors[0].detach()
                if len(self.queue) >= self.limit:
                    self.compute_oldest()
                self.queue.append(lambda: (weight.backward((dy.mT @ x).sum(0)), bias.backward(dy.sum((0, 1)))))
                return dy @ weight

        return Function.apply(x)

    def compute_oldest(self):
        self.queue.pop(0)()


class InPlace(Later):
    """It multiplies elementwise, and adds in place."""

    @torch.no_grad()
    def compute_oldest(self):
        weight, bias, x, dy = self.queue.pop(0)
        for parameter, new in (weight, dy.unsqueeze(-1) * x.unsqueeze(-2)), (bias, dy):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad += new.sum((0, 1))


class QueueOfEach(Later):
    """Each layer has its own."""

    def __init__(self, limit):
        self.queues = defaultdict(lambda: Later(limit))

    def linear(self, x, weight, bias):
        return self.queues[weight.shape].linear(x, weight, bias)

    def finish(self):
        for later in self.queues.values():
            later.finish()


class Keeps(Later):
    def finish(self):
        pairs = [*self.queue]
        super().finish()
        self.queue = pairs


def first(does, y):
    """y, whose backward does this before what follows."""

    def hook(grad_y):
        does(grad_y)

    y.register_hook(hook)
    return y


@torch.enable_grad()
def by_autograd(weight, bias, x, grad_y):
    return torch.autograd.grad(linear(x, weight, bias), (weight, bias), grad_y)


MISTAKES = """
linear(x, weight.detach(), bias.detach()) => linear(x, weight, bias)
y.register_hook(defer) =>
    The weights have their gradients after each backward, as with any linear layer: nothing is deferred.
        Hide weight and bias from autograd, and put x and ∂y into a queue.
linear(x, weight.detach(), bias.detach()) => linear(x, weight, bias)
    Autograd computes the weight gradients in backward, and the queue again.
        Detach weight and bias.
bias.detach() => bias
zip((weight, bias), gradients) => zip([weight], gradients)
    Autograd computes the bias gradient in backward. No rank waits for it.
        Defer it as well.
weight.detach() => weight
rows.T @ x.flatten(0, -2), rows.sum(0) => [rows.sum(0)]
zip((weight, bias), gradients) => zip([bias], gradients)
    Only the bias is deferred. The weight gradient is the expensive half.
        Detach the weight as well.
y.register_hook(defer) =>
    No weight gets a gradient, and no pair is kept.
        Put x and ∂y into the queue.
parameter.grad = new if old is None else old + new => pass
    No weight gets a gradient.
        Add it to weight.grad (None at first).
zip((weight, bias), gradients) => zip([weight], gradients)
    The biases have no gradient.
        A bias gets the sum of ∂y over sequences and tokens.
new if old is None else old + new => new
    Each pair replaces .grad, so a weight has the gradient of one microbatch.
        Add to .grad.
len(self.queue) == self.limit => False
    The limit is ignored.
        When the queue is full, compute its oldest pair first.
linear(x, weight.detach(), bias.detach()) => linear(x, weight.detach())
    Your y has no bias.
        y is x @ weight.T + bias.
len(self.queue) == self.limit => len(self.queue) > self.limit
    One pair too many waits. The queue is full when it has `limit` pairs.
        Compare before you append.
self.queue.append((weight, bias, x_only, grad_y)) =>
len(self.queue) == self.limit => self.queue.append((weight, bias, x_only, grad_y)) or len(self.queue) > self.limit
    All gradients are right, and the queue is too long for a moment: a pair goes in before the oldest is out.
        If the queue is full, compute its oldest pair first, then append.
len(self.queue) == self.limit => len(self.queue) == self.limit and (self.queue.pop(0) is None)
    The oldest pair leaves a full queue, and its gradients are not computed.
        Compute them before you drop the pair.
len(self.queue) == self.limit => len(self.queue) >= max(self.limit - 1, 1)
    A pair leaves the queue too early: you keep at most limit - 1.
        Room for a new pair is enough.
QueueOfEach
    Each layer has its own queue of `limit` pairs. Memory is limited for all layers.
        Use one queue.
if len(self.queue) == self.limit: => for _ in self.queue[:] if len(self.queue) == self.limit else []:
    A full queue is emptied, while the previous rank waits for this backward.
        Compute the oldest alone.
self.queue.append((weight, bias, x_only, grad_y)) =>
len(self.queue) == self.limit => self.queue.append((weight, bias, x_only, grad_y)) or len(self.queue) > self.limit
self.queue.pop(0) => self.queue.pop()
or
self.queue.pop(0) => self.queue.pop()
    When the queue is full, you leave the oldest pair in it.
        The oldest leaves first: pop(0).
while self.queue: => while len(self.queue) > 1:
    `finish` leaves one pair in the queue.
        Compute all that is left.
while self.queue: => while False:
    `finish` leaves out the last pairs, and nothing hangs.
        Compute all that is left.
while self.queue: => for _ in self.queue:
    `finish` computes every second pair: a loop over a list that gets shorter.
        Write `while queue:`.
Keeps
    `finish` computes its pairs and keeps them.
        The next step would add them again: empty the queue.
in gradient:
rows.T @ x.flatten(0, -2), rows.sum(0) => rows.T @ x.flatten(0, -2) / len(rows), rows.mean(0)
or
rows.sum(0) => rows.mean(0)
    A gradient is the mean over the tokens. The loss has been divided already, and ∂y has that factor.
        Add up the tokens: the gradient of weight is ∂yᵀ · x, that of bias the sum of ∂y.
x_only = x.detach() => weight.x = x_only = x.detach()
x.flatten(0, -2) => weight.x.flatten(0, -2)
or
y.register_hook(defer) => first(lambda grad_y: setattr(weight, "grad_y", grad_y), y).register_hook(defer)
rows = grad_y.flatten(0, -2) => rows = weight.grad_y.flatten(0, -2)
or
x_only = x.detach() => weight.x = x_only = x.detach()
x.flatten(0, -2) => weight.x.flatten(0, -2)
y.register_hook(defer) => first(lambda grad_y: setattr(weight, "grad_y", grad_y), y).register_hook(defer)
rows = grad_y.flatten(0, -2) => rows = weight.grad_y.flatten(0, -2)
or
self.limit, self.queue = limit, [] => self.limit, self.queue, self.xs = limit, [], defaultdict(list)
x_only = x.detach() => self.xs[weight.shape].append(x_only := x.detach())
x.flatten(0, -2) => self.xs[weight.shape].pop(0).flatten(0, -2)
    A weight gradient is computed from the x, or the ∂y, of a different microbatch, from a variable that calls share.
        Let each entry of the queue have its own x and its own ∂y.
in gradient of x:
linear(x, weight.detach(), bias.detach()) => linear(x_only, weight.detach(), bias.detach()).requires_grad_()
    Backward computes no gradient for x.
        The layer and the stage before wait for it.
in all:
x_only, grad_y)) => grad_y.flatten(0, -2).T @ x_only.flatten(0, -2), grad_y.sum((0, 1))))
rows = grad_y.flatten(0, -2) =>
rows.T @ x.flatten(0, -2), rows.sum(0) => x, grad_y
or
x_only, grad_y)) => (grad_y.unsqueeze(-1) * x_only.unsqueeze(-2)).sum((0, 1)), grad_y.sum((0, 1))))
rows = grad_y.flatten(0, -2) =>
rows.T @ x.flatten(0, -2), rows.sum(0) => x, grad_y
    The matmul for a weight gradient runs in backward, and only its result is added later. The previous stage still
    waits for it.
        Put x and ∂y into the queue, and compute when the pair leaves it.
y.register_hook(defer) => first(lambda grad_y: linear(x_only, weight, bias), y).register_hook(defer)
    Backward computes more than ∂x and the pairs that leave the queue.
        Does forward run again?
rows.T @ x.flatten(0, -2), rows.sum(0) => by_autograd(weight, bias, x, grad_y)
    A pair costs more than ∂yᵀ · x: autograd also computes y or ∂x again.
        Multiply ∂y and x yourself.
x_only = x.detach() => x_only = x
    All gradients are right, with a history: weight.grad keeps every x until the optimizer step.
        Detach x, or no_grad.
x_only = x.detach() => x_only = x.detach().clone()
    All gradients are right, and more than x and ∂y is kept.
        Keep the tensors themselves, without a copy.
"""

EXERCISE = exercise(globals(), points=3, right=(Later, InFunctions, InPlace), ranks=(1,))
