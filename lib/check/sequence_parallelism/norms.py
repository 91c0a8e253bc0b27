"""Chapter 07, a norm of which each rank has some of the tokens: exercise 07.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from lib.check.exercise import Data, Exercise, Mistake, but, kind, random, several
from lib.check.listen import Heard, listen
from lib.mesh import Group

_B, _T, _D = 2, 8, 6  # of a slice; n times _T tokens in all
_NAMES = ("gradient of x", "gradient of the weight", "gradient of the bias")
OF_X, OF_WEIGHT, OF_BIAS = _NAMES
RETURNED = "what was returned"
ONE, SEVERAL, MORE = "one message, of two rows", "more than one message", "more bytes than the two need"


def _norm_inputs(generator: torch.Generator, n: int) -> list[Data]:
    weight, bias = random(generator, _D), random(generator, _D)

    def tokens() -> Tensor:
        return 1 + 2 * random(generator, _B, _T, _D)  # far from normalised

    return [
        {"x": tokens(), "gradient": random(generator, _B, _T, _D), "weight": weight, "bias": bias} for _ in range(n)
    ]


def _norm_gradients(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    result = answer(*(given[name].clone() for name in ("x", "gradient", "weight", "bias")), group)
    three = zip(_NAMES, several(result, 3), strict=True)
    found = {RETURNED: kind(result)} | {name: x.detach() if torch.is_tensor(x) else x for name, x in three}
    return found | {"what was sent": _describe(heard, group.size)}


def _describe(heard: Heard, n: int) -> str:
    rows_bytes = 2 * _D * 8
    most = {"all_reduce": rows_bytes, "reduce": rows_bytes}  # gathered rows, instead of summed ones, are n times that
    sent = heard.calls + [("message", n_bytes) for _, n_bytes in heard.sent]
    if any(n_bytes > most.get(call, n * rows_bytes) for call, n_bytes in sent):
        return MORE
    return SEVERAL if heard.collectives > 1 else ONE


def _backward(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor) -> Data:
    """What autograd gives for these tokens."""
    x, weight, bias = (tensor.clone().requires_grad_() for tensor in (x, weight, bias))
    y = layer_norm(x, (_D,), weight, bias)
    return dict(zip(_NAMES, torch.autograd.grad(y, (x, weight, bias), gradient), strict=True))


def _own(given: list[Data]) -> list[Data]:
    """From each rank's own tokens."""
    return [_backward(**g) for g in given]


def _norm_reference(given: list[Data]) -> list[Data]:
    n = len(given)
    whole = {name: torch.cat([g[name] for g in given], 1) for name in ("x", "gradient")}
    serial = _backward(**given[0] | whole)
    right = {RETURNED: "3 results"} | serial | {"what was sent": ONE}
    return [right | {OF_X: of_x} for of_x in serial[OF_X].chunk(n, 1)]


def _numbers(of: Callable[[list[Data], list[Data], int], Data]) -> Callable:
    """Like the right answer, but for the gradients that of(given, want, r) changes on rank r."""

    def answers(given: list[Data], want: list[Data]) -> list[Data]:
        right = [{name: w[name] for name in _NAMES} for w in want]
        return [r_right | of(given, want, r) for r, r_right in enumerate(right)]

    return answers


def _both(of: Callable[[Data], Any]) -> Data:
    return {name: of(name) for name in (OF_WEIGHT, OF_BIAS)}


NORM = Exercise(
    id="07.3",
    title="norm_gradients",
    points=2,
    body=_norm_gradients,
    inputs=_norm_inputs,
    reference=_norm_reference,
    mistakes=(
        Mistake(
            "The gradients of weight and bias are of this rank's tokens alone. All tokens went through the same "
            "weight: sum its gradient over the ranks.",
            _numbers(lambda given, want, r: _both(lambda name: _own(given)[r][name])),
        ),
        Mistake(
            "The gradients of weight and bias are means over the ranks. Here the ranks have tokens of the same "
            'sequences, and what they find are terms of one sum: op="sum".',
            _numbers(lambda given, want, r: _both(lambda name: want[r][name] / len(given))),
        ),
        Mistake(
            "You summed the gradient of x, too. Each rank has tokens of its own, and a norm works on each token by "
            "itself: nobody else has a term of it.",
            _numbers(lambda given, want, r: {OF_X: sum(w[OF_X] for w in want)}),
        ),
        Mistake(
            "The weight's gradient is summed, the bias's is still of this rank's tokens. Each rank adds the bias to "
            "its own tokens only: sum both.",
            _numbers(lambda given, want, r: {OF_BIAS: _own(given)[r][OF_BIAS]}),
        ),
        Mistake(
            "You multiplied with x as it came in. The weight multiplies the normalised x, and so its gradient is a sum "
            "of gradient · (x - mean)/deviation.",
            _numbers(
                lambda given, want, r: {OF_WEIGHT: sum((g["gradient"] * g["x"]).sum((0, 1)) for g in given)},
            ),
        ),
        Mistake(
            "The gradient of x is only gradient · weight. Mean and deviation depend on x as well: let autograd do it, "
            "or go backward through both.",
            _numbers(lambda given, want, r: {OF_X: given[r]["gradient"] * given[r]["weight"]}),
        ),
        Mistake(
            "The gradients are right, but tokens have travelled. Let each rank sum over its own tokens first: then "
            "two rows of D numbers are all there is to send.",
            but(**{"what was sent": MORE}),
        ),
        Mistake(
            "The gradients are right, in more than one message. They are short, and each message has its latency: put "
            "both into one tensor and sum that.",
            but(**{"what was sent": SEVERAL}),
        ),
    ),
)

EXERCISES = (NORM,)
