"""Chapter 10, a linear layer that puts off the gradients of its weights: exercise 10.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear
from torch.utils.flop_counter import FlopCounterMode

from lib.check.exercise import Data, Exercise, Mistake, but, kind, random, whole
from lib.check.units import AS_NEEDED, MORE
from lib.memory import MemoryTracker
from lib.mesh import Group

_ROWS, _TOKENS, _D, _F = 2, 3, 5, 7  # of a microbatch; width of x, and between the two layers
_SHAPES = {"up": (_F, _D), "up_bias": (_F,), "down": (_D, _F), "down_bias": (_D,)}
_BIASES = ("up_bias", "down_bias")
_QUEUE, _FUNCTIONS, _NOTHING = "what was put into the queue", "functions", "nothing"
_EARLY, _NONE = "gradients of weights that are there before the queue is run", "none"
_NOW, _LATER, _KEPT = "operations before the queue is run", "operations of the queue", "bytes that wait for the queue"
_SAVED = """If it was ctx.saved_tensors in a function of the queue: autograd has let go of them by then.
Take them out of ctx in backward, and give them to the function."""


def _inputs(generator: torch.Generator, n: int) -> list[Data]:
    count = whole(generator, 3, 6)
    pieces = [tuple(random(generator, _ROWS, _TOKENS, _D) for _ in range(2)) for _ in range(count)]  # x and ∂y
    order = torch.randperm(count - 1, generator=generator).tolist()  # the last one forward is not the last to be run
    weights = {name: random(generator, *shape) for name, shape in _SHAPES.items()}
    return [weights | {"microbatches": pieces, "order": [count - 1, *order]}]


def _halves(answer: Callable, group: Group, given: Data) -> Data:
    """F of all microbatches, I of all, and then W of all, in another order."""
    weights = {name: given[name].clone().requires_grad_() for name in _SHAPES}
    pieces = [(x.clone().requires_grad_(), gradient.clone()) for x, gradient in given["microbatches"]]
    queues: list[list] = [[] for _ in pieces]
    memory = MemoryTracker()
    memory.count_as("parameter", *weights.values(), *(tensor for piece in pieces for tensor in piece))
    with memory:
        results = [_forward(answer, x, weights, queue) for (x, _), queue in zip(pieces, queues, strict=True)]
        with FlopCounterMode(display=False) as now:
            for _, gradient in pieces:
                results.pop(0).backward(gradient)
        kept = memory.live["activation"]
    found = {
        _QUEUE: _what_is_in(queues),
        _EARLY: ", ".join(n for n, w in weights.items() if w.grad is not None) or _NONE,
    }
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
    return found | {
        **{_of(name): _NONE if gradient is None else gradient for name, gradient in gradients.items()},
        _NOW: _amount(now.get_total_flops(), products),
        _LATER: _amount(later.get_total_flops(), products),
        _KEPT: _amount(kept, wait),
    }


def _forward(answer: Callable, x: Tensor, weights: dict[str, Tensor], queue: list) -> Tensor:
    up, up_bias, down, down_bias = weights.values()
    return answer(gelu(answer(x, up, up_bias, queue)), down, down_bias, queue)


def _of(name: str) -> str:
    return f"gradient of {name}"


def _what_is_in(queues: list[list]) -> str:
    others = [one for queue in queues for one in queue if not callable(one)]
    return kind(others[0]) if others else _FUNCTIONS if all(queues) else _NOTHING


def _amount(got: float, needed: float) -> str:
    return MORE if got > 1.2 * needed else AS_NEEDED


# ---- gradients, and what they are summed of -------------------------------------------------------------------------

Factors = list[tuple[Tensor, Tensor]]  # ∂y and x of each layer, for a microbatch: ∂W = ∂yᵀ · x


def _back(given: Data, m: int) -> tuple[Tensor, Factors]:
    """∂x of a microbatch, and the factors of its ∂W."""
    x, gradient = given["microbatches"][m]
    up, up_bias, down = (given[name] for name in ("up", "up_bias", "down"))
    x = x.clone().requires_grad_()
    inner = linear(x, up, up_bias)
    hidden = gelu(inner)
    of_x, of_inner = torch.autograd.grad(hidden, [x, inner], gradient @ down)
    return of_x, [(of_inner, x), (gradient, hidden)]


def _gradients(counted: Callable[[list[Factors]], list[Factors]] = lambda factors: factors) -> Callable:
    """Of x, and of the weights as sums over the factors that count, which come in the order of the queues."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        back = [_back(given[0], m) for m in range(len(given[0]["microbatches"]))]
        found = {_of(f"x, microbatch {m}"): of_x for m, (of_x, _) in enumerate(back)}
        layers = zip(*counted([back[m][1] for m in given[0]["order"]]), strict=True)
        for (weight, bias), terms in zip((("up", "up_bias"), ("down", "down_bias")), layers, strict=True):
            found[_of(weight)] = sum(of_y.flatten(0, -2).T @ x.flatten(0, -2) for of_y, x in terms)
            found[_of(bias)] = sum(of_y.sum((0, 1)) for of_y, _ in terms)
        return [found]

    return answers


def _all_x_of_the_last(factors: list[Factors]) -> list[Factors]:
    """Whoever went forward last is run first."""
    return [[(of_y, x) for (of_y, _), (_, x) in zip(one, factors[0], strict=True)] for one in factors]


_DONE = {_QUEUE: _FUNCTIONS, _EARLY: _NONE, _NOW: AS_NEEDED, _LATER: AS_NEEDED, _KEPT: AS_NEEDED}
_ALL = ", ".join(_SHAPES)


def _reference(given: list[Data]) -> list[Data]:
    return [_DONE | _gradients()(given)[0]]


def _is(**entries: Any) -> Callable:
    return lambda given, want: [entries]


HALVES = Exercise(
    id="10.2",
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
            lambda given, want: [{_EARLY: _ALL} | _gradients(lambda factors: factors * 2)(given)[0]],
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
            _gradients(lambda factors: factors[-1:]),
        ),
        Mistake(
            "Every ∂W is computed with the x of the microbatch that came last. When the queue is run, a name that all "
            "calls share has been given another value: let each function have its own x and ∂y.",
            _gradients(_all_x_of_the_last),
        ),
        Mistake(
            "The first layer gets no gradient from the second: backward returns none for x. ∂x is what the stage "
            "before waits for.",
            lambda given, want: [
                {_QUEUE: _FUNCTIONS} | {_of(f"x, microbatch {m}"): _NONE for m in range(len(given[0]["order"]))}
            ],
        ),
        Mistake(
            "All gradients are right, but the products for the weights are computed at once, and only added later. "
            "Then nothing is won: the previous stage waits for the products.",
            lambda given, want: [{_EARLY: _NONE, _NOW: MORE} | _gradients()(given)[0]],
        ),
        Mistake(
            "All gradients are right, but your queue computes more than ∂W and ∂b: something is done a second time. "
            "∂yᵀ · x needs nothing but ∂y and x, and both have been there.",
            but(**{_LATER: MORE}),
        ),
        Mistake(
            "All gradients are right, but more waits for the queue than ∂y and x. What else does your function hold? "
            "A result with a history keeps all that it was made of.",
            but(**{_KEPT: MORE}),
        ),
    ),
)

EXERCISES = (HALVES,)
