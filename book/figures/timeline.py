"""The timeline of a step: the actions of every rank, and their times; or of several steps on one axis, and the gain.

Every chapter draws this picture: ranks from top to bottom, time to the right. Where steps are compared they share one
axis, a bracket says how much sooner than the first one each of the others ends, and each rank has its idle share at
the right.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from book.figures.canvas import FRAMES, Canvas
from book.figures.lanes import IDLE, KINDS, Axis, Rows, Step, draw_axis
from book.figures.svg import SMALLEST_PX, Figure, color, drawn_twice, num, text_width

_GAIN = 17  # pixels of the words in a bracket


def legend(kinds: Iterable[str], outline: bool) -> list[tuple[str, str]]:
    """(colour, name) of the kinds that a figure has, those of one colour together, and of the outlines."""
    names = defaultdict(list)
    for kind in kinds:
        ink, name = KINDS[kind]
        names[ink].append(name)
    written = [(ink, " or ".join(of_ink)) for ink, of_ink in names.items()]
    return written + ([("outline", "predicted")] if outline else [])


@drawn_twice
def draw_timeline(
    rows: Rows | Mapping[str, Rows],
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "ms",
    predicted: Rows | None = None,
    end: float | None = None,
    again: bool = False,
    width: float = 680,
) -> Figure:
    """The timeline of a step, or of several, one below the other on one axis.

    A rank has a lane of compute and one of network. Hatching is idle time inside the step, and its share stands at the
    right; behind the end of a step is paper. How much sooner or later than the first the other steps end is written
    into a bracket.

    Args:
        rows: a `Trace` (counted from its first span or event), or `Bar`s: (rank, lane, kind, label, start, end) with
            times already in `unit`; or steps to compare, name to one of these. Bars of one lane that overlap are
            stacked. A bar of kind `idle` adds a line and its words ("waits 3 ms") to the hatching.
        unit: of the axis: `s`, `ms`, `µs`, or with bars any word ("forwards").
        predicted: of the one step, when `rows` is measured: thin tracks below the bars.
        end: where the axis ends, in `unit`; give it in an `Explorer` so that frames compare. Default: last end.
        again: where a step ends before the axis, the next one begins there, pale.
        width: of the drawing in pixels; a phone has its own width.
    """
    named = rows if isinstance(rows, Mapping) else {"": rows}
    steps = [Step(rows, unit, predicted, name) for name, rows in named.items()]
    last = max((bar.end for step in steps for bar in step.both), default=0.0)
    high = last if end is None else end
    if last <= 0 or not last * (1 - 1e-9) <= high < math.inf:
        count = sum(len(step.both) for step in steps)
        raise ValueError(f"end={end}: {count} bars, the last ends at {last:g} {unit}; the axis must reach it")
    axis = axis_beside(steps, width, high, unit)
    canvas = Canvas(alt)
    y = canvas.head(title, legend_of(steps, axis), axis.left, width)
    below = draw_steps(canvas, steps, axis, y, again=again)[-1][1]
    below += draw_axis(canvas, axis, below)
    return canvas.figure(width, below, caption)


def axis_beside(steps: list[Step], width: float, high: float, unit: str) -> Axis:
    """The axis of these steps, between the names of their lanes and their idle shares."""
    names = [name for step in steps for name in [*step.lanes[1:], *(f"rank {rank}" for rank in step.ranks)]]
    left = 12 + max(text_width(words, SMALLEST_PX) for words in names)
    right = width - 10 - (IDLE - 6 if any(step.computes for step in steps) else 0)
    return Axis(left, right, min(step.begin for step in steps), high, unit)


def legend_of(steps: list[Step], axis: Axis) -> list[tuple[str, str]]:
    """Of all steps together; where bars have no room for their numbers it says so."""
    found = {kind for step in steps for kind in step.kinds()}
    written = legend([kind for kind in KINDS if kind in found], False)
    written += [("track", "predicted")] if any(step.predicted for step in steps) else []
    return written + ([("", "too narrow for numbers")] if not all(step.has_numbers(axis) for step in steps) else [])


def draw_steps(
    canvas: Canvas, steps: list[Step], axis: Axis, y: float, *, thin: bool = False, again: bool = False
) -> list[tuple[float, float]]:
    """Steps from height `y` on, each with its end, compared with the first; the top and bottom of each."""
    first, places = steps[0], []
    for step in steps:
        y += 18 if step.computes else 0
        below = step.draw(canvas, axis, y, thin=thin, again=again)
        if step.computes:
            _draw_heading(canvas, step, first, axis, y, below, again)
            at = num(axis.at(step.end))
            canvas.layer(FRAMES, stroke=color("text"), stroke_width=2).path(f"M{at} {num(y - 4)}V{num(below + 1)}")
        places.append((y, below))
        y = below + 8
    if len(steps) > 1:  # where the first one ends, down to the axis
        line = {"stroke": color("text"), "stroke_width": 1.2, "stroke_dasharray": "3 3"}
        canvas.layer(FRAMES, **line).path(f"M{num(axis.at(first.end))} {num(places[0][0] - 4)}V{num(below)}")
    return places


def _draw_heading(canvas: Canvas, step: Step, first: Step, axis: Axis, y: float, below: float, again: bool) -> None:
    """Above a step its name and when it ends; between there and the end of the first step, the difference."""
    x, right, end = axis.left, axis.right, axis.words(step.end)
    if step.name:
        canvas.text(x, y - 6, step.name, font_weight=650)
        x += text_width(step.name) + 12
    canvas.note(axis.right + IDLE, y - 6, "idle", "end")
    choices, change = [f"ends at {end}", end], step.end - first.end
    if abs(change) > 1e-3 * first.end:
        gain, share = (
            f"{text}".replace("-", "−") for text in (axis.words(change, "+"), f"{change / first.end:+.0%}")
        )
        ends, on_paper = sorted((axis.at(step.end), axis.at(first.end))), change < 0 and not again
        if not _draw_gain(canvas, ends, y, below, change < 0, *((gain, share) if on_paper else ("", ""))):
            choices = [f"ends at {end}: {gain}, {share}", f"{end}: {gain}, {share}", f"{end}: {share}", share]
            right = right if on_paper else ends[0]
    fits = [words for words in choices if x + text_width(words, SMALLEST_PX) <= right]
    if fits:
        canvas.note(x, y - 6, fits[0])


def _draw_gain(
    canvas: Canvas, places: list[float], y: float, below: float, wins: bool, gain: str, share: str
) -> bool:
    """A bracket between two ends, on paper, with its words if there is room for them; whether there was."""
    (begin, end), ink, middle = places, color("ok" if wins else "bad"), (y + below) / 2
    if gain:
        canvas.rect(begin, y - 4, end - begin, below - y + 4, radius=0, fill=ink, fill_opacity=0.12)
    fits = gain and text_width(gain, _GAIN) + 6 <= end - begin and below - y > 50
    if fits:
        canvas.text((begin + end) / 2, middle - 7, gain, "middle", font_size=_GAIN, font_weight=650, fill=ink)
        canvas.text((begin + end) / 2, middle + 21, share, "middle", font_weight=650, fill=ink)
    elif not gain:
        middle = y - 10
    tips = f"m-5 -4l5 4l-5 4M{num(begin + 8)} {num(middle - 4)}l-5 4l5 4" if end - begin > 20 else ""
    canvas.layer(FRAMES, stroke=ink, stroke_width=1.8).path(f"M{num(begin + 3)} {num(middle)}H{num(end - 3)}{tips}")
    return bool(fits)
