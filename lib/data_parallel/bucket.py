"""A bucket: gradients side by side in one flat tensor, one message for all of them.

Until the sum over the ranks arrives, p.grad is a placeholder (`placeholders.py`): a loop that forgets `finish()` would
clip or step each rank's own gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lib import comm
from lib.data_parallel.gradient_sums import any_gradient, squares_of
from lib.data_parallel.placeholders import CONVERTED, GRADIENT_IN_FLIGHT, Placeholders
from lib.facts import Fact
from lib.mesh import Group


class Bucket:
    """Gradients side by side in `flat`, for an all-reduce; then each p.grad becomes a view into it.

    `Gradients` calls the methods up to `squares`, `ShardedOptimizer` the others; here each rank steps all parameters.
    """

    def __init__(self, facts: Sequence[Fact]) -> None:
        self.params, self.group = [fact.parameter for fact in facts], facts[0].sum_over
        self.stepped = {fact.name: fact.parameter for fact in facts}
        sizes = [p.numel() for p in self.params]
        self.flat = self.params[0].new_zeros(sum(sizes))
        self.views = [x.view_as(p) for p, x in zip(self.params, self.flat.split(sizes), strict=True)]
        self.missing = set(range(len(self.params)))  # no gradient yet
        self.away = Placeholders(self.params, self.stepped, GRADIENT_IN_FLIGHT)  # until the sum arrives
        self._sums: set[int] = set()  # gradients that are sums

    def check_in_place(self) -> None:
        """Raise RuntimeError if a parameter was converted, and its gradient no longer fits into the bucket."""
        for name, p in self.stepped.items():
            if (p.dtype, p.device) != (self.flat.dtype, self.flat.device):
                raise RuntimeError(CONVERTED.format(f"{name} was"))

    def holds_sum(self, i: int) -> bool:
        """Whether gradient i is a sum that was neither used nor cleared."""
        return i in self._sums and self.params[i].grad is self.views[i]

    def reopen(self, i: int, scale: Tensor, is_kept: bool) -> None:
        """Prepare a sum for gradients that will be added to it; all will be multiplied by `scale` and summed again.

        All ranks hold the same sum, and each contributes 1/n of it.
        """
        self.views[i].div_(scale * self.group.size)
        self._sums.discard(i)

    def take(self, i: int, scale: Tensor) -> None:
        """Copy gradient i to its place in the bucket, multiplied by `scale`."""
        torch.mul(self.params[i].grad, scale, out=self.views[i])
        self.away.place(i)

    def take_nothing(self, i: int, counts: bool = True) -> None:
        """Send zeros for gradient i: the parameter is not used on this rank, and perhaps on others.

        If no rank `counts` them, the parameter has no gradient.
        """
        self.views[i].zero_()
        if counts:
            self.away.place(i)

    def keep(self, i: int) -> None:
        """Keep gradient i, to which later microbatches add."""
        if self.params[i].grad is not self.views[i]:
            self.views[i].copy_(self.params[i].grad)
            self.params[i].grad = self.views[i]
            self._sums.discard(i)  # it was cleared

    def send(self, group: Group) -> comm.Pending:
        """Start the sum."""
        reduced = comm.all_reduce_start(self.flat, group, "sum", out=self.flat)

        def arrive() -> None:
            reduced.wait()
            self.zero(self.zeroed())
            self._sums = self.held() - self.gone()
            self.away.remove_all()
            for i in self._sums:
                self.params[i].grad = self.views[i]

        return comm.Pending(arrive, reduced.record)

    def has_sum(self) -> bool:
        """Whether the sum has arrived, and no optimizer has cleared it since."""
        return any_gradient(self.params)

    def held(self) -> set[int]:
        """Gradients in the bucket: the user does not see them in p.grad."""
        return self.away.placed

    def gone(self) -> set[int]:
        """Those that the user dropped: `p.grad = None`."""
        return self.away.gone()

    def zeroed(self) -> set[int]:
        """Those that the user set to zero."""
        return self.away.zeroed()

    def drop(self, some: set[int]) -> None:
        """Drop some gradients."""
        for i in list(some):
            self.away.remove(i)

    def zero(self, some: set[int]) -> None:
        """Set some sums to zero."""
        for i in some:
            self.views[i].zero_()

    def squares(self, facts: dict[int, Fact]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each gradient here, and this rank's share of its square."""
        return squares_of(self.params, facts)

    def gradients_to_pieces(self) -> None:
        """Give each tensor its gradient, before the step."""

    def after_step(self) -> None:
        """Note that the step used the gradients."""
        for p in self.params:
            p.grad = None

    def publish(self) -> comm.Pending | None:
        """Send new parameters to all ranks; nothing to send here."""
