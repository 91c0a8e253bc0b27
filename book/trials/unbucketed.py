"""Data parallelism and ZeRO-1 without buckets, with which their chapters begin: a message per parameter after backward.

They have the interface of `lib.data_parallel`, and give the same weights.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lib import comm
from lib.data_parallel.ddp import DataParallel, broadcast_weights, replicas
from lib.data_parallel.flat import MakeOptimizer
from lib.data_parallel.gradient_sums import GradientSums, State, any_gradient
from lib.facts import Fact
from lib.mesh import Group
from lib.placement import check_apart


class NaiveGradients(GradientSums):
    """One all-reduce per parameter, all of them after backward.

    forward, backward: no communication. finish: one all-reduce per tensor, together 2(n−1)/n · Ψ elements per rank.
    """

    def __init__(self, facts: Iterable[Fact], op: str = "sum") -> None:
        super().__init__(facts, op)
        self.begun = False  # p.grad is this rank's own gradient, not yet summed
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self._note)

    def _note(self, p: nn.Parameter) -> None:
        self.gradient_came(p)
        self.begun = self.begun or self.syncs

    def give_up(self) -> None:
        super().give_up()
        self.begun = False

    @torch.no_grad()
    def finish(self) -> None:
        if not (self.arrived and any_gradient(self.trained)):
            self.sum_with(lambda p: comm.all_reduce(p.grad, self.facts[id(p)].sum_over, self.op))

    def sum_with(self, total: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Replace each p.grad by its sum over the ranks."""
        for p in self.trained:
            if p.requires_grad:  # not frozen since
                if p.grad is None:
                    p.grad = torch.zeros_like(p)  # unused on this rank, perhaps used on others
                with comm.label("gradient"):
                    p.grad = total(p)
        self.begun, self.state = False, State.SUMMED


class NaiveDDP(DataParallel):
    """One all-reduce per parameter, all of them after backward: `NaiveGradients`.

    Args:
        module, group, op: as for `BucketedDDP`, and the same errors.
    """

    def __init__(self, module: nn.Module, group: Group, op: str = "mean") -> None:
        gradients = NaiveGradients(replicas(module, group), op)
        broadcast_weights(module, group)
        super().__init__(module, group, gradients)


class NaiveZeRO1(DataParallel):
    """ZeRO-1 with full parameters: only the owner of a parameter keeps its optimizer state and steps it.

    finish: each gradient is reduced to its owner. step: the owner steps, and broadcasts the parameter. Together
    2(n−1)/n · Ψ elements, the mean over the ranks: who owns a large parameter keeps and sends more than the others.

    Args:
        optimizer: called with pairs of name and parameter, for the parameters of this rank.
    """

    def __init__(self, module: nn.Module, group: Group, optimizer: MakeOptimizer, op: str = "mean") -> None:
        check_apart(module)
        gradients = NaiveGradients(replicas(module, group), op)
        broadcast_weights(module, group)
        super().__init__(module, group, gradients, counts_over=group)
        self.owners = share_out([p.numel() for p in self.trained], group.size)
        pieces = []  # a different rank's are empty: so parameter groups are the same on all ranks, and none is empty
        for fact, owner in zip(gradients.facts.values(), self.owners, strict=True):
            p = fact.parameter
            pieces.append((fact.name, p if owner == group.rank else nn.Parameter(p.new_empty((0,) * p.dim()))))
        self.optimizer = optimizer(pieces)

    @torch.no_grad()
    def finish(self) -> None:
        """Return when the owner of each parameter has its averaged gradient; p.grad is None on the others."""
        sums, owner_of = self.gradients, dict(zip(self.trained, self.owners, strict=True))
        sums.check_all_known(self.module)
        if not sums.arrived:
            sums.sum_with(lambda p: comm.reduce(p.grad, self.group, owner_of[p], sums.op))

    @torch.no_grad()
    def step(self) -> None:
        """Step the parameters of this rank, then broadcast them.

        Raises:
            RuntimeError: there is no new gradient.
        """
        self.gradients.use()
        self.optimizer.step()
        for p, owner in zip(self.trained, self.owners, strict=True):
            p.grad = None
            with comm.label("parameter"):
                p.copy_(comm.broadcast(p, self.group, owner))


def share_out(sizes: Sequence[int], n: int) -> list[int]:
    """Owner of each size: the largest first, to the smallest total."""
    owners, held = [0] * len(sizes), [0] * n
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = held.index(min(held))
        held[owners[i]] += sizes[i]
    return owners
