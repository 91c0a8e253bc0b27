"""Faults of schedules, as data next to the sentence of the error.

The problem: a sentence is for people. A workshop that explains a mistake, and a grader that names it, would have to
search the sentence for words, and would break when an editor improves it. The idea: an error has a kind, and the
actions and ranks that it is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lib.pipeline.schedules.action import Action


class Fault(StrEnum):
    """The kinds, each with the actions that such an error names."""

    EMPTY = "nothing to read"
    NO_ACTION = "a word that is not an action"
    OTHER_LINE = "the line of another rank"
    NO_RANK = "a stage that no rank has"
    WRONG_RANK = "on a rank that does not have the stage"  # the action
    NO_SUCH = "of a stage or microbatch that does not exist"  # the action
    REPEATED = "more than once"  # the action
    MISSING = "missing"  # the missing action
    HALF = "half a backward"  # the half that the schedule has, the missing half
    HALF_AGAIN = "a half and the full backward"  # the half, the full backward
    TOO_EARLY = "before an action that it needs"  # the action, the action that it needs
    TOO_LATE = "after the action that needs it"  # the receive, the action that needs it
    NEEDLESS = "a message that no rank needs"  # the message
    CROSSED = "received in a different order than sent"  # the receive, the send that is next
    CIRCLE = "ranks wait for each other"  # the action at which each of them waits
    ENDLESS = "a rank waits for an action that never runs"  # the action at which it waits
    TIMES = "begins before the end of an action that it needs"  # the action, the action that it needs
    MISFIT = "does not fit"  # made for different ranks, stages, batches or shapes
    OTHER_SIZES = "ranks or microbatches differ from par"
    UNEQUAL = "ranks with different numbers of stages"
    NO_BACKWARD = "no backward"


class ScheduleError(ValueError):
    """A schedule that cannot be read, cannot work, or does not fit; the message shows the place.

    Args:
        kind: the kind of fault.
        actions: the actions of the fault; `Fault` says which.
        waits: rank → rank that it waits for, where ranks wait.
    """

    def __init__(
        self,
        message: str,
        kind: Fault = Fault.MISFIT,
        actions: tuple[Action, ...] = (),
        waits: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.actions, self.waits = kind, actions, dict(waits or {})
