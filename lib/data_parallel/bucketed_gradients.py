"""Gradient buckets: when each bucket is sent during backward, and in which order.

The problem: g = (1/n) Σ gᵢ is one line of mathematics. As one line of code after backward, every rank is idle while all
gradients travel, and a model of sixty tensors pays the latency of sixty messages.

The idea, in two steps. *Buckets*: copy gradients side by side into a few flat buffers, and sum each buffer in one call.
*Overlap*: backward makes the last layer's gradients first, so the first bucket can travel while the rest is computed.

This file does not depend on the kind of bucket: a `Bucket` is all-reduced, a `Flat` (`flat.py`) is reduce-scattered.
Nor does it depend on layers: the `Fact` of a parameter names the ranks to sum over. Parameters with different ranks, or
of different pipeline stages, are in separate buckets.

Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704, sections 3.2 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lib import comm
from lib.data_parallel.buckets import ONE, Bucket, fill_buckets
from lib.data_parallel.gradient_sums import GradientSums, State, with_gradient
from lib.facts import Fact
from lib.mesh import Group

BUCKET_BYTES = 4 * 2**20
_SECOND = (
    "a parameter got a second gradient while its first may be in flight: between two finish() only the last backward "
    "may run outside no_sync()"
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
        self._lines: list[_Line] = []
        self._went_back = False  # the last backward of a step has begun, and was not finished or given up
        self.held = False  # full buckets are sent at the end of the microbatch
        super().__init__(facts, op)
        self.each, self.one_at_a_time = each, one_at_a_time
        self.buckets = list(buckets or self._make_buckets(bucket_bytes, make or Bucket))
        for number, bucket in enumerate(self.buckets):
            line = self._line_of(self.facts[id(bucket.params[0])])
            line.buckets.append(bucket)
            line.labels.append(f"bucket {number}")
            for i, p in enumerate(bucket.params):
                p.register_post_accumulate_grad_hook(partial(self._gradient_is_there, line, bucket, i))

    def _make_buckets(self, bucket_bytes: int, make: Callable[[list[Fact]], Bucket]) -> Iterator[Bucket]:
        lines: dict[tuple, list[nn.Parameter]] = {}
        for p in self.trained[::-1]:
            fact = self.facts[id(p)]
            lines.setdefault((fact.sum_over.ranks, fact.stages), []).append(p)
        for params in lines.values():
            for some in fill_buckets(params, bucket_bytes):
                yield make([self.facts[id(p)] for p in some])

    def _line_of(self, fact: Fact) -> _Line:
        for line in self._lines:
            if (line.group.ranks, line.stages) == (fact.sum_over.ranks, frozenset(fact.stages)):
                return line
        scale = ONE / fact.sum_over.size if self.op == "mean" else ONE
        self._lines.append(_Line(fact.sum_over, frozenset(fact.stages), scale, fact.crosses))
        return self._lines[-1]

    @property
    def syncs(self) -> bool:
        """Whether backward sends a bucket as soon as it is full."""
        return self._syncs

    @syncs.setter
    def syncs(self, value: bool) -> None:
        self._syncs = value
        for line in self._lines:
            line.syncs = value

    @property
    def begun(self) -> bool:
        return any(line.begun for line in self._lines)

    @property
    def pending(self) -> list[comm.Pending]:
        """Sums in flight."""
        return [pending for line in self._lines for pending in line.pending]

    def _gradient_is_there(self, line: _Line, bucket: Bucket, i: int, p: nn.Parameter) -> None:
        if i not in bucket.missing:
            raise RuntimeError(_SECOND)
        self._gradient_came(p)
        if line.syncs:
            bucket.take(i, line.scale)
            bucket.missing.remove(i)
            if not bucket.missing:
                self._send_full_buckets(line)
        else:
            bucket.keep(i)
            line.sent = line.left = False

    def _send_full_buckets(self, line: _Line) -> None:
        while line.next < len(line.buckets) and not line.buckets[line.next].missing and not self.held:
            bucket = line.buckets[line.next]
            if self.one_at_a_time and line.pending and not line.crosses:
                line.pending[-1].wait()
            with comm.label(line.labels[line.next]):
                line.pending.append(bucket.send(line.group))
            line.next += 1
        if self.each and line.next == len(line.buckets):  # ready for another microbatch
            while len(line.pending) > 1:
                line.pending.pop(0).wait()
            line.begin_again()
            line.sent = line.left = True

    def _send_the_rest(self, line: _Line) -> None:
        """Send all buckets that backward did not fill, with the gradients that they hold."""
        for bucket in line.buckets[line.next :]:
            self._fill(line, bucket)
        self._send_full_buckets(line)

    def _fill(self, line: _Line, bucket: Bucket) -> None:
        for i in bucket.missing:
            p = bucket.params[i]
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # unused on this rank, perhaps used on others
            bucket.take(i, line.scale)
            if not p.requires_grad:
                p.grad = None  # frozen since
        bucket.missing.clear()

    @torch.no_grad()
    def no_more(self, bucket: Bucket) -> None:
        """Note that backward has passed this bucket: a parameter without a gradient will not get one."""
        line = self._line_of(self.facts[id(bucket.params[0])])
        if line.syncs:
            self._fill(line, bucket)
            self._send_full_buckets(line)

    def end_microbatch(self) -> None:
        """Send what the last backward left, if each is sent: it may not have used all parameters."""
        for line in self._lines:
            if line.begun or self._went_back and not line.sent:
                self._send_the_rest(line)
            line.sent = False
        self._went_back = False

    def before_forward(self) -> None:
        if self.each and self._through:
            self.end_microbatch()
        super().before_forward()
        for bucket in self.buckets:
            bucket.check_in_place()

    def after_forward(self, output: object) -> None:
        if tensors := with_gradient(output):
            register_multi_grad_hook(tensors, self._backward_comes, mode="any")

    def _backward_comes(self, gradient: Tensor) -> None:
        self._went_back = self._went_back or self._syncs

    def last_backward(self, stage: int) -> None:
        """Note that the next backward of this stage is its last before `start`: send its buckets as they fill."""
        for line in self._lines:
            line.closed.add(stage)
            line.syncs = line.syncs or line.stages <= line.closed and not (self.each and line.crosses)

    @torch.no_grad()
    def start(self, stage: int) -> list[comm.Pending]:
        """Send the rest of the stage's buckets after its last backward; return the sums in flight."""
        under_way: list[comm.Pending] = []
        for line in self._lines:
            line.started.add(stage)
            if line.stages <= line.started and not (self.each and line.crosses):  # these are sent once, in finish
                if not line.left or line.begun:  # some buckets were not sent inside backward
                    self._send_the_rest(line)
                line.syncs, line.left = self._syncs, False
                line.closed.clear()
                line.started.clear()
                under_way += line.pending
        return under_way

    def has_sums(self) -> bool:
        return self.state is State.SUMMED and not self.begun and any(bucket.has_sum() for bucket in self.buckets)

    @torch.no_grad()
    def finish(self) -> None:
        if self.has_sums():
            return
        for line in self._lines:
            if not line.sent or line.begun:
                self._send_the_rest(line)
        self._end_lines()
        for bucket in self.buckets:
            bucket.summed()
        self.state = State.SUMMED

    def _end_lines(self) -> None:
        self._went_back = False
        for line in self._lines:
            line.wait()
            line.begin_again()
            line.syncs = self._syncs
            line.sent = line.left = False
            line.closed.clear()  # of two stages that share a weight, one may be ahead when the step ends
            line.started.clear()

    def give_up(self) -> None:
        for line in self._lines:
            # Other ranks may wait for sums of parameters that this rank did not reach or does not use.
            if line.begun or self._went_back and not line.sent:
                self._send_the_rest(line)
        self._end_lines()
        for bucket in self.buckets:
            bucket.drop()
        super().give_up()

    def _held(self) -> Iterator[tuple[Tensor | None, Callable[[], Tensor]]]:
        for bucket in self.buckets:
            yield from bucket.held(self.facts)


class _Line:
    """Buckets with the same group and stages, sent one after the other."""

    def __init__(self, group: Group, stages: frozenset[int], scale: Tensor, crosses: bool) -> None:
        self.group, self.stages, self.scale, self.crosses = group, stages, scale, crosses
        self.buckets: list[Bucket] = []
        self.labels: list[str] = []
        self.pending: list[comm.Pending] = []
        self.next = 0  # the bucket to send next
        self.syncs = True
        # Whether all buckets were sent, in this step and since the last `start`; only if each backward is sent.
        self.sent = self.left = False
        self.closed: set[int] = set()  # stages whose last backward began
        self.started: set[int] = set()  # ... and ended

    @property
    def begun(self) -> bool:
        return self.next > 0 or any(len(bucket.missing) < len(bucket.params) for bucket in self.buckets)

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait()
        self.pending = []

    def begin_again(self) -> None:
        self.next = 0
        for bucket in self.buckets:
            bucket.missing.update(range(len(bucket.params)))
