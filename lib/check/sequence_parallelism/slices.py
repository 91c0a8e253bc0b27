"""Chapter 07, slices of the sequence between parallel layers: exercises 07.1 and 07.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from lib.check.exercise import Data, Exercise, Mistake, but, random
from lib.check.listen import Heard, listen
from lib.mesh import Group

TOKENS = 1  # the dim of x[B, T, D] that is cut
HALF, TWO_HALVES = "as much as an all-gather of x", "as much as an all-gather and a reduce-scatter of x"
THREE_HALVES, MORE = "half as much again", "more than that"
FORWARD, BACKWARD = "sent in forward", "sent in backward"


def _sizes(n: int) -> tuple[int, int, int, int]:
    """B, T/n, D, F: n divides each, so that whoever cuts along another dim gets something, and can be told."""
    return n, n, 2 * n, 32 * n


def _amount(heard: Heard, n: int, x: Tensor, of: dict[float, str]) -> str:
    """What was sent, in words by the number of halves of an all-reduce, where x is a rank's slice."""
    halves = heard.sent_bytes(n) / ((n - 1) * x.numel() * x.element_size())
    return next((words for most, words in of.items() if halves < most + 0.1), MORE)


# ---- 07.1 mlp_on_slices ---------------------------------------------------------------------------------------------

_PARTS = ("up", "up_bias", "down", "down_bias")


def _mlp_inputs(generator: torch.Generator, n: int) -> list[Data]:
    rows, tokens, d, f = _sizes(n)
    up, up_bias = random(generator, f, d) / d**0.5, random(generator, f)
    down, down_bias = random(generator, d, f) / f**0.5, random(generator, d)
    cut = zip(up.chunk(n), up_bias.chunk(n), down.chunk(n, dim=1), strict=True)
    return [
        {"x": random(generator, rows, tokens, d)} | dict(zip(_PARTS, (*mine, down_bias), strict=True)) for mine in cut
    ]


