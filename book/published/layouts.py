"""Tables of measured layouts: does the planner choose well, and does it predict which layouts fit?

Aleph Alpha measured hundreds of layouts of three models on A100s, including layouts that ran out of memory. This tests
the purpose of a planner: which layout would it choose, and how much slower is this layout than the best?
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from book.published import LAYOUTS
from lib.cost.sizes import LLAMA, ModelShape
from lib.planner import Cluster, Layout4D, Training, fits, step_s
from lib.planner.training import GPUS, stack_for

_SIZES = {  # Touvron et al. 2023 (Llama), table 2; the vocabulary as inferred by the collectors of the tables
    "13B": ModelShape(5120, 40, 40, 128_000, 2048, d_mlp=13_824, tied=False, **LLAMA),
    "30B": ModelShape(6656, 60, 52, 128_000, 2048, d_mlp=17_920, tied=False, **LLAMA),
    "65B": ModelShape(8192, 80, 64, 128_000, 2048, d_mlp=22_016, tied=False, **LLAMA),
}


class Cell(NamedTuple):
    """One measured layout."""

    training: Training
    layout: Layout4D
    kernel: str
    measured_s: float | None  # None: out of memory

    @property
    def predicted_s(self) -> float:
        return step_s(self.training, self.layout).total

    @property
    def should_fit(self) -> bool:
        return fits(self.training, self.layout)


def read_tables(path: str | Path = LAYOUTS) -> dict[str, list[Cell]]:
    """Name of a table → its cells, without kernels that were not available."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    tables = {}
    for name, rows in found["tables"].items():
        records = (dict(zip(found["columns"], row, strict=True)) for row in rows)
        measured = (record for record in records if record["step_time"] != "Kernel not available")
        tables[name.removesuffix(".xlsx")] = [_cell(name, record) for record in measured]
    return tables


def _cell(name: str, record: dict) -> Cell:
    long, kernel, gpus = "8k" in name, record["kernel"], record["world_size"]
    model = replace(_SIZES[name.split("_")[1]], context=8192 if long else 2048)
    tp, pp = record["model_parallel_size"], record["pipe_parallel_size"]
    of_kernel = replace(stack_for("aleph-alpha", "a100"), fused_attention="flash" in kernel)
    if "RMS" not in kernel:  # a norm of many small kernels keeps the output of each
        of_kernel = replace(of_kernel, spare_activations=2.0)
    slices = bool(record["sequence_parallel"]) and tp > 1
    recompute = "none" if record["activation_checkpointing_type"] == "disabled" else "full"
    axes = tp, 1, pp, gpus // tp // pp
    layout = Layout4D(*axes, record["micro_batch_size"], zero=1, sequence_parallel=slices, recompute=recompute)
    training = Training(model, Cluster(GPUS["a100"], gpus), of_kernel, 512 if long else 2048)
    seconds = record["step_time"]
    return Cell(training, layout, kernel, seconds if isinstance(seconds, (int, float)) else None)


def choice_among(table: list[Cell]) -> Cell:
    """The planner's choice among the measured cells: the fastest cell that fits by its prediction."""
    ran = [cell for cell in table if cell.measured_s]
    return min([cell for cell in ran if cell.should_fit] or ran, key=lambda cell: cell.predicted_s)


def regret(table: list[Cell]) -> float:
    """How much slower the planner's choice is than the best cell: 0.05 is 5 % more seconds."""
    return choice_among(table).measured_s / min(cell.measured_s for cell in table if cell.measured_s) - 1


def pairs(table: list[Cell]) -> list[tuple[float, float]]:
    """Of each two cells of a kernel: how many times as long the slower one takes by prediction, and as measured.

    Cells with equal seconds, predicted or measured, are in no pair. A measured ratio below 1: the prediction names the
    wrong cell as the faster one.
    """
    ran = sorted((cell.kernel, cell.predicted_s, cell.measured_s) for cell in table if cell.measured_s)
    return [
        (slow / fast, slow_measured / fast_measured)
        for (kernel, fast, fast_measured), (other, slow, slow_measured) in combinations(ran, 2)
        if kernel == other and slow > fast and slow_measured != fast_measured
    ]


def right_about_memory(tables: dict[str, list[Cell]]) -> float:
    """The fraction of all cells for which it predicts correctly whether they fit."""
    cells = [cell for table in tables.values() for cell in table]
    return sum(cell.should_fit == bool(cell.measured_s) for cell in cells) / len(cells)
