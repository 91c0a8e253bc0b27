"""Predictions of published runs: the test of a planner is a run that it was not fitted to.

A row is a dict as in `book/published/runs.json`: sizes of a model, a layout, a batch, the measured seconds of a step,
and its source.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from book.published import SCALE
from lib.planner.fp8 import CALIBRATED_IN_8_BIT
from lib.planner.report import table
from lib.planner.seconds import Seconds, step_s
from lib.planner.stacks import CALIBRATED, CALIBRATED_ATTENTION
from lib.planner.training import stack_of, training_of

PUBLISHERS = {"sc21": "Narayanan", "korthikanti": "Korthikanti", "llama3": "Llama 3", "nemo": "DGX Cloud"}
PUBLISHERS |= {"mosaic": "MosaicML", "titan": "torchtitan", "ibm": "IBM", "aa": "Aleph Alpha", "zb": "Qi"}
PUBLISHERS |= {"kempner": "Kempner", "bridge": "Megatron-Bridge", "nemo-2024": "NeMo 24.03"}
NEEDED = "hidden layers heads vocab seq global_batch gpus gpu tp pp dp microbatch step_s".split()


@dataclass(frozen=True)
class Prediction:
    """The prediction of the planner for a row."""

    id: str
    group: str
    seconds: Seconds
    measured_s: float
    tflops: float  # per GPU, with the full attention matrix
    stack: str = ""  # the planner's, and the GPU
    evidence: str = "in view"  # when the constants were chosen; or `calibrated`, `later`, `kept back`
    configuration: tuple = ()  # what a copy on more GPUs with as many more sequences has in common

    @property
    def error(self) -> float:
        """0.05: the planner predicts 5 % more seconds than measured."""
        return self.seconds.total / self.measured_s - 1


def read_rows(path: str | Path) -> list[dict]:
    """The rows of a JSON file: a list, or an object whose `rows` share its remaining values.

    A row has seconds of a step, or tokens per second and GPU, of which they follow.

    Raises:
        ValueError: no rows; or a row that lacks a value for the prediction, or whose batch and microbatches disagree.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    shared = {}
    if isinstance(rows, dict):
        shared = {name: value for name, value in rows.items() if name != "rows"}
        rows = rows.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must be a list of runs, each an object as in book/published/runs.json")
    rows = [shared | row for row in rows]
    for number, row in enumerate(rows):
        named = f"run {row.get('id', number)} of {path}"
        if "tokens_per_s_per_gpu" in row and not {"seq", "global_batch", "gpus"} - row.keys():
            tokens = row["seq"] * row["global_batch"]
            row.setdefault("step_s", tokens / row["gpus"] / row["tokens_per_s_per_gpu"])
        if missing := [name for name in NEEDED if name not in row]:
            raise ValueError(f"{named} lacks {', '.join(missing)}")
        at_once = row["dp"] * row["microbatch"]
        if "accumulation" in row and row["global_batch"] != row["accumulation"] * at_once:
            given = f"{row['accumulation']} times {at_once} sequences"
            raise ValueError(f"{named} has a batch of {row['global_batch']}, and {given}")
    return rows


def read_scale() -> dict:
    """Throughput of a GPU on more and more GPUs, `relative` to 8: a figure of models whose sizes are not published."""
    return json.loads(SCALE.read_text(encoding="utf-8"))["rows"][0]


def predict(row: Mapping) -> Prediction:
    """Seconds of a step by kind, with the measured seconds; its group is its stack and GPU, unless it names one."""
    training, layout = training_of(row)
    seconds, stack = step_s(training, layout), row.get("stack", "")
    tflops = training.utilisation(seconds.total) * training.cluster.device.peak_flops / 1e12
    group = row.get("group") or f"{PUBLISHERS.get(stack, stack)} {row['gpu']}".strip()
    calibrated = {*CALIBRATED.values(), *CALIBRATED_IN_8_BIT.values(), *CALIBRATED_ATTENTION.values()}
    evidence = "calibrated" if row.get("id") in calibrated else row.get("evidence", "in view")
    same = training.model, *layout._replace(dp=0, replicas=0), layout.microbatches(row["global_batch"])
    on = f"{stack_of(row)}, {row['gpu']}" + ", FP8" * bool(row.get("fp8"))
    more = on, evidence, (group, stack_of(row), bool(row.get("fp8")), *same)
    return Prediction(row.get("id", ""), group, seconds, row["step_s"], tflops, *more)


def distinct(predictions: Iterable[Prediction]) -> list[Prediction]:
    """One for each configuration: that of its runs with the median error; copies on more GPUs tell little more."""
    runs: dict[tuple, list[Prediction]] = {}
    for one in predictions:
        runs.setdefault(one.configuration, []).append(one)
    return [sorted(same, key=lambda one: one.error)[len(same) // 2] for same in runs.values()]


def medians(errors: Iterable[tuple[str, float]]) -> dict[str, tuple[int, float, float]]:
    """Group → rows, median and worst of the absolute errors; `all` is the last."""
    groups: dict[str, list[float]] = {}
    for group, error in errors:
        groups.setdefault(group, []).append(abs(error))
    groups["all"] = [error for found in groups.values() for error in found]
    return {name: (len(found), statistics.median(found), max(found)) for name, found in groups.items() if found}


def rows_json(predictions: list[Prediction]) -> dict:
    """Runs and medians as plain data; an error of 0.05 is 5 % too many seconds."""
    names, once = "id group measured_s tflops error evidence".split(), distinct(predictions)
    runs = [{name: getattr(one, name) for name in names} | {"kinds": one.seconds._asdict()} for one in predictions]
    said: dict = {"runs": [run | {"seconds": sum(run["kinds"].values())} for run in runs]}
    for kind, field in {"medians": "group", "stacks": "stack", "evidence": "evidence"}.items():
        number = Counter(word for one in predictions for word in (getattr(one, field), "all"))
        said[kind] = {
            key: {"runs": number[key], "configurations": n, "median": median, "worst": worst}
            for key, (n, median, worst) in medians((getattr(one, field), one.error) for one in once).items()
        }
    return said


def rows_text(predictions: list[Prediction]) -> str:
    """Measured and predicted seconds, a line for each run, and the medians of each group."""
    plain = rows_json(predictions)
    rows = [["run", "measured s", "predicted s", "error", "TFLOP/s", "constants", "mostly"]]
    for one in plain["runs"]:
        kind = max(one["kinds"], key=one["kinds"].get)
        mostly = f"{one['kinds'][kind] / one['seconds']:.0%} {kind}"
        times = f"{one['measured_s']:.3f}", f"{one['seconds']:.3f}", f"{one['error']:+.1%}", f"{one['tflops']:.0f}"
        rows.append([one["id"], *times, one["evidence"], mostly])
    tables = [table(rows)]
    for kind, name in (("medians", "group"), ("stacks", "stack, GPU"), ("evidence", "constants")):
        lines = [[name, "runs", "configurations", "median", "worst"]]
        for key, of in plain[kind].items():
            counts = str(of["runs"]), str(of["configurations"])
            lines.append([key, *counts, f"{of['median']:.1%}", f"{of['worst']:.1%}"])
        tables.append(table(lines))
    return "\n\n".join(tables)
