"""Chapter 12, a linear layer that puts off the gradients of its weights: exercise 12.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear
from torch.utils.flop_counter import FlopCounterMode

from lib.check.exercise import Data, Exercise, Mistake, but, random, whole
from lib.check.fsdp.units import AS_NEEDED, MORE
from lib.memory import MemoryTracker
from lib.mesh import Group

_ROWS, _TOKENS, _D, _F = 2, 3, 5, 7  # of a microbatch; width of x, and between the two layers
_SHAPES = {"up": (_F, _D), "up_bias": (_F,), "down": (_D, _F), "down_bias": (_D,)}
_BIASES = ("up_bias", "down_bias")
_QUEUE, _FUNCTIONS, _NOTHING = "what backward has put into the queue", "functions", "nothing"
_BEFORE = "what forward has put into the queue"
_EARLY, _NONE = "gradients of weights that are there before the queue is run", "none"
_NOW, _LATER, _KEPT = "operations before the queue is run", "operations of the queue", "bytes that wait for the queue"
_INPUTS = "the inputs that it was made of"
_LESS, _HISTORY = "less than that", "what a gradient of the weights remembers"
_SAVED = """If it was ctx.saved_tensors in a function of the queue: autograd has let go of them by then.
Take them out of ctx in backward, and give them to the function."""


def _inputs(generator: torch.Generator, n: int) -> list[Data]:
    count = whole(generator, 4, 6)
    pieces = [tuple(random(generator, _ROWS, _TOKENS, _D) for _ in range(2)) for _ in range(count)]  # x and ∂y
    weights = {name: random(generator, *shape) for name, shape in _SHAPES.items()}
    # Neither in the order of forward, nor is the last one of anything the last one of the next.
    back = [count - 1, *torch.randperm(count - 1, generator=generator).tolist()]
    order = [back[-1], *(back[i] for i in torch.randperm(count - 1, generator=generator))]
    return [weights | {"microbatches": pieces, "back": back, "order": order}]


def _halves(answer: Callable, group: Group, given: Data) -> Data:
    """F of all microbatches, I of all, and then W of all, each time in another order."""
    weights = {name: given[name].clone().requires_grad_() for name in _SHAPES}
    pieces = [(x.clone().requires_grad_(), gradient.clone()) for x, gradient in given["microbatches"]]
    queues: list[list] = [[] for _ in pieces]
    memory = MemoryTracker()
    memory.count_as("parameter", *weights.values(), *(tensor for piece in pieces for tensor in piece))
    with memory, FlopCounterMode(display=False) as now:
        results = {
            m: _forward(answer, x, weights, queue)
            for m, ((x, _), queue) in enumerate(zip(pieces, queues, strict=True))
        }
        found: Data = {f"y, microbatch {m}": y.detach().clone() for m, y in results.items()}
        memory.count_as("parameter", *found.values())  # copies of ours
        found[_BEFORE] = _what_is_in(queues)
        for m in given["back"]:
            results.pop(m).backward(pieces[m][1])
        kept = memory.live["activation"]
    found[_QUEUE] = _what_is_in(queues)
    found[_EARLY] = ", ".join(name for name, w in weights.items() if w.grad is not None) or _NONE
    if found[_QUEUE] not in (_FUNCTIONS, _NOTHING):
        return found
    with FlopCounterMode(display=False) as later:
        try:
            for m in given["order"]:
                for put_off in queues[m]:
                    put_off()
        except RuntimeError as error:
            if "saved" in str(error):
                error.add_note(_SAVED)
            raise
    numbers = _ROWS * _TOKENS * len(pieces)
    products = 2 * 2 * numbers * _D * _F  # of two layers, one for each
    wait = 8 * numbers * (2 * _F + _D)  # input and gradient of the layer between, and the gradient of x
    gradients = {f"x, microbatch {m}": x.grad for m, (x, _) in enumerate(pieces)}
    gradients |= {name: weight.grad for name, weight in weights.items()}
    remembers = any(weight.grad is not None and weight.grad.requires_grad for weight in weights.values())
    return found | {
        **{_of(name): _NONE if gradient is None else gradient.detach() for name, gradient in gradients.items()},
        _NOW: _amount(now.get_total_flops(), 2 * products),
        _LATER: _amount(later.get_total_flops(), products),
        _KEPT: _amount(kept, wait),
        _HISTORY: _INPUTS if remembers else _NONE,
    }


def _forward(answer: Callable, x: Tensor, weights: dict[str, Tensor], queue: list) -> Tensor:
    up, up_bias, down, down_bias = weights.values()
    return answer(gelu(answer(x, up, up_bias, queue)), down, down_bias, queue)


def _of(name: str) -> str:
    return f"gradient of {name}"


def _what_is_in(queues: list[list]) -> str:
    others = [one for queue in queues for one in queue if not callable(one)]
    return type(others[0]).__name__ if others else _FUNCTIONS if all(queues) else _NOTHING


def _amount(got: float, needed: float) -> str:
    return MORE if got > 1.2 * needed else AS_NEEDED if got > 0.8 * needed else _LESS


# ---- gradients, and what they are summed of -------------------------------------------------------------------------

Factors = list[tuple[Tensor, Tensor]]  # ∂y and x of each layer, for a microbatch: ∂W = ∂yᵀ · x


def _back(given: Data, m: int) -> tuple[Tensor, Tensor, Factors]:
    """y and ∂x of a microbatch, and the factors of its ∂W."""
    x, gradient = given["microbatches"][m]
    up, up_bias, down, down_bias = (given[name] for name in _SHAPES)
    x = x.clone().requires_grad_()
    inner = linear(x, up, up_bias)
    hidden = gelu(inner)
    of_x, of_inner = torch.autograd.grad(hidden, [x, inner], gradient @ down)
    return linear(hidden, down, down_bias).detach(), of_x, [(of_inner, x.detach()), (gradient, hidden.detach())]


def _gradients(counted: Callable[[list[Factors], Data], list[Factors]] = lambda factors, given: factors) -> Callable:
    """y, and gradients of x and of the weights: sums over the factors that count, of those of the microbatches."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        ys, of_x, factors = zip(*(_back(given[0], m) for m in range(len(given[0]["microbatches"]))), strict=True)
        found = {f"y, microbatch {m}": y for m, y in enumerate(ys)}
        found |= {_of(f"x, microbatch {m}"): gradient for m, gradient in enumerate(of_x)}
        layers = zip(*counted([*factors], given[0]), strict=True)
        for (weight, bias), terms in zip((("up", "up_bias"), ("down", "down_bias")), layers, strict=True):
            found[_of(weight)] = sum(of_y.flatten(0, -2).T @ x.flatten(0, -2) for of_y, x in terms)
            found[_of(bias)] = sum(of_y.sum((0, 1)) for of_y, _ in terms)
        return [found]

    return answers


