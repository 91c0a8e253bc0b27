"""Pipelines on one clock: microbatches travel down the ranks and back, and each rank keeps them until then."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Player, Scene, Step, Thing
from book.figures.svg import text_width
from lib.pipeline.gantt import KIND
from lib.pipeline.schedules.action import Action, Op, Schedule
from lib.pipeline.simulate import Costs, Slot, Timeline, simulate

ROW, HEAD = 30, 24  # pixels: from rank to rank, and above the first


class _Grid(NamedTuple):
    """The places: a name and a tray left of the bars of each rank, time to the right."""

    tray: float
    item: float  # width of an item in a tray
    left: float  # where time begins
    unit: float

    @classmethod
    def of(cls, width: float, makespan: float, kept: int) -> _Grid:
        name, item, gap = (46.0, 17.0, 12.0) if width > NARROW else (14.0, 9.5, 6.0)
        left = name + item * kept + gap
        return cls(name, item, left, (width - left - 2) / makespan)

    def bar(self, top: float, slot: Slot, now: float, words: str) -> Thing:
        """The part of it that is done."""
        x = self.left + slot.start * self.unit
        width = max(1.0, (min(slot.end, now) - slot.start) * self.unit - 2)
        return Thing(x, top + ROW * slot.rank, width, ROW - 6, KIND[slot.action.op], words)


def play_pipelines(schedules: Sequence[Schedule], costs: Costs | None = None) -> Player:
    """Schedules from top to bottom, run with the given costs of actions.

    Args:
        schedules: of the same ranks and microbatches, such as GPipe and 1F1B. Where a rank has several stages, those
            after its first have a dash, and each takes its part of the time.
        costs: of all stages of a rank. Default: a forward of 1, a backward of 2.
    """
    costs = costs or Costs()
    timelines = [simulate(schedule, _of_a_stage(costs, schedule)) for schedule in schedules]
    title = " and ".join(schedule.name for schedule in schedules)
    title = f"{title}, {schedules[0].num_microbatches} microbatches"
    middle = len(_moments(timelines)) // 2  # the last step would answer the question of the page
    return Player(title, lambda width: _scene(timelines, width), still=middle)


def _moments(timelines: Sequence[Timeline]) -> list[float]:
    return sorted({slot.end for timeline in timelines for slot in timeline.compute} | {0})


def _scene(timelines: Sequence[Timeline], width: float) -> Scene:
    ranks = timelines[0].schedule.num_ranks
    moments = _moments(timelines)
    kept = math.ceil(max(timeline.peak(rank) for timeline in timelines for rank in range(ranks)))
    grid = _Grid.of(width, max(moments), kept)
    canvas, tops = Canvas(f"pipelines {width}"), [HEAD + i * (HEAD + ROW * ranks + 12) for i in range(len(timelines))]
    for timeline, top in zip(timelines, tops, strict=True):
        name = timeline.schedule.name.partition(",")[0]
        canvas.text(0, top - 9, name, font_weight=650)
        canvas.note(max(grid.left, text_width(name) + 6), top - 9, "time")
        if width > NARROW and grid.tray > text_width(name):
            canvas.note(grid.tray, top - 9, "kept")
        for rank in range(ranks):
            canvas.text(0, top + ROW * rank + 17, f"rank {rank}" if width > NARROW else f"{rank}")
    steps = []
    for now in moments:
        things = {}
        for timeline, top in zip(timelines, tops, strict=True):
            things |= dict(_things(timeline, now, top, grid))
            playhead = Thing(grid.left + now * grid.unit - 2, top - 4, 2, ROW * ranks + 2, "soft")
            things[f"{timeline.schedule.name} playhead"] = playhead
        steps.append(Step(_sentence(timelines, now), things))
    return Scene(canvas, tops[-1] + ROW * ranks, steps)


def _things(timeline: Timeline, now: float, top: float, grid: _Grid) -> Iterator[tuple[str, Thing]]:
    """The actions that began before `now`, and the microbatches kept then. The next actions wait, invisible."""
    name, schedule = timeline.schedule.name, timeline.schedule
    of_stage = {slot.action: slot for slot in timeline.compute}
    for slot in timeline.compute:
        action, words = slot.action, _words(schedule, slot.action)
        if slot.start < now:
            yield f"{name} {action}", grid.bar(top, slot, now, words)
            continue
        step = 1 if action.op == Op.F else -1
        before = of_stage.get(action._replace(stage=action.stage - step)) or of_stage[action._replace(op=Op.F)]
        there = grid.bar(top, before, before.end, words)
        yield f"{name} {action}", there._replace(ink=KIND[action.op], seen=0.0)
    for rank in range(schedule.num_ranks):
        forwards = [slot for slot in timeline.compute if slot.rank == rank and slot.action.op == Op.F]
        there = [slot.action for slot in forwards if slot.start < now < _freed(timeline, slot)]
        for place, action in enumerate(there):
            box = grid.tray + grid.item * place, top + ROW * rank, grid.item - 2, ROW - 6
            yield f"{name} kept {rank} {action}", Thing(*box, "forward", _words(schedule, action))


def _of_a_stage(costs: Costs, schedule: Schedule) -> Costs:
    stages = schedule.num_stages // schedule.num_ranks
    return replace(costs, F=costs.F / stages, I=costs.I / stages, W=costs.W / stages)


def _words(schedule: Schedule, action: Action) -> str:
    """The microbatch, with a dash for each stage that the rank has before this one."""
    return f"{action.microbatch}" + "′" * schedule.rank_of[: action.stage].count(schedule.rank_of[action.stage])


def _freed(timeline: Timeline, forward: Slot) -> float:
    """When the activations of a forward are freed."""
    of_whole, of_half = (forward.action._replace(op=op) for op in (Op.B, Op.W))
    return next(slot.end for slot in timeline.compute if slot.action in (of_whole, of_half))


def _sentence(timelines: Sequence[Timeline], now: float) -> str:
    ranks = range(timelines[0].schedule.num_ranks)
    if now == 0:
        return (
            "The batch is cut into microbatches, the model into stages. Each microbatch goes down all ranks and back."
        )
    if now >= max(timeline.makespan for timeline in timelines):
        said = [
            f"{one.schedule.name} waited {one.bubble:.0%} of {one.makespan:g} units and kept "
            f"{', '.join(f'{_kept(one, one.peak(rank)):g}' for rank in ranks)} microbatches"
            for one in timelines
        ]
        return f"{'; '.join(said)}."
    stages = [[n for time, n in one.alive(0) if time < now][-1] for one in timelines]
    kept = (f"{_kept(one, n):g} under {one.schedule.name}" for one, n in zip(timelines, stages, strict=True))
    return f"Time {now:g}: rank 0 keeps {', '.join(kept)}."


def _kept(timeline: Timeline, stages: float) -> float:
    """So many stages' activations, counted in all stages of a rank."""
    return stages * timeline.schedule.num_ranks / timeline.schedule.num_stages
