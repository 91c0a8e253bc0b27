"""13.1: all groups of a mesh along one axis, or along several."""

from itertools import product
from math import prod

import torch

from course.check.edits import exercise
from course.check.exercise import call, ranks_in, whole


def inputs(generator, n):
    """The eight ranks of the chapter first: a FAIL shows the first wrong groups."""
    eight, x, y = {"dp": 2, "pp": 2, "tp": 2}, whole(generator, 2, 4), whole(generator, 2, 5)
    cases = [(eight, (axis,)) for axis in eight]
    cases += [({"pp": 3, "dp": x, "tp": 2}, ("dp",)), ({"dp": 2, "pp": 3, "tp": y}, ("pp",))]
    cases += [({"dp": 2, "pp": 3, "tp": y}, ("dp", "tp")), ({"tp": 2, "dp": 3, "pp": x}, ("pp", "dp"))]
    cases += [({"dp": 2, "cp": 3, "pp": 1, "tp": 2}, ("cp", "dp")), ({"dp": 3, "pp": 2}, ("dp", "pp"))]
    return [{"cases": cases}]


def body(answer, group, given):
    """Groups in one form, in any order; and whether the ranks of each ascend."""
    found, ascend = {}, True
    for sizes, axes in given["cases"]:
        written = answer(dict(sizes), axes)
        try:
            groups = [ranks_in(ranks) for ranks in written]
        except TypeError:
            groups = [type(written).__name__]
        ascend = ascend and all([*ranks] == sorted(ranks) for ranks in groups)
        texts = [ranks if isinstance(ranks, str) else str(sorted(ranks)) for ranks in groups]
        found[call("mesh_groups", (sizes, axes))] = " ".join(sorted(texts, key=lambda text: (len(text), text)))
    return found | {"ranks within each group": "ascending" if ascend else "in a different order"}


def mesh_groups(sizes, axes):
    groups = {}
    places = product(*(range(n) for n in sizes.values()))
    for rank, place in enumerate(places):
        here = zip(sizes, place)
        others = tuple(i for axis, i in here if axis not in axes)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def by_reshape(sizes, axes):
    """As torch's DeviceMesh does it; a tensor."""
    box = torch.arange(prod(sizes.values())).reshape(*sizes.values())
    dims = sorted(range(box.dim()), key=lambda i: list(sizes)[i] in axes)
    return box.permute(dims).reshape(-1, prod(sizes[axis] for axis in axes))


MISTAKES = """
sizes.values() => reversed(sizes.values())
zip(sizes, place) => zip(reversed(sizes), place)
    You count along the first axis first.
        Here the last axis is the innermost: rank + 1 is the next place on it, so tp, named last, has consecutive ranks
        and stays on one node.
sizes.values() => [sizes[axis] for axis in sorted(sizes)]
zip(sizes, place) => zip(sorted(sizes), place)
    Right as long as the names of the axes are in alphabetical order, as dp, pp, tp are.
        `sizes` names them from the outermost; ranks are counted in that order.
tuple(i for axis, i in here if axis not in axes) => rank // prod(sizes[axis] for axis in axes)
    Every group of yours has consecutive ranks.
        That holds only for the innermost axis. On any outer axis, neighbours are as far apart as all axes to the right
        of it have ranks together.
=> rank % prod(sizes[axis] for axis in sizes if axis not in axes)
    You treat every axis as the outermost: the members of each group are world/n ranks apart.
        Between two neighbours on an axis are only the ranks of the axes to the right of it.
returns result[:1]
    You return the group of rank 0 alone.
        All ranks make all groups together, so each needs the list of all of them.
returns [ranks for ranks in result for _ in ranks]
    Each group appears once for every member.
        Ranks that differ only along the axes asked for share one group.
axis not in axes => axis in axes
    You made the groups of everything but the axes asked for.
        Along an axis only the coordinate on that axis differs.
=> axis != axes[0]
or
=> axis != axes[-1]
    Of several axes you take only one.
        A joint group holds every combination of coordinates on them, n₁ · n₂ ranks.
returns [ranks for axis in axes for ranks in mesh_groups(sizes, [axis])]
    For several axes your groups overlap: you return the lines along each axis.
        A gradient that is summed over dp×tp needs one group with all n₁ · n₂ ranks, and each rank is in exactly one.
returns [ranks[::-1] for ranks in result]
    The groups are right, but within a joint group the ranks do not ascend.
        The place in that list is the rank within the group: if it depends on the order in which the axes are named,
        dp×tp and tp×dp cut a tensor differently.
"""

ALSO_RIGHT = """
list(groups.values()) => map(set, reversed(groups.values()))
    Sets, the last axis first.
"""

EXERCISE = exercise(globals(), points=2, right=(mesh_groups, by_reshape), ranks=(1,))