def _with(of_y: list[Factors], x: list[Factors]) -> list[Factors]:
    """Each ∂y with the x that stands at its place."""
    pairs = zip(of_y, x, strict=True)
    return [[(mine, its) for (mine, _), (_, its) in zip(a, b, strict=True)] for a, b in pairs]


def _last_x(factors: list[Factors], given: Data) -> list[Factors]:
    return _with(factors, factors[-1:] * len(factors))


def _last_gradient(factors: list[Factors], given: Data) -> list[Factors]:
    return _with([factors[given["back"][-1]]] * len(factors), factors)


def _last_of_both(factors: list[Factors], given: Data) -> list[Factors]:
    return [factors[given["back"][-1]]] * len(factors)


def _first_come(order: str) -> Callable:
    """Each ∂y, in this order, with the x that went forward first of those that are left."""
    return lambda factors, given: _with([factors[m] for m in given[order]], factors)


def _only_the_last(factors: list[Factors], given: Data) -> list[Factors]:
    return [factors[given["order"][-1]]]


_DONE = {_BEFORE: _NOTHING, _QUEUE: _FUNCTIONS, _EARLY: _NONE, _NOW: AS_NEEDED, _LATER: AS_NEEDED, _KEPT: AS_NEEDED}
_ALL = ", ".join(_SHAPES)
_SHARED = (
    "The products for the weights are of an x, or a ∂y, that is another microbatch's. When the queue is run, a name "
    "that all calls share has been given another value: let each function have its own x and its own ∂y."
)
_AT_ONCE = (
    "All gradients are right, but the products for the weights are computed at once, and only added later. Then "
    "nothing is won: the stage before waits for the products."
)
_EARLY_HINT = (
    "The weights have a gradient before the queue is run, though it is only put off here. In backward return None for "
    "them, or hide them from autograd."
)


