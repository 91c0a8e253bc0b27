"""Training loops as data, run on a wrapped model and, beside it, in one process.

A loop is a list of operations, each a name and its arguments, such as `("backward", "sends")`. `Alone` and `Wrapped`
have a method for each name: the first does what PyTorch does in one process on the rows of all ranks, the second what a
reader of the book writes with a wrapper.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from book.trials.net_of_loops import OPTIMIZERS, Net, rows_of
from book.trials.unbucketed import NaiveDDP, NaiveZeRO1
from lib import comm
from lib.data_parallel.ddp import BucketedDDP
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.zero import ZeRO1, ZeRO2
from lib.mesh import Group

WRAPPERS = {
    "NaiveDDP": NaiveDDP,
    "BucketedDDP": BucketedDDP,
    "NaiveZeRO1": NaiveZeRO1,
    "ZeRO1": ZeRO1,
    "ZeRO2": ZeRO2,
    "FSDP": FSDP,
}
Operation = tuple
Loop = list[Operation]

# Ways to clear gradients; each takes an `Alone` or a `Wrapped`.
CLEAR: dict[str, Callable] = {
    "optimizer.zero_grad()": lambda side: side.optimizer.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda side: side.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda side: side.model.zero_grad(),
    "module.zero_grad()": lambda side: side.module.zero_grad(),
    "p.grad = None": lambda side: _each(side.module.parameters(), _drop),
    "p.grad.zero_()": lambda side: _each(side.module.parameters(), _zero),
}


def _each(params: Iterable[nn.Parameter], do: Callable[[nn.Parameter], None]) -> None:
    for p in params:
        do(p)


def _drop(p: nn.Parameter) -> None:
    p.grad = None


def _zero(p: nn.Parameter) -> None:
    if p.grad is not None:
        p.grad.zero_()


class Alone:
    """A loop in one process, on the rows of all ranks.

    Args:
        ranks: their number.
        optimizer: a name in `OPTIMIZERS`.
        step_clears: whether the step of the wrapper clears gradients.
        writes: whether the model writes a weight in forward.
    """

    def __init__(self, ranks: int, optimizer: str, step_clears: bool, writes: bool = False) -> None:
        torch.manual_seed(0)
        self.model = self.module = Net(writes).double()
        self.ranks, self.step_clears = range(ranks), step_clears
        self.optimizer = OPTIMIZERS[optimizer](self.module.named_parameters())
        self._prepare()

    def _prepare(self) -> None:
        self.number = 0  # of the next backward
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = self.weights()  # of weights (EMA)
        self.saved: object = None
        self.norms: list[float] = []  # and losses

    # ---- what differs between one process and many -------------------------------------------------------------------

    def loss(self, rank: int, broken: bool) -> Tensor:
        return self.share(self.model(rows_of(self.number, rank, broken)).square().mean())

    def share(self, loss: Tensor) -> Tensor:
        """The part of a rank's loss in the loss of all."""
        return loss / len(self.ranks)

    def backward(self, how: str, clears: str | None = None, broken: bool = False) -> None:
        """Forward, perhaps a clear, and backward; `how` counts on a wrapper only."""
        losses = [self.loss(rank, broken) for rank in self.ranks]
        if clears:
            self.clear(clears)
        for loss in losses:
            loss.backward()
        self.number += 1

    def look(self) -> None:
        """Evaluate."""
        with torch.no_grad():
            self.norms.append(sum(self.loss(rank, False).item() for rank in self.ranks))

    def finish(self) -> None:
        """Count parameters without a gradient as zero, as the wrappers do."""
        for p in self.module.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)

    def clip(self, max_norm: float) -> None:
        self.norms.append(nn.utils.clip_grad_norm_(self.module.parameters(), max_norm).item())

    torch_clip = clip

    def step(self) -> None:
        self.optimizer.step()
        if self.step_clears:
            self.optimizer.zero_grad()

    def torch_step(self) -> None:
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def write(self, values: dict[str, Tensor]) -> None:
        """Write all weights, through the state of the model."""
        self.module.load_state_dict(values)

    def save(self) -> None:
        self.saved = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))

    def load(self) -> None:
        model, optimizer = self.saved
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))

    def foreign_group(self) -> None:
        """Add a group of a tensor that does not belong to the model."""

    def held_gradients(self) -> None:
        """Read each gradient."""

    # ---- what is the same -------------------------------------------------------------------------------------------

    def clear(self, way: str) -> None:
        CLEAR[way](self)

    def clip_and_step_if_finite(self, max_norm: float, way: str | None) -> None:
        """Skip a step whose norm is not finite, and clear."""
        self.clip(max_norm)
        if self.norms[-1] == self.norms[-1]:
            self.step()
        if way:
            self.clear(way)

    def schedule(self) -> None:
        self.scheduler.step()

    def freeze(self, i: int, is_frozen: bool) -> None:
        [*self.module.parameters()][i].requires_grad_(not is_frozen)

    def rate(self, factor: float) -> None:
        """Change a group."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def update_average(self) -> None:
        for name, now in self.weights().items():
            self.average[name].lerp_(now, 0.3)

    def swap(self) -> None:
        """Exchange weights and their average."""
        now = self.weights()
        self.write(self.average)
        self.average = now

    @torch.no_grad()
    def average_in_place(self) -> None:
        """Average as people do who know parameters only."""
        for name, p in self.module.named_parameters():
            self.average[name].lerp_(p, 0.3)

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamp weights, as a WGAN does."""
        for p in self.module.parameters():
            p.clamp_(-0.3, 0.3)


