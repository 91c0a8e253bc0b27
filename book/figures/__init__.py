"""Pictures, from data: timelines, curves, matrices, moves, schedules, and sliders that live in a page.

May import the modules whose data it draws: `lib.trace`, `lib.cost`, `lib.memory`, `lib.pipeline`, `lib.kineto`,
`lib.doctor`, `course.workshop`, `book.trials`.
Must never know a chapter: captions and alternative texts are given to it.
"""

from book.figures.explorer import Explorer

__all__ = ["Explorer"]
