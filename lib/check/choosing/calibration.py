"""Chapter 14, two constants of an unknown stack from six of its runs: exercise 14.5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lib.check.exercise import SEEN, Data, Exercise, Mistake, but, several, whole
from lib.mesh import Group
from lib.planner import Cluster, Layout4D, Stack, Training, step_s
from lib.planner.presets import GPUS, PRESET_MODELS, SHARES

_NAME = "calibrate"
_NEAR, _NOISE, _STACKS = 0.02, 0.01, 3
_FOUND, _HOLDS = "what the other runs say", "all are met"
_NO_PAIR, _SWAPPED, _OVER_PEAK, _OVER_ALL = "no pair", "swapped", "over the peak", "more than all"
_SECONDS, _HIDDEN, _EXPOSED, _BOOK = "seconds", "all hidden", "all exposed", "the book's"
_SHARE_OFF, _TP_OFF = "the share", "the sums"

Row = dict[str, float]


class _Run(NamedTuple):
    model: str
    context: int
    global_batch: int
    layout: Layout4D


_SHOWN = (
    _Run("llama-7b", 4096, 32, Layout4D(1, 1, 1, 8)),
    _Run("llama-13b", 4096, 256, Layout4D(1, 1, 4, 8)),
    _Run("llama-13b", 2048, 64, Layout4D(4, 1, 1, 4, sequence_parallel=True)),
    _Run("llama-7b", 2048, 64, Layout4D(8, 1, 1, 1, zero=0, sequence_parallel=True)),
    _Run("llama-70b", 4096, 1024, Layout4D(2, 1, 8, 4, sequence_parallel=True)),
    _Run("gpt-175b", 2048, 1536, Layout4D(2, 1, 16, 4, sequence_parallel=True)),
)
_KEPT_BACK = (
    _Run("llama-13b", 2048, 128, Layout4D(1, 1, 2, 8)),
    _Run("llama-13b", 2048, 32, Layout4D(8, 1, 1, 2, sequence_parallel=True)),
    _Run("llama-70b", 4096, 512, Layout4D(8, 1, 4, 2, sequence_parallel=True)),
    _Run("gpt-175b", 2048, 512, Layout4D(8, 1, 8, 4, sequence_parallel=True)),
    _Run("llama-405b", 4096, 1024, Layout4D(4, 1, 18, 8, sequence_parallel=True)),
)


def parts_of(run: _Run) -> Row:
    """Seconds of a run's step: its matmuls at the peak, its tp sums if nothing hides them, and the rest.

    All three with their part of the bubble. The step is matmuls ÷ share + exposed · tp + rest.
    """
    shape = replace(PRESET_MODELS[run.model], context=run.context)
    cluster = Cluster(GPUS["a100"], run.layout.gpus)

    def seconds(share: float, exposed: float) -> float:
        stack = Stack(share, SHARES["a100"][1], exposed_tp=exposed)
        return step_s(Training(shape, cluster, stack, run.global_batch), run.layout).total

    matmuls = seconds(0.5, 0) - seconds(1, 0)
    return {"matmuls": matmuls, "tp": seconds(1, 1) - seconds(1, 0), "rest": seconds(1, 0) - matmuls}


def _predicted(row: Row, share: float, exposed: float) -> float:
    return row["matmuls"] / share + exposed * row["tp"] + row["rest"]


def _stacks_inputs(generator: torch.Generator, n: int) -> list[Data]:
    stacks = []
    for _ in range(_STACKS):
        share, exposed = whole(generator, 450, 850) / 1000, whole(generator, 300, 900) / 1000
        rows = []
        for run in _SHOWN:
            row, noise = parts_of(run), 1 + _NOISE * (2 * torch.rand((), generator=generator).item() - 1)
            rows.append(row | {"measured": _predicted(row, share, exposed) * noise})
        stacks.append({"rows": rows, "share": share, "exposed": exposed})
    return [{"stacks": stacks}]


def _fit_of_seconds(rows: Sequence[Row]) -> tuple[float, float]:
    """Share and exposed fraction by least squares, each row as it is; a step is linear in 1/share and the fraction."""
    parts = torch.tensor([[row["matmuls"], row["tp"]] for row in rows], dtype=torch.float64)
    wanted = torch.tensor([[row["measured"] - row["rest"]] for row in rows], dtype=torch.float64)
    slowdown, exposed = torch.linalg.lstsq(parts, wanted).solution.flatten().tolist()
    return 1 / slowdown, exposed


def _worst(stack: Data, runs: Sequence[_Run], share: float, exposed: float) -> float:
    """The largest relative error on runs that the answer has not seen."""
    rows = [parts_of(run) for run in runs]
    true = [_predicted(row, stack["share"], stack["exposed"]) for row in rows]
    return max(abs(_predicted(row, share, exposed) / s - 1) for row, s in zip(rows, true, strict=True))


def _told(stack: Data, result: Any) -> str:
    try:
        share, exposed = map(float, several(result, 2))
    except (TypeError, ValueError):
        return _NO_PAIR
    if not share > 0 or exposed != exposed:
        return _NO_PAIR
    if _worst(stack, _KEPT_BACK, share, exposed) <= _NEAR:
        return _HOLDS
    if exposed > 0 and _worst(stack, _KEPT_BACK, exposed, share) <= _NEAR:
        return _SWAPPED
    if all(abs(a - b) <= 2e-3 for a, b in zip((share, exposed), _fit_of_seconds(stack["rows"]), strict=True)):
        return _SECONDS
    if share > 1:
        return _OVER_PEAK
    if not 0 <= exposed <= 1:
        return _OVER_ALL
    if abs(share - SHARES["a100"][0]) < 1e-3:
        return _BOOK
    if exposed in (0, 1):
        return _EXPOSED if exposed else _HIDDEN
    without_tp = [run for run in _KEPT_BACK if run.layout.tp == 1]
    return _SHARE_OFF if _worst(stack, without_tp, share, exposed) > _NEAR else _TP_OFF


def _calibrate(answer: Callable, group: Group, given: Data) -> Data:
    for number, stack in enumerate(given["stacks"], 1):
        result = answer([dict(row) for row in stack["rows"]])
        told = _told(stack, result)
        if told != _HOLDS:
            return {_FOUND: told, SEEN: _figures(number, stack, result) if told != _NO_PAIR else ""}
    return {_FOUND: _HOLDS}


def _figures(number: int, stack: Data, result: Any) -> str:
    share, exposed = map(float, several(result, 2))
    lines = [f"Stack {number}, share {share:.3f}, exposed {exposed:.3f}; errors on runs that were kept back:"]
    for run in _KEPT_BACK:
        row = parts_of(run)
        error = _predicted(row, share, exposed) / _predicted(row, stack["share"], stack["exposed"]) - 1
        lines.append(
            f"  {run.model:<11} tp {run.layout.tp} · pp {run.layout.pp} · dp {run.layout.dp:<3}{error:>+7.1%}"
        )
    return "\n".join(lines)


def _says(told: str, hint: str) -> Mistake:
    return Mistake(hint, but(**{_FOUND: told}))


CALIBRATE = Exercise(
    id="14.5",
    title=_NAME,
    points=3,
    body=_calibrate,
    inputs=_stacks_inputs,
    reference=lambda given: [{_FOUND: _HOLDS}],
    ranks=(1,),
    mistakes=(
        _says(_NO_PAIR, "Return two numbers: the share of the peak, above 0, and the exposed fraction of the sums."),
        _says(_SWAPPED, "The right numbers in the wrong order: first the share of the peak, then the fraction."),
        _says(
            _SECONDS,
            "You minimise seconds. Runs of 200 s then outweigh runs of 3 s, and in the long ones there are hardly any "
            "tp sums to learn from. Minimise errors relative to what was measured.",
        ),
        _says(
            _OVER_PEAK,
            "A share above 1 is faster than the GPU's peak. Matmuls take their seconds at the peak divided by the "
            "share, so the share is below 1.",
        ),
        _says(_OVER_ALL, "The exposed fraction is between 0, all sums are hidden, and 1, none is."),
        _says(
            _BOOK,
            "That share is the book's, for another stack on this GPU. A stack has its own kernels: calibrate it on "
            "its own runs.",
        ),
        _says(
            _HIDDEN,
            "You take all tp sums for hidden, and the share makes up for them. It then depends on how much tp the "
            "calibrated runs have, and runs with more tp are predicted too fast.",
        ),
        _says(
            _EXPOSED,
            "You take no tp sum for hidden, and the share makes up for it. Runs with more tp are then predicted too "
            "slow.",
        ),
        _says(
            _SHARE_OFF,
            "Even runs without tensor parallelism are off, so the share is wrong. There the sums are 0 s: those runs "
            "determine the share alone. Use more than one run, as each is off by up to 1%.",
        ),
        _says(
            _TP_OFF,
            "Runs without tensor parallelism are predicted well, the others are not: the exposed fraction is wrong. "
            "Runs with much tp determine it best; in the long ones 1% of noise is more than all of their sums.",
        ),
    ),
)

EXERCISES = (CALIBRATE,)
