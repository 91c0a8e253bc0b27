"""Gradient buckets: one message for many gradients, sent during backward.

The problem: g = (1/n) Σ gᵢ is one line of mathematics. As one line of code after backward, every rank is idle while all
gradients travel, and a model of sixty tensors pays the latency of sixty messages.

The idea, in two steps. *Buckets*: copy gradients side by side into a few flat buffers, and sum each buffer in one call.
*Overlap*: backward makes the last layer's gradients first, so the first bucket can travel while the rest is computed.

`Gradients` does not depend on the kind of bucket: a `Bucket` is all-reduced, a `Flat` (`flat.py`) is reduce-scattered.
Nor does it depend on layers: the `Fact` of a parameter names the ranks to sum over. Parameters with different ranks, or
of different pipeline stages, are in separate buckets.

Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704, sections 3.2 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lib import comm
from lib.cost.sizes import BUCKET_BYTES, bucket_shares
from lib.data_parallel.bucket import Bucket
from lib.data_parallel.gradient_sums import GradientSums, State, with_gradient
from lib.data_parallel.placeholders import accumulates
from lib.facts import Fact

ONE = torch.ones([], dtype=torch.float64)  # a tensor: torch would convert a number at each use


def fill_buckets(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters into buckets: neighbours of one dtype and device, in equal shares of about `bucket_bytes`.

    So no small bucket remains at the end that would need a separate message.
    """
    buckets: list[list[nn.Parameter]] = []
    for _, neighbours in groupby(params, key=lambda p: (p.dtype, p.device)):
        alike = list(neighbours)
        shares = bucket_shares([p.nbytes for p in alike], bucket_bytes)
        buckets += [[alike[i] for i in share] for share in shares]
    return buckets


class Progress(Enum):
    """How far a line of buckets is with the gradients of a step.

        IDLE --- the last backward begins ---> SENDING --- it filled all buckets ---> SENT --- `start` ---> STARTED
          ^                                       |                                    |                       |
          +--- `finish`, `give_up` ---------------+--- if each is sent: the next microbatch -------------------+

    A line becomes SENT and STARTED only if the gradients of each microbatch are sent.
    """

    IDLE = "no backward yet, or only inside no_sync(): finish sends all buckets"
    SENDING = "the last backward has begun: what it does not fill is sent behind it"
    SENT = "it filled all buckets: nothing is left to send"
    STARTED = "`start` returned their sums, and the next microbatch may come"


FROZEN_WITH_GRADIENT = (
    "a parameter was frozen while it had a gradient, which a backward that is given up before finish() would lose, and "
    "one process would go on to step it: set its p.grad = None where you freeze it, or call finish() before you clear"
)


