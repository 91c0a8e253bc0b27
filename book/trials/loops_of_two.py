"""Loops with more than a backward of one model: a second model with its own wrapper, and the gradient of a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from book.trials.loops import Alone, Loop, Wrapped, compare
from book.trials.net_of_loops import rows_of
from lib.mesh import Group


class _WithCritic:
    """Operations that `Alone` and `Wrapped` have in common; `critic` is another `Alone` or `Wrapped`."""

    critic: Alone

    def play(self, way: str) -> None:
        """Step the critic on outputs of the model, then run backward through both, as in a GAN.

        Args:
            way: the name of a way to clear gradients, in `CLEAR`.
        """
        self.critic.clear(way)  # also of what the last backward through both has left there
        for rank in self.ranks:
            self.judge(rank, self.output(rank).detach()).backward()
        self.critic.finish()
        self.critic.step()
        for rank in self.ranks:
            self.judge(rank, self.output(rank)).neg().backward()
        self.number += 1

    def output(self, rank: int) -> Tensor:
        return self.model(rows_of(self.number, rank))

    def judge(self, rank: int, output: Tensor) -> Tensor:
        """The critic's loss on two columns of the input, and the two of the output."""
        seen = torch.cat([rows_of(self.number, rank)[:, :2], output], dim=1)
        return self.share(self.critic.model(seen).square().mean())

    def penalty(self) -> None:
        """Run backward through a loss and the square of its gradient with respect to the input."""
        for rank in self.ranks:
            x = rows_of(self.number, rank).requires_grad_()
            loss = self.model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            self.share(loss + slope.square().mean()).backward()
        self.number += 1


class TwoAlone(_WithCritic, Alone):
    """Two models in one process; arguments as for `Alone`."""

    def __init__(self, ranks: int, optimizer: str, step_clears: bool) -> None:
        super().__init__(ranks, optimizer, step_clears)
        self.critic = Alone(ranks, optimizer, step_clears)


class TwoWrapped(_WithCritic, Wrapped):
    """Two models, each in its wrapper; arguments as for `Wrapped`."""

    def __init__(self, world: Group, kind: str, optimizer: str, **options: object) -> None:
        super().__init__(world, kind, optimizer, **options)
        self.critic = Wrapped(world, kind, optimizer, **options)


def run_loop_of_two(world: Group, kind: str, optimizer: str, options: dict, loop: Loop) -> float | str:
    """What `compare` says of a loop with a critic."""
    alone = TwoAlone(world.size, optimizer, step_clears=not kind.endswith("DDP"))
    return compare(loop, alone, TwoWrapped(world, kind, optimizer, **options))
