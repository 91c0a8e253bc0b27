"""A pipeline step beside `torch.distributed.pipelining`, on the same stages. And how schedules grow."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from benchmarks.data_parallel import CONFIG
from benchmarks.table import between_barriers, paired, ratio, show, three
from lib import data, run
from lib.mesh import Group
from lib.model import GPT, loss_term, mean_loss
from lib.pipeline.execute import execute
from lib.pipeline.lower import lower
from lib.pipeline.prove import prove
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import simulate
from lib.pipeline.stage import Stage, cut

Step = Callable[[], None]
MICROBATCHES, ROWS_PER_MICROBATCH = 8, 2
SCHEDULES = {
    "GPipe": (gpipe, pipelining.ScheduleGPipe, 1),
    "1F1B": (one_f_one_b, pipelining.Schedule1F1B, 1),
    "interleaved": (partial(interleaved, stages_per_rank=2), pipelining.ScheduleInterleaved1F1B, 2),
}


def _made(name: str, side: str, world: Group) -> Step:
    """A step of this rank, with its optimizer."""
    torch.manual_seed(0)
    make, theirs, per_rank = SCHEDULES[name]
    schedule = make(world.size, MICROBATCHES)
    pieces = cut(GPT(replace(CONFIG, num_layers=2 * per_rank * world.size)), schedule.num_stages)
    mine = {s: pieces[s] for s, rank in enumerate(schedule.rank_of) if rank == world.rank}
    rows = MICROBATCHES * ROWS_PER_MICROBATCH
    inputs, targets = data.batch(data.load().train, 0, global_batch=rows, context=CONFIG.context)
    parameters = [p for piece in mine.values() for p in piece.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if side == "ours":
        stages = {s: Stage(piece, CONFIG.d_model) for s, piece in mine.items()}
        through = partial(
            execute, lower(schedule), stages, world, inputs, targets, partial(loss_term, count=targets.numel())
        )
    else:
        there = [PipelineStage(piece, s, schedule.num_stages, torch.device("cpu")) for s, piece in mine.items()]
        engine = theirs(there if per_rank > 1 else there[0], MICROBATCHES, loss_fn=mean_loss)
        given = (inputs,) if 0 in mine else ()
        wanted = {"target": targets, "losses": []} if schedule.num_stages - 1 in mine else {}
        through = partial(engine.step, *given, **wanted)

    def step() -> None:
        optimizer.zero_grad()
        through()
        optimizer.step()

    return step


def _measure(world: Group, name: str, rounds: int) -> dict[str, list[float]]:
    sides = {side: partial(between_barriers, world, _made(name, side, world)) for side in ("ours", "theirs")}
    paired(sides, 3)
    return paired(sides, rounds)


def steps(fresh: int, rounds: int) -> None:
    rows = [("ranks", "schedule", "ours, ms", "ours / theirs")]
    for n in (2, 4):
        for name in SCHEDULES:
            times: dict[str, list[float]] = {}
            for _ in range(fresh):
                for side, values in run(_measure, n, name, rounds, timeout_s=600)[0].items():
                    times.setdefault(side, []).extend(values)
            ms = f"{1e3 * statistics.median(times['ours']):.0f}"
            rows.append((f"{n}", name, ms, three(ratio(times["theirs"], times["ours"]))))
    show(f"Pipeline step ({fresh * rounds} pairs, reach 1.0), {MICROBATCHES} microbatches, AdamW", rows)


def growth() -> None:
    """Seconds of processor for schedules of more and more actions."""
    rows = [("ranks", "microbatches", "actions", "simulate, s", "check, s", "lower, s", "check with messages, s")]

    def took(work: Callable[[Schedule], object], schedule: Schedule) -> str:
        began_s = time.process_time()
        work(schedule)
        return f"{time.process_time() - began_s:.2f}"

    for ranks, microbatches in ((16, 256), (32, 512), (64, 1024)):
        schedule = one_f_one_b(ranks, microbatches)
        actions = sum(map(len, schedule.actions))
        times = [took(work, schedule) for work in (simulate, prove, lower)]
        rows.append((f"{ranks}", f"{microbatches}", f"{actions:,}", *times, took(prove, lower(schedule))))
    show("1F1B as data (reach 1 s of simulate for the last one)", rows)


def main(fresh: int = 3, rounds: int = 9) -> None:
    """`fresh` times new processes and models, `rounds` pairs of steps in each."""
    steps(fresh, rounds)
    growth()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