class Gradients(GradientSums):
    """Sum gradients in buckets, started inside backward.

    forward: no communication. backward: one sum per bucket, as soon as its gradients exist. finish: waits.

    Buckets go from the last parameters to the first, about the order in which backward computes gradients. All ranks
    send them in this order, even if their gradients come in a different order.

    If a pipeline adds up gradients over many backward passes, its schedule marks the last one of each stage and the
    start of its sums: `last_backward`, `start`.

    Args:
        facts, op: as for `GradientSums`.
        bucket_bytes: approximate size of a bucket, see `fill_buckets`.
        make: function from the facts of neighbouring parameters to their bucket. Default: all-reduced (`Bucket`).
        each: send the gradients of each backward instead of only the last; a bucket then adds up the sums.
        one_at_a_time: wait for each sum before the next is started: memory for one bucket in flight.
        buckets: made before, of all parameters, in the order of sending.
    """

    def __init__(
        self,
        facts: Iterable[Fact],
        op: str = "sum",
        bucket_bytes: int = BUCKET_BYTES,
        make: Callable[[list[Fact]], Bucket] | None = None,
        each: bool = False,
        one_at_a_time: bool = False,
        buckets: Sequence[Bucket] | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
        super().__init__(facts, op)
        self.each, self.one_at_a_time = each, one_at_a_time
        alike: dict[tuple, list[nn.Parameter]] = {}
        for fact in reversed(self.facts.values()):
            alike.setdefault((fact.sum_over.ranks, frozenset(fact.stages)), []).append(fact.parameter)
        self.buckets, self._lines = [], []
        for params in alike.values():
            if buckets is None:
                of_buckets = ([self.facts[id(p)] for p in some] for some in fill_buckets(params, bucket_bytes))
                mine = list(map(make or Bucket, of_buckets))
            else:
                here = {id(p) for p in params}
                mine = [bucket for bucket in buckets if id(bucket.params[0]) in here]
            line = _Line(self, self.facts[id(params[0])], mine)
            self.buckets += line.buckets
            self._lines.append(line)

    @property
    def begun(self) -> bool:
        return any(line.begun for line in self._lines)

    @property
    def pending(self) -> list[comm.Pending]:
        """Sums in flight."""
        return [pending for line in self._lines for pending in line.pending]

    @torch.no_grad()
    def no_more(self, bucket: Bucket) -> None:
        """Note that backward passed this bucket: a parameter without a gradient will not get one."""
        line = next(line for line in self._lines if bucket in line.buckets)
        if line.syncs and line.progress is not Progress.SENT:
            line.fill(bucket)
            line.send_full_buckets()

    def end_microbatch(self) -> None:
        """Send what the last backward left, if each is sent: it may use only some parameters."""
        for line in self._lines:
            if line.progress is Progress.SENDING:
                line.send_the_rest()
            line.progress = Progress.IDLE

    def before_forward(self) -> None:
        if self.each and self._backward_ended:
            self.end_microbatch()
        super().before_forward()
        for bucket in self.buckets:
            bucket.check_in_place()

    def after_forward(self, output: object) -> None:
        if tensors := with_gradient(output):
            register_multi_grad_hook(tensors, self._backward_comes, mode="any")

    def _backward_comes(self, gradient: Tensor) -> None:
        for line in self._lines:
            if self.syncs and line.progress is Progress.IDLE:
                line.progress = Progress.SENDING

    def last_backward(self, stage: int) -> None:
        """Note that the next backward of this stage is its last before `start`: send its buckets as they fill."""
        for line in self._lines:
            line.closed.add(stage)

    @torch.no_grad()
    def start(self, stage: int) -> list[comm.Pending]:
        """Send the rest of the stage's buckets after its last backward; return the sums in flight."""
        return [pending for line in self._lines for pending in line.start(stage)]

    @torch.no_grad()
    def finish(self) -> None:
        self.forget_cleared()
        if not (self.arrived and any(bucket.has_sum() for bucket in self.buckets)):
            self._end_lines(Progress.IDLE, Progress.SENDING)
            self.state = State.SUMMED
            self.forget_cleared()  # those that were in flight

    @torch.no_grad()
    def forget_cleared(self) -> None:
        if not any(bucket.gone() or bucket.zeroed() for bucket in self.buckets):
            return
        if self.begun or self.state is not State.SUMMED:  # a backward came, whose gradients are dropped here
            self._check_frozen()
        if not self.begun:
            for line in self._lines:
                line.forget_cleared()
            if self.state is State.SUMMED and not any(bucket.held() for bucket in self.buckets):
                self.state = State.IDLE
        elif all(bucket.held() == bucket.gone() | bucket.zeroed() for bucket in self.buckets):
            self.give_up()  # otherwise finish() forgets them

    def _check_frozen(self) -> None:
        """Raise RuntimeError if a frozen parameter has a gradient: one process would go on to step it."""
        held = ((bucket, i) for bucket in self.buckets for i in range(len(bucket.params)))
        if any(i in bucket.held() or bucket.holds_sum(i) for bucket, i in held if not bucket.params[i].requires_grad):
            raise RuntimeError(FROZEN_WITH_GRADIENT)

    def give_up(self) -> None:
        self._check_frozen()
        # Other ranks may wait for sums of parameters that this rank did not reach or does not use.
        self._end_lines(Progress.SENDING)
        for bucket in self.buckets:
            bucket.drop(bucket.held())
        super().give_up()

    def _end_lines(self, *unsent: Progress) -> None:
        for line in self._lines:
            if line.progress in unsent:
                line.send_the_rest()
        for line in self._lines:
            line.end()

    def _held(self) -> Iterator[tuple[Tensor, Tensor]]:
        for bucket in self.buckets:
            yield from bucket.squares(self.facts)


class _Line:
    """Buckets with the same group and stages, sent one after the other."""

    def __init__(self, owner: Gradients, fact: Fact, buckets: list[Bucket]) -> None:
        self.owner, self.group, self.stages, self.crosses = owner, fact.sum_over, frozenset(fact.stages), fact.crosses
        self.scale = ONE / self.group.size if owner.op == "mean" else ONE
        self.buckets, self.next = buckets, 0  # the bucket to send next
        self.pending: list[comm.Pending] = []
        self.progress = Progress.IDLE
        self.closed: set[int] = set()  # stages whose last backward began
        self.started: set[int] = set()  # ... and ended
        for bucket in buckets:
            for i, p in enumerate(bucket.params):
                p.register_hook(partial(self._gradient_comes, bucket, i))
                p.register_post_accumulate_grad_hook(partial(self._gradient_is_there, bucket, i))

    @property
    def syncs(self) -> bool:
        """Whether backward sends a bucket as soon as it is full."""
        return self.owner.syncs or self.stages <= self.closed and not self.waits_for_finish

    @property
    def waits_for_finish(self) -> bool:
        """Whether it is sent once, though others send the gradients of each microbatch."""
        return self.owner.each and self.crosses

    @property
    def begun(self) -> bool:
        """Whether it has gradients to send."""
        return self.next > 0 or any(len(bucket.missing) < len(bucket.params) for bucket in self.buckets)

    @torch.no_grad()
    def _gradient_comes(self, bucket: Bucket, i: int, gradient: Tensor) -> None:
        """Autograd has a gradient of parameter i, and is about to add it to p.grad."""
        self.owner.backward_begins()
        is_taken, p = i not in bucket.missing, bucket.params[i]
        if not (is_taken or bucket.holds_sum(i)) or not accumulates(p):
            return
        if is_taken:
            raise RuntimeError(
                "a parameter got a second gradient while its first may be in flight: between two finish() only the "
                "last backward may run outside no_sync()"
            )
        if not self.syncs:
            self.wait()
        bucket.reopen(i, self.scale, is_kept=not self.syncs)

    def _gradient_is_there(self, bucket: Bucket, i: int, p: nn.Parameter) -> None:
        self.owner.gradient_came(p)
        if not self.syncs:
            self.progress = Progress.IDLE
            return bucket.keep(i)
        self.progress = Progress.SENDING
        bucket.take(i, self.scale)
        bucket.missing.remove(i)
        if not bucket.missing:
            self.send_full_buckets()

    def fill(self, bucket: Bucket) -> None:
        """Take the gradients that backward did not bring."""
        self.progress = Progress.SENDING
        bucket.zero(bucket.zeroed() & bucket.missing)  # a sum that the user cleared after the last backward
        bucket.drop(bucket.gone() & bucket.missing)
        for i in bucket.missing:
            p = bucket.params[i]
            counts = p.requires_grad or bucket.holds_sum(i)  # not if it was frozen before it had a gradient
            if bucket.holds_sum(i):  # of a finish() before this one
                bucket.reopen(i, self.scale, is_kept=False)
            if p.grad is None:
                bucket.take_nothing(i, counts)
            else:
                bucket.take(i, self.scale)
        bucket.missing.clear()

    def send_full_buckets(self) -> None:
        owner = self.owner
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            if owner.one_at_a_time and self.pending and not self.crosses:
                self.pending[-1].wait()
            bucket = self.buckets[self.next]
            with comm.label(f"bucket {owner.buckets.index(bucket)}"):
                self.pending.append(bucket.send(self.group))
            self.next += 1
        if owner.each and self.next == len(self.buckets):  # ready for another microbatch
            while len(self.pending) > 1:
                self.pending.pop(0).wait()
            self._empty()
            self.progress = Progress.SENT

    def send_the_rest(self) -> None:
        """Send all buckets that backward did not fill, with the gradients that they hold."""
        for bucket in self.buckets[self.next :]:
            self.fill(bucket)
        self.send_full_buckets()

    def start(self, stage: int) -> list[comm.Pending]:
        self.started.add(stage)
        if not self.stages <= self.started or self.waits_for_finish:
            return []
        if self.progress is not Progress.SENT:  # some buckets were not sent inside backward
            self.send_the_rest()
        self._reopen(Progress.STARTED if self.owner.each else self.progress)
        return self.pending

    def forget_cleared(self) -> None:
        """Drop, or set to zero, what the user cleared, and sums of it."""
        self.wait()
        for bucket in self.buckets:
            bucket.zero(bucket.zeroed())
            bucket.drop(bucket.gone())

    def wait(self) -> None:
        """Wait for the sums in flight."""
        for pending in self.pending:
            pending.wait()

    def end(self) -> None:
        """Wait for the sums, and forget the step."""
        self.wait()
        self.pending = []
        self._empty()
        self._reopen(Progress.IDLE)  # of two stages that share a weight, one may be ahead when the step ends

    def _reopen(self, progress: Progress) -> None:
        self.progress = progress
        self.closed.clear()
        self.started.clear()

    def _empty(self) -> None:
        self.next = 0
        for bucket in self.buckets:
            bucket.missing.update(range(len(bucket.params)))
