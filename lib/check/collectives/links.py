"""Chapter 02, bytes and seconds of a link: exercises 02.5 and 02.6."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, several, whole
from lib.cost.steps import all_reduce_bytes
from lib.mesh import Group

# ---- 02.5 busiest_bytes ---------------------------------------------------------------------------------------------


def _sizes_inputs(generator: torch.Generator, n: int) -> list[Data]:
    ranks = [2, 8, whole(generator, 5, 8), 64]
    return [{"cases": [(a, whole(generator, 10**3, 10**6), n) for a in ("naive", "tree", "ring") for n in ranks]}]


def _busiest(answer: Callable, group: Group, given: Data) -> Data:
    return {f"busiest_bytes{case}": answer(*case) for case in given["cases"]}


def _bytes(**changed: Callable[[float, int], float]) -> Callable:
    """The right bytes, but for the algorithms given: those as functions of (S, n)."""

    def of(algorithm: str, size: float, n: int) -> float:
        right = all_reduce_bytes(algorithm, size, n)[0]
        return float(changed.get(algorithm, lambda size, n: right)(size, n))

    return lambda given, want=None: [{f"busiest_bytes{case}": of(*case) for case in g["cases"]} for g in given]


BUSIEST = Exercise(
    id="02.5",
    title="busiest_bytes",
    points=2,
    body=_busiest,
    inputs=_sizes_inputs,
    reference=_bytes(),
    ranks=(1,),
    mistakes=(
        Mistake(
            "That is what all ranks send together, and it is the same for all three. The question is about one rank.",
            _bytes(**dict.fromkeys(("naive", "tree", "ring"), lambda size, n: 2 * (n - 1) * size)),
        ),
        Mistake(
            "Naive and tree are right. For the ring you counted the reduce-scatter; the all-gather costs the same.",
            _bytes(ring=lambda size, n: (n - 1) / n * size),
        ),
        Mistake(
            "Naive: rank 0 sends (n-1)·S. It receives as much, before, but that is not sent.",
            _bytes(naive=lambda size, n: 2 * (n - 1) * size),
        ),
        Mistake(
            "Tree: a number of rounds is whole. Round log2(n) up.",
            _bytes(tree=lambda size, n: log2(n) * size),
        ),
        Mistake(
            "Tree: going up, rank 0 only receives. It sends once in each round of the way down.",
            _bytes(tree=lambda size, n: 2 * (n - 1).bit_length() * size),
        ),
        Mistake(
            "Ring: a rank sends 2(n-1) chunks of S/n each; 2·S is only the limit for many ranks.",
            _bytes(ring=lambda size, n: 2 * size),
        ),
    ),
)

# ---- 02.6 fit_link --------------------------------------------------------------------------------------------------


def _link_inputs(generator: torch.Generator, n: int) -> list[Data]:
    alpha_s, bandwidth_Bps = whole(generator, 5, 50) * 1e-6, whole(generator, 2, 20) * 1e9
    sizes = [whole(generator, 4**k, 2 * 4**k) for k in range(5, 14)]
    return [{"alpha_s": alpha_s, "bandwidth_Bps": bandwidth_Bps, "sizes": sizes}]


def _seconds(given: Data) -> list[float]:
    return [given["alpha_s"] + size / given["bandwidth_Bps"] for size in given["sizes"]]


def _fit(answer: Callable, group: Group, given: Data) -> Data:
    alpha_s, bandwidth_Bps = several(answer(list(given["sizes"]), _seconds(given)), 2)
    return {"alpha_s": alpha_s, "bandwidth_Bps": bandwidth_Bps}


def _pair(of: Callable[[float, float, Data], tuple[float, float]]) -> Callable:
    def answers(given: list[Data], want: Any = None) -> list[Data]:
        pairs = [of(g["alpha_s"], g["bandwidth_Bps"], g) for g in given]
        return [{"alpha_s": float(a), "bandwidth_Bps": float(b)} for a, b in pairs]

    return answers


FIT = Exercise(
    id="02.6",
    title="fit_link",
    points=2,
    body=_fit,
    inputs=_link_inputs,
    reference=_pair(lambda a, b, g: (a, b)),
    ranks=(1,),
    mistakes=(
        Mistake(
            "The slope of the line is seconds a byte. The bandwidth is bytes a second: one over the slope.",
            _pair(lambda a, b, g: (a, 1 / b)),
        ),
        Mistake(
            "Both numbers are right, in the wrong order: return (alpha_s, bandwidth_Bps).",
            _pair(lambda a, b, g: (b, a)),
        ),
        Mistake(
            "Your bandwidth is the largest message over its time, which counts the latency as bytes. Take the slope of "
            "the line through the points.",
            _pair(lambda a, b, g: (a, g["sizes"][-1] / _seconds(g)[-1])),
        ),
        Mistake(
            "Your latency is the time of the smallest message, which has bytes in it too. Take the line's height at "
            "0 bytes.",
            _pair(lambda a, b, g: (_seconds(g)[0], b)),
        ),
        Mistake("Your latency is in microseconds; the name says seconds.", _pair(lambda a, b, g: (1e6 * a, b))),
    ),
)

EXERCISES = (BUSIEST, FIT)
