"""Run a schedule: real tensors, real messages, the very actions that were simulated and proved.

The problem: a loop for each schedule, with sends and receives between its lines, is where pipelines hang. The idea: an
interpreter. It takes the rank's actions one by one and knows nothing of 1F1B. Each message starts when its action
comes, and nobody waits for it there: a compute action waits for what it needs. A send that blocks would cost the
overlap that the schedule was made for. What a send carries is kept until a message from its receiver tells that it has
been used.

Read before: `lib/pipeline/lower.py`, `lib/pipeline/stage.py`. Chapters 8 and 10.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from lib import comm, trace
from lib.comm import Pending
from lib.mesh import Group
from lib.pipeline.gantt import KIND
from lib.pipeline.lower import lower, other_end, proves
from lib.pipeline.schedules.action import COMPUTE, RECVS, SENDS, Action, Op, Schedule, ScheduleError
from lib.pipeline.simulate import Slot, Timeline
from lib.pipeline.stage import Stage


class Reduce(Protocol):
    """Whoever sums gradients over the replicas of a pipeline: `Gradients`, of any kind."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, nothing leaves but at a REDUCE."""

    def last_backward(self, stage: int) -> None:
        """The next backward of the stage is the last before its REDUCE."""

    def start(self, stage: int) -> list[Pending]:
        """REDUCE: what the stage's backwards have left leaves now; the sums that are under way."""


@dataclass(frozen=True)
class StepResult:
    """What a step came to on a rank.

    Args:
        loss: of the batch, a number on all ranks: the sum of the microbatches' terms.
        losses: the term of each microbatch, shape [M], on all ranks.
        slots: when this rank's actions ran, in seconds of `time.perf_counter`; `timeline` puts all ranks' together. A
            REDUCE runs until its sums are there.
    """

    loss: Tensor
    losses: Tensor
    slots: tuple[Slot, ...]


def timeline(schedule: Schedule, results: Iterable[StepResult]) -> Timeline:
    """What was measured, in the form in which `simulate` predicts it; times count from the first action's begin."""
    slots = [slot for result in results for slot in result.slots]
    zero = min(slot.start for slot in slots)
    moved = (slot._replace(start=slot.start - zero, end=slot.end - zero) for slot in slots)
    return Timeline.of(schedule, moved)


def execute(
    schedule: Schedule,
    stages: Mapping[int, Stage],
    group: Group,
    inputs: Tensor,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    reduce: Reduce | None = None,
) -> StepResult:
    """One step on this rank: all of the batch forward, and back unless the schedule is of an evaluation.

    Gradients are added to `.grad`: those of the sum of the microbatches' terms. Microbatches may differ by a row.

    Args:
        schedule: compute only, or with its messages.
        stages: this rank's, by their number.
        inputs: [B, …], the whole batch; the first stage takes it in `num_microbatches` pieces.
        targets: [B, …], which the last stage compares with.
        loss: (output, targets) of a microbatch to its term: what it adds to the batch's loss, such as
            `partial(loss_term, count=...)`. A mean over the microbatch, such as `cross_entropy` gives by itself, would
            be num_microbatches times too large, and NaN for all of the batch where one has no target that counts.
        reduce: sums gradients over the replicas of this pipeline, at each REDUCE of the schedule.

    Raises:
        ScheduleError: stages, ranks or rows that do not fit to the schedule; a stage whose output is not what travels.
    """
    _check_fits(schedule, stages, group, inputs)
    sums = any(action.op == Op.REDUCE for action in schedule.actions[group.rank])
    if sums != (reduce is not None) and not schedule.is_forward_only:
        raise ScheduleError(
            f"{schedule.name} has a REDUCE and nobody to do it: give reduce="
            if sums
            else f"{schedule.name} has no REDUCE, so gradients would stay each rank's own: use with_reduce(schedule)"
        )
    return _Step(lower(schedule), stages, group, inputs, targets, loss, reduce).run()


def _check_fits(schedule: Schedule, stages: Mapping[int, Stage], group: Group, inputs: Tensor) -> None:
    if schedule.num_ranks != group.size:
        raise ScheduleError(
            f"{schedule.name} is for {schedule.num_ranks} ranks; {group.axis} has {group.size}: make it for "
            f"{group.size}"
        )
    mine = [stage for stage, rank in enumerate(schedule.rank_of) if rank == group.rank]
    if sorted(stages) != mine:
        raise ScheduleError(f"rank {group.rank} has the stages {sorted(stages)}; {schedule.name} gives it {mine}")
    if len(inputs) < schedule.num_microbatches:
        raise ScheduleError(
            f"{len(inputs)} rows cannot be cut into {schedule.num_microbatches} microbatches; use as many rows at least"
        )