class Wrapped(Alone):
    """The loop of a rank.

    Args:
        kind: a name in `WRAPPERS`.
        optimizer: a name in `OPTIMIZERS`.
        options: of the wrapper.
    """

    def __init__(self, world: Group, kind: str, optimizer: str, writes: bool = False, **options: object) -> None:
        torch.manual_seed(0)
        self.world, self.ranks = world, range(world.rank, world.rank + 1)
        self.op, self.module, make = options.get("op", "mean"), Net(writes).double(), OPTIMIZERS[optimizer]
        self.steps_itself, self.is_sharded = kind.endswith("DDP"), kind in ("ZeRO1", "ZeRO2", "FSDP")
        if self.steps_itself:
            self.model = WRAPPERS[kind](self.module, world, **options)
            self.optimizer = make(self.module.named_parameters())
        else:
            self.model = WRAPPERS[kind](self.module, world, make, **options)
            self.optimizer = self.model.optimizer
        self._prepare()

    def share(self, loss: Tensor) -> Tensor:
        return loss / self.world.size if self.op == "sum" else loss

    def backward(self, how: str, clears: str | None = None, broken: bool = False) -> None:
        with self.model.no_sync() if how == "no_sync" else nullcontext():
            super().backward(how, clears, broken)

    def look(self) -> None:
        super().look()
        self.norms[-1] = comm.all_reduce(
            torch.tensor(self.norms[-1], dtype=torch.float64), self.world, self.op
        ).item()

    def finish(self) -> None:
        self.model.finish()

    def clip(self, max_norm: float) -> None:
        self.norms.append(self.model.clip_gradients(max_norm).item())

    def torch_clip(self, max_norm: float) -> None:
        super().clip(max_norm)

    def step(self) -> None:
        if self.steps_itself:
            self.optimizer.step()
        else:
            self.model.step()

    def weights(self) -> dict[str, Tensor]:
        if not self.is_sharded:
            return super().weights()
        state = self.model.full_state_dict()  # on rank 0
        shapes = {name: torch.zeros_like(p) for name, p in self.module.named_parameters()}
        return {name: comm.broadcast(state.get(name, like), self.world) for name, like in shapes.items()}

    def write(self, values: dict[str, Tensor]) -> None:
        if self.is_sharded:
            self.model.load_full_state_dict(values)
        else:
            super().write(values)

    def save(self) -> None:
        if self.is_sharded:
            self.saved = self.model.sharded_state_dict()
        else:
            super().save()

    def load(self) -> None:
        if self.is_sharded:
            self.model.load_sharded_state_dict(self.saved)
        else:
            super().load()

    def foreign_group(self) -> None:
        extra = nn.Parameter(torch.ones(2))
        has_names = "param_names" in self.optimizer.param_groups[0]
        self.optimizer.add_param_group({"params": [("extra", extra) if has_names else extra]})

    def held_gradients(self) -> None:
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad.norm()


def run_loop(world: Group, kind: str, optimizer: str, options: dict, loop: Loop) -> float | str:
    """What `compare` says of a loop on a wrapper."""
    alone = Alone(world.size, optimizer, not kind.endswith("DDP"), options.get("writes", False))
    return compare(loop, alone, Wrapped(world, kind, optimizer, **options))


def compare(loop: Loop, alone: Alone, ours: Alone) -> float | str:
    """How far norms and weights of a loop are from one process, relative to their size; or, if it was refused, the name
    of the operation and the error.
    """
    for name, *given in loop:
        getattr(alone, name)(*given)
    for name, *given in loop:
        try:
            getattr(ours, name)(*given)
        except (RuntimeError, ValueError) as error:
            return f"{name}: {error}"
    have, right = ours.weights(), alone.weights()
    return max(
        _apart(torch.tensor(ours.norms), torch.tensor(alone.norms)), *(_apart(have[k], right[k]) for k in right)
    )


def _apart(have: Tensor, right: Tensor) -> float:
    """Their distance, relative to `right`; 0 if both are NaN in the same places."""
    if not torch.equal(have.isnan(), right.isnan()):
        return float("inf")
    right = right.nan_to_num()
    return ((have.nan_to_num() - right).norm() / (right.norm() + 1e-3)).item()
