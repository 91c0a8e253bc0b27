"""01.1: bytes of the model states by kind, with all parameters trained or with low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from course.check.exercise import Data, Exercise, Mistake, call, whole
from lib.mesh import Group

MOMENTS = {"SGD": 0, "momentum": 1, "Adam": 2}
KINDS = ("parameter", "gradient", "optimizer")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    matrices = [(whole(generator, 100, 5000), whole(generator, 100, 5000)) for _ in range(whole(generator, 2, 4))]
    adapters = (None, whole(generator, 4, 65))
    return [{"cases": [(matrices, *case) for case in product(adapters, ("float32", "mixed"), MOMENTS)]}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    return {k: v for case in given["cases"] for k, v in by_kind(call("state_bytes", case), answer(*case)).items()}


def by_kind(title: str, result: Any) -> Data:
    """Entries for each kind, so that a FAIL says which is wrong."""
    return {f'{title}["{kind}"]': result.get(kind) if isinstance(result, dict) else None for kind in KINDS}


def states(
    gradient: int = 2,
    moment: int = 4,
    master: int = 4,
    master_in_float32: int = 0,
    master_as: str = "optimizer",
    moments: dict = MOMENTS,
    frozen_have: tuple[str, ...] = ("parameter",),
) -> Callable:
    """Bytes per element in mixed precision, unless named otherwise, and what a frozen parameter has."""

    def program(matrices, q, precision, optimizer):
        mixed, full = precision == "mixed", sum(rows * columns for rows, columns in matrices)
        frozen, trained = (0, full) if q is None else (full, q * sum(map(sum, matrices)))

        def held(what: str, each: int) -> float:
            return float(each * (trained + frozen * (what in frozen_have)))

        found = {
            "parameter": held("parameter", 2 if mixed else 4),
            "gradient": held("gradient", gradient if mixed else 4),
            "optimizer": held("moment", moments[optimizer] * (moment if mixed else 4)),
        }
        found[master_as] += held("master", master if mixed else master_in_float32)
        return found

    return program


def tensor_by_tensor(matrices, q, precision, optimizer):
    each = [("trained" if q is None else "frozen", rows * columns) for rows, columns in matrices]
    if q is not None:
        each += [("trained", rows * q + q * columns) for rows, columns in matrices]
    moments = {"SGD": 0, "momentum": 4, "Adam": 8}[optimizer]
    of_trained = (4, 4, moments) if precision == "float32" else (2, 2, 4 + moments)
    total = dict.fromkeys(KINDS, 0)
    for how, size in each:
        for kind, n_bytes in zip(KINDS, of_trained, strict=True):
            total[kind] += size * n_bytes * (how == "trained" or kind == "parameter")
    return total


def without_adapters(matrices, q, precision, optimizer):
    parameters_alone = states()(matrices, None, precision, optimizer)["parameter"]
    return states()(matrices, q, precision, optimizer) | {"parameter": parameters_alone}


EXERCISE = Exercise(
    id="01.1",
    title="state_bytes",
    points=2,
    body=body,
    inputs=inputs,
    right=(states(), tensor_by_tensor),
    ranks=(1,),
    mistakes=(
        Mistake(
            "The master weights are missing. In mixed precision the optimizer updates float32 copies: 4 more bytes for "
            "each parameter that is trained, by any optimizer.",
            states(master=0),
        ),
        Mistake(
            "You also have master weights in float32. There the parameter itself is precise enough, and no copy is "
            "kept.",
            states(master_in_float32=4),
        ),
        Mistake(
            "The sum is right. But master weights belong to the optimizer: only its step reads them, and ZeRO-1 "
            "shards them with the moments.",
            states(master_as="parameter"),
        ),
        Mistake(
            "Adam keeps two moments per parameter, of the gradient and of its square. You have one.",
            states(moments=MOMENTS | {"Adam": 1}),
        ),
        Mistake(
            "You keep the moments in 16 bits. In mixed precision they stay in float32, 4 bytes each.",
            states(moment=2),
        ),
        Mistake(
            "You keep gradients in float32. Some frameworks do, and then Adam takes 18 bytes; here gradients have the "
            "2 bytes of the parameters.",
            states(gradient=4),
        ),
        Mistake(
            "With adapters you count all states of the frozen matrices as well, as if they were trained. Go through "
            "the kinds, and ask for each who would read it.",
            states(frozen_have=("parameter", "gradient", "moment", "master")),
        ),
        Mistake(
            "Your frozen matrices have master weights. A master weight adds up small steps, and a frozen matrix takes "
            "none.",
            states(frozen_have=("parameter", "master")),
        ),
        Mistake(
            "Your frozen matrices have gradients. Backward passes through a frozen matrix to the layers before it, but "
            "computes no gradient of it: no step would use one.",
            states(frozen_have=("parameter", "gradient")),
            about=('["gradient"]',),
        ),
        Mistake(
            "Your optimizer keeps states of the frozen matrices. It updates the adapters alone, and holds moments and "
            "master weights of these.",
            states(frozen_have=("parameter", "moment", "master")),
            about=('["optimizer"]',),
        ),
        Mistake(
            "With adapters your parameters are those of the adapters. Forward also multiplies by the frozen matrices: "
            "they stay in memory.",
            states(frozen_have=()),
            about=('["parameter"]',),
        ),
        Mistake(
            "The adapters are parameters too: add their bytes to those of the frozen matrices.",
            without_adapters,
            about=('["parameter"]',),
        ),
    ),
)
