"""Over which ranks the gradient of each parameter is a sum, and how its value is sharded: two facts, from the mesh.

The problem: the ranks over which a gradient must be summed depend on all axes: a norm may work on a shard of the
sequence, an embedding may have a second use on a different stage.
The idea: code that shards a module has left its marks there (`placements`, `partial_gradients`, `used_by`). With the
groups of the mesh, they are enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from torch import nn

from lib.facts import Fact, check_trains
from lib.layout import TOKEN_AXES
from lib.mesh import Group, Mesh
from lib.pipeline.stage import Stage
from lib.placement import parts, with_experts, with_partial_gradients
from lib.tensor_parallel.sequence import check_marks


def facts_of(
    stages: nn.Module | Mapping[int, Stage],
    mesh: Mesh,
    rank_of: Sequence[int] = (0,),
    norm_over: Group | None = None,
    names: Mapping[int, str] | None = None,
) -> list[Fact]:
    """The two facts of each parameter on this rank. All ranks must call it: it may make groups.

    A gradient is a sum over the data-parallel and the context-parallel ranks, which have different tokens; also over
    the tensor-parallel ranks, if a module marks its gradients as partial; and over the ranks of all stages that share
    the weight (`tie`). The tokens that chose an expert came from all ranks that share the experts, so its gradient is a
    sum over the ranks that hold the same expert, and no others.

    Args:
        stages: the stages on this rank, by number, or a model without pipeline stages.
        mesh: mesh with any of the axes dp, pp, cp and tp.
        rank_of: function from a stage to its rank in the pipeline.
        norm_over: the ranks over which the gradient norm will be summed. Default: all. If every data-parallel rank
            holds full sums, one replica is enough: `mesh.group("pp", "tp")`.
        names: `id` of a parameter → its name in the full model. Default: its name in its stage.

    Raises:
        ValueError: nothing to train, weights shared in different ways, or a sharded sequence and a missing mark.
    """
    pieces = {0: stages} if isinstance(stages, nn.Module) else {s: stage.module for s, stage in stages.items()}
    tp, replicas = mesh.group_of_some("tp"), mesh.group_of_some(*TOKEN_AXES)
    replicas_and_slices = mesh.group_of_some(*TOKEN_AXES, "tp")
    partial = set().union(*map(with_partial_gradients, pieces.values()))
    tied = _tied_weights(pieces, mesh, rank_of, partial)
    experts = {key: group for piece in pieces.values() for key, group in with_experts(piece).items()}
    holders = {ep: same_experts(mesh, ep) for ep in experts.values() if ep.size > 1}  # else all replicas do
    counted = set((norm_over or mesh.world).ranks)

    facts: dict[int, Fact] = {}
    for stage, piece in pieces.items():
        if tp.size > 1:
            check_marks(piece)
        placements = {name: placement for name, (_, placement) in parts(piece).items()}
        for name, p in piece.named_parameters():
            if id(p) in facts:  # a different stage on this rank uses it, too
                before = facts[id(p)]
                facts[id(p)] = replace(before, stages=(*before.stages, stage))
                continue
            serial, users = tied.get((stage, name), (name, None))
            serial = names[id(p)] if names else serial
            is_partial = id(p) in partial
            ep = experts.get(id(p), Group())
            sum_over = users or holders.get(ep) or (replicas_and_slices if is_partial else replicas)
            in_the_norm = len(counted.intersection(sum_over.ranks))
            copies = in_the_norm // tp.size if is_partial else in_the_norm
            facts[id(p)] = Fact(
                serial,
                p,
                sum_over,
                placement=placements[name],
                cut_over=tp,
                experts_over=ep,
                copies=copies,
                stages=(stage,),
                crosses=users is not None,
            )
    in_order = _crossing_by_name(list(facts.values()))
    check_trains(in_order, mesh.group_of_some("pp"), all(hasattr(piece, "used_by") for piece in pieces.values()))
    return in_order


def same_experts(mesh: Mesh, ep: Group) -> Group:
    """The ranks that hold the same experts as this one, if the ranks of `ep` share them."""
    return mesh.fold(*TOKEN_AXES, inner=ep.size, names=("ep", "edp"))[1]


def _tied_weights(
    pieces: Mapping[int, nn.Module], mesh: Mesh, rank_of: Sequence[int], partial: Collection[int]
) -> dict[tuple[int, str], tuple[str, Group | None]]:
    """(stage, name) of a weight that several stages use → its serial name, and the ranks of all its users.

    The ranks are None if one rank has all its users: then its gradient is a sum like any other.
    """
    used_by = next((piece.used_by for piece in pieces.values() if hasattr(piece, "used_by")), [])
    tied: dict[tuple[int, str], tuple[str, Group | None]] = {}
    stages_on: dict[tuple[int, ...], list[int]] = {}  # ranks → the stages that share a weight there
    for users in used_by:
        ranks, group = tuple(sorted({rank_of[stage] for stage in users})), None
        if len(ranks) > 1:
            first = stages_on.setdefault(ranks, [*users])
            if first != [*users]:  # they share buckets
                raise ValueError(
                    f"stages {first} share a weight, {[*users]} another, all on ranks {ranks}: cut them alike"
                )
            here = [pieces[stage].get_parameter(name) for stage, name in users.items() if stage in pieces]
            is_partial = any(id(p) in partial for p in here)
            also = ("tp",) if is_partial else ()
            group = mesh.group_of_some(*TOKEN_AXES, "pp", *also, among={"pp": ranks})
        serial, *_ = users.values()
        tied |= {(stage, name): (serial, group) for stage, name in users.items()}
    return tied


def _crossing_by_name(facts: list[Fact]) -> list[Fact]:
    """The facts, in which those that cross ranks stand in the order of their names: the same on all these ranks."""
    crossing = iter(sorted((fact for fact in facts if fact.crosses), key=attrgetter("name")))
    return [next(crossing) if fact.crosses else fact for fact in facts]
