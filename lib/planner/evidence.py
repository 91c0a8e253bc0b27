"""How far the planner missed published runs: the ± of its answers.

The problem: a prediction without an error is read as a measurement, and an error that counts the run on which a
constant was calibrated is 0.0 %. The idea: for each GPU and its software, the errors of published runs that calibrated
nothing. `tools/evidence.py` writes them into `evidence.json`, from the rows of `book.published`. Where there is no such
run, the error is unknown, and an answer says so.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from lib.cost.hardware import GPUS
from lib.planner.stacks import STACKS, stack_for
from lib.planner.training import Training

EVIDENCE = Path(__file__).with_name("evidence.json")
# Constants of a stack: bytes that are kept.
OF_MEMORY = "recipe", "logits_bytes", "spare_activations", "usable_share", "splits_vocabulary"


@dataclass(frozen=True)
class Evidence:
    """Errors on one GPU with one software, of a quantity: `seconds` of a step, or peak `memory`.

    Args:
        quantity: also `seconds in FP8`.
        gpu: its name, or None for a GPU that is none of the table.
        stack: name of the software, or None if no stack has these constants.
        runs, configurations: published runs that calibrated nothing; those that differ in more than the number of
            copies.
        median, worst: absolute errors, 0.05 for 5 %: of the configurations, and of all runs. None without runs.
        in_view: runs that were known when constants were chosen.
        calibrating: names of the runs on which a constant was calibrated; they are not counted.
    """

    quantity: str
    gpu: str | None
    stack: str | None
    runs: int = 0
    configurations: int = 0
    median: float | None = None
    worst: float | None = None
    in_view: int = 0
    calibrating: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Behind a number: ` ± 4 %` and of which runs, or that it is unknown and why."""
        if self.median is None or self.worst is None:
            return f": the error is unknown: {self._why_unknown()}"
        if self.runs == 1:
            return f" ± {percent(self.worst)} (one published row on this GPU and stack, no more)"
        many = f"{self.configurations} published layouts" if self.configurations > 1 else "one published layout"
        many += f", {self.runs} runs," if self.runs > self.configurations else ""
        return f" ± {percent(self.median)} (median of {many} on this GPU and stack; worst {percent(self.worst)})"

    def plain(self) -> dict:
        """As plain data, with its words as `said`."""
        return asdict(self) | {"said": str(self)}

    def _why_unknown(self) -> str:
        if self.gpu is None:
            return "no published run on a GPU with these figures"
        what = {"memory": " says its memory", "seconds in FP8": " is in FP8"}.get(self.quantity, "")
        if not any(_of(self.quantity, name, self.gpu) for name in STACKS):
            return f"no published run on this card ({self.gpu}){what}"
        if self.stack is None:
            return f"no published run on {self.gpu} has software with exactly these constants"
        if self.calibrating:
            rows = "row" if len(self.calibrating) == 1 else "rows"
            return f"calibrated on its only {rows} ({', '.join(self.calibrating)}), no evidence"
        return f"no published run on {self.gpu} with the stack {self.stack}{what}"


def percent(part: float) -> str:
    """`0.5 %`, `15 %`."""
    return f"{100 * part:.2g} %" if part >= 5e-4 else "less than 0.1 %"


def evidence_of(training: Training) -> dict[str, Evidence]:
    """The errors of `seconds` and of `memory` on the GPU and with the software of a training.

    A GPU with a different network is the same GPU; a stack with different bytes per parameter is the same software.
    """
    gpu, names = _gpu(training), _stacks(training)
    found = {}
    for asked in ("seconds", "memory"):
        quantity = "seconds in FP8" if asked == "seconds" and training.stack.fp8_speedup != 1 else asked
        first = names[0] if names else None
        stack = next((name for name in names if _of(quantity, name, gpu)), first)
        found[asked] = evidence_on(quantity, gpu, stack)
    return found


def evidence_on(quantity: str, gpu: str | None, stack: str | None) -> Evidence:
    """The errors of a quantity on a GPU of the table with a stack, by their names; None for either that has none."""
    return Evidence(quantity, gpu, stack, **_of(quantity, stack, gpu))


def _gpu(training: Training) -> str | None:
    """The GPU with these speeds; of several the one with the nearest memory."""

    def speeds(device):
        return device.peak_flops, device.memory_Bps, device.link_Bps

    mine = training.cluster.device
    same = [name for name, device in GPUS.items() if speeds(device) == speeds(mine)]
    return min(same, key=lambda name: abs(GPUS[name].memory_bytes - mine.memory_bytes), default=None)


def _stacks(training: Training) -> list[str]:
    """The stacks with these constants, but for bytes that are kept: exactly the same first."""
    gpu, mine = _gpu(training), training.stack
    kept = {name: getattr(mine, name) for name in (*OF_MEMORY, "fp8_speedup")}
    stacks = {name: stack_for(name, gpu or "h100") for name in STACKS}
    same = [name for name, stack in stacks.items() if replace(stack, **kept) == mine]
    return sorted(same, key=lambda name: stacks[name].recipe != mine.recipe)


def _of(quantity: str, stack: str | None, gpu: str | None) -> dict:
    """What the file says of a quantity; nothing if there is no run."""
    found = read_evidence().get(f"{stack}, {gpu}", {}).get(quantity, {})
    return found | {"calibrating": tuple(found["calibrating"])} if found else {}


@cache
def read_evidence(path: Path = EVIDENCE) -> dict[str, dict]:
    """`stack, gpu` → `seconds` and `memory` → the values of an `Evidence`."""
    return json.loads(path.read_text(encoding="utf-8"))