class _Step:
    def __init__(self, schedule, stages, group, inputs, targets, loss, reduce) -> None:
        self.schedule, self.stages, self.group, self.loss, self.reduce = schedule, stages, group, loss, reduce
        # With .data each microbatch is a tensor by itself, so that what one does in place is no change of the others.
        self.inputs = [x.data for x in inputs.tensor_split(schedule.num_microbatches)]
        self.targets = targets.tensor_split(schedule.num_microbatches)
        row = schedule.actions[group.rank]
        back = [action for action in row if action.op in (*COMPUTE, Op.REDUCE) and action.op not in (Op.F, Op.I)]
        # The last backwards before a sum, during which buckets may leave.
        self.closing = {a for a, b in pairwise(back) if b.op == Op.REDUCE and a[0] == b.stage}
        # What there is to compute with, by the receive that would bring it, and to send, by its send.
        self.here: dict[Action, Tensor | Pending] = {}
        self.going: dict[Action, Pending] = {}  # sends that may still be on their way
        self.sums: dict[Action, list[Pending]] = {}  # sums of gradients, by the REDUCE that has seen them off
        self.through = proves(schedule, group.rank)
        self.losses = torch.zeros(schedule.num_microbatches, dtype=torch.float64, device=inputs.device)
        self.split = {action[::2] for row in schedule.actions for action in row if action.op == Op.I}
        self.last = schedule.num_stages - 1

    def run(self) -> StepResult:
        slots = []
        forward_only = torch.no_grad() if self.schedule.is_forward_only else nullcontext()
        with forward_only, self.reduce.no_sync() if self.reduce else nullcontext():
            for action in self.schedule.actions[self.group.rank]:
                with comm.label(str(action)):
                    start_s = self._do(action)
                end_s = time.perf_counter()
                slots.append(Slot(self.group.rank, action, start_s, end_s))
        for pending in self.going.values():
            pending.wait()
        with comm.label("losses"):
            knows = self.schedule.rank_of[self.last]
            losses = comm.broadcast(self.losses, self.group, src=knows)
        slots = [slot._replace(end=max([slot.end, *self._arrivals(slot.action)])) for slot in slots]
        return StepResult(losses.sum(), losses, tuple(slots))

    def _do(self, action: Action) -> float:
        """Do it; return when it began, having waited for what it needs."""
        stage, op, m = action
        start_s = time.perf_counter()
        if op in RECVS:
            like = next(iter(self.stages.values())).travels(self.inputs[m])
            self.here[action] = comm.recv(like, self.group, self._peer(action))
        elif op in SENDS:
            x = self.here.pop(action)
            self.going[action] = comm.send(x, self.group, self._peer(action))
        elif op == Op.REDUCE:
            self.sums[action] = self.reduce.start(stage)
            for pending in self.sums[action]:
                pending.follow()
        else:
            x = None if op == Op.W else self._what_came(action)
            start_s = time.perf_counter()
            if action in self.closing:
                self.reduce.last_backward(stage)
            with trace.span(KIND[op], str(action)):
                if op == Op.F:
                    self._forward(stage, m, x)
                elif op == Op.W:
                    self.stages[stage].backward_weight(m)
                else:
                    self._backward(stage, op, m, x)
        return start_s

    def _arrivals(self, action: Action) -> Iterator[float]:
        """When the sums of a REDUCE were there; none of any other action."""
        for pending in self.sums.get(action, ()):
            pending.wait()
            yield pending.ended_s

    def _peer(self, action: Action) -> int:
        return self.schedule.rank_of[other_end(action).stage]

    def _what_came(self, action: Action) -> Tensor | None:
        """Input, or gradient of the output; None where the loss begins."""
        stage, op, m = action
        if op == Op.F and stage == 0:
            return self.inputs[m]
        if op != Op.F and stage == self.last:
            return None
        receive = Action(stage, Op.RECV_F if op == Op.F else Op.RECV_B, m)
        came = self.here.pop(receive)
        if isinstance(came, Pending):
            came = came.wait()
            for send in self.through[receive]:
                self.going.pop(send).wait()
        return came

    def _forward(self, stage: int, m: int, x: Tensor) -> None:
        loss = partial(self._loss, m) if stage == self.last else None
        y = self.stages[stage].forward(m, x, loss, (stage, m) in self.split)
        if not loss:
            self.stages[stage].check_output(stage, y, self.inputs[m])
            self._hand_on(Action(stage, Op.SEND_F, m), y)

    def _loss(self, m: int, y: Tensor) -> Tensor:
        """The term of microbatch m."""
        loss = self.loss(y, self.targets[m])
        self.losses[m] = loss.detach()
        return loss

    def _backward(self, stage: int, op: Op, m: int, gradient: Tensor | None) -> None:
        work = self.stages[stage].backward if op == Op.B else self.stages[stage].backward_input
        of_x = work(m, gradient)
        if stage:
            self._hand_on(Action(stage, Op.SEND_B, m), of_x)

    def _hand_on(self, send: Action, x: Tensor) -> None:
        """To another stage here, or to be sent."""
        receive = other_end(send)
        is_here = self.schedule.rank_of[receive.stage] == self.group.rank
        self.here[receive if is_here else send] = x
