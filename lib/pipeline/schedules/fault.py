"""What can be wrong with a schedule, as data beside the sentence that says it.

The problem: a sentence is for people. A workshop that explains a mistake, and a grader that names it, would have to
look for words in it, and break when somebody writes it better. The idea: an error has a kind, and the actions and ranks
that it is about.
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
    NO_ACTION = "a word that is no action"
    OTHER_LINE = "the line of another rank"
    NO_RANK = "a stage that no rank has"
    WRONG_RANK = "on a rank that does not have the stage"  # the action
    NO_SUCH = "of a stage or microbatch that does not exist"  # the action
    REPEATED = "more than once"  # the action
    MISSING = "missing"  # the action that is not there
    HALF = "half a backward"  # the half that is there, the one that is not
    HALF_AGAIN = "a half beside the whole backward"  # the half, the whole
    TOO_EARLY = "before what it needs"  # the action, what it needs
    TOO_LATE = "behind what needs it"  # the receive, what needs it
    NEEDLESS = "a message that no rank needs"  # the message
    CROSSED = "received in another order than sent"  # the receive, the send that is next
    CIRCLE = "ranks wait for each other"  # at which each of them stands
    ENDLESS = "a rank waits for what never comes"  # at which it stands
    TIMES = "begins before what it needs has ended"  # the action, what it needs
    MISFIT = "made for something else"  # other ranks, stages, rows or shapes than it is used with
    OTHER_SIZES = "made for other numbers than par"
    UNEQUAL = "ranks with different numbers of stages"
    NO_BACKWARD = "nothing goes backward"


class ScheduleError(ValueError):
    """A schedule that cannot be read, cannot work, or does not fit; it says where.

    Args:
        kind: what is wrong.
        actions: those that it is about, as `Fault` says.
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
