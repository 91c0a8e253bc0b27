"""Steps of published runs: what calibrates the planner, and what it has to beat.

The errors of its predictions say little alone (`book.published.rows` has them): a rule without any formula may be as
good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lib.planner import Layout4D, Training, step_s
from lib.planner.training import training_of


def calibrated(row: Mapping) -> float:
    """The fraction of its peak that a large matmul must reach for an exact prediction of the row.

    Raises:
        ValueError: as `matmul_share_of`.
    """
    return matmul_share_of(*training_of(row), row["step_s"])


def matmul_share_of(training: Training, layout: Layout4D, measured_s: float) -> float:
    """The fraction of the peak with which the prediction of a step is the measured time.

    Raises:
        ValueError: no fraction between 0.1 and 1: the error has a different cause.
    """
    return _constant_of(training, layout, measured_s, "matmul_share", 0.1, 1.0)


def fp8_speedup_of(row: Mapping) -> float:
    """How many times as fast in FP8 the matmuls of blocks must be for an exact prediction of the row.

    Raises:
        ValueError: no number between 0.5 and 4: the error has a different cause.
    """
    return _constant_of(*training_of(row), row["step_s"], "fp8_speedup", 0.5, 4.0)


def _constant_of(
    training: Training, layout: Layout4D, measured_s: float, name: str, low: float, high: float
) -> float:
    """The value of a constant of the stack, between two, with which the prediction of a step is the measured time."""

    def too_slow(value: float) -> bool:
        stack = replace(training.stack, **{name: value})
        return step_s(replace(training, stack=stack), layout).total > measured_s

    if too_slow(high) or not too_slow(low):
        raise ValueError(f"no {name} between {low} and {high} explains {measured_s} s of this layout")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if too_slow(middle) else (low, middle)
    return high


def constant_share(row: Mapping) -> float:
    """The fraction of the peak that the GPUs of a row reached, recomputation included: its HFU."""
    training, layout = training_of(row)
    return training.utilisation(row["step_s"], layout.recompute)


def constant_utilisation(row: Mapping, share: float) -> float:
    """Seconds of a step if all runs computed with this fraction of the peak: the rule that a planner has to beat."""
    return constant_share(row) / share * row["step_s"]


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """1 if both have the same order, −1 if the orders are opposite; pairs that are equal in either are not counted.

    Source: Kendall 1938.
    """
    sign = total = 0
    for i in range(len(one)):
        for j in range(i):
            product = (one[i] - one[j]) * (other[i] - other[j])
            sign += (product > 0) - (product < 0)
            total += product != 0
    return sign / total
