"""Where a step's time goes, at 1, 2, 4 and 8 ranks of the same work; and how much of it is this library's own.

A machine with fewer cores than ranks makes a rank wait for a core, so what a rank *does* is measured in CPU seconds of
its main thread, each counted once, for the innermost of these that it is in:

    compute     modules forward, loss, autograd backward
    optimizer   clipping and AdamW
    gradients   hooks, and copies into and out of buckets
    transport   torch.distributed, called; what it is given copied, what it has brought added up
    ours        all else in `ParallelModel.step`: the scheduler, and what is around a call of torch.distributed: to
                compare it with the other ranks', to watch it, to count it

CPU seconds of gloo's own threads are added to transport. What a rank waits for is wall time, blocked in `Pending.wait`:
a wait for pp is a message's, or the bubble.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps

import torch
from torch import nn

import lib.parallel
from benchmarks.table import show
from benchmarks.three_d import ADAMW, CONFIG, MAX_NORM, MICROBATCHES, ours
from lib import comm, data, run, trace
from lib.data_parallel import bucketed_gradients
from lib.data_parallel.flat import Flat
from lib.layout import Layout
from lib.mesh import Group
from lib.model import GPT, loss_term
from lib.parallel_model import ParallelModel
from lib.pipeline.schedules.action import Action
from lib.pipeline.simulate import Slot, Timeline
from lib.pipeline.stage import Stage
from lib.runtime import pending

SIZES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2))
DOING = ("compute", "optimizer", "gradients", "transport", "ours")
AXES = ("tp", "pp", "dp", "world")
ROWS = 64

LIBRARY = {  # what is watched, and as what it counts
    "transport": (
        (
            comm,
            "all_reduce_start reduce_scatter_start all_gather_start all_to_all all_to_all_rows broadcast send recv",
        ),
        (comm, "_all_reduce _all_gather _broadcast _all_to_all _isend _irecv"),
        (pending, "_work_wait"),
    ),
    "ours": ((comm, "collective message"), (ParallelModel, "step")),
    "gradients": (
        (bucketed_gradients._Line, "_gradient_is_there"),
        (bucketed_gradients.Gradients, "finish"),
        (Flat, "gradients_to_pieces after_step"),
    ),
    "compute": ((Stage, "_compute"), (torch.autograd, "backward"), (lib.parallel, "vocab_parallel_loss")),
    "optimizer": ((ParallelModel, "clip"), (torch.optim.AdamW, "step")),
}


class Meter:
    """CPU seconds of this thread by what it does, `spent`, and wall seconds blocked by axis, `blocked`."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.blocked: Counter[str] = Counter()
        self._now, self._since_s = "other", time.thread_time()

    def _turn(self, what: str) -> str:
        """From here on time is `what`; what it was."""
        now_s, before = time.thread_time(), self._now
        self.spent[before] += now_s - self._since_s
        self._now, self._since_s = what, now_s
        return before

    def counted(self, function: Callable, what: str) -> Callable:
        """The function, whose time counts as `what`, but for what is counted inside."""

        @wraps(function)
        def counted(*args: object, **kwargs: object) -> object:
            before = self._turn(what)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn(before)

        return counted

    def watch_library(self) -> None:
        """From now on, and until this process ends."""
        collective, wait = comm.collective, comm.Pending.wait

        def finishing(what: str, x: object, group: Group, finish: Callable, *args: object, **more: object):
            return collective(what, x, group, self.counted(finish, "transport"), *args, **more)

        def waiting(pending: comm.Pending) -> object:
            began_s = time.perf_counter()
            result = wait(pending)
            if pending.record:
                self.blocked[pending.record.call.axis] += time.perf_counter() - began_s
            return result

        comm.collective, comm.Pending.wait = finishing, self.counted(waiting, "ours")
        for what, places in LIBRARY.items():
            for owner, names in places:
                for name in names.split():
                    setattr(owner, name, self.counted(getattr(owner, name), what))


@dataclass(frozen=True)
class Spent:
    """Of a step on a rank: seconds."""

    wall: float
    main: float  # CPU of the thread that calls
    all: float  # ... and of all others
    doing: Counter[str]
    blocked: Counter[str]
    slots: list[Slot]
    calls: int


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return data.batch(data.load().train, 0, global_batch=ROWS, context=CONFIG.context)


