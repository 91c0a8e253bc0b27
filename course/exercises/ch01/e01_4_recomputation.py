"""01.4: the cheapest recomputation with which the activations of all layers fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from course.check.exercise import Data, Exercise, Mistake, each_call, whole

HOW = ("none", "selective", "full")  # cheapest first


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    cases = []
    for fraction, how in ((1.0, "none"), (0.95, "none"), (1.0, "selective"), (0.95, "selective"), (0.95, "full")):
        heads = 4 * whole(generator, 2, 9)
        case = (whole(generator, 2, 6), 128 * whole(generator, 4, 17), 64 * heads, heads, whole(generator, 20, 65))
        cases.append((*case, int(fraction * kept(*case)[HOW.index(how)])))
    return [{"cases": cases}]


def kept(b: int, s: int, h: int, a: int, layers: int, matrix: int = 5, full: int = 2) -> list[int]:
    """Bytes of all layers for each of `HOW`."""
    return [layers * s * b * n for n in (34 * h + matrix * a * s, 34 * h, full * h)]


def first_that_fits(kept: Callable = kept, order: Sequence[str] = HOW) -> Callable:
    def program(*case):
        *sizes, memory_bytes = case
        need = dict(zip(HOW, kept(*sizes), strict=True))
        return next((how for how in order if need[how] <= memory_bytes), None)

    return program


def unrolled(rows, tokens, width, heads, layers, memory_bytes):
    a_layer_bytes, sbh = memory_bytes / layers, tokens * rows * width
    if sbh * (34 + 5 * heads * tokens / width) <= a_layer_bytes:
        return "none"
    if 34 * sbh <= a_layer_bytes:
        return "selective"
    return "full" if 2 * sbh <= a_layer_bytes else None


EXERCISE = Exercise(
    id="01.4",
    title="recomputation",
    points=2,
    body=each_call("recomputation"),
    inputs=inputs,
    right=(first_that_fits(), unrolled),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You count the activations of one layer. All layers keep theirs until backward reaches them: multiply by "
            "`layers`.",
            first_that_fits(lambda b, s, h, a, layers: kept(b, s, h, a, 1)),
        ),
        Mistake(
            "You left out the matrix of attention probabilities, 5as/h. Without it there would be nothing to gain "
            'from "selective".',
            first_that_fits(lambda *sizes: kept(*sizes, matrix=0)),
        ),
        Mistake(
            "You counted one sequence. A microbatch of b sequences keeps b times as much.",
            first_that_fits(lambda b, *sizes: kept(1, *sizes)),
        ),
        Mistake(
            "You choose the way that keeps least. Recomputing costs time: take the first that fits, in the order "
            '"none", "selective", "full".',
            first_that_fits(order=("full",)),
        ),
        Mistake(
            'You take "full" for free. It still keeps the input of each layer, 2sbh bytes, which may not fit.',
            first_that_fits(lambda *sizes: kept(*sizes, full=0)),
        ),
    ),
)
