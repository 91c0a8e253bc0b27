"""Data parallelism and ZeRO-1 without buckets, with which their chapters begin: a message per parameter after backward.

They have the interface of `lib.data_parallel`, and give the same weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lib import comm
from lib.data_parallel.check_optimizer import check_owned
from lib.data_parallel.ddp import DataParallel, broadcast_weights, replicas
from lib.data_parallel.flat import MakeOptimizer
from lib.data_parallel.gradient_sums import GradientSums, State, any_gradient, squares_of
from lib.data_parallel.placeholders import GRADIENT_OF_A_SHARD, Placeholders, accumulates
from lib.facts import Fact
from lib.mesh import Group
from lib.placement import check_apart, parameter_like

UNUSED = (
    "a gradient would be added to the sum of the last finish(), which no step used: clear it with zero_grad(), or use "
    "no_sync() for all microbatches but the last"
)
WRITTEN = (
    "the gradient of {} was written between backward() and finish(), as clip_grad_norm_ does: it is this rank's own, "
    "not the average; call finish() first"
)


class NaiveGradients(GradientSums):
    """One all-reduce per parameter, all of them after backward.

    forward, backward: no communication. finish: one all-reduce per tensor, together 2(n−1)/n · Ψ elements per rank.
    """

    def __init__(self, facts: Iterable[Fact], op: str = "sum") -> None:
        super().__init__(facts, op)
        self.begun = False  # p.grad is this rank's own gradient, not yet summed
        self._sums: dict[nn.Parameter, Tensor] = {}  # that finish() left in p.grad
        self._versions: dict[nn.Parameter, int] = {}  # of p.grad, as backward left it
        for p in self.trained:
            p.register_hook(partial(self._gradient_comes, p))
            p.register_post_accumulate_grad_hook(self._note)

    def holds_sum(self, p: nn.Parameter) -> bool:
        """Whether there is a sum of p that was neither used nor cleared."""
        return p.grad is not None and p.grad is self._sums.get(p) and bool(p.grad.any())

    def _gradient_comes(self, p: nn.Parameter, gradient: Tensor) -> None:
        self.backward_begins()
        if self.holds_sum(p) and accumulates(p):
            raise RuntimeError(UNUSED)

    def _note(self, p: nn.Parameter) -> None:
        self.gradient_came(p)
        self.begun = self.begun or self.syncs
        self._versions[p] = p.grad._version

    def _is_written(self, p: nn.Parameter) -> bool:
        """Whether somebody has written p.grad since backward; not if it was set to zero."""
        version = self._versions.get(p)
        return self.begun and p.grad is not None and p.grad._version != version and bool(p.grad.any())

    def give_up(self) -> None:
        super().give_up()
        self.begun = False

    @torch.no_grad()
    def finish(self) -> None:
        if not (self.arrived and any_gradient(self.trained)):
            self.sum_with(lambda p: comm.all_reduce(p.grad, self.facts[id(p)].sum_over, self.op))

    def sum_with(self, total: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Replace each p.grad by its sum over the ranks."""
        if any(self.holds_sum(p) for p in self.trained):
            raise RuntimeError(UNUSED)
        for p in self.trained:
            if self._is_written(p):
                raise RuntimeError(WRITTEN.format(self.facts[id(p)].name))
        for p in self.trained:
            if p.requires_grad:  # not frozen since
                if p.grad is None:
                    p.grad = torch.zeros_like(p)  # unused on this rank, perhaps used on others
                with comm.label("gradient"):
                    p.grad = total(p)
        self._sums = {p: p.grad for p in self.trained if p.grad is not None}
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


class OwnedGradients(NaiveGradients):
    """The same, each sum only on the rank that owns the parameter.

    Args:
        owners: rank of the owner of each parameter that is trained.

    Attributes:
        pieces: name → what the optimizer steps: this rank's parameters. Those of other ranks are empty, so that groups
            are the same on all ranks, and none is empty.
    """

    def __init__(self, facts: Iterable[Fact], op: str, owners: Sequence[int], rank: int) -> None:
        super().__init__(facts, op)
        self.owners, self.pieces, others = owners, {}, []
        for fact, owner in zip(self.facts.values(), owners, strict=True):
            p = fact.parameter
            self.pieces[fact.name] = p if owner == rank else parameter_like(p, p.new_empty((0,) * p.dim()))
            others += [fact.name] * (owner != rank)
        self._other = [fact.parameter for fact in self.facts.values() if fact.name in others]
        self._number = {id(p): i for i, p in enumerate(self._other)}
        # Placeholders of other ranks' sums, and of gradients that this rank has for them.
        self._away = Placeholders(self._other, others, GRADIENT_OF_A_SHARD)
        self._of_pieces = Placeholders([self.pieces[name] for name in others], others, GRADIENT_OF_A_SHARD)

    def holds_sum(self, p: nn.Parameter) -> bool:
        if id(p) not in self._number:
            return super().holds_sum(p)
        return p.grad is not None and p.grad is self._sums.get(p)

    def _note(self, p: nn.Parameter) -> None:
        super()._note(p)
        if id(p) in self._number:
            self._of_pieces.place(self._number[id(p)])

    def forget_cleared(self) -> None:
        gone = self._away.gone() | self._away.zeroed() | self._of_pieces.gone() | self._of_pieces.zeroed()
        for i in gone:
            self._away.remove(i)
            self._of_pieces.remove(i)
            self._other[i].grad = None

    def give_up(self) -> None:
        self._away.remove_all()
        self._of_pieces.remove_all()
        super().give_up()

    @torch.no_grad()
    def finish(self) -> None:
        self.forget_cleared()
        if self.arrived:
            return
        owner_of = {id(p): owner for p, owner in zip(self.trained, self.owners, strict=True)}
        self.sum_with(lambda p: comm.reduce(p.grad, self.facts[id(p)].sum_over, owner_of[id(p)], self.op))
        for i, p in enumerate(self._other):
            if p.requires_grad:
                self._away.place(i)
                self._of_pieces.place(i)
                self._sums[p] = p.grad

    def use(self) -> None:
        super().use()
        self._away.remove_all()
        self._of_pieces.remove_all()

    def _held(self) -> Iterator[tuple[Tensor, Tensor]]:
        return squares_of((p for p in self.trained if id(p) not in self._number), self.facts)


class NaiveZeRO1(DataParallel):
    """ZeRO-1 with full parameters: only the owner of a parameter keeps its optimizer state and steps it.

    finish: each gradient is reduced to its owner. step: the owner steps, and broadcasts the parameter. Together
    2(n−1)/n · Ψ elements, the mean over the ranks: who owns a large parameter keeps and sends more than the others.

    Args:
        optimizer: called with pairs of name and parameter, for the parameters of this rank.
    """

    def __init__(self, module: nn.Module, group: Group, optimizer: MakeOptimizer, op: str = "mean") -> None:
        check_apart(module)
        facts = replicas(module, group)
        self.owners = share_out(
            [fact.parameter.numel() for fact in facts if fact.parameter.requires_grad], group.size
        )
        gradients = OwnedGradients(facts, op, self.owners, group.rank)
        broadcast_weights(module, group)
        super().__init__(module, group, gradients, counts_over=group)
        self.optimizer = optimizer([*gradients.pieces.items()])
        check_owned(self.optimizer, gradients.pieces.values())

    @torch.no_grad()
    def step(self) -> None:
        """Step the parameters of this rank, then broadcast them.

        Raises:
            RuntimeError: there is no new gradient.
            ValueError: the optimizer also holds other tensors.
        """
        check_owned(self.optimizer, self.gradients.pieces.values())
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
