"""06.5: a block that is right and sends three and a half times too much; two all-reduces are enough."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from course.check.exercise import Data, Exercise, Mistake, random
from course.check.listen import Heard, listen
from lib import comm, cost
from lib.conjugate import all_reduce_identity as g
from lib.conjugate import identity_all_reduce as f
from lib.mesh import Group

WIDTH, EACH = 6, 4  # of x; features of a head, and of the MLP, on each rank
SHAPES = dict.fromkeys(("q", "k", "v", "gate", "up"), (EACH, WIDTH)) | dict.fromkeys(("out", "down"), (WIDTH, EACH))


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    replicated = {name: random(generator, 2, 3, WIDTH) for name in ("x", "gradient")}
    shapes = SHAPES.items()
    return [replicated | {"weights": {k: random(generator, *shape) for k, shape in shapes}} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    x = given["x"].clone().requires_grad_()
    weights = {name: w.clone().requires_grad_() for name, w in given["weights"].items()}
    heard = listen()
    y = answer(x, weights, group)
    found = {"y": y, "forward sends": amount(heard, x, group.size)}
    if not torch.is_tensor(y) or not y.requires_grad or y.shape != x.shape:
        return found
    heard.forget()
    y.backward(given["gradient"])
    found |= {"y": y.detach(), "gradient of x": zeros_or(x), "backward sends": amount(heard, x, group.size)}
    return found | {f"gradient of {name}": zeros_or(w) for name, w in weights.items()}


def zeros_or(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def amount(heard: Heard, x: Tensor, n: int) -> str:
    """Rounded: a few numbers more do not count."""
    return f"{round(heard.sent_bytes(n) / cost.wire_bytes('all_reduce', x.nbytes, n))} × an all-reduce of x"


def reference(given: list[Data]) -> list[Data]:
    x = given[0]["x"].clone().requires_grad_()
    each = [{name: w.clone().requires_grad_() for name, w in g["weights"].items()} for g in given]
    y = x + sum(sum(terms([x] * 5, w)) for w in each)
    y.backward(given[0]["gradient"])
    one = "1 × an all-reduce of x"
    right = {"y": y.detach(), "gradient of x": x.grad, "forward sends": one, "backward sends": one}
    return [right | {f"gradient of {name}": w.grad for name, w in weights.items()} for weights in each]


# ---- right programs -------------------------------------------------------------------------------------------------


def terms(xs: list[Tensor], w: dict) -> tuple[Tensor, Tensor]:
    """The partial sums of attention and MLP; xs are the inputs of the five column-parallel matrices."""
    q, k, v, gate, up = (x @ w[name].T for x, name in zip(xs, SHAPES, strict=False))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended @ w["out"].T, (silu(gate) * up) @ w["down"].T


def block(x, w, group, num_f=1, num_g=1):
    every = [f(x, group) for _ in range(num_f)]
    xs = every if num_f == 5 else every[:1] * 3 + every[-1:] * 2
    attended, mlp = terms(xs, w)
    return x + (g(attended + mlp, group) if num_g == 1 else g(attended, group) + g(mlp, group))


def block_with_a_hook(x, w, group):
    inside = x.view_as(x)
    inside.register_hook(lambda gradient: comm.all_reduce(gradient, group))
    term = sum(terms([inside] * 5, w))
    return x + term + (comm.all_reduce(term, group) - term).detach()


# ---- wrong programs -------------------------------------------------------------------------------------------------


def but(**wrong: int) -> Callable:
    return lambda *given: block(*given, **wrong)


def without_f(x, w, group):
    return x + g(sum(terms([x] * 5, w)), group)


def residual_inside_g(x, w, group):
    return g(x + sum(terms([f(x, group)] * 5, w)), group)


def residual_after_f(x, w, group):
    return without_f(f(x, group), w, group)


def one_partial_sum(x, w, group):
    attended, mlp = terms([f(x, group)] * 5, w)
    return x + attended + g(mlp, group)


EXERCISE = Exercise(
    id="06.5",
    title="frugal_block",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(block, block_with_a_hook),
    mistakes=(
        Mistake(
            "That is still the given block: two all-reduces in forward, and five in backward, one for each f. Each f "
            "sums a separate term of the same gradient.",
            but(num_f=5, num_g=2),
        ),
        Mistake(
            "One f for each pair is the usual block: four all-reduces. But both pairs read the same x, and both "
            "results are added to the same tensor. Share f between the pairs, and add before g.",
            but(num_f=2, num_g=2),
        ),
        Mistake(
            "One all-reduce in backward is right; forward still has two. Sums may change their order: add the partial "
            "sums of both pairs on each rank, then one g.",
            but(num_g=2),
        ),
        Mistake(
            "One all-reduce in forward is right; backward still has one for each f. The five matrices read the same "
            "x: call f once, and use its result five times.",
            but(num_f=5),
        ),
        Mistake(
            "One all-reduce in forward is right; backward still has two, because attention and MLP have an f each. "
            "They read the same x: one f is enough for both.",
            but(num_f=2),
        ),
        Mistake(
            "Backward sends nothing, so the gradient of x is only the term of this rank. One f is necessary.",
            without_f,
            about=("y", "gradient"),
        ),
        Mistake(
            "The residual path goes through g, and x is added n times. It is replicated: add it after the all-reduce.",
            residual_inside_g,
            about=("y",),
        ),
        Mistake(
            "The residual path also goes through f, so its gradient is summed, although it is equal on all ranks "
            "already. Add the x before f.",
            residual_after_f,
            about=("y", "gradient"),
        ),
        Mistake(
            "The output of attention is added without g: each rank has only its partial sum of it.",
            one_partial_sum,
            about=("y",),
        ),
    ),
)
