"""Pipelines on one clock: microbatches travel down the ranks and back, and each rank keeps them until then."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import text_width
from lib.pipeline.gantt import KIND
from lib.pipeline.lower import message_behind
from lib.pipeline.schedules.action import Action, Op, Schedule
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import Costs, Slot, Timeline, simulate

ROW, TALL, HEAD = 30, 21, 24  # pixels: from rank to rank, of a bar, and above the first
BELOW = 22  # below the last rank, for the difference of two ends
UNDERLINE = "\u0332"  # below the character before it
BALL = ROW - TALL  # a message, as high as the gap between two ranks, so that it lies on no number


class _Grid(NamedTuple):
    """The places: a name and a tray left of the bars of each rank, time to the right, then its idle time."""

    tray: float
    item: float  # width of an item in a tray
    left: float  # where time begins
    right: float  # where it ends
    unit: float

    @classmethod
    def of(cls, width: float, makespan: float, kept: int) -> _Grid:
        name, item, gap, idle = (50.0, 17.0, 14.0, 32) if width > NARROW else (16.0, 7.5, 8.0, 24)
        left, right = name + item * kept + gap, width - idle
        return cls(name, item, left, right, (right - left) / makespan)

    def bar(self, top: float, slot: Slot, now: float, words: str) -> Thing:
        """The part of it that is done."""
        x = self.left + slot.start * self.unit
        width = max(1.0, (min(slot.end, now) - slot.start) * self.unit - 2)
        return Thing(x, top + ROW * slot.rank, width, TALL, KIND[slot.action.op], words)


def play_gpipe(num_ranks: int, num_microbatches: int) -> Player:
    """GPipe: when a rank waits, and what it keeps meanwhile."""
    last, m = num_ranks - 1, num_microbatches
    one = simulate(gpipe(num_ranks, m))
    first_wait = _begin(one, Op.B, 0, 0) - _end(one, Op.F, m - 1, 0)
    beats = [
        (
            "Before",
            f"{m} microbatches go down {num_ranks} ranks, and their gradients come back. When does a rank wait?",
            0,
        ),
        (
            "Down",
            f"Microbatch 0 goes down, others follow. Rank {last} waits {_begin(one, Op.F, 0, last):g} units for it.",
            _end(one, Op.F, 0, last),
        ),
        (
            "Full",
            f"Each rank keeps what it has computed, for the way back. All {m} are in: every tray is full.",
            _end(one, Op.F, m - 1, last),
        ),
        (
            "Back",
            f"Gradients go up. The first reaches rank 0 after a wait of {first_wait:g} units.",
            _end(one, Op.B, 0, 0),
        ),
        (
            "Empty",
            f"Trays empty. Each rank has been idle for {one.idle(0):g} of {one.makespan:g} units.",
            one.makespan,
        ),
    ]
    return _player([one], beats)


def play_trays(num_ranks: int, num_microbatches: int) -> Player:
    """GPipe and 1F1B: the same work in the same time, and how much each rank keeps."""
    last, m = num_ranks - 1, num_microbatches
    full, one = simulate(gpipe(num_ranks, m)), simulate(one_f_one_b(num_ranks, m))
    down, turned, returned = _end(one, Op.F, 0, last), _end(one, Op.B, 0, last), _end(one, Op.B, 0, 0)
    beats = [
        (
            "Before",
            f"{m} microbatches go down {num_ranks} ranks and come back. A rank keeps each until then: watch the trays.",
            0,
        ),
        (
            "Down",
            f"Microbatch 0 reaches rank {last}. So far both are the same: rank 0 keeps {_kept_at(one, 0, down)}.",
            down,
        ),
        (
            "They part",
            f"1F1B: rank {last} sends 0 back. Rank 0 is free but takes in no more. GPipe: it does, and all trays fill.",
            turned,
        ),
        (
            "Back",
            f"1F1B: 0 is back on rank 0, which stopped at {one.peak(0):g}. GPipe: rank 0 keeps {full.peak(0):g}.",
            returned,
        ),
        (
            "Steady",
            "1F1B: rank 0 takes one in only when one has come back. GPipe: nothing new, trays empty one by one.",
            _end(one, Op.F, m - 1, 0),
        ),
        (
            "End",
            f"Both end at {one.makespan:g}, idle {one.bubble:.0%}. GPipe kept {_peaks(full)}; 1F1B kept {_peaks(one)}.",
            one.makespan,
        ),
    ]
    return _player([full, one], beats)


def play_rounds(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Player:
    """1F1B, and interleaved with shorter stages: a microbatch makes a round over the ranks for each stage of a rank."""
    v, m = stages_per_rank, num_microbatches
    one, cut = (
        simulate(schedule, _of_a_stage(Costs(), schedule))
        for schedule in (one_f_one_b(num_ranks, m), interleaved(num_ranks, m, v))
    )
    begins = _begin(cut, Op.F, 0, 1)
    beats = [
        (
            "Before",
            f"Below, each rank has {v} stages, each 1/{v} as long. What does that change at the start?",
            0,
        ),
        (
            "Sooner",
            f"Interleaved: rank 1 begins after {begins:g} units instead of {_begin(one, Op.F, 0, 1):g}.",
            begins,
        ),
        (
            "Second round",
            "Microbatch 0 comes to rank 0 again, for its second stage: underlined.",
            _end(cut, Op.F, 0, num_ranks),
        ),
        ("Back", "The last stage has its loss. Its gradient returns through both rounds.", _end(cut, Op.B, 0, 0)),
        (
            "End",
            f"Interleaved ends at {cut.makespan:g}, 1F1B at {one.makespan:g}. For that rank 0 keeps "
            f"{_kept(cut, cut.peak(0)):g} microbatches instead of {_kept(one, one.peak(0)):g}.",
            max(one.makespan, cut.makespan),
        ),
    ]
    return _player([one, cut], beats)


def _player(timelines: Sequence[Timeline], beats: Sequence[tuple[str, str, float]]) -> Player:
    """Beats: (name, sentence, time until which)."""
    unit = min(slot.end - slot.start for timeline in timelines for slot in timeline.compute)
    names, m = " and ".join(map(_name, timelines)), timelines[0].schedule.num_microbatches
    numbered = [Beat(name, sentence, round(until / unit)) for name, sentence, until in beats]
    return Player(
        f"{names}, {m} microbatches", lambda width: _scene(timelines, unit, numbered[-1].until, width), numbered
    )


def _name(timeline: Timeline) -> str:
    """Of its schedule, without the number of its stages."""
    return timeline.schedule.name.partition(",")[0]


def _slot(timeline: Timeline, op: Op, microbatch: int, stage: int) -> Slot:
    return next(slot for slot in timeline.compute if slot.action == Action(stage, op, microbatch))


def _begin(timeline: Timeline, op: Op, microbatch: int, stage: int) -> float:
    return _slot(timeline, op, microbatch, stage).start


def _end(timeline: Timeline, op: Op, microbatch: int, stage: int) -> float:
    return _slot(timeline, op, microbatch, stage).end


def _scene(timelines: Sequence[Timeline], unit: float, last: int, width: float) -> Scene:
    ranks = timelines[0].schedule.num_ranks
    kept = math.ceil(max(timeline.peak(rank) for timeline in timelines for rank in range(ranks)))
    grid = _Grid.of(width, last * unit, kept)
    canvas, tops = Canvas(f"pipelines {width}"), [HEAD + i * (HEAD + ROW * ranks + 12) for i in range(len(timelines))]
    for timeline, top in zip(timelines, tops, strict=True):
        name = _name(timeline)
        canvas.text(0, top - 9, name, font_weight=650)
        if grid.tray > text_width(name):
            canvas.note(grid.tray, top - 9, "kept")
        canvas.note(width - 2, top - 9, "idle so far", "end")
        for rank in range(ranks):
            canvas.text(0, top + ROW * rank + 15, f"rank {rank}" if width > NARROW else f"{rank}")
            long = timeline.makespan * grid.unit - 2
            canvas.rect(grid.left, top + ROW * rank, long, TALL, radius=3, fill=canvas.hatched)
    frames = []
    for k in range(last + 1):
        things = {}
        for timeline, top in zip(timelines, tops, strict=True):
            things |= dict(_things(timeline, k * unit, unit, top, grid))
        frames.append(things)
    for timeline, top in zip(timelines[1:], tops[1:], strict=True):
        frames[-1] |= dict(_gain(timelines[0], timeline, top, grid))
    times = [grid.left + k * unit * grid.unit for k in range(last + 1)]
    ends = {timeline.makespan for timeline in timelines}
    return Scene(canvas, tops[-1] + ROW * ranks + BELOW * (len(ends) > 1), frames, times)


def _things(timeline: Timeline, now: float, unit: float, top: float, grid: _Grid) -> Iterator[tuple[str, Thing]]:
    """What a rank has done before `now`, its messages, and what it keeps then; the time to come is covered by paper."""
    name, schedule = timeline.schedule.name, timeline.schedule
    ranks, until = range(schedule.num_ranks), min(now, timeline.makespan)
    ends = grid.left + timeline.makespan * grid.unit
    for rank in ranks:
        x, y = grid.left + until * grid.unit, top + ROW * rank
        yield f"{name} future {rank}", Thing(x, y - 1, ends - x, TALL + 2, "paper", radius=0)
    for slot in timeline.compute:
        began = slot if slot.start < now else slot._replace(end=slot.start)
        box = grid.bar(top, began, now, _words(schedule, slot.action))
        yield f"{name} {slot.action}", box._replace(seen=float(slot.start < now))
    for slot in timeline.compute:
        message = message_behind(slot.action, schedule)
        if message and slot.end == now:
            y = top + ROW * slot.rank + (TALL if message[0] > slot.rank else -BALL)
            x = grid.left + now * grid.unit - 1 - BALL / 2
            yield f"{name} message {slot.action}", Thing(x, y, BALL, BALL, "comm", radius=BALL / 2)
    for rank in ranks:
        there = [action for action, start, end in _stays(timeline, rank) if start < now < end]
        for place, action in enumerate(there):
            box = grid.tray + grid.item * place, top + ROW * rank, grid.item - 2, TALL
            words = _words(schedule, action) if grid.item > 12 else ""
            yield f"{name} kept {rank} {action}", Thing(*box, "forward", words)
        if most := max(_kept_at(timeline, rank, k * unit) for k in range(round(now / unit) + 1)):
            frame = grid.tray - 2, top + ROW * rank - 2, grid.item * most + 2, TALL + 4
            yield f"{name} most {rank}", Thing(*frame, "outline")
        busy = sum(max(0, min(slot.end, now) - slot.start) for slot in timeline.compute if slot.rank == rank)
        at = grid.right + 2, top + ROW * rank, 22, TALL
        yield f"{name} idle {rank}", Thing(*at, "plain", f"{until - busy:g}")
    head = grid.left + until * grid.unit - 1, top - 5, 2, ROW * schedule.num_ranks + 2
    yield f"{name} playhead", Thing(*head, "soft", radius=0)


def _gain(first: Timeline, second: Timeline, top: float, grid: _Grid) -> Iterator[tuple[str, Thing]]:
    """The ends of both schedules with the time between them; if both end together, the places that each tray saved."""
    rows = range(second.schedule.num_ranks)
    earlier, later = (grid.left + one.makespan * grid.unit - 1 for one in (second, first))
    if earlier < later:
        high = ROW * len(rows) + BELOW - 18
        yield "end of the second", Thing(earlier, top, 1, high, "frame", radius=0)
        yield "end of the first", Thing(later, top, 1, high, "outline", radius=0)
        y = top + ROW * len(rows)
        yield from bracket("gain", earlier + 4, later - 3, y, second.makespan - first.makespan, below=True)
        return
    for rank in rows:
        fewer, more = second.peak(rank), first.peak(rank)
        if fewer < more:
            begin, end = (grid.tray + grid.item * kept for kept in (fewer, more))
            yield from bracket(f"gain {rank}", begin + 3, end - 2, top + ROW * rank + TALL - 2, fewer - more)


def bracket(
    name: str, begin: float, end: float, y: float, difference: float, *, below: bool = False
) -> Iterator[tuple[str, Thing]]:
    """Between two places, with its difference above it, or below where that has more room."""
    yield f"{name} line", Thing(begin, y, end - begin, 0.5, "frame", radius=0)
    for side, x in (("left", begin), ("right", end - 0.5)):
        yield f"{name} {side}", Thing(x, y - 4, 0.5, 8, "frame", radius=0)
    words = f"{difference:g}".replace("-", "−")
    long = max(end - begin, text_width(words))
    yield f"{name} words", Thing(end - (long + end - begin) / 2, y + (5 if below else -18), long, 14, "plain", words)


def _stays(timeline: Timeline, rank: int) -> list[tuple[Action, float, float]]:
    """From when until when a rank keeps the activations of each of its forwards."""
    forwards = [slot for slot in timeline.compute if slot.rank == rank and slot.action.op == Op.F]
    return [(slot.action, slot.start, _freed(timeline, slot)) for slot in forwards]


def _kept_at(timeline: Timeline, rank: int, now: float) -> int:
    return sum(start < now < end for _, start, end in _stays(timeline, rank))


def _peaks(timeline: Timeline) -> str:
    return ", ".join(f"{_kept(timeline, timeline.peak(rank)):g}" for rank in range(timeline.schedule.num_ranks))


def _of_a_stage(costs: Costs, schedule: Schedule) -> Costs:
    stages = schedule.num_stages // schedule.num_ranks
    return replace(costs, F=costs.F / stages, I=costs.I / stages, W=costs.W / stages)


def _words(schedule: Schedule, action: Action) -> str:
    """The microbatch, underlined outside the first stage of its rank."""
    is_first = schedule.rank_of.index(schedule.rank_of[action.stage]) == action.stage
    return "".join(digit if is_first else digit + UNDERLINE for digit in f"{action.microbatch}")


def _freed(timeline: Timeline, forward: Slot) -> float:
    """When the activations of a forward are freed."""
    of_whole, of_half = (forward.action._replace(op=op) for op in (Op.B, Op.W))
    return next(slot.end for slot in timeline.compute if slot.action in (of_whole, of_half))


def _kept(timeline: Timeline, stages: float) -> float:
    """So many stages' activations, counted in all stages of a rank."""
    return stages * timeline.schedule.num_ranks / timeline.schedule.num_stages
