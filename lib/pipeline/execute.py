"""Execute a schedule with real tensors and messages: the same actions that are simulated and proved.

The problem: pipelines hang in hand-written loops for each schedule. The idea: an interpreter of a rank's actions. Each
message starts at its action, without waiting: a compute action waits for its input. The tensor of a send is kept until
a message from its receiver shows that it was used.

Read before: `lib/pipeline/lower.py`, `lib/pipeline/stage.py`. Chapters 8 and 10.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

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
    """The interface to sum gradients over the replicas of a pipeline: any kind of `Gradients`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, sums start only at a REDUCE."""

    def last_backward(self, stage: int) -> None:
        """Note that the next backward of the stage is the last before its REDUCE."""

    def start(self, stage: int) -> list[Pending]:
        """REDUCE: start the remaining sums of the stage; return the sums in flight."""


class StepResult(NamedTuple):
    """The result of a step on a rank.

    Args:
        loss: loss of the batch, on all ranks: the sum of the terms of the microbatches.
        losses: the term of each microbatch, shape [m], on all ranks.
        slots: times of this rank's actions, in seconds of `time.perf_counter`; `timeline` combines all ranks. A REDUCE
            ends when its sums arrive.
    """

    loss: Tensor
    losses: Tensor
    slots: tuple[Slot, ...]


def timeline(schedule: Schedule, results: Iterable[StepResult]) -> Timeline:
    """The measured timeline, in the form of `simulate`; times count from the start of the first action."""
    slots = [slot for result in results for slot in result.slots]
    zero = min(slot.start for slot in slots)
    moved = (slot._replace(start=slot.start - zero, end=slot.end - zero) for slot in slots)
    return Timeline.of(schedule, moved)


def execute(
    schedule: Schedule,
    stages: Mapping[int, Stage],
    group: Group,
    inputs: Tensor,
    targets: Tensor | None,
    loss: Callable[[Tensor, Tensor | None], Tensor],
    reduce: Reduce | None = None,
) -> StepResult:
    """Run one step on this rank: forward of the full batch, and backward unless the schedule is for evaluation.

    Gradients of the sum of all terms are added to `.grad`. Microbatches may differ by one row.

    Args:
        schedule: compute only, or with its messages.
        stages: the stages on this rank, by number.
        inputs: [B, …], the full batch; the first stage splits it into `num_microbatches` microbatches.
        targets: [B, …], for the loss in the last stage; None if it needs none, and on other ranks.
        loss: function from (output, targets) of a microbatch to its term in the loss of the batch, such as
            `partial(loss_term, count=...)`. A mean over the microbatch, the default of `cross_entropy`, would be
            num_microbatches times too large, and NaN for the batch if one microbatch has no counted target.
        reduce: sums gradients over the replicas of this pipeline, at each REDUCE of the schedule.

    Raises:
        ScheduleError: stages, ranks or rows that do not match the schedule; an output or a loss of the wrong form.

    Example:
        import torch
        from torch import nn
        from torch.nn.functional import mse_loss

        from lib.pipeline.execute import execute
        from lib.pipeline.schedules.one_f_one_b import one_f_one_b
        from lib.pipeline.stage import Stage

        def term(y, targets):
            return mse_loss(y, targets, reduction="sum") / (8 * 4)  # all elements of the batch

        stages = {world.rank: Stage(nn.Linear(4, 4))}  # stage 0 on rank 0, stage 1 on rank 1
        schedule = one_f_one_b(num_ranks=2, num_microbatches=4)
        result = execute(schedule, stages, world, torch.ones(8, 4), torch.zeros(8, 4), term)
        assert result.losses.shape == (4,) and stages[world.rank].module.weight.grad is not None
    """
    name, n, m = schedule.name, group.size, schedule.num_microbatches
    if not schedule.is_forward_only and not torch.is_grad_enabled():
        raise ScheduleError(f"{name} runs backward, but under no_grad: run it outside, or forward_only()")
    if schedule.num_ranks != n:
        raise ScheduleError(f"{name} is for {schedule.num_ranks} ranks; {group.axis} has {n}: make it for {n}")
    if sorted(stages) != (mine := schedule.stages_on(group.rank)):
        raise ScheduleError(f"rank {group.rank} has the stages {sorted(stages)}; {name} gives it {mine}")
    if why := comm.why_not_plain(inputs):
        raise ScheduleError(f"the inputs are {why}")
    if len(inputs) < m:
        raise ScheduleError(f"{len(inputs)} rows cannot be split into {m} microbatches; use as many or more")
    sums = any(action.op == Op.REDUCE for action in schedule.actions[group.rank])
    if sums and reduce is None and not schedule.is_forward_only:
        raise ScheduleError(f"{name} has a REDUCE but no object to do it: give reduce=")
    if reduce is not None and not sums and not schedule.is_forward_only:
        raise ScheduleError(f"{name} has no REDUCE, so gradients would not be summed: use with_reduce(schedule)")
    return _Step(lower(schedule), stages, group, inputs, targets, loss, reduce).run()


class _Step:
    def __init__(self, schedule, stages, group, inputs, targets, loss, reduce) -> None:
        self.schedule, self.stages, self.group, self.loss, self.reduce = schedule, stages, group, loss, reduce
        # With .data each microbatch is a separate tensor: a change of one in place does not affect the others.
        self.inputs = [x.data for x in inputs.tensor_split(schedule.num_microbatches)]
        self.targets = [None] * len(self.inputs) if targets is None else targets.tensor_split(len(self.inputs))
        row = schedule.actions[group.rank]
        back = [action for action in row if action.op in (*COMPUTE, Op.REDUCE) and action.op not in (Op.F, Op.I)]
        # The last backwards before a sum, during which buckets may leave.
        self.closing = {a for a, b in pairwise(back) if b.op == Op.REDUCE and a[0] == b.stage}
        # Tensors to compute with, by their receive, and to send, by their send.
        self.here: dict[Action, Tensor | Pending] = {}
        self.going: dict[Action, Pending] = {}  # sends that may be in flight
        self.sums: dict[Action, list[Pending]] = {}  # sums of gradients, by the REDUCE that started them
        self.proved = proves(schedule, group.rank)
        self.losses = torch.zeros(schedule.num_microbatches, dtype=torch.float64, device=inputs.device)
        self.last = schedule.num_stages - 1

    def run(self) -> StepResult:
        slots: dict[Action, Slot] = {}
        forward_only = torch.no_grad() if self.schedule.is_forward_only else nullcontext()
        with forward_only, self.reduce.no_sync() if self.reduce else nullcontext():
            for action in self.schedule.actions[self.group.rank]:
                with comm.label(str(action)):
                    start_s = self._do(action)
                slots[action] = Slot(self.group.rank, action, start_s, trace.clock())
        for pending in self.going.values():
            pending.wait()
        with comm.label("losses"):
            losses = comm.broadcast(self.losses, self.group, src=self.schedule.rank_of[self.last])
        for action, sums in self.sums.items():
            for pending in sums:
                pending.wait()
                slots[action] = slots[action]._replace(end=max(slots[action].end, pending.ended_s))
        return StepResult(losses.sum(), losses, tuple(slots.values()))

    def _do(self, action: Action) -> float:
        """Wait for the input of an action and execute it; return its start."""
        stage, op, m = action
        start_s = trace.clock()
        if op in RECVS:
            sender = stage - 1 if op == Op.RECV_F else stage  # a gradient has the form of this stage's own output
            like = self.stages[stage].travels(self.inputs[m], sender)
            self.here[action] = comm.recv(like, self.group, self._peer(action))
        elif op in SENDS:
            self.going[action] = comm.send(self.here.pop(action), self.group, self._peer(action))
        elif op == Op.REDUCE:
            self.sums[action] = self.reduce.start(stage)
            for pending in self.sums[action]:
                pending.follow()
        else:
            x = None if op == Op.W else self._what_came(action)
            start_s = trace.clock()
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

    def _peer(self, action: Action) -> int:
        return self.schedule.rank_of[other_end(action).stage]

    def _what_came(self, action: Action) -> Tensor | None:
        """The received input, or output gradient; None where backward begins at the loss."""
        stage, op, m = action
        if op == Op.F and stage == 0:
            return self.inputs[m]
        if op != Op.F and stage == self.last:
            return None
        receive = Action(stage, Op.RECV_F if op == Op.F else Op.RECV_B, m)
        came = self.here.pop(receive)
        if isinstance(came, Pending):
            came = came.wait()
            for send in self.proved[receive]:
                self.going.pop(send).wait()
        return came

    def _forward(self, stage: int, m: int, x: Tensor) -> None:
        last, its = stage == self.last, self.stages[stage]
        then = partial(self._loss, m) if last else partial(its.check_output, stage, inputs=self.inputs[m])
        y = its.forward(m, x, then, (stage, m) in self.schedule.in_halves)
        if not last:
            self._hand_on(Action(stage, Op.SEND_F, m), y)

    def _loss(self, m: int, y: object) -> Tensor:
        """The term of microbatch m."""
        loss = self.loss(y, self.targets[m])
        is_number = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
        if not is_number or torch.is_grad_enabled() and not loss.requires_grad:
            returned = comm.spec(loss) + ", without a gradient" * is_number
            raise ScheduleError(
                f"the loss after stage {self.last} is {returned}: return one real number, float[], computed from the "
                "output without detach(), of a model with a parameter to train"
            )
        self.losses[m] = loss.detach()
        return loss

    def _backward(self, stage: int, op: Op, m: int, gradient: Tensor | None) -> None:
        its = self.stages[stage]
        of_x = (its.backward if op == Op.B else its.backward_input)(m, gradient)
        if stage:
            self._hand_on(Action(stage, Op.SEND_B, m), of_x)

    def _hand_on(self, send: Action, x: Tensor) -> None:
        """Pass a tensor to the next stage on this rank, or to its send."""
        is_here = self._peer(send) == self.group.rank
        self.here[other_end(send) if is_here else send] = x
