"""A schedule in time as a picture: simulated, measured, or both on one axis."""

from __future__ import annotations

from lib import plot
from lib.pipeline.gantt import KIND
from lib.pipeline.simulate import Timeline
from lib.svg import Figure


def bars_of(timeline: Timeline, scale: float = 1.0) -> list[plot.Bar]:
    """A bar for each action, with its microbatch; with its stage in front of it where a rank has several.

    Args:
        scale: what times are multiplied with: 1000 for milliseconds, if they are seconds.
    """
    several = timeline.schedule.num_stages > timeline.schedule.num_ranks
    return [
        plot.Bar(
            rank,
            plot.COMPUTE,
            KIND[action.op],
            f"stage {action.stage}, {action.microbatch}" if several else f"{action.microbatch}",
            scale * start,
            scale * end,
        )
        for rank, action, start, end in timeline.compute
    ]


def gantt(
    timeline: Timeline,
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
    """Ranks from top to bottom, time to the right; the hatching that is left is the bubble.

    Args:
        unit, scale: of the axis, and what the timeline's times are multiplied with to be in it.
        predicted: another timeline, of the same unit, drawn as outlines.
        end: where the axis ends, in `unit`; give it in an `Explorer` so that frames compare.
    """
    return plot.timeline(
        bars_of(timeline, scale),
        title=title,
        alt=alt,
        caption=caption,
        unit=unit,
        outline=None if predicted is None else bars_of(predicted, scale),
        end=end,
        width=width,
    )
