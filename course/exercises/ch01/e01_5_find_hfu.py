"""01.5: of a table of training runs, the one whose claimed MFU counts recomputed operations, and its MFU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course.check.exercise import Data, Exercise, Mistake, several, whole
from lib.mesh import Group

DAY_S = 86_400
# MFU in percent, and the operations that its claim counts, over 6 per parameter and token: attention adds to 6. The
# second run has the highest claim, the fifth (long sequences) the claim with the most percentage points above its MFU,
# and the last the lowest MFU.
RUNS = (((30, 45), 1.02), ((56, 59), 1.03), ((14, 17), 8 / 6), ((30, 45), 1.05), ((46, 49), 1.14), ((9, 13), 1.0))


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    def run(percent: tuple[int, int], counted: float) -> dict:
        parameters, gpus, days = (
            10**8 * whole(generator, 10, 700),
            64 * whole(generator, 2, 33),
            whole(generator, 9, 90),
        )
        peak_flops, mfu = (312e12, 989e12)[whole(generator, 0, 2)], whole(generator, *percent)
        tokens = int(round(gpus * peak_flops * mfu / 100 * days * DAY_S / (6 * parameters), -7))
        sizes = {"parameters": parameters, "tokens": tokens, "gpus": gpus, "peak_flops": peak_flops, "days": days}
        return {**sizes, "claimed": round(mfu * counted) / 100}

    def table() -> list[dict]:
        order = torch.randperm(len(RUNS), generator=generator).tolist()
        return [{"name": name, **run(*RUNS[i])} for name, i in zip("ABCDEF", order, strict=True)]

    return [{"tables": [table() for _ in range(3)]}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for i, runs in enumerate(given["tables"]):
        name, mfu = several(answer([dict(run) for run in runs]), 2)
        found |= {f"table {i}: name of the run": name, f"table {i}: its MFU in whole percent": percent(mfu)}
    return found


def percent(x: Any) -> Any:
    try:
        return round(100 * float(x))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return x


# ---- programs -------------------------------------------------------------------------------------------------------


def mfu_of(run: dict, flops: int = 6, share: bool = True, seconds: int = DAY_S) -> float:
    peak = run["peak_flops"] * (run["gpus"] if share else 1)
    return flops * run["parameters"] * run["tokens"] / (peak * run["days"] * seconds)


def find(worst: Callable = lambda run: run["claimed"] / mfu_of(run), value: Callable = mfu_of) -> Callable:
    def program(runs):
        run = max(runs, key=worst)
        return run["name"], value(run)

    return program


def nearest_to_eight(runs):
    for run in runs:
        gpu_seconds = run["days"] * 24 * 3600 * run["gpus"]
        executed = run["claimed"] * run["peak_flops"] * gpu_seconds / run["tokens"] / run["parameters"]
        if executed > 7.5:
            return [run["name"], torch.tensor(run["claimed"] * 6 / executed)]


EXERCISE = Exercise(
    id="01.5",
    title="find_hfu",
    points=1,
    body=body,
    inputs=inputs,
    right=(find(), nearest_to_eight),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You named the run with the highest claim. A high claim can be true: compare each claim with 6 · "
            "parameters · tokens, over the operations that its GPUs could execute in that time.",
            find(lambda run: run["claimed"]),
            about=("name",),
        ),
        Mistake(
            "You named the run whose claim is furthest above 6 · parameters · tokens in percentage points. Its claim "
            "counts attention, a seventh more at its sequence length. Recomputation adds a third: compare ratios.",
            find(lambda run: run["claimed"] - mfu_of(run)),
            about=("name",),
        ),
        Mistake(
            "You named the run that reached the smallest fraction of the peak. Its claim says so: compare the "
            "fraction with the claim.",
            find(lambda run: -mfu_of(run)),
            about=("name",),
        ),
        Mistake(
            "That is the right run, and still its HFU: 8 operations per parameter and token, 2 of them for the forward "
            "that runs again. MFU counts 6.",
            find(value=lambda run: mfu_of(run, flops=8)),
        ),
        Mistake(
            "That is the right run, with the correction upside down. HFU counts more operations than MFU: multiply "
            "the claim by 6/8.",
            find(value=lambda run: run["claimed"] * 8 / 6),
        ),
        Mistake(
            "That is the right run. But 2 operations per parameter and token are forward alone. Backward adds 4.",
            find(value=lambda run: mfu_of(run, flops=2)),
        ),
        Mistake(
            "Your fraction is of the peak of one GPU. All of them computed: divide by `gpus` as well.",
            find(value=lambda run: mfu_of(run, share=False)),
            about=("MFU",),
        ),
        Mistake(
            "That is the right run. But a day has 86 400 seconds, and you count hours.",
            find(value=lambda run: mfu_of(run, seconds=24)),
        ),
    ),
)
