"""Debug this run: a small run of `lib.train` with one sickness or two, drawn by a seed: `python -m course.practise 7`.

The real program trains, on real ranks; in each rank a few functions of `lib` are replaced before it starts. A reader
looks at the report, the trace and the plan, runs other layouts with the same sickness, and names cause and place.

May import `course.check` and `lib`.
Must never write a cause where a reader finds it: ranks get the seed, and draw it themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course.practise.sick import SickRun


def sick_run(seed: int | str, row: str = "") -> SickRun:
    """The sick run of a seed, or of an exercise: `sick_run("15.1")`, in a course with the letter of your row.

    `report()` is what one looks at first; `under(dp=1, tp=2)` is the same sickness under a different layout, and
    `without_twin()` the same run without one process to compare it with.
    """
    from course.practise.sick import SickRun  # the ranks and their libraries: a second

    return SickRun.drawn(f"{seed}{row.upper()}")
