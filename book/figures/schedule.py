"""A schedule in time as a picture: simulated, measured, or both on one axis; and the order of its messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from book.figures.canvas import FRAMES, Canvas
from book.figures.lanes import COMPUTE, NETWORK, Axis, Bar, Step, draw_axis
from book.figures.svg import SMALLEST_PX, Figure, color, drawn_twice, num
from book.figures.timeline import axis_beside, draw_steps, draw_timeline, legend_of
from lib.pipeline.gantt import KIND
from lib.pipeline.lower import message_behind
from lib.pipeline.schedules.action import Op, Schedule
from lib.pipeline.simulate import Timeline, simulate


def schedule_bars(timeline: Timeline, scale: float = 1.0) -> list[Bar]:
    """A bar for each action, with its microbatch; with its stage before it where a rank has several, and with I or W.

    Sums of gradients that take time are on the network lane of the rank. Bars outside the first stage of a rank are
    marked.

    Args:
        scale: factor of all times: 1000 for milliseconds, if they are seconds.
    """
    schedule = timeline.schedule
    several = schedule.num_stages > schedule.num_ranks
    first = {schedule.rank_of.index(rank) for rank in range(schedule.num_ranks)}
    bars = []
    for rank, action, start, end in timeline.slots:
        if action.op == Op.REDUCE and end > start:
            words = f"stage {action.stage}" if several else "sum"
            bars.append(Bar(rank, NETWORK, "comm", words, scale * start, scale * end))
    for rank, action, *times in timeline.compute:
        half = action.op.name if action.op in (Op.I, Op.W) else ""  # told apart in grey print, where there is room
        words = f"stage {action.stage}, " * several + f"{half}{action.microbatch}"
        start, end = (scale * time for time in times)
        kind = "input" if action.op == Op.I else KIND[action.op]
        bars.append(Bar(rank, COMPUTE, kind, words, start, end, action.stage not in first))
    return bars


def draw_gantt(
    timeline: Timeline | Mapping[str, Timeline],
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "units",
    scale: float = 1.0,
    predicted: Timeline | None = None,
    end: float | None = None,
    width: float = 680,
) -> Figure:
    """Ranks from top to bottom, time to the right; the hatching is the bubble.

    Where a rank has several stages, actions outside its first stage are underlined, and the caption says so.

    Args:
        timeline: of a step; or of several, name to timeline, which are compared on one axis.
        unit, scale: of the axis, and the factor that converts the times of the timeline to it.
        predicted: of the one step, of the same unit, drawn as a thin track below its bars.
        end: where the axis ends, in `unit`; give it in an `Explorer` so that frames compare.
    """
    named = timeline if isinstance(timeline, Mapping) else {"": timeline}
    rows = {name: schedule_bars(one, scale) for name, one in named.items()}
    caption = _with_underlined(caption, rows.values())
    track = None if predicted is None else schedule_bars(predicted, scale)
    said = {"title": title, "alt": alt, "caption": caption}
    return draw_timeline(rows, **said, unit=unit, predicted=track, end=end, width=width)


@drawn_twice
def draw_block(
    timelines: Mapping[str, Timeline],
    begin: float,
    end: float,
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "units",
    width: float = 680,
) -> Figure:
    """Steps as strips on one axis, and of the last one the part from `begin` to `end` enlarged.

    For schedules that repeat a block too often for their numbers to have room.
    """
    rows = {name: schedule_bars(timeline) for name, timeline in timelines.items()}
    steps = [Step(bars, unit, name=name) for name, bars in rows.items()]
    axis = axis_beside(steps, width, max(step.end for step in steps), unit)
    large = axis._replace(low=begin, high=end)
    canvas = Canvas(alt)
    top = canvas.head(title, legend_of(steps[-1:], large), axis.left, width)
    top, below = draw_steps(canvas, steps, axis, top, thin=True)[-1]
    y = below + draw_axis(canvas, axis, below) + 14
    lens = canvas.layer(FRAMES, stroke=color("text"), stroke_width=1.4)
    lens.rect(axis.at(begin) - 1.5, top - 3, axis.long(end - begin) + 2, below - top + 3, fill="none")
    sides = ((axis.at(begin) - 1.5, axis.left), (axis.at(end) + 0.5, axis.right))
    canvas.path("".join(f"M{num(x)} {num(below)}L{num(far)} {num(y - 3)}" for x, far in sides), stroke=color("soft"))
    below = steps[-1].draw(canvas, large, y)
    below += draw_axis(canvas, large, below)
    return canvas.figure(width, below, _with_underlined(caption, list(rows.values())[-1:]))


@drawn_twice
def draw_end(
    timeline: Timeline,
    ranks: Collection[int],
    begin: float,
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "units",
    width: float = 680,
) -> Figure:
    """Some ranks from a time to the end of the step, with a line below each wait between two actions."""
    bars = [bar for bar in schedule_bars(timeline) if bar.rank in ranks and bar.end > begin]
    waits = ((start, slot) for rank in ranks for start, slot in timeline.pauses(rank) if start > begin)
    bars += [Bar(slot.rank, COMPUTE, "idle", "wait", start, slot.start) for start, slot in waits]
    step = Step(bars, unit)
    axis = Axis(axis_beside([step], width, step.end, unit).left, width - 10, begin, timeline.makespan, unit)
    canvas = Canvas(alt)
    below = step.draw(canvas, axis, canvas.head(title, legend_of([step], axis), axis.left, width))
    return canvas.figure(width, below + draw_axis(canvas, axis, below), caption)


def _with_underlined(caption: str, rows: Iterable[list[Bar]]) -> str:
    is_said = any(bar.marked for bars in rows for bar in bars)
    return f"{caption} Underlined is everything outside the first stage of a rank.".strip() if is_said else caption


_PITCH, _TALL = 62, 26  # of rows with room for arrows in between


@drawn_twice
def draw_messages(schedule: Schedule, *, title: str, alt: str, caption: str = "", width: float = 680) -> Figure:
    """The simulated schedule, with an arrow for each message, numbered in the order in which `lower` writes them."""
    seen, left = simulate(schedule), 62
    unit = (width - left - 12) / seen.makespan
    kinds = dict.fromkeys(KIND[slot.action.op] for slot in seen.slots)
    canvas = Canvas(alt)
    top = canvas.head(title, [*((kind, kind) for kind in kinds), ("comm", "message")], left, width) + 12
    for rank in range(schedule.num_ranks):
        y = top + rank * _PITCH
        canvas.text(left - 9, y + 18, f"rank {rank}", "end")
        canvas.rect(left, y, width - left - 12, _TALL, radius=3, fill=canvas.hatched)
    numbers, arrows = canvas.layer(FRAMES, font_size=SMALLEST_PX), []
    for slot in sorted(seen.slots, key=lambda slot: slot.end):
        kind, x, y = KIND[slot.action.op], left + slot.start * unit, top + slot.rank * _PITCH
        long = (slot.end - slot.start) * unit
        canvas.bars(kind).rect(x, y, long - 1, _TALL)
        canvas.words_on(kind).text(x + long / 2, y + 17.5, str(slot.action.microbatch))
        if message := message_behind(slot.action, schedule):
            down = message[0] > slot.rank
            at = x + long - 0.5 + (4 if down else -4)  # next to an arrow of the opposite direction
            near = y + _TALL + 3 if down else y - 3
            far = top + message[0] * _PITCH + (-3 if down else _TALL + 3)
            tip = -5 if down else 5
            arrows.append(f"M{num(at)} {num(near)}V{num(far)}m-4 {tip}l4 {-tip}l4 {tip}")
            beside, anchor = (at + 6, "") if down else (at - 6, "end")
            numbers.text(beside, near + 0.3 * (far - near) + 4.5, str(len(arrows)), anchor)  # where it begins
    canvas.layer(FRAMES).path("".join(arrows), stroke_width=2, stroke=color("comm"))
    bottom = top + (schedule.num_ranks - 1) * _PITCH + _TALL + 6
    below = draw_axis(canvas, Axis(left, width - 12, 0, seen.makespan, "units"), bottom)
    return canvas.figure(width, bottom + below, caption)