def _mlp_on_slices(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    y = answer(*(given[name].clone() for name in ("x", *_PARTS)), group)
    words = {2: TWO_HALVES, 3: THREE_HALVES}
    return {"y": y, "what was sent": _amount(heard, group.size, given["x"], words)}


def _term(g: Data, x: Tensor) -> Tensor:
    """What a rank's part of the width makes of x."""
    return gelu(x @ g["up"].T + g["up_bias"]) @ g["down"].T


def _gathered_along(dim: int, given: list[Data]) -> list[Tensor]:
    """Every rank's term of all that was gathered."""
    x = torch.cat([g["x"] for g in given], dim)
    return [_term(g, x) for g in given]


def _outputs(of: Callable[[list[Data], int], Tensor]) -> Callable:
    """Rank r's output is of(given, r), plus the bias."""
    return lambda given, want=None: [{"y": of(given, r) + g["down_bias"]} for r, g in enumerate(given)]


def _scattered(gather: int | None, scatter: int | None) -> Callable:
    """Gathered along one dim, summed, and scattered along another; None: not at all."""

    def of(given: list[Data], r: int) -> Tensor:
        terms = [_term(g, g["x"]) for g in given] if gather is None else _gathered_along(gather, given)
        return sum(terms) if scatter is None else sum(terms).chunk(len(given), scatter)[r]

    return _outputs(of)


def _mlp_reference(given: list[Data]) -> list[Data]:
    return [found | {"what was sent": TWO_HALVES} for found in _scattered(TOKENS, TOKENS)(given)]


MLP = Exercise(
    id="07.1",
    title="mlp_on_slices",
    points=3,
    body=_mlp_on_slices,
    inputs=_mlp_inputs,
    reference=_mlp_reference,
    mistakes=(
        Mistake(
            "The output is right, but you send half as much again: an all-reduce gives every rank all tokens, and you "
            "keep a slice. A reduce-scatter gives each rank just that.",
            but(**{"what was sent": THREE_HALVES}),
        ),
        Mistake(
            "The output is right, but you send more than the tokens: one all-gather and one reduce-scatter of them "
            "are enough, and the weights stay where they are.",
            but(**{"what was sent": MORE}),
        ),
        Mistake(
            "down_bias is in it n times: each rank has added it to its term, and the reduce-scatter adds up the "
            "terms. Add it afterwards.",
            lambda given, want: [
                {"y": w["y"] + (len(given) - 1) * g["down_bias"]} for g, w in zip(given, want, strict=True)
            ],
        ),
        Mistake(
            "down_bias is missing. Add it to what comes out of the reduce-scatter.",
            lambda given, want: [{"y": w["y"] - g["down_bias"]} for g, w in zip(given, want, strict=True)],
        ),
        Mistake(
            "You averaged over the ranks. Each has a part of the width, and what they make of a token are terms of a "
            'sum: op="sum".',
            _outputs(lambda given, r: sum(_gathered_along(TOKENS, given)).chunk(len(given), TOKENS)[r] / len(given)),
        ),
        Mistake(
            "That is this rank's part of the width alone, on its own tokens: one term of n. Collect all tokens, and "
            "reduce-scatter what comes of them.",
            _outputs(lambda given, r: _term(given[r], given[r]["x"])),
        ),
        Mistake(
            "You added up terms of different tokens: each rank computed on its own slice only. Every rank needs all "
            "tokens, so gather them first.",
            _scattered(None, TOKENS),
        ),
        Mistake(
            "As in chapter 6: an all-reduce, and no gather before it. Here each rank's x holds other tokens, and you "
            "added up terms that do not belong together.",
            _scattered(None, None),
        ),
        Mistake(
            "Every rank has the output of all tokens. Give back this rank's slice: end with a reduce-scatter along "
            "dim 1 instead.",
            _scattered(TOKENS, None),
        ),
        Mistake(
            "You gathered along the tokens and scattered along dim 0, the rows of the batch. That is what "
            "reduce_scatter does unless you say dim=1.",
            _scattered(TOKENS, 0),
        ),
        Mistake(
            "You gathered along dim 0, the rows of the batch, and scattered along the tokens. That is what all_gather "
            "does unless you say dim=1.",
            _scattered(0, TOKENS),
        ),
    ),
)

# ---- 07.2 GatherTokens ----------------------------------------------------------------------------------------------


def _gather_inputs(generator: torch.Generator, n: int) -> list[Data]:
    rows, tokens, d, _ = _sizes(n)
    return [
        {"x": random(generator, rows, tokens, d), "gradient": random(generator, rows, n * tokens, d)}
        for _ in range(n)
    ]


def _watched(function: Any, seen: list[Tensor | None], shape: torch.Size) -> Any:
    """The same autograd function. It notes what backward returns for x, and lets only that shape pass."""

    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        result = function.backward(ctx, *gradients)
        of_x, *others = result if isinstance(result, tuple) else (result,)
        seen.append(of_x)
        return (of_x if getattr(of_x, "shape", None) == shape else None, *others)

    return type(function)(function.__name__, (function,), {"backward": staticmethod(backward)})


def _gather_tokens(answer: Any, group: Group, given: Data) -> Data:
    if not isinstance(answer, type):
        raise TypeError("GatherTokens is to be a class, a torch.autograd.Function with forward and backward")
    x, gradient = given["x"].clone().requires_grad_(), given["gradient"]
    heard, seen = listen(), []
    y = _watched(answer, seen, x.shape).apply(x, group)
    result = y.detach().clone() if torch.is_tensor(y) else y
    if not torch.is_tensor(y) or y.shape != gradient.shape:
        return {"y": result}
    words = {1: HALF, 2: TWO_HALVES}
    in_forward = _amount(heard, group.size, x, words)
    heard.forget()
    y.backward(gradient.clone())
    return {
        "y": result,
        "gradient of x": seen[0] if seen else x.grad,
        FORWARD: in_forward,
        BACKWARD: _amount(heard, group.size, x, words),
    }


def _whole(given: list[Data]) -> Tensor:
    return torch.cat([g["x"] for g in given], TOKENS)


def _terms(given: list[Data]) -> Tensor:
    """Each rank's gradient of y, [n, B, T, D]."""
    return torch.stack([g["gradient"] for g in given])


def _backward(of: Callable[[Tensor, int], Tensor]) -> Callable:
    """Where backward returns of(every rank's gradient of y, r) on rank r."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        return [{"y": _whole(given), "gradient of x": of(_terms(given), r)} for r in range(len(given))]

    return answers


def _slice(x: Tensor, r: int, n: int, dim: int = TOKENS) -> Tensor:
    return x.chunk(n, dim)[r]


_right = _backward(lambda terms, r: _slice(terms.sum(0), r, len(terms)))

GATHER = Exercise(
    id="07.2",
    title="GatherTokens",
    points=2,
    body=_gather_tokens,
    inputs=_gather_inputs,
    reference=lambda given: [found | {FORWARD: HALF, BACKWARD: HALF} for found in _right(given)],
    mistakes=(
        Mistake(
            "The gradients are right, but backward sends twice as much as it must: an all-reduce gives every rank the "
            "gradient of all tokens. A reduce-scatter gives each its own.",
            but(**{BACKWARD: TWO_HALVES}),
        ),
        Mistake(
            "The gradients are right, but backward sends every rank's gradient of all tokens to every rank. They are "
            "terms of a sum, of which each rank needs its slice: reduce-scatter.",
            but(**{BACKWARD: MORE}),
        ),
        Mistake(
            "All numbers are right, but forward sends twice as much as it must: an all-reduce adds up what is zero on "
            "all ranks but one. An all-gather sends each slice as it is.",
            but(**{FORWARD: TWO_HALVES}),
        ),
        Mistake(
            "Backward only cuts: the gradient of x is this rank's term. Every rank went on with your tokens, in its "
            "own part of the layer, so there are n terms to add up: reduce-scatter.",
            _backward(lambda terms, r: _slice(terms[r], r, len(terms))),
        ),
        Mistake(
            "Backward adds up, and does not cut: it returns the gradient of all tokens, where x has some of them. A "
            "reduce-scatter along dim 1 does both.",
            _backward(lambda terms, r: terms.sum(0)),
        ),
        Mistake(
            "You averaged over the ranks in backward. They had the same tokens, in other parts of one layer: the "
            'gradient is the sum, op="sum".',
            _backward(lambda terms, r: _slice(terms.mean(0), r, len(terms))),
        ),
        Mistake(
            "Backward cuts along dim 0, the rows of the batch, where forward put tokens together. That is what "
            "reduce_scatter does unless you say dim=1.",
            _backward(lambda terms, r: _slice(terms.sum(0), r, len(terms), 0)),
        ),
        Mistake(
            "Backward gathers once more. The transpose of a gather is a reduce-scatter: what was copied to all ranks "
            "comes back from all of them, and is added up.",
            _backward(lambda terms, r: torch.cat(list(terms), TOKENS)),
        ),
        Mistake(
            "Forward put the slices together along dim 0, as more rows. They are slices of the sequence: dim=1.",
            lambda given, want: [{"y": torch.cat([g["x"] for g in given])}] * len(given),
        ),
    ),
)

EXERCISES = (MLP, GATHER)
