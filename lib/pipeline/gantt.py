"""A timeline in letters, for a terminal, a test and an error; and as a trace, for Perfetto."""

from __future__ import annotations

from lib.pipeline.schedules.action import Op
from lib.pipeline.simulate import Timeline
from lib.trace import Span, Trace

IDLE, GOES_ON = "·", "-"
KIND = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weight"}  # as traces and pictures call them
SUM = "="


def gantt(timeline: Timeline, unit: float | None = None) -> str:
    """A line for each rank, a cell for each unit of time: `F0 F1 ·  B0--`. Messages are not drawn.

    Below it, if sums of gradients take time, one of theirs: `===`.

    Args:
        unit: time of a cell; without it, the shortest action's.
    """
    compute = timeline.compute
    unit = unit or min(slot.end - slot.start for slot in compute)
    zero = min(slot.start for slot in compute)
    several = timeline.schedule.num_stages > timeline.schedule.num_ranks
    names = {slot.action: str(slot.action) if several else str(slot.action).lstrip("0123456789") for slot in compute}
    wide = max(map(len, names.values())) + 1
    lines = []
    for rank in range(timeline.schedule.num_ranks):
        line = ""
        for slot in sorted((s for s in compute if s.rank == rank), key=lambda s: s.start):
            begin, end = (wide * round((time - zero) / unit) for time in (slot.start, slot.end))
            while len(line) < begin:
                line += IDLE.ljust(wide)
            name = names[slot.action]
            line += f"{name}{GOES_ON * (max(end - len(line), wide) - len(name) - 1)} "
        lines.append(f"rank {rank}  {line.rstrip()}")
        if sums := [s for s in timeline.slots if s.rank == rank and s.action.op == Op.REDUCE and s.end > s.start]:
            line = ""
            for slot in sums:
                begin, end = (wide * round((time - zero) / unit) for time in (slot.start, slot.end))
                line = line.ljust(begin) + SUM * (max(end - begin, 2) - 1) + " "
            lines.append(f"   sums  {line.rstrip()}")
    return "\n".join(lines)


def to_trace(timeline: Timeline, unit_s: float = 1.0, lane: str = "compute") -> Trace:
    """The timeline as spans, without messages. For example, measured and predicted in one file:

        both = [to_trace(measured), to_trace(predicted, unit_s=0.01, lane="predicted")]
        Trace.merge(both).save("pipeline.json")

    Args:
        unit_s: seconds of the timeline's unit; 1 for what `execute` has measured.
        lane: the row of each rank that they are shown in.
    """
    spans = [
        Span(rank, KIND[action.op], str(action), unit_s * start, unit_s * end, lane)
        for rank, action, start, end in timeline.compute
    ]
    return Trace(spans=spans)
