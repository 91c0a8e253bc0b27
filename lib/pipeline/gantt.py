"""A timeline in letters, for a terminal, a test and an error; and as a trace, for Perfetto."""

from lib.pipeline.schedules.action import Op
from lib.pipeline.simulate import Timeline
from lib.trace import Span, Trace

IDLE, GOES_ON = "·", "-"
KIND = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weight"}  # as traces and pictures call them
SUM = "="


def gantt(timeline: Timeline, unit: float | None = None) -> str:
    """A line for each rank, a cell for each unit of time: `F0 F1 ·  B0--`. Messages are not drawn.

    Below it, if sums of gradients take time, a line for the sums: `===`.

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
        line = sums = ""
        for slot in (slot for slot in timeline.slots if slot.rank == rank):
            begin, end = (wide * round((time - zero) / unit) for time in (slot.start, slot.end))
            if name := names.get(slot.action):
                while len(line) < begin:
                    line += IDLE.ljust(wide)
                line += f"{name}{GOES_ON * (max(end - len(line), wide) - len(name) - 1)} "
            elif slot.action.op == Op.REDUCE and slot.end > slot.start:
                sums = sums.ljust(begin) + SUM * (max(end - begin, 2) - 1) + " "
        lines.append(f"rank {rank}  {line.rstrip()}")
        lines += [f"   sums  {sums.rstrip()}"] if sums else []
    return "\n".join(lines)


def to_trace(timeline: Timeline, unit_s: float = 1.0, lane: str = "compute") -> Trace:
    """The timeline as spans, without messages. For example, measured and predicted in one file:

        both = [to_trace(measured), to_trace(predicted, unit_s=0.01, lane="predicted")]
        Trace.merge(both).save("pipeline.json")

    Args:
        unit_s: seconds of the timeline's unit; 1 for a timeline from `execute`.
        lane: the row of each rank that shows them.
    """
    spans = [
        Span(rank, KIND[action.op], str(action), unit_s * start, unit_s * end, lane)
        for rank, action, start, end in timeline.compute
    ]
    return Trace(spans=spans)