def _reference(given: list[Data]) -> list[Data]:
    (right,) = _gradients()(given)
    ys = {name: y for name, y in right.items() if name.startswith("y,")}
    return [ys | _DONE | right | {_HISTORY: _NONE}]


HALVES = Exercise(
    id="12.1",
    title="later",
    points=3,
    body=_halves,
    inputs=_inputs,
    reference=_reference,
    ranks=(1,),
    mistakes=(
        Mistake(
            "Nothing is in the queue, and the weights have their gradients at once: that is what any linear layer "
            "does. Put a function into the queue that computes them when it is called.",
            lambda given, want: [{_QUEUE: _NOTHING, _EARLY: _ALL}],
        ),
        Mistake(
            "The weights' gradients are exactly twice too large: they are computed at once, and again by what is in "
            "the queue. In backward return None for the weights, so that autograd leaves them alone.",
            lambda given, want: [{_EARLY: _ALL} | _gradients(lambda factors, given: factors * 2)(given)[0]],
        ),
        Mistake(
            "The bias has its gradient at once. It is a sum over ∂y, and nobody waits for it either: put it off with "
            "the weight's.",
            lambda given, want: [{_QUEUE: _FUNCTIONS, _EARLY: ", ".join(_BIASES)}],
        ),
        Mistake(
            "Nothing is in the queue, and the weights have no gradient: backward throws away what it does not return. "
            "Put a function into the queue that computes it.",
            lambda given, want: [{_QUEUE: _NOTHING, _EARLY: _NONE}],
        ),
        Mistake(
            "What is in the queue leaves no gradient at the weights. It has to add to weight.grad, which is None the "
            "first time.",
            lambda given, want: [{_QUEUE: _FUNCTIONS} | {_of(name): _NONE for name in _SHAPES}],
        ),
        Mistake(
            "The weights are right, the biases have no gradient. A bias gets the sum of ∂y over all rows and tokens.",
            lambda given, want: [want[0] | {_of(name): _NONE for name in _BIASES}],
        ),
        Mistake(
            "The weights learn from one microbatch only: each function replaces .grad. Add to what is there.",
            _gradients(_only_the_last),
        ),
        *(
            Mistake(_SHARED, _gradients(mixed))
            for mixed in (_last_x, _last_gradient, _last_of_both, _first_come("back"), _first_come("order"))
        ),
        Mistake(
            "The first layer gets no gradient from the second: backward returns none for x. ∂x is what the stage "
            "before waits for.",
            lambda given, want: [
                {_QUEUE: _FUNCTIONS} | {_of(f"x, microbatch {m}"): _NONE for m in range(len(given[0]["order"]))}
            ],
        ),
        Mistake(_EARLY_HINT, lambda given, want: [{_QUEUE: _FUNCTIONS, _EARLY: _ALL}]),
        Mistake(_EARLY_HINT, lambda given, want: [{_QUEUE: _FUNCTIONS, _EARLY: "up, down"}]),
        Mistake(
            "Functions are in the queue before backward has begun. Who runs the queue now finds no ∂y: put them there "
            "when ∂y comes.",
            lambda given, want: [{_BEFORE: _FUNCTIONS}],
        ),
        Mistake(_AT_ONCE, lambda given, want: [{_NOW: MORE, _LATER: _LESS} | _gradients()(given)[0]]),
        Mistake(_AT_ONCE, lambda given, want: [{_LATER: _LESS} | _gradients()(given)[0]]),
        Mistake(
            "All gradients are right, but more is computed than y and ∂x before the queue is run: is forward done a "
            "second time?",
            lambda given, want: [{_EARLY: _NONE, _NOW: MORE} | _gradients()(given)[0]],
        ),
        Mistake(
            "All gradients are right, but your queue computes more than ∂W and ∂b: something is done a second time. "
            "∂yᵀ · x needs nothing but ∂y and x, and both have been there.",
            lambda given, want: [{_EARLY: _NONE, _LATER: MORE} | _gradients()(given)[0]],
        ),
        Mistake(
            "All gradients are right, but they remember how they were made: weight.grad has a history, and keeps every "
            "x alive until the optimizer. Detach x, or compute inside torch.no_grad().",
            but(**{_HISTORY: _INPUTS}),
        ),
        Mistake(
            "All gradients are right, but more waits for the queue than ∂y and x. What else does your function hold? "
            "A copy takes as much again, and a result with a history keeps all that it was made of.",
            but(**{_KEPT: MORE}),
        ),
    ),
)

EXERCISES = (HALVES,)
