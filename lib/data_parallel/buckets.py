"""Gradients side by side: one message for many tensors, as large as one likes.

A bucket is what `Gradients` sends at once. This one is all-reduced; of a `Flat` (`flat.py`) each rank gets its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from lib import comm
from lib.cost.tensors import bucket_shares
from lib.facts import Fact
from lib.mesh import Group

ONE = torch.ones([], dtype=torch.float64)  # scales are tensors, as torch would make each number into one, each time


class Bucket:
    """Gradients side by side in `flat`, for an all-reduce; each p.grad becomes a view into it."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        self.params = [fact.parameter for fact in facts]
        self.pieces = {fact.name: fact.parameter for fact in facts}  # what an optimizer steps
        sizes = [p.numel() for p in self.params]
        self.flat = self.params[0].new_zeros(sum(sizes))
        pieces = self.flat.split(sizes)
        self.views = [x.view_as(p) for p, x in zip(self.params, pieces, strict=True)]
        self.missing = set(range(len(self.params)))  # no gradient yet

    def check_in_place(self) -> None:
        """Whether each parameter is still where the optimizer's step will reach it; here they lie anywhere."""

    def take(self, i: int, scale: Tensor) -> None:
        """Copy gradient i to its place in the bucket, scaled on the way."""
        torch.mul(self.params[i].grad, scale, out=self.views[i])
        self.params[i].grad = self.views[i]

    def keep(self, i: int) -> None:
        """Let gradient i grow further, as more microbatches come."""
        if self.params[i].grad is not self.views[i]:
            self.take(i, ONE)

    def send(self, group: Group) -> comm.Pending:
        return comm.all_reduce_start(self.flat, group, "sum", out=self.flat)

    def summed(self) -> None:
        """The sum is there."""

    def has_sum(self) -> bool:
        """After `summed`: whether the sum is there still, and no optimizer has cleared it."""
        return any_gradient(self.params)

    def drop(self) -> None:
        """The step is given up."""

    def held(self, facts: dict[int, Fact]) -> Iterator[tuple[Tensor | None, Callable[[], Tensor]]]:
        """Each gradient, and how its square is counted."""
        for p in self.params:
            yield p.grad, lambda p=p: facts[id(p)].square(p.grad)

    # What `ShardedOptimizer` asks of every bucket; here each rank has all, and steps it.

    def named_pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer gets of each parameter."""
        yield from self.pieces.items()

    def gradients_to_pieces(self) -> None:
        """Before the step: each piece gets its gradient."""

    def after_step(self) -> None:
        """The gradients are used up."""
        for p in self.params:
            p.grad = None

    def publish(self) -> comm.Pending | None:
        """Let every rank see the new parameters."""


def any_gradient(params: Iterable[nn.Parameter]) -> bool:
    """Whether any parameter has a gradient that is not all zeros."""
    return any(p.grad is not None and bool(p.grad.any()) for p in params)


def fill_buckets(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device, in the order of `params`, in equal shares of about `bucket_bytes`.

    So no small bucket is left over at the end, to pay for a message of its own.
    """
    buckets: list[list[nn.Parameter]] = []
    for _, neighbours in groupby(params, key=lambda p: (p.dtype, p.device)):
        alike = list(neighbours)
        shares = bucket_shares([p.nbytes for p in alike], bucket_bytes)
        buckets += [[alike[i] for i in share] for share in shares]
    return buckets
