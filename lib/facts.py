"""Parameter metadata: how each is sharded, and over which ranks its gradient is reduced. Techniques share only this.

The problem: each technique is right alone and wrong in combination. A clip that sums over the stages ignores the shards
of the matrices; an average over data-parallel ranks ignores that the gradient of a norm is also a sum over shards of
the sequence.
The idea: each parameter carries two facts. *How its value is sharded*: a norm then counts each element once, and a
checkpoint has the full tensor. *Over which ranks its gradient is a sum*: each of them then adds once.

Code that shards a module sets the first (`placements`, `partial_gradients` of the module); `lib/parallel.py`, which has
the mesh, derives the second; code that sums, shards, clips or saves reads them here. All gradients are terms of sums: a
loss is divided by the global count before backward, never by a number of ranks after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lib import comm
from lib.launch import device
from lib.mesh import Group
from lib.placement import Placement, Replicate, all_experts, copies_of, of_experts, shard, unshard


@dataclass(frozen=True, eq=False)
class Fact:
    """The facts of one parameter on this rank.

    Args:
        name: its name in the serial model.
        parameter: the shard on this rank.
        sum_over: the ranks over which its gradient is a sum.
        placement: placement of its value on the ranks of `cut_over`.
        cut_over: the tensor-parallel ranks.
        experts_over: the ranks that share the experts of a stacked weight, along dim 0, before `placement` cuts each.
        copies: ranks with the same shard among those over which a norm is summed and which do not shard it:
            data-parallel ranks, and the second stage of a tied weight.
        stages: the stages on this rank that use it; its gradient is complete after the last backward of each.
        crosses: whether stages of other ranks also use it: waiting for its sum inside a pipeline may then deadlock.
    """

    name: str
    parameter: nn.Parameter
    sum_over: Group
    placement: Placement = Replicate()
    cut_over: Group = Group()
    experts_over: Group = Group()
    copies: int = 1
    stages: tuple[int, ...] = (0,)
    crosses: bool = False

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's shard of the full tensor; a copy, without communication."""
        return shard(of_experts(whole, self.experts_over), self.placement, self.cut_over)

    def whole_of(self, part: Tensor) -> Tensor:
        """The full tensor, from the shards of all ranks, which all must call it."""
        return all_experts(unshard(part, self.placement, self.cut_over), self.experts_over)

    @cached_property
    def held_by(self) -> int | Tensor:
        """Number of ranks that hold each element of this shard; a tensor if it differs between sections."""
        return copies_of(self.placement, self.parameter.shape, self.cut_over) * self.copies

    def square(self, gradient: Tensor, piece: slice | None = None, owners: int = 1) -> Tensor:
        """This rank's share of the squared gradient norm, []: the shares of all ranks add up to the square.

        Squares are taken in float32 at least.

        Args:
            gradient: the full gradient, or the flat `piece` of it on this rank.
            owners: number of ranks that shard each copy: `sum_over.size` if they do, else 1.
        """
        wide = torch.promote_types(gradient.dtype, torch.float32)
        if isinstance(self.held_by, int):
            return torch.linalg.vector_norm(gradient, dtype=wide) ** 2 * (owners / self.held_by)
        each = self.held_by.expand(self.parameter.shape).reshape(-1)[piece or slice(None)].to(gradient.device)
        return (gradient.reshape(-1).to(wide).abs().square() / each).sum() * owners


def check_trains(facts: Iterable[Fact], stages: Group | None = None, is_tied: bool = True) -> None:
    """Check that a model has something to train, and that no weight of two stages is summed over only one.

    Args:
        stages: the ranks of its pipeline stages; all must call it.
        is_tied: whether facts say which stages share a parameter. If not, equal weights count as one, but not if all
            their elements are equal, as in a new norm.

    Raises:
        ValueError: nothing to train, or a weight that two stages may share.
    """
    trained = [fact for fact in facts if fact.parameter.requires_grad]
    rows = int(comm.all_reduce(torch.tensor(len(trained), device=device()), stages or Group(), "max"))
    if not rows:
        raise ValueError("no parameter of this model requires a gradient, so there is nothing to average")
    if is_tied:
        return
    table = torch.zeros(rows, 2, dtype=torch.float64, device=device())  # stage, and a mark of the values
    for row, fact in zip(table, trained, strict=False):
        x = fact.parameter.detach().reshape(-1)
        row[0], row[1] = fact.stages[0], (x - x[:1]).abs().double() @ torch.arange(len(x)).to(table).cos()
    for stage, mark in comm.all_gather(table, stages).tolist():
        for fact, (own, same) in zip(trained, table.tolist(), strict=False):
            if mark == same != 0 and stage not in fact.stages:
                raise ValueError(
                    f"{fact.name} of stage {own:.0f} has the values of a weight of stage {stage:.0f}: if it is one "
                    "weight, shared by (tied in) both, call `tie` of lib/pipeline/stage.py with all stages on every "
                    "rank; if not, start with different values"
                )


def serial_names(model: nn.Module) -> dict[str, tuple[str, torch.Size]]:
    """Key of the `state_dict` of a serial model → the name of its parameter, and its shape.

    Raises:
        ValueError: the state has something else.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    if others := [key for key, x in state.items() if id(x) not in names]:
        raise ValueError(
            f"{others[0]} is in the state of this model, but is no parameter, and a layout saves and loads only these: "
            "use register_buffer(..., persistent=False), or a layer without it"
        )
    return {key: (names[id(p)], p.shape) for key, p in state.items()}