def _made(world: Group, sizes: tuple[int, int, int]) -> tuple[ParallelModel, Callable[[], object]]:
    torch.manual_seed(0)
    parallel = ours(GPT(CONFIG), world, Layout(*sizes, microbatches=MICROBATCHES, zero=1))
    step = partial(parallel.step, *_batch(), MAX_NORM)
    for _ in range(3):
        step()
    return parallel, step


def _spent(world: Group, sizes: tuple[int, int, int], rounds: int) -> Spent:
    parallel, step = _made(world, sizes)
    wall, main, everything = _clocks(world, step, rounds)
    with trace.record(world.rank) as recorded:
        step()
    slots = [
        Slot(parallel.pp.rank, Action.parse(span.label), span.start_s, span.end_s)
        for span in recorded.spans
        if span.kind in ("forward", "backward")
    ]
    meter = Meter()
    meter.watch_library()
    _, step = _made(world, sizes)  # anew: the old one's hooks are not watched
    meter.spent.clear()
    meter.blocked.clear()
    for _ in range(rounds):
        step()
    each = [Counter({key: s / rounds for key, s in spent.items()}) for spent in (meter.spent, meter.blocked)]
    return Spent(wall, main, everything, *each, slots, len(recorded.events))


def _clocks(world: Group, step: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Seconds of a step: wall, CPU of this thread, CPU of this process."""
    clocks = (time.perf_counter, time.thread_time, time.process_time)
    taken = []
    for _ in range(rounds):
        comm.barrier(world)
        began = [clock() for clock in clocks]
        step()
        taken.append([clock() - s for clock, s in zip(clocks, began, strict=True)])
    wall, main, everything = map(statistics.median, zip(*taken, strict=True))
    return wall, main, everything


def _plain(world: Group, rounds: int) -> tuple[float, float, float]:
    """The same training in a plain loop, without this library."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = ADAMW(model.parameters())
    inputs, targets = _batch()

    def step() -> None:
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss_term(model(x), y, targets.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return _clocks(world, step, rounds)


def _bubble(ranks: list[Spent], sizes: tuple[int, int, int]) -> float:
    """The part of a pipeline's time in which its ranks are in no action, the mean over the pipelines."""
    dp, pp, tp = sizes
    schedule = Layout(pp=pp, microbatches=MICROBATCHES).make_schedule()
    pipelines = [[ranks[(d * pp + p) * tp + t] for p in range(pp)] for d in range(dp) for t in range(tp)]
    return statistics.mean(
        Timeline.of(schedule, [slot for rank in pipeline for slot in rank.slots]).bubble for pipeline in pipelines
    )


def main(rounds: int = 5) -> None:
    wall, main, everything = run(_plain, 1, rounds, timeout_s=600)[0]
    rows = [("dp · pp · tp", "step, ms", "CPU, ms", *DOING, "calls", *(f"waits {axis}" for axis in AXES), "bubble")]
    rows.append(("a plain loop", f"{1e3 * wall:.0f}", f"{1e3 * everything:.0f}", *("",) * (len(rows[0]) - 3)))
    for sizes in SIZES:
        ranks = list(run(_spent, math.prod(sizes), sizes, rounds, timeout_s=600))

        def mean(of: Callable[[Spent], float], ranks: list[Spent] = ranks) -> float:
            return statistics.mean(map(of, ranks))

        threads = mean(lambda s: s.all - s.main)
        spent = {what: mean(lambda s, what=what: s.doing[what]) for what in DOING}
        spent["transport"] += threads
        whole = sum(spent.values())
        rows.append(
            (
                "{} · {} · {}".format(*sizes),
                f"{1e3 * mean(lambda s: s.wall):.0f}",
                f"{1e3 * mean(lambda s: s.all):.0f}",
                *(f"{100 * spent[what] / whole:.1f}%" for what in DOING),
                f"{mean(lambda s: s.calls):.0f}",
                *(f"{1e3 * mean(lambda s, axis=axis: s.blocked[axis]):.0f} ms" for axis in AXES),
                f"{100 * _bubble(ranks, sizes):.0f}%",
            )
        )
    tokens = ROWS * CONFIG.context
    show(f"Where a step of {tokens:,} tokens goes: parts of a rank's CPU time (reach: ours 5%)", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
