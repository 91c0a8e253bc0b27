"""Gradients side by side in a bucket: one message for many tensors.

`Gradients` sends a bucket in one call. This bucket is all-reduced; a `Flat` (`flat.py`) is reduce-scattered.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from lib import comm
from lib.cost.sizes import bucket_shares
from lib.facts import Fact
from lib.mesh import Group

ONE = torch.ones([], dtype=torch.float64)  # a tensor: torch would convert a number at each use


class Bucket:
    """Gradients side by side in `flat`, for an all-reduce; each p.grad becomes a view into it."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        self.params = [fact.parameter for fact in facts]
        self.pieces = {fact.name: fact.parameter for fact in facts}  # the optimizer steps these
        sizes = [p.numel() for p in self.params]
        self.flat = self.params[0].new_zeros(sum(sizes))
        pieces = self.flat.split(sizes)
        self.views = [x.view_as(p) for p, x in zip(self.params, pieces, strict=True)]
        self.missing = set(range(len(self.params)))  # no gradient yet

    def check_in_place(self) -> None:
        """Nothing to check here: parameters keep their own memory."""

    def take(self, i: int, scale: Tensor) -> None:
        """Copy gradient i to its place in the bucket, multiplied by `scale`."""
        torch.mul(self.params[i].grad, scale, out=self.views[i])
        self.params[i].grad = self.views[i]

    def keep(self, i: int) -> None:
        """Keep gradient i, to which later microbatches add."""
        if self.params[i].grad is not self.views[i]:
            self.take(i, ONE)

    def send(self, group: Group) -> comm.Pending:
        return comm.all_reduce_start(self.flat, group, "sum", out=self.flat)

    def summed(self) -> None:
        """Note that the sum has arrived."""

    def has_sum(self) -> bool:
        """Whether the sum has arrived, and no optimizer has cleared it since."""
        return any_gradient(self.params)

    def drop(self) -> None:
        """Drop the gradients of a step that was given up."""

    def held(self, facts: dict[int, Fact]) -> Iterator[tuple[Tensor | None, Callable[[], Tensor]]]:
        """Each gradient, and how its square is counted."""
        for p in self.params:
            yield p.grad, lambda p=p: facts[id(p)].square(p.grad)

    # The interface for `ShardedOptimizer`; here each rank holds and steps all parameters.

    def named_pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and tensors for the optimizer."""
        yield from self.pieces.items()

    def gradients_to_pieces(self) -> None:
        """Give each tensor its gradient, before the step."""

    def after_step(self) -> None:
        """Note that the step used the gradients."""
        for p in self.params:
            p.grad = None

    def publish(self) -> comm.Pending | None:
        """Send new parameters to all ranks; nothing to send here."""


def any_gradient(params: Iterable[nn.Parameter]) -> bool:
    """Whether any parameter has a gradient that is not all zeros."""
    return any(p.grad is not None and bool(p.grad.any()) for p in params)


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
