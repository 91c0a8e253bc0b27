"""12.1: linear layers whose weight gradients wait in one queue, at most so many at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear
from torch.utils.flop_counter import FlopCounterMode

from lib.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random, whole
from lib.memory import MemoryTracker
from lib.mesh import Group

ROWS, TOKENS, D, F = 2, 5, 5, 7  # of a microbatch; width of x, and between the two layers
SHAPES = {"up": (F, D), "up_bias": (F,), "down": (D, F), "down_bias": (D,)}
LIMITS = (1, 3, 99)
BEFORE, IN_ALL, DONE = "matmuls before finish", "matmuls in all", "after finish"
WAIT, LEFT, HISTORY = "pairs kept before finish", "pairs kept after finish", "weights whose .grad has a history"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    count = whole(generator, 4, 6)
    pieces = [tuple(random(generator, ROWS, TOKENS, D) for _ in range(2)) for _ in range(count)]  # x and ∂y
    weights = {name: random(generator, *shape) for name, shape in SHAPES.items()}
    back = [count - 1, *torch.randperm(count - 1, generator=generator).tolist()]  # not in the order of forward
    return [weights | {"microbatches": pieces, "back": back}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for limit in LIMITS:
        found |= {f"limit {limit}: {what}": value for what, value in with_limit(answer, limit, given).items()}
    return found


def with_limit(answer: Callable, limit: int, given: Data) -> Data:
    """Forward of all microbatches through two layers, backward of all in a different order, and the rest."""
    weights = {name: given[name].clone().requires_grad_() for name in SHAPES}
    pieces = [(x.clone().requires_grad_(), gradient.clone()) for x, gradient in given["microbatches"]]
    up, up_bias, down, down_bias = weights.values()
    later, found, memory = answer(limit), {}, MemoryTracker()
    with memory, FlopCounterMode(display=False) as flops:
        ours = [*weights.values(), *(tensor for piece in pieces for tensor in piece)]
        results = [later.linear(gelu(later.linear(x, up, up_bias)), down, down_bias) for x, _ in pieces]
        for m, y in enumerate(results):
            found[f"y of microbatch {m}"] = y.detach().clone()
        for done, m in enumerate(given["back"], 1):
            results[m].backward(pieces[m][1])
            results[m] = y = None
            found[f"gradient of x, microbatch {m}"] = gradient_of(pieces[m][0])
            pieces[m][0].grad = None
            found |= {f"gradient of {name} after {done} backwards": gradient_of(w) for name, w in weights.items()}
        now = flops.get_total_flops()

        def pairs() -> int:
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
    return found | {WAIT: wait, LEFT: left, HISTORY: history}


def gradient_of(tensor: Tensor) -> Tensor:
    """None counts as zeros."""
    return torch.zeros_like(tensor).detach() if tensor.grad is None else tensor.grad.detach().clone()


def reference(given: list[Data]) -> list[Data]:
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
        now = common | {BEFORE: AS_NEEDED, IN_ALL: AS_NEEDED, WAIT: min(limit, len(terms)), LEFT: 0, HISTORY: 0}
        for done in range(1, len(back) + 2):
            is_last = done > len(back)
            until, when = (len(terms), DONE) if is_last else (max(2 * done - limit, 0), f"after {done} backwards")
            for name, w in zip(SHAPES, weights, strict=True):
                now[f"gradient of {name} {when}"] = sum((of[name] for of in terms[:until]), torch.zeros_like(w))
        found |= {f"limit {limit}: {what}": value for what, value in now.items()}
    return [found]


# ---- classes, right and wrong ---------------------------------------------------------------------------------------


class Later:
    """The answer, in small methods: each mistake changes one or two."""

    def __init__(self, limit):
        self.limit, self.queue = limit, []

    def linear(self, x, weight, bias):
        kept = self.keep(x)
        y = linear(x, *self.hide(weight, bias)).requires_grad_()
        y.register_hook(lambda dy: self.put((weight, bias, *self.pair(kept, dy))))
        return y

    def keep(self, x):
        return x.detach()

    def hide(self, weight, bias):
        return weight.detach(), bias.detach()

    def pair(self, x, dy):
        return x, dy

    def put(self, pair):
        if self.is_full():
            self.make_room()
        self.queue.append(pair)

    def is_full(self):
        return len(self.queue) == self.limit

    def make_room(self):
        self.compute(*self.queue.pop(0))

    def compute(self, weight, bias, x, dy):
        self.add(weight, self.matmul(dy, x))
        self.add(bias, dy.sum((0, 1)))

    def matmul(self, dy, x):
        return dy.flatten(0, -2).T @ x.flatten(0, -2)

    def add(self, parameter, gradient):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def finish(self):
        while self.queue:
            self.make_room()


def changed(of: type = Later, **methods: Callable) -> type:
    return type("Later", (of,), methods)


def mistake(hint: str, about: str = "", **methods: Callable) -> Mistake:
    return Mistake(hint, changed(**methods), about=(about,))


def nothing(*_: Any) -> None:
    pass


def elementwise(self: Any, dy: Tensor, x: Tensor) -> Tensor:
    return (dy.unsqueeze(-1) * x.unsqueeze(-2)).sum((0, 1))


@torch.no_grad()
def add_in_place(self: Any, parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    parameter.grad += gradient


def a_queue_each(self: Any, pair: tuple) -> None:
    mine = [other for other in self.queue if other[0] is pair[0]]
    if len(mine) == self.limit:
        self.compute(*self.queue.pop(next(i for i, other in enumerate(self.queue) if other is mine[0])))
    self.queue.append(pair)


class Shared(Later):
    """All calls of a layer share lists of x and ∂y; `uses` chooses the pair for each gradient."""

    def __init__(self, limit):
        super().__init__(limit)
        self.xs, self.dys = defaultdict(list), defaultdict(list)

    def linear(self, x, weight, bias):
        self.xs[weight.shape].append(x.detach())
        return super().linear(x, weight, bias)

    def put(self, pair):
        self.dys[pair[0].shape].append(pair[3])
        super().put(pair)

    def compute(self, weight, bias, x, dy):
        super().compute(weight, bias, *self.uses(x, dy, self.xs[weight.shape], self.dys[weight.shape]))


class InFunctions(Later):
    """One more in the queue for a short time: both tensors of a pair exist in backward in any case."""

    def linear(self, x, weight, bias):
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return linear(x, weight, bias)

            @staticmethod
            def backward(ctx, dy):
                x = ctx.saved_tensors[0].detach()
                self.queue.append(lambda: (weight.backward((dy.mT @ x).sum(0)), bias.backward(dy.sum((0, 1)))))
                if len(self.queue) > self.limit:
                    self.make_room()
                return dy @ weight

        return Function.apply(x)

    def make_room(self):
        self.queue.pop(0)()


STACK = "When the queue is full, you leave the oldest pair in it. The oldest leaves first: pop(0)."

EXERCISE = Exercise(
    id="12.1",
    title="Later",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(1,),
    right=(Later, InFunctions, changed(add=add_in_place, matmul=elementwise)),
    mistakes=(
        mistake(
            "The weights have their gradients after each backward, as with any linear layer: nothing is deferred. "
            "Hide weight and bias from autograd, and put x and ∂y into a queue.",
            hide=lambda self, *both: both,
            put=nothing,
        ),
        mistake(
            "Autograd computes the weight gradients in backward, and the queue again: detach weight and bias.",
            hide=lambda self, *both: both,
        ),
        mistake(
            "Autograd computes the bias gradient in backward. No rank waits for it: defer it as well.",
            hide=lambda self, weight, bias: (weight.detach(), bias),
            compute=lambda self, weight, bias, x, dy: self.add(weight, self.matmul(dy, x)),
        ),
        mistake(
            "Only the bias is deferred. The weight gradient is the expensive half: detach the weight as well.",
            hide=lambda self, weight, bias: (weight, bias.detach()),
            compute=lambda self, weight, bias, x, dy: self.add(bias, dy.sum((0, 1))),
        ),
        mistake("No weight gets a gradient, and no pair is kept. Put x and ∂y into the queue.", put=nothing),
        mistake("No weight gets a gradient. Add it to weight.grad (None at first).", compute=nothing),
        mistake(
            "The biases have no gradient. A bias gets the sum of ∂y over sequences and tokens.",
            compute=lambda self, weight, bias, x, dy: self.add(weight, self.matmul(dy, x)),
        ),
        mistake(
            "Each pair replaces .grad, so a weight has the gradient of one microbatch. Add to .grad.",
            add=lambda self, parameter, gradient: setattr(parameter, "grad", gradient),
        ),
        mistake("The limit is ignored. When the queue is full, compute its oldest pair first.", is_full=nothing),
        mistake(
            "One pair too many waits. The queue is full when it has `limit` pairs: compare before you append.",
            is_full=lambda self: len(self.queue) > self.limit,
        ),
        mistake(
            "A pair leaves the queue too early: you keep at most limit - 1. Room for a new pair is enough.",
            is_full=lambda self: len(self.queue) >= max(self.limit - 1, 1),
        ),
        mistake(
            "Each layer has its own queue of `limit` pairs. Memory is limited for all layers: use one queue.",
            put=a_queue_each,
        ),
        mistake(
            "A full queue is emptied, while the previous rank waits for this backward: compute the oldest alone.",
            make_room=lambda self: [self.compute(*self.queue.pop(0)) for _ in range(len(self.queue))],
        ),
        mistake(STACK, put=lambda self, pair: self.compute(*pair) if self.is_full() else self.queue.append(pair)),
        mistake(STACK, make_room=lambda self: self.compute(*self.queue.pop())),
        mistake("`finish` leaves out the last pairs, and nothing hangs. Compute all that is left.", finish=nothing),
        mistake(
            "`finish` computes every second pair: a loop over a list that gets shorter. Write `while queue:`.",
            finish=lambda self: [self.make_room() for _ in self.queue],
        ),
        mistake(
            "`finish` computes its pairs and keeps them. The next step would add them again: empty the queue.",
            finish=lambda self: [self.compute(*pair) for pair in self.queue],
        ),
        *(
            mistake(
                "A weight gradient is computed from the x, or the ∂y, of a different microbatch, from a variable that "
                "calls share. Let each entry of the queue have its own x and its own ∂y.",
                "gradient",
                of=Shared,
                uses=staticmethod(uses),
            )
            for uses in (
                lambda x, dy, xs, dys: (xs[-1], dy),
                lambda x, dy, xs, dys: (x, dys[-1]),
                lambda x, dy, xs, dys: (xs[-1], dys[-1]),
                lambda x, dy, xs, dys: (xs.pop(0), dy),
            )
        ),
        mistake(
            "Backward computes no gradient for x. The layer and the stage before wait for it.",
            "gradient of x",
            linear=lambda self, x, *weights: Later.linear(self, x.detach(), *weights),
        ),
        *(
            mistake(
                "The matmul for a weight gradient runs in backward, and only its result is added later. The previous "
                "stage still waits for it. Put x and ∂y into the queue, and compute when the pair leaves it.",
                matmul=how,
                pair=lambda self, x, dy: (self.matmul(dy, x), dy.sum((0, 1))),
                compute=lambda self, *pair: [self.add(*of) for of in zip(pair[:2], pair[2:], strict=True)],
            )
            for how in (Later.matmul, elementwise)
        ),
        mistake(
            "Backward computes more than ∂x and the pairs that leave the queue. Does forward run again?",
            put=lambda self, pair: (linear(pair[2], *pair[:2]), Later.put(self, pair))[1],
        ),
        mistake(
            "A pair costs more than ∂yᵀ · x: autograd also computes y or ∂x again. Multiply ∂y and x yourself.",
            compute=torch.enable_grad()(lambda self, weight, bias, x, dy: linear(x, weight, bias).backward(dy)),
        ),
        mistake(
            "All gradients are right, and they have a history: weight.grad keeps every x in memory until the "
            "optimizer step. Detach x, or compute inside torch.no_grad().",
            keep=lambda self, x: x,
        ),
        mistake(
            "All gradients are right, and more than x and ∂y is kept. Keep the tensors themselves, without a copy.",
            keep=lambda self, x: x.detach().clone(),
        ),
    ),
)
