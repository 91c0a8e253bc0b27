"""Chapter 07, what a layer keeps for backward: exercise 07.5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, call, each_call, formula, whole
from lib.cost import activation_bytes
from lib.cost.sizes import ModelShape

_NAME = "saved_bytes"


def _saved_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case(t: int, sliced: bool, recompute: str) -> tuple:
        heads = t * whole(generator, 2, 7)
        sizes = t * whole(generator, 20, 300), whole(generator, 1, 9), heads * whole(generator, 8, 129), heads
        return (*sizes, t, sliced, recompute)

    forms = [(sliced, recompute) for recompute in ("none", "selective", "full") for sliced in (False, True)]
    return [{"cases": [case(1, True, "none"), *(case(whole(generator, 2, 9), *form) for form in forms)]}]


def _saved(s: int, b: int, h: int, a: int, t: int, sequence_parallel: bool, recompute: str) -> float:
    shape = ModelShape(d_model=h, num_layers=1, num_heads=a, vocab_size=1, context=s)
    kept = activation_bytes(shape, b, recompute, tp=t, sequence_parallel=sequence_parallel)
    # The paper's table has `full` without slices only. There is no reason to keep more than the slice.
    return float(kept / t if recompute == "full" and sequence_parallel else kept)


def _kept(matrices: float, t: int, sliced: bool, recompute: str, whole_on_each: float = 10) -> float:
    """Multiples of sbh, with the parts of it to change."""
    if recompute == "full":
        return 2 / t if sliced else 2
    between = whole_on_each / t if sliced else whole_on_each
    return between + (24 + (matrices if recompute == "none" else 0)) / t


def _by(kept: Callable[[float, int, bool, str], float], full_too: bool = False) -> Callable:
    """What comes of a multiple of sbh; those calls with `full` may give anything unless it is about them."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found = {}
        for case in given[0]["cases"]:
            s, b, h, a, t, sliced, recompute = case
            if full_too or recompute != "full":
                found[call(_NAME, case)] = float(s * b * h * kept(5 * a * s / h, t, sliced, recompute))
        return [found]

    return answers


SAVED = Exercise(
    id="07.5",
    title="saved_bytes",
    points=1,
    body=each_call(_NAME),
    inputs=_saved_inputs,
    reference=formula(_NAME, _saved),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You divide all of it by t, whether the sequence is cut or not. Tensor parallelism alone leaves 10sbh "
            "whole on every rank: norms, dropouts, and what enters the column layers.",
            _by(lambda m, t, sliced, how: _kept(m, t, True, how)),
        ),
        Mistake(
            "With sequence parallelism you still have 10sbh on every rank. That is what it cuts: 34/t.",
            _by(lambda m, t, sliced, how: _kept(m, t, False, how)),
        ),
        Mistake(
            "The attention matrices are whole in yours. A rank has a/t of the heads, and so 5as/(ht).",
            _by(lambda m, t, sliced, how: _kept(m * t, t, sliced, how)),
        ),
        Mistake(
            "Selective recomputation has the attention matrices computed again, and keeps the rest. You have it the "
            "other way round.",
            _by(lambda m, t, sliced, how: m / t if how == "selective" else _kept(m, t, sliced, how)),
        ),
        Mistake(
            "With `selective` you still keep the attention matrices. Those are computed again, and 5as/h goes.",
            _by(lambda m, t, sliced, how: _kept(m, t, sliced, "none")),
        ),
        Mistake(
            "Twice as much as it is. 34 and 5as/h are bytes already: the 2 of a number is in them.",
            _by(lambda m, t, sliced, how: 2 * _kept(m, t, sliced, how)),
        ),
        Mistake(
            "You count the masks of dropout with 2 bytes. An element of a mask is one byte: 10 and 5as/h, not 12 and "
            "6as/h.",
            _by(lambda m, t, sliced, how: _kept(m * 6 / 5, t, sliced, how, whole_on_each=12)),
        ),
        Mistake(
            "With `full` a rank keeps the layer's input, and in slices that is a slice: 2sbh/t with sequence "
            "parallelism.",
            _by(lambda m, t, sliced, how: _kept(m, t, sliced and how != "full", how), full_too=True),
        ),
        Mistake(
            "Without sequence parallelism the layer's input is whole on every rank, and so is what `full` keeps: "
            "2sbh.",
            _by(lambda m, t, sliced, how: _kept(m, t, sliced or how == "full", how), full_too=True),
        ),
    ),
)

EXERCISES = (SAVED,)
