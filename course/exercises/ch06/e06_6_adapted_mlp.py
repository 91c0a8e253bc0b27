"""06.6: low-rank adapters in a column–row pair: half of each adapter is replicated, and its gradient is partial."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu

from course.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random
from course.check.listen import listen
from lib import comm, cost
from lib.conjugate import all_reduce_identity as g
from lib.conjugate import identity_all_reduce as f
from lib.conjugate import pair
from lib.mesh import Group

TOKENS, WIDTH, EACH, LOW = 3, 8, 5, 2  # EACH: hidden features of a rank
REPLICATED = {"up A": (LOW, WIDTH), "down B": (WIDTH, LOW)}
SHARDED = {"up": (EACH, WIDTH), "up B": (EACH, LOW), "down": (WIDTH, EACH), "down A": (LOW, EACH)}
ADAPTERS = ("up A", "up B", "down A", "down B")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    drawn = {name: random(generator, TOKENS, WIDTH) for name in ("x", "gradient")}
    same = {name: random(generator, *shape) for name, shape in REPLICATED.items()}
    shards = [{name: random(generator, *shape) for name, shape in SHARDED.items()} for _ in range(n)]
    return [drawn | {"weights": same | own} for own in shards]


def body(answer: Callable, group: Group, given: Data) -> Data:
    x, n = given["x"].clone().requires_grad_(), group.size
    weights = {name: w.clone().requires_grad_(name in ADAPTERS) for name, w in given["weights"].items()}
    heard = listen()
    y = answer(x, weights, group)
    if not torch.is_tensor(y) or not y.requires_grad or y.shape != x.shape:
        return {"y": y}
    y.backward(given["gradient"])
    few = (x, x, weights["up A"], weights["down B"])
    most = 1.1 * sum(cost.wire_bytes("all_reduce", z.nbytes, n) for z in few)
    found = {"y": y.detach(), "gradient of x": x.grad, "what was sent": AS_NEEDED}
    found |= {"what was sent": MORE} if heard.sent_bytes(n) > most else {}
    return found | {f"gradient of {name}": weights[name].grad for name in ADAPTERS}


def reference(given: list[Data]) -> list[Data]:
    x = given[0]["x"].clone().requires_grad_()
    both = {name: given[0]["weights"][name].clone().requires_grad_() for name in REPLICATED}
    each = [{k: w.clone().requires_grad_() for k, w in g["weights"].items()} | both for g in given]
    y = sum(term(hidden(x, w), w) for w in each)
    y.backward(given[0]["gradient"])
    right = {"y": y.detach(), "gradient of x": x.grad, "what was sent": AS_NEEDED}
    return [right | {f"gradient of {name}": w[name].grad for name in ADAPTERS} for w in each]


def hidden(x: Tensor, w: dict) -> Tensor:
    return gelu(x @ w["up"].T + x @ w["up A"].T @ w["up B"].T)


def term(hidden: Tensor, w: dict) -> Tensor:
    return hidden @ w["down"].T + hidden @ w["down A"].T @ w["down B"].T


# ---- right programs -------------------------------------------------------------------------------------------------


def through_f(*names: str, by: Callable = f) -> Callable:
    """The given program, with these weights passed through f."""

    def program(x, w, group):
        w = w | {name: by(w[name], group) for name in names}
        return g(term(hidden(f(x, group), w), w), group)

    return program


def with_small_sums(x, w, group):
    """Replicated matrices multiply replicated tensors, outside the pair."""
    low = f(x @ w["up A"].T, group)
    inside = gelu(f(x, group) @ w["up"].T + low @ w["up B"].T)
    return g(inside @ w["down"].T, group) + g(inside @ w["down A"].T, group) @ w["down B"].T


def with_hooks(x, w, group):
    for name in REPLICATED:
        w[name].register_hook(lambda gradient: comm.all_reduce(gradient, group))
    return through_f()(x, w, group)


# ---- wrong programs -------------------------------------------------------------------------------------------------


def averaged(x: Tensor, group: Group) -> Tensor:
    return pair(x, lambda x: x.view_as(x), lambda gradient: comm.all_reduce(gradient, group, op="mean"))


def sums_twice(x, w, group):
    w = w | {"down B": f(w["down B"], group)}
    x = f(x, group)
    low = f(x @ w["up A"].T, group)
    return g(term(gelu(x @ w["up"].T + low @ w["up B"].T), w), group)


def loses_f(x, w, group):
    w = w | {"down B": f(w["down B"], group)}
    low = f(x @ w["up A"].T, group)
    return g(term(gelu(x @ w["up"].T + low @ w["up B"].T), w), group)


EXERCISE = Exercise(
    id="06.6",
    title="adapted_mlp",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(through_f(*REPLICATED), with_small_sums, with_hooks),
    mistakes=(
        Mistake(
            "That is still the given program: the gradients of two replicated matrices are only the term of this "
            "rank. Which of the four is replicated, and used between f and g?",
            through_f(),
            about=("y", "gradient"),
        ),
        Mistake(
            "The gradient of A of the first layer is right now; the gradient of B of the second is still only the "
            "term of this rank. B is replicated, and each rank multiplies it with a different partial sum.",
            through_f("up A"),
            about=("y", "gradient"),
        ),
        Mistake(
            "The gradient of B of the second layer is right now; the gradient of A of the first is still only the "
            "term of this rank. A is replicated, but each rank uses its result for different hidden features.",
            through_f("down B"),
            about=("y", "gradient"),
        ),
        Mistake(
            "You sum the gradients of all four matrices. B of the first layer and A of the second are shards: on "
            "each rank their elements belong to different hidden features, and must not be added.",
            through_f(*ADAPTERS),
            about=("y", "gradient"),
        ),
        Mistake(
            "You took the mean over the ranks. Each has a term of the gradient: add them up.",
            through_f(*REPLICATED, by=averaged),
            about=("y", "gradient"),
        ),
        Mistake(
            "You passed the matrices through g, which sums them in forward: the adapters are n times too large. They "
            "are replicated, so forward must send nothing: f.",
            through_f(*REPLICATED, by=g),
            about=("y",),
        ),
        Mistake(
            "Through the adapter, the gradient of x is n times too large: x passes f, and then x @ A.T passes f again. "
            "Use the x before f for A, or pass A itself.",
            sums_twice,
            about=("y", "gradient"),
        ),
        Mistake(
            "The adapters are right, and now the gradient of x is not: the path through the first matrix itself needs "
            "f as well.",
            loses_f,
            about=("y", "gradient"),
        ),
    ),
)
