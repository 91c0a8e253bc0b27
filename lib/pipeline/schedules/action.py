"""A schedule is data: which rank does what, in which order.

The problem: a pipeline written as a loop with sends and receives in it can only be run. Nobody can print it, count its
bubbles before it runs, or prove that it will not hang. The idea: write down the order of each rank as a list of small
actions, `2F0` for "stage 2, forward, microbatch 0", and let others read the list. `simulate` says when each action
runs, `lower` adds the messages, `prove` proves that it is right. None of them has an order of its own.

There is no time in a schedule and no bubble: a bubble is what comes out when it is simulated or run.
Words: a *stage* is a piece of the model, a *rank* is a process; a rank may have several stages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from lib.pipeline.schedules.fault import Fault, ScheduleError


class Op(StrEnum):
    """What is done with a microbatch in a stage."""

    F = "F"  # forward
    B = "B"  # the whole backward: I and W
    I = "I"  # its half that gives the gradient of the input, which the stage before waits for  # noqa: E741
    W = "W"  # its half that gives the gradients of the weights, for which nobody waits
    SEND_F = "SEND_F"  # this stage's output, to the rank of the next stage
    RECV_F = "RECV_F"  # this stage's input, from the rank of the stage before
    SEND_B = "SEND_B"  # the gradient of this stage's input, to the rank of the stage before
    RECV_B = "RECV_B"  # the gradient of this stage's output, from the rank of the next stage
    REDUCE = "REDUCE"  # its weight gradients leave, for a sum over the replicas of this stage: of all microbatches,
    # `2REDUCE`, or of one, `2REDUCE3`


COMPUTE = (Op.F, Op.B, Op.I, Op.W)
ALL = -1  # in the place of a microbatch
SENDS, RECVS = (Op.SEND_F, Op.SEND_B), (Op.RECV_F, Op.RECV_B)
_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(Op, key=len, reverse=True))})(\d*)")
_RANK = re.compile(r"\s*rank\s+(\d+)\s*:")


class Action(NamedTuple):
    """One thing that a rank does, printed as `2F0`."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch == ALL else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that is written `2F0` or `1RECV_B3`.

        Raises:
            ScheduleError: it is written otherwise.
        """
        found = _ACTION.fullmatch(text)
        if not found or not (found[3] or found[2] == Op.REDUCE):
            ops = ", ".join(Op)
            said = f"{text!r} is no action; write stage, one of {ops}, and microbatch, such as 2F0"
            raise ScheduleError(said, Fault.NO_ACTION)
        return cls(int(found[1]), Op(found[2]), int(found[3] or ALL))


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order.

    Args:
        name: for titles and messages.
        num_stages: pieces of the model, in the order in which a microbatch passes through them.
        num_microbatches: pieces of a rank's batch.
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
        """The stages of a rank."""
        return [stage for stage, its in enumerate(self.rank_of) if its == rank]

    @cached_property
    def is_lowered(self) -> bool:
        """Whether its messages are in it."""
        return any(action.op in SENDS + RECVS for row in self.actions for action in row)

    @cached_property
    def in_halves(self) -> set[tuple[int, int]]:
        """(stage, microbatch) of each backward that comes as I and W."""
        return {(action.stage, action.microbatch) for row in self.actions for action in row if action.op == Op.I}

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether nothing goes backward, as in an evaluation."""
        forward = (Op.F, Op.SEND_F, Op.RECV_F)
        return all(action.op in forward for row in self.actions for action in row)

    def forward_only(self, num_microbatches: int | None = None) -> Schedule:
        """Its forwards in their order, without messages: an evaluation.

        Args:
            num_microbatches: only those of so many, where there are fewer rows than in training.
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
        """The schedule that somebody has typed: a line for each rank, actions with blanks between them.

        A line may begin with `rank 0:`; what stands behind a # does not count, nor do empty lines. Stages, microbatches
        and who has which stage follow from the actions. Whether it can work is for `prove` to say.

        Raises:
            ScheduleError: a word that is no action, a stage on two ranks, a stage that nobody has.
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
                raise ScheduleError(f"nobody has stage {stage}; the stages are 0 to {num_stages - 1}", Fault.NO_RANK)
        num_microbatches = max(action.microbatch for row in rows for action in row) + 1
        return cls(name, num_stages, num_microbatches, tuple(owner[s] for s in range(num_stages)), tuple(rows))

    def grid(self, marked: Action | None = None) -> str:
        """Each rank's actions in columns, one of them between > and <; in order, not in time."""
        rows = [[f">{action}<" if action == marked else str(action) for action in row] for row in self.actions]
        wide = max((len(cell) for row in rows for cell in row), default=0)
        return "\n".join(
            f"  rank {rank}  " + " ".join(cell.ljust(wide) for cell in row).rstrip() for rank, row in enumerate(rows)
        )


def check_sizes(num_ranks: int, num_microbatches: int) -> None:
    """Whether there is something to schedule.

    Raises:
        ValueError: a number below 1.
    """
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def one_stage_each(name: str, num_microbatches: int, rows: list[list[Action]]) -> Schedule:
    """A schedule in which rank r has stage r."""
    n = len(rows)
    return Schedule(name, n, num_microbatches, tuple(range(n)), tuple(map(tuple, rows)))
