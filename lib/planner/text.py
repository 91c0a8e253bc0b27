"""Results of the planner, for a terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from lib.planner.plan_text import table
from lib.planner.rows import Prediction, medians
from lib.planner.search import Planned, why_slower
from lib.planner.seconds import Seconds
from lib.planner.training import Layout4D, Training


def layouts_text(training: Training, found: list[Planned]) -> str:
    """The layouts, a column each: memory and seconds by kind, utilisation, and why the next layout is slower."""
    rows = [["", *(f"{place}." for place, _ in enumerate(found, 1))]]
    rows += [[name, *(str(getattr(one.layout, name)) for one in found)] for name in Layout4D._fields]
    rows += [["GB: " + kind, *(f"{one.memory[i] / 1e9:.2f}" for one in found)] for i, kind in _kinds(found, "memory")]
    rows += [["GB in all", *(f"{one.memory.total / 1e9:.1f}" for one in found)]]
    rows += [["s: " + kind, *(f"{one.seconds[i]:.2f}" for one in found)] for i, kind in _kinds(found, "seconds")]
    rows += [["s per step", *(f"{one.seconds.total:.2f}" for one in found)]]
    for name, counted in (("MFU", lambda one: "none"), ("HFU", lambda one: one.layout.recompute)):
        shares = [training.utilisation(one.seconds.total, counted(one)) for one in found]
        rows.append([name, *(f"{share:.1%}" for share in shares)])
    reasons = [f"{place}. is {why_slower(found[0], one)}" for place, one in enumerate(found[1:], 2)]
    return "\n".join([table(rows), *reasons])


def _kinds(found: list[Planned], what: str) -> list[tuple[int, str]]:
    """The kinds that are not zero in every layout, with their places."""
    names = getattr(found[0], what)._fields
    return [(i, name) for i, name in enumerate(names) if any(getattr(one, what)[i] for one in found)]


def layouts_json(training: Training, found: list[Planned]) -> dict:
    """The same as plain data."""
    return {
        "model": asdict(training.model),
        "gpus": training.cluster.gpus,
        "global_batch": training.global_batch,
        "layouts": [
            {
                "layout": one.layout._asdict(),
                "seconds": one.seconds._asdict() | {"total": one.seconds.total},
                "memory_bytes": one.memory._asdict() | {"total": one.memory.total},
                "mfu": training.utilisation(one.seconds.total),
                "hfu": training.utilisation(one.seconds.total, one.layout.recompute),
            }
            for one in found
        ],
    }


def rows_text(predictions: list[Prediction]) -> str:
    """Measured and predicted seconds, a line for each run, and the medians of each group."""
    rows = [["run", "measured s", "predicted s", "error", "TFLOP/s", "mostly"]]
    for one in predictions:
        kind = max(Seconds._fields, key=lambda kind: getattr(one.seconds, kind))
        share = getattr(one.seconds, kind) / one.seconds.total
        times = f"{one.measured_s:.3f}", f"{one.seconds.total:.3f}", f"{one.error:+.1%}", f"{one.tflops:.0f}"
        rows.append([one.id, *times, f"{share:.0%} {kind}"])
    return "\n\n".join([table(rows), table(_medians(predictions))])


def _medians(predictions: list[Prediction]) -> list[list[str]]:
    found = medians((one.group, one.error) for one in predictions)
    rows = [["group", "runs", "median", "worst"]]
    return rows + [[name, str(n), f"{middle:.1%}", f"{worst:.1%}"] for name, (n, middle, worst) in found.items()]


def rows_json(predictions: list[Prediction]) -> dict:
    """The same as plain data; an error of 0.05 is 5 % too many seconds."""
    found = medians((one.group, one.error) for one in predictions)
    return {
        "runs": [
            {"id": one.id, "group": one.group, "seconds": one.seconds.total, "measured_s": one.measured_s}
            | {"tflops": one.tflops, "error": one.error, "kinds": one.seconds._asdict()}
            for one in predictions
        ],
        "medians": {name: {"runs": n, "median": mid, "worst": worst} for name, (n, mid, worst) in found.items()},
    }
