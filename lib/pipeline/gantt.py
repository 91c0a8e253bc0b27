"""A timeline in letters, for a terminal, a test and an error."""

from __future__ import annotations

from lib.pipeline.simulate import Timeline

IDLE, GOES_ON = "·", "-"


def gantt(timeline: Timeline, unit: float | None = None) -> str:
    """A line for each rank, a cell for each unit of time: `F0 F1 ·  B0--`. Messages are not drawn.

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
    return "\n".join(lines)
