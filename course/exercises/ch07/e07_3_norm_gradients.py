"""07.3: the gradients of a LayerNorm on shards of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import layer_norm

from course.check.exercise import Data, Exercise, Mistake, kind, random, several
from course.check.listen import Heard, listen
from lib import comm
from lib.mesh import Group

B, T, D = 2, 8, 6  # of a shard; n times T tokens in all
NAMES = ("gradient of x", "gradient of the weight", "gradient of the bias")
GIVEN = ("x", "gradient", "weight", "bias")
ONE, SEVERAL, MORE = "one message, of two vectors", "more than one message", "more bytes than the two need"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    alike = {"weight": random(generator, D), "bias": random(generator, D)}
    return [  # x is far from normalised
        alike | {"x": 1 + 2 * random(generator, B, T, D), "gradient": random(generator, B, T, D)} for _ in range(n)
    ]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    result = answer(*(given[name] for name in GIVEN), group)
    three = zip(NAMES, several(result, 3), strict=True)
    found = {"what was returned": kind(result)} | {name: x.detach() if torch.is_tensor(x) else x for name, x in three}
    return found | {"what was sent": describe(heard, group.size)}


def describe(heard: Heard, n: int) -> str:
    two_bytes = 2 * D * 8
    most = {
        "all_reduce": two_bytes,
        "reduce": two_bytes,
    }  # gathered vectors, instead of summed ones, are n times that
    sent = heard.calls + [("message", n_bytes) for _, n_bytes in heard.sent]
    if any(n_bytes > most.get(call, n * two_bytes) for call, n_bytes in sent):
        return MORE
    return SEVERAL if heard.collectives > 1 else ONE


def backward(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """The gradients of these tokens, by autograd."""
    x, weight, bias = (tensor.detach().requires_grad_() for tensor in (x, weight, bias))
    return torch.autograd.grad(layer_norm(x, (D,), weight, bias), (x, weight, bias), gradient)


def reference(given: list[Data]) -> list[Data]:
    full = {name: torch.cat([g[name] for g in given], 1) for name in ("x", "gradient")}
    of_x, *two = backward(*((given[0] | full)[name] for name in GIVEN))
    right = {"what was returned": "3 results", "what was sent": ONE}
    return [right | dict(zip(NAMES, (mine, *two), strict=True)) for mine in of_x.chunk(len(given), 1)]


def norm(reduce: Callable = comm.all_reduce, of_x: Callable = lambda g, group: g, change: Any = None) -> Callable:
    """The answer, with a place for each mistake."""

    def program(x, gradient, weight, bias, group):
        found, *two = backward(x, gradient, weight, bias)
        if change:
            found, *two = change(x, gradient, weight, found, *two)
        return of_x(found, group), *reduce(torch.stack(two), group)

    return program


def by_hand(x, gradient, weight, bias, group):
    deviation = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    normal = (x - x.mean(-1, keepdim=True)) / deviation
    both = torch.cat([(gradient * normal).sum((0, 1)), gradient.sum((0, 1))])
    dist.all_reduce(both)
    inside = gradient * weight
    along = normal * (inside * normal).mean(-1, keepdim=True)
    return [(inside - inside.mean(-1, keepdim=True) - along) / deviation, *both.chunk(2)]


def of_all_tokens(x, gradient, weight, bias, group):
    both = comm.all_gather(torch.stack([x, gradient]), group, dim=2)
    of_x, *two = backward(*both, weight, bias)
    return of_x.chunk(group.size, 1)[group.rank], *two


EXERCISE = Exercise(
    id="07.3",
    title="norm_gradients",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(norm(), by_hand, norm(lambda two, group: comm.all_gather(two[None], group).sum(0))),
    mistakes=(
        Mistake(
            "The gradients of weight and bias come from this rank's tokens alone. All tokens went through the same "
            "weight: sum its gradient over the ranks.",
            norm(lambda two, group: two),
            about=NAMES,
        ),
        Mistake(
            "The gradients of weight and bias are means over the ranks. Here the ranks have tokens of the same "
            'sequences, and each finds a partial gradient: op="sum".',
            norm(lambda two, group: comm.all_reduce(two, group, op="mean")),
            about=NAMES,
        ),
        Mistake(
            "You also summed the gradient of x. Each rank has its own tokens, and a norm works on each token alone: no "
            "other rank has a part of it.",
            norm(of_x=comm.all_reduce),
            about=NAMES,
        ),
        Mistake(
            "The gradient of the weight is summed, the gradient of the bias still comes from this rank's tokens. Each "
            "rank adds the bias to its own tokens: sum both.",
            norm(lambda two, group: (comm.all_reduce(two[0], group), two[1])),
            about=NAMES,
        ),
        Mistake(
            "You multiplied with x as it came in. The weight multiplies the normalised x, and its gradient is a sum "
            "of gradient · (x - mean)/deviation.",
            norm(change=lambda x, g, weight, of_x, of_weight, of_bias: (of_x, (g * x).sum((0, 1)), of_bias)),
            about=NAMES,
        ),
        Mistake(
            "The gradient of x is only gradient · weight. Mean and deviation depend on x as well: let autograd do it, "
            "or run backward through both.",
            norm(change=lambda x, g, weight, of_x, *two: (g * weight, *two)),
            about=NAMES,
        ),
        Mistake(
            "The gradients are right, but tokens were sent. Let each rank sum over its own tokens first: then two "
            "vectors of D elements are enough.",
            of_all_tokens,
        ),
        Mistake(
            "The gradients are right, in more than one message. They are short, and each message has its latency: put "
            "both into one tensor and sum that.",
            norm(lambda two, group: [comm.all_reduce(one, group) for one in two]),
        ),
    ),
)
