"""01.1: bytes of the model states by kind, from the precision and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, call, whole
from lib.mesh import Group

MOMENTS = {"SGD": 0, "momentum": 1, "Adam": 2}
KINDS = ("parameter", "gradient", "optimizer")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    pairs = [(precision, optimizer) for precision in ("float32", "mixed") for optimizer in MOMENTS]
    return [{"cases": [(whole(generator, 10**6, 10**9), *pair) for pair in pairs]}]


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
) -> Callable:
    """Bytes per element in mixed precision, unless named otherwise."""

    def program(num_parameters, precision, optimizer):
        mixed = precision == "mixed"
        held = {"parameter": 2 if mixed else 4, "gradient": gradient if mixed else 4}
        held["optimizer"] = moments[optimizer] * (moment if mixed else 4)
        held[master_as] += master if mixed else master_in_float32
        return {kind: float(n_bytes * num_parameters) for kind, n_bytes in held.items()}

    return program


def case_by_case(num_parameters, precision, optimizer):
    moments = {"SGD": 0, "momentum": 4, "Adam": 8}[optimizer]
    each = (4, 4, moments) if precision == "float32" else (2, 2, 4 + moments)
    return dict(zip(KINDS, (n * num_parameters for n in each), strict=True))


EXERCISE = Exercise(
    id="01.1",
    title="state_bytes",
    points=2,
    body=body,
    inputs=inputs,
    right=(states(), case_by_case),
    ranks=(1,),
    mistakes=(
        Mistake(
            "The master weights are missing. In mixed precision the optimizer updates a float32 copy of each "
            "parameter: 4 more bytes, for any optimizer.",
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
    ),
)
