"""A mixture on several ranks: some experts here, tokens from all ranks, loads counted over all.

The problem: three things of a mixture belong to no rank alone. An expert computes tokens of all ranks. A balance loss
compares loads and scores of all tokens: the mean of the losses of the ranks is a different number. And an expert that
is full on one rank may have room on the next.

The idea: `MoE` computes as in one process, and asks at these three places. Here the answers come from a group: rows
are dispatched (`dispatch.py`), loads are summed, room is what earlier ranks left.

Together with tensor parallelism a rank has a slice of each of its experts, as of an MLP; router and weights see the
same tokens on all these ranks, and with sequence parallelism those of its shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lib import comm
from lib.conjugate import (
    all_gather_reduce_scatter,
    all_reduce_identity,
    identity_all_reduce,
    reduce_scatter_all_gather,
)
from lib.expert_parallel.dispatch import Dispatch
from lib.mesh import Group
from lib.moe import Experts, MoE, bias_change
from lib.placement import Fused, Shard, of_experts, parameter_like, shard
from lib.tensor_parallel.custom_layers import own_part

SEQUENCE_DIM = 1  # of x[B, T, D]


@dataclass(frozen=True)
class ExpertGroups:
    """The ranks that a mixture talks to.

    Args:
        ep: the ranks that share the experts.
        tp: the tensor-parallel ranks: each has a slice of every expert.
        tokens: all ranks with different tokens of the batch.
        sequence: the ranks with different tokens of one sequence.
        batch_pieces: the parts of the batch that one forward is one of: data-parallel ranks × microbatches.
        sequence_parallel: x is a shard of the sequence over `tp`.
        capacity_over: `rank` or `group`: the tokens that share the capacity of an expert.
    """

    ep: Group = Group()
    tp: Group = Group()
    tokens: Group = Group()
    sequence: Group = Group()
    batch_pieces: int = 1
    sequence_parallel: bool = False
    capacity_over: str = "rank"


class ParallelExperts(Experts):
    """This rank's experts, of each a slice of the width.

    Attributes:
        placements: how `tp` slices each expert.
        shared_by: the ranks that share the experts.
    """

    def __init__(self, serial: Experts, ep: Group, tp: Group) -> None:
        nn.Module.__init__(self)
        self.act, self.shared_by = serial.act, ep
        inner, width = serial.up.shape[1], serial.down.shape[2]
        rows = Shard(1) if inner == width else Fused(1, (width, width), (1, 1))  # gate, up
        self.placements = {"up": rows, "down": Shard(2)}
        for name, placement in self.placements.items():
            whole = getattr(serial, name)
            part = shard(of_experts(whole.detach(), ep), placement, tp)
            setattr(self, name, parameter_like(whole, part))


class ParallelMoE(MoE):
    """The mixture that it replaces, on these ranks. x[B, T, D] → y[B, T, D], of this rank's tokens.

    forward: two all-to-alls of rows over `ep`, one of loads; over `tp` those of a column and a row layer. backward: the
    same.
    """

    def __init__(self, serial: MoE, groups: ExpertGroups) -> None:
        nn.Module.__init__(self)
        self.options, self.groups, self.balances_alone = serial.options, groups, False
        self.router, self.shared, self.dropout = serial.router, serial.shared, serial.dropout
        self.experts = ParallelExperts(serial.experts, groups.ep, groups.tp)
        self.router.partial_gradients = ("weight",) if groups.sequence_parallel else ()

    def mixture(self, x_BTD: Tensor, chosen_BTk: Tensor, gates_BTk: Tensor) -> Tensor:
        tp = self.groups.tp
        if not self.groups.sequence_parallel:
            x_BTD, gates_BTk = identity_all_reduce(x_BTD, tp), identity_all_reduce(gates_BTk, tp)
            return all_reduce_identity(super().mixture(x_BTD, chosen_BTk, gates_BTk), tp)
        x_BTD, gates_BTk = (all_gather_reduce_scatter(x, tp, SEQUENCE_DIM) for x in (x_BTD, gates_BTk))
        chosen_BTk = comm.all_gather(chosen_BTk, tp, SEQUENCE_DIM)
        return reduce_scatter_all_gather(super().mixture(x_BTD, chosen_BTk, gates_BTk), tp, SEQUENCE_DIM)

    def computed(self, rows_RD: Tensor, load_E: Tensor) -> Tensor:
        dispatch = Dispatch.of(load_E, self.groups.ep)
        y_RD = self.experts(dispatch.there(rows_RD), dispatch.arriving_ne.sum(0).tolist())
        return dispatch.home(y_RD)

    def room(self, load_E: Tensor, tokens: int) -> Tensor:
        if self.groups.capacity_over == "rank":
            return super().room(load_E, tokens)
        ep = self.groups.ep
        every = comm.all_gather(torch.cat([load_E, load_E.new_tensor([tokens])])[None], ep)
        capacity = super().room(load_E, int(every[:, -1].sum()))
        return (capacity - every[: ep.rank, :-1].sum(0)).clamp(min=0)

    def over_ranks(self, load: Tensor) -> Tensor:
        over = self.groups.tokens if self.options.balance_over == "batch" else self.groups.sequence
        return comm.all_reduce(load, over)

    def all_rows(self, rows: int) -> int:
        return rows * self.groups.batch_pieces

    @torch.no_grad()
    def bias_change(self) -> Tensor:
        """By how much this step moves the biases of the router, by the loads of all tokens.

        All ranks with tokens must call it. → [E], equal on all of them; 0 where no backward reached the router.
        """
        load = self.router.load
        if load is None:
            load = torch.zeros_like(self.router.bias, dtype=torch.float64)
        load = comm.all_reduce(load, self.groups.tokens)
        return bias_change(load, self.options.bias_rate)


def expert_parallel(model: nn.Module, groups: ExpertGroups) -> nn.Module:
    """Replace each mixture of a model in place, perhaps of a tensor-parallel one; the values are equal on all ranks.

    One with parts of your own stays as it is, where ranks compute it as one process does.

    Raises:
        ValueError: elsewhere.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    made: dict[int, MoE] = {}  # a mixture may be in two places
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, MoE):
                if id(child) not in made:
                    made[id(child)] = _on_ranks(child, groups, paths[id(child)])
                setattr(module, name, made[id(child)])
    return model


def _on_ranks(mixture: MoE, groups: ExpertGroups, path: str) -> MoE:
    own = own_part(mixture, groups.tp.size)
    if not own:
        return ParallelMoE(mixture, groups).train(mixture.training)
    if groups.ep.size == groups.tp.size == 1 and not mixture.options.is_balanced:
        return mixture
    raise ValueError(
        f"{path} has {own} of your own, lost where ranks share or slice experts, or balance their loads: use ep=1, "
        "tp=1 and no balance, or a mixture of lib/moe.py as it is"
    )
