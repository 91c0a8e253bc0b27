"""What watching costs: a call's entry in the call table and the wait around it; and how long a verdict takes."""

from __future__ import annotations

import time

from benchmarks.table import quartiles, show, three
from course.check import verdict
from lib import comm, run
from lib.runtime import calls, places


def _measure(world, rounds: int = 2000) -> list[float]:
    table, costs_us = calls.table, []
    for _ in range(rounds):
        began_s = time.perf_counter()
        line = places.where()
        number = table.call(f"{world.ranks}", world.ranks, "all_reduce sum float32[4]", line)
        with table.waiting("all_reduce sum float32[4]", line, world.ranks, f"{world.ranks}", number):
            pass
        costs_us.append(1e6 * (time.perf_counter() - began_s))
    return costs_us


def main() -> None:
    rows = [("ranks", "µs a call")]
    rows += [(f"{n}", three(quartiles(run(_measure, n)[0]), "{:.1f}")) for n in (1, 2, 4, 8)]
    show("The call table (reach: at most 20 µs)", rows)

    def average_gradients(params, group):
        for p in params:
            if p.grad is not None:
                p.grad = comm.all_reduce(p.grad, group, op="mean")

    began_s = time.perf_counter()
    times_s = []
    for _ in range(7):
        verdict("03.1", average_gradients)
        times_s.append(time.perf_counter() - began_s - sum(times_s))
    show("A verdict, 3 and 4 ranks (reach: under a second)", [("exercise", "s"), ("03.1", three(quartiles(times_s)))])
