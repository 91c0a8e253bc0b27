"""A schedule is data: the actions of each rank, in order.

The problem: a pipeline written as a loop with sends and receives in it can only be run. No function can print it,
compute its bubble before it runs, or prove that it will not hang. The idea: write down the order of each rank as a list
of small actions, `2F0` for "stage 2, forward, microbatch 0", and let the rest of the code read the list. `simulate`
computes when each action runs, `lower` adds the messages, `prove` proves that it is right.

Words: a *stage* is some layers of the model, a *rank* is a process; a rank may have several stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Op(StrEnum):
    """The operation on a microbatch in a stage."""

    F = "F"  # forward
    B = "B"  # the full backward: I and W
    I = "I"  # its half for the input gradient, for which the previous stage waits  # noqa: E741
    W = "W"  # its half for the weight gradients, for which no rank waits
    SEND_F = "SEND_F"  # the output of this stage, to the rank of the next stage
    RECV_F = "RECV_F"  # the input of this stage, from the rank of the previous stage
    SEND_B = "SEND_B"  # the input gradient of this stage, to the rank of the previous stage
    RECV_B = "RECV_B"  # the output gradient of this stage, from the rank of the next stage
    REDUCE = "REDUCE"  # starts the sum of its weight gradients over the replicas of this stage: of all microbatches,
    # `2REDUCE`, or of one, `2REDUCE3`


COMPUTE = (Op.F, Op.B, Op.I, Op.W)
ALL = -1  # all microbatches, instead of one
SENDS, RECVS = (Op.SEND_F, Op.SEND_B), (Op.RECV_F, Op.RECV_B)
_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(Op, key=len, reverse=True))})(\d*)")
_RANK = re.compile(r"\s*rank\s+(\d+)\s*:")


class Action(NamedTuple):
    """One action of a rank, printed as `2F0`."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch == ALL else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that is written `2F0` or `1RECV_B3`.

        Raises:
            ScheduleError: the text has a different form.
        """
        match = _ACTION.fullmatch(text)
        if not match or not (match[3] or match[2] == Op.REDUCE):
            ops = ", ".join(Op)
            said = f"{text!r} is not an action; write stage, one of {ops}, and microbatch, such as 2F0"
            raise ScheduleError(said, Fault.NO_ACTION)
        return cls(int(match[1]), Op(match[2]), int(match[3] or ALL))


class Fault(StrEnum):
    """The kind of an error, and after it the actions that the error names.

    It is data: a program that explains or grades a mistake must not search the sentence, which is for people.
    """

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


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order.

    Args:
        name: for titles and messages.
        num_stages: number of stages; a microbatch passes through them in order.
        num_microbatches: number of microbatches of a step.
        rank_of: the rank of each stage.
        actions: of each rank, in order.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    def stages_on(self, rank: int) -> list[int]:
        return [stage for stage, its in enumerate(self.rank_of) if its == rank]

    @cached_property
    def is_lowered(self) -> bool:
        """Whether it contains its messages."""
        return any(action.op in SENDS + RECVS for row in self.actions for action in row)

    @cached_property
    def in_halves(self) -> set[tuple[int, int]]:
        """(stage, microbatch) of each backward that is split into I and W."""
        return {(action.stage, action.microbatch) for row in self.actions for action in row if action.op == Op.I}

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether it has no backward, as in an evaluation."""
        forward = (Op.F, Op.SEND_F, Op.RECV_F)
        return all(action.op in forward for row in self.actions for action in row)

    def forward_only(self, num_microbatches: int | None = None) -> Schedule:
        """Its forwards in their order, without messages: an evaluation.

        Args:
            num_microbatches: keep so many, for a batch with fewer sequences than in training.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        rows = (tuple(a for a in row if a.op == Op.F and a.microbatch < count) for row in self.actions)
        return replace(self, num_microbatches=count, actions=tuple(rows))

    def to_text(self) -> str:
        """A line for each rank, as `from_text` reads it."""
        rows = enumerate(self.actions)
        return "\n".join(f"rank {rank}: {' '.join(map(str, row))}".rstrip() for rank, row in rows) + "\n"

    @classmethod
    def from_text(cls, text: str, name: str = "by hand") -> Schedule:
        """Read a typed schedule: a line for each rank, actions with blanks between them.

        A line may begin with `rank 0:`. Comments after a # and empty lines are skipped. Stages, microbatches and the
        rank of each stage follow from the actions. `prove` checks whether the schedule can work.

        Raises:
            ScheduleError: a word that is not an action, a stage on two ranks, a stage on no rank.
        """
        lines = [line for line in (line.partition("#")[0].strip() for line in text.splitlines()) if line]
        rows = []
        for rank, line in enumerate(lines):
            said = _RANK.match(line)
            if said and int(said[1]) != rank:
                wrong = f"line {rank + 1} says rank {said[1]}; it is the line of rank {rank}"
                raise ScheduleError(wrong, Fault.OTHER_LINE)
            words = line[said.end() :] if said else line
            rows.append(tuple(Action.parse(word) for word in words.replace(",", " ").split()))
        if not any(rows):
            raise ScheduleError("there is no action in it; write a line for each rank, such as: 0F0 0B0", Fault.EMPTY)
        owner: dict[int, int] = {}
        for rank, row in enumerate(rows):
            for action in row:
                if owner.setdefault(action.stage, rank) != rank:
                    wrong = f"{action} is on rank {rank}, but rank {owner[action.stage]} has stage {action.stage}"
                    raise ScheduleError(wrong, Fault.WRONG_RANK, (action,))
        num_stages = max(owner) + 1
        for stage in range(num_stages):
            if stage not in owner:
                raise ScheduleError(f"no rank has stage {stage}; the stages are 0 to {num_stages - 1}", Fault.NO_RANK)
        num_microbatches = max(action.microbatch for row in rows for action in row) + 1
        return cls(name, num_stages, num_microbatches, tuple(owner[s] for s in range(num_stages)), tuple(rows))

    def grid(self, marked: Action | None = None) -> str:
        """The actions of each rank in columns, one of them between > and <; in order, not in time."""
        rows = [[f">{action}<" if action == marked else str(action) for action in row] for row in self.actions]
        wide = max((len(cell) for row in rows for cell in row), default=0)
        return "\n".join(
            f"  rank {rank}  " + " ".join(cell.ljust(wide) for cell in row).rstrip() for rank, row in enumerate(rows)
        )


def check_sizes(num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError unless there is at least one rank and one microbatch."""
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def one_stage_each(name: str, num_microbatches: int, rows: list[list[Action]]) -> Schedule:
    """A schedule in which rank r has stage r."""
    n = len(rows)
    return Schedule(name, n, num_microbatches, tuple(range(n)), tuple(map(tuple, rows)))
