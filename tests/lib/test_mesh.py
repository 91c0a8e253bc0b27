"""The arithmetic of a mesh, and the groups that ranks get from it."""

import sys
from itertools import product

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from lib import comm
from lib.launch import MismatchError, RankError, run
from lib.mesh import Group, Mesh, MeshShape, second_lane

AXES = ("dp", "pp", "tp")

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(("dp", "pp", "tp"), list(product((1, 2, 3), repeat=3)))
def test_every_rank_has_one_place(dp, pp, tp):
    shape = MeshShape(dp=dp, pp=pp, tp=tp)
    assert shape.size == dp * pp * tp
    places = list(product(range(dp), range(pp), range(tp)))  # tp innermost
    for rank, place in enumerate(places):
        here = dict(zip(AXES, place, strict=True))
        assert shape.coordinates(rank) == here and shape.rank(**here) == rank
    for axis in AXES:
        groups = shape.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(shape.size))
        for group in groups:
            assert [shape.coordinates(rank)[axis] for rank in group] == list(range(shape.sizes[axis]))
            rest = [{a: x for a, x in shape.coordinates(rank).items() if a != axis} for rank in group]
            assert all(r == rest[0] for r in rest)


def test_neighbours_along_tp_are_neighbours():
    assert MeshShape(dp=2, pp=2, tp=2).groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert MeshShape(dp=2, pp=2, tp=2).groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert MeshShape(dp=2, pp=2, tp=2).groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "2", None])
def test_a_shape_is_made_of_whole_numbers(bad):
    with pytest.raises(ValueError, match="tp=.* must be a whole number of at least 1"):
        MeshShape(tp=bad)


def test_bad_input():
    shape = MeshShape(dp=2, pp=1, tp=2)
    for rank in (4, -1):
        with pytest.raises(ValueError, match=f"rank {rank} is not on a mesh of 4 ranks"):
            shape.coordinates(rank)
    for place in ({"dp": 2}, {"tp": -1}, {"pp": 1}):
        (axis, i), *_ = place.items()
        with pytest.raises(ValueError, match=f"{axis}={i} is not on"):
            shape.rank(**place)
    with pytest.raises(ValueError, match="the mesh has no axis 'sp'; it has dp, pp, tp"):
        shape.groups("sp")
    with pytest.raises(ValueError, match="the mesh has no axis 'sp'"):
        Mesh(MeshShape(dp=1), Group()).group("sp")
    with pytest.raises(ValueError, match="dp=2 x pp=1 x tp=2 needs 4 ranks, but the run has 1"):
        Mesh(shape, Group())
    with pytest.raises(ValueError, match="needs the group of all ranks"):
        Mesh(MeshShape(dp=2), Group("tp", (2, 3), 0))


def test_a_world_of_one_needs_no_process_group():
    mesh = Mesh(MeshShape(dp=1, pp=1, tp=1), Group())
    assert [mesh.group(axis) for axis in AXES] == [Group(axis) for axis in AXES]
    assert mesh.group("dp").size == 1 and mesh.group("dp").global_rank == 0


@pytest.mark.usefixtures("machine")
def test_groups_in_a_run():
    def asks(world):
        wide = Mesh(MeshShape(dp=2, pp=1, tp=2), world)
        long = Mesh(MeshShape(dp=1, pp=4, tp=1), world)  # two meshes at once
        groups = [mesh.group(axis) for mesh in (wide, long) for axis in AXES]
        sums = [comm.all_reduce(torch.tensor(world.rank), g).item() for g in groups]
        return [(g.axis, g.ranks, g.rank, g.global_rank) for g in groups], sums

    for rank, (groups, sums) in enumerate(run(asks, 4)):
        row, column = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        everyone, alone = (0, 1, 2, 3), (rank,)
        want = [column, alone, row, alone, everyone, alone]
        assert groups == [(a, r, r.index(rank), rank) for a, r in zip(AXES * 2, want, strict=True)]
        assert sums == [sum(r) for r in want]


@pytest.mark.usefixtures("machine")
def test_a_mesh_that_does_not_fit_the_run():
    with pytest.raises(RankError, match="ValueError: dp=2 x pp=1 x tp=2 needs 4 ranks, but the run has 3"):
        run(lambda world: Mesh(MeshShape(dp=2, pp=1, tp=2), world), 3)


def test_joint_groups_and_groups_among_some():
    shape = MeshShape(dp=2, pp=3, tp=2)
    assert shape.groups("dp", "tp") == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]
    assert shape.groups("dp", "pp", among={"pp": (0, 2)}) == [(0, 4, 6, 10), (1, 5, 7, 11)]
    assert MeshShape(tp=2, dp=2).groups("tp") == [(0, 2), (1, 3)], "the order of the names is that of the axes"

    def asks(world):
        mesh = Mesh(MeshShape(dp=2, pp=1, tp=2), world)
        joint, same = mesh.group("dp", "tp"), mesh.group("dp", "pp")
        one = mesh.group("dp", "tp", among={"tp": (1,)})
        total = comm.all_reduce(torch.tensor(world.rank), joint).item()
        return joint.axis, joint.ranks, total, same.axis, same.pg is mesh.group("dp").pg, one and one.ranks

    for rank, found in enumerate(run(asks, 4)):
        assert found == ("dp×tp", (0, 1, 2, 3), 6, "dp", True, (1, 3) if rank % 2 else None)


def test_a_second_lane_has_an_order_of_its_own():
    """Two ranks call in different orders on two lanes of one group: no mismatch, and both sums are right."""

    def calls(world):
        other = second_lane(world)
        lanes = [world, other] if world.rank else [other, world]
        pending = [comm.all_reduce_start(torch.tensor(float(lane is other)), lane) for lane in lanes]
        return [one.wait().item() for one in pending]

    assert run(calls, 2) == [[2, 0], [0, 2]]


def test_groups_are_made_by_their_members_whatever_a_rank_made_before():
    """torch would name them by the number of groups of a rank, and these ranks would wait forever."""

    def works(world):
        if world.rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        meshes = [Mesh(MeshShape(pp=2, dp=2), world), Mesh(MeshShape(pp=2, dp=2), world)]
        groups = [mesh.group("pp") for mesh in meshes]
        if world.rank < 2:  # of the first stage alone
            groups.append(second_lane(meshes[1].group("dp")))
        if world.rank in (0, 3):
            groups.append(second_lane(Group("ends", (0, 3), world.rank // 3)))
        groups += [second_lane(world), second_lane(groups[0]), second_lane(groups[0])]
        assert len({group.channel for group in groups}) == len(groups)
        return [comm.all_reduce(torch.tensor(world.rank), group).item() for group in groups]

    assert run(works, 4) == [[2, 2, 1, 3, 6, 2, 2], [4, 4, 1, 6, 4, 4], [2, 2, 6, 2, 2], [4, 4, 3, 6, 4, 4]]


def test_meshes_built_in_different_orders_are_named():
    def works(world):
        shapes = MeshShape(dp=2, tp=2), MeshShape(dp=2, pp=2)
        for shape in shapes if world.rank else shapes[::-1]:
            Mesh(shape, world)

    with pytest.raises(MismatchError, match=r"(?s)ranks 0, 2\) for dp of dp=2 x pp=2.*\) for dp of dp=2 x tp=2"):
        run(works, 4)
