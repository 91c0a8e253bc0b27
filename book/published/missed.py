"""Errors of the planner on published runs, for each software and GPU: the content of `lib/planner/evidence.json`.

A run that calibrated a constant is named and not counted, and neither are its copies on more GPUs. The median is over
configurations, because copies of a layout tell little more than the layout; the worst is over all runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from book.published import STEPS
from book.published.rows import Prediction, predict, read_rows
from lib.planner import memory_bytes
from lib.planner.training import gpu_of, stack_of, training_of

GB, GIB = 1e9, 2**30
MEASURED = {"memory_gb": GB, "peak_memory_gib": GIB, "memory_gib": GIB}  # keys of a row, in bytes


def measured_bytes(row: Mapping) -> float | None:
    """The published peak of memory of a rank; None where there is none, or a range."""
    found = [row[name] * unit for name, unit in MEASURED.items() if isinstance(row.get(name), (int, float))]
    return found[0] if found else None


def all_missed() -> dict[str, dict]:
    """`stack, gpu` → `seconds`, `seconds in FP8` and `memory` → the values of a `lib.planner.evidence.Evidence`."""
    groups: dict[str, list[tuple[dict, Prediction]]] = {}
    for row in (row for path in STEPS for row in read_rows(path)):
        groups.setdefault(f"{stack_of(row)}, {gpu_of(row)}", []).append((row, predict(row)))
    found = {}
    for name in sorted(groups):
        held = [
            (one, memory_bytes(*training_of(row)).total / size - 1)
            for row, one in groups[name]
            if (size := measured_bytes(row))
        ]
        of = {
            quantity: _missed((one, one.error) for row, one in groups[name] if bool(row.get("fp8")) == in_fp8)
            for quantity, in_fp8 in (("seconds", False), ("seconds in FP8", True))
        }
        of["memory"] = _missed(held)
        found[name] = {quantity: missed for quantity, missed in of.items() if missed}
    return {name: of for name, of in found.items() if of}


def _missed(errors: Iterable[tuple[Prediction, float]]) -> dict:
    """Of predictions and their errors."""
    errors = list(errors)
    if not errors:
        return {}
    calibrating = [one for one, _ in errors if one.evidence == "calibrated"]
    known = {one.configuration for one in calibrating}
    counted = [(one, abs(error)) for one, error in errors if one.configuration not in known]
    copies: dict[tuple, list[float]] = {}  # configuration → the errors of its runs
    for one, error in counted:
        copies.setdefault(one.configuration, []).append(error)
    medians = [statistics.median(same) for same in copies.values()]
    return {
        "runs": len(counted),
        "configurations": len(copies),
        "median": round(statistics.median(medians), 4) if medians else None,
        "worst": round(max(error for _, error in counted), 4) if counted else None,
        "in_view": sum(one.evidence == "in view" for one, _ in counted),
        "calibrating": [one.id for one in calibrating],
    }
