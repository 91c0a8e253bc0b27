"""The two facts of each parameter, from the mesh: how its value is sharded, and over which ranks its gradient is a sum.

The problem: the ranks over which a gradient must be summed depend on all axes: a norm may work on a shard of the
sequence, an embedding may have a second use on a different stage.
The idea: code that shards a module has left its marks there (`placements`, `partial_gradients`, `used_by`). With the
groups of the mesh, they are enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from torch import nn

from lib.facts import Fact, check_trains
from lib.layout import AXES
from lib.mesh import Group, Mesh
from lib.pipeline.stage import Stage
from lib.placement import parts, with_partial_gradients
from lib.tensor_parallel.sequence import check_marks


def facts_of(
    stages: nn.Module | Mapping[int, Stage], mesh: Mesh, rank_of: Sequence[int] = (0,), norm_over: Group | None = None
) -> list[Fact]:
    """The two facts of each parameter on this rank. All ranks must call it: it may make groups.

    A gradient is a sum over the data-parallel ranks; also over the tensor-parallel ranks, if a module marks its
    gradients as partial; and over the ranks of all stages that share the weight (`tie`).

    Args:
        stages: the stages on this rank, by number, or a model without pipeline stages.
        mesh: mesh with any of the axes dp, pp and tp.
        rank_of: function from a stage to its rank in the pipeline.
        norm_over: the ranks over which the gradient norm will be summed. Default: all. If every data-parallel rank
            holds full sums, one replica is enough: `mesh.group("pp", "tp")`.

    Raises:
        ValueError: nothing to train, weights shared in different ways, or a sharded sequence and a missing mark.
    """
    counted = (norm_over or mesh.world).ranks
    pieces = {0: stages} if isinstance(stages, nn.Module) else {s: stage.module for s, stage in stages.items()}
    rows, pipeline, cut = ([axis] if axis in mesh.shape.axes else [] for axis in AXES)
    tp, over, over_slices = (_group(mesh, axes) for axes in (cut, rows, rows + cut))
    slices = set().union(*map(with_partial_gradients, pieces.values()))
    used_by = next((piece.used_by for piece in pieces.values() if hasattr(piece, "used_by")), [])
    tied: list[tuple[dict[int, str], Group | None]] = []  # the users of a weight; their ranks, if there are several
    alike: dict[tuple[int, ...], list[int]] = {}
    for users in used_by:
        ranks = tuple(sorted({rank_of[s] for s in users}))
        of_slices = {id(pieces[s].get_parameter(name)) for s, name in users.items() if s in pieces} & slices
        axes = [*rows, "pp", *(cut if of_slices else [])]
        tied.append((users, _group(mesh, axes, {"pp": ranks}) if len(ranks) > 1 else None))
        if len(ranks) > 1 and (same := alike.setdefault(ranks, [*users])) != [*users]:  # they share buckets
            raise ValueError(
                f"stages {same} share a weight, {[*users]} another, all on ranks {ranks}: cut them alike"
            )
    found: dict[int, Fact] = {}
    for number, piece in pieces.items():
        if tp.size > 1:
            check_marks(piece)
        placements = {name: placement for name, (_, placement) in parts(piece).items()}
        shared = {users[number]: (next(iter(users.values())), both) for users, both in tied if number in users}
        for name, p in piece.named_parameters():
            if id(p) in found:  # by a different stage on this rank
                found[id(p)] = replace(found[id(p)], stages=(*found[id(p)].stages, number))
                continue
            serial, both = shared.get(name, (name, None))
            sums = both or (over_slices if id(p) in slices else over)
            copies = len(set(sums.ranks) & set(counted)) // (tp.size if id(p) in slices else 1)
            uses = {"copies": copies, "stages": (number,), "crosses": both is not None}
            found[id(p)] = Fact(serial, p, sums, placement=placements[name], cut_over=tp, **uses)
    crossing = iter(sorted((fact for fact in found.values() if fact.crosses), key=attrgetter("name")))
    facts = [next(crossing) if fact.crosses else fact for fact in found.values()]  # in the same order on all ranks
    check_trains(facts, _group(mesh, pipeline), all(hasattr(piece, "used_by") for piece in pieces.values()))
    return facts


def _group(mesh: Mesh, axes: list[str], among: dict | None = None) -> Group:
    """The group along these axes; of only this rank if there are none."""
    return mesh.group(*axes, among=among) if axes else Group(ranks=(mesh.world.global_rank,))
