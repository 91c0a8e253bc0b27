"""13.2: the ranks over which a parameter's gradient is a sum."""

import torch

from course.check.edits import exercise
from course.check.exercise import call, ranks_in, whole
from lib.mesh import MeshShape

CUT = ("column weight", "column bias", "row weight")
REPLICATED = ("norm", "row bias", "positions")
TIED = "embedding"


def inputs(generator, n):
    """Each kind with and without sequence parallelism; the eight ranks of the chapter first, then one stage."""

    def case(sizes, kind, slices):
        """For a rank whose stage has such a parameter."""
        here = {axis: whole(generator, 0, size) for axis, size in sizes.items()}
        ends = {"positions": 0, TIED: (sizes["pp"] - 1) * whole(generator, 0, 2)}
        return sizes, MeshShape(**sizes).rank(**here | {"pp": ends.get(kind, here["pp"])}), kind, slices

    meshes = ({"dp": 2, "pp": 2, "tp": 2}, {"dp": 2, "pp": 4, "tp": 2}, {"pp": 3, "tp": 3, "dp": 2})
    kinds = (*CUT, *REPLICATED, TIED)
    cases = [case(sizes, kind, slices) for sizes in meshes for kind in kinds for slices in (False, True)]
    return [{"cases": [*cases, case({"dp": 3, "pp": 1, "tp": 2}, TIED, True)]}]


def body(answer, group, given):
    found = {}
    for sizes, *case in given["cases"]:
        ranks = ranks_in(answer(dict(sizes), *case))
        found[call("ranks_to_sum", (sizes, *case))] = str(sorted(ranks)) if isinstance(ranks, list) else ranks
    return found


def ranks_to_sum(sizes, rank, kind, sequence_parallel):
    shape = MeshShape(**sizes)
    axes, among = ["dp"], None
    if kind in ("norm", "row bias", "positions") and sequence_parallel:
        axes = ["dp", "tp"]
    if kind == "embedding":
        axes, among = ["dp", "pp"], {"pp": (0, sizes["pp"] - 1)}
    groups = shape.groups(*axes, among=among)
    return next(ranks for ranks in groups if rank in ranks)


def by_places(sizes, rank, kind, slices):
    """A tensor, descending."""
    shape = MeshShape(**sizes)
    places = {axis: [i] for axis, i in shape.coordinates(rank).items()} | {"dp": range(sizes["dp"])}
    if kind == TIED:
        places["pp"] = 0, sizes["pp"] - 1
    elif slices and kind in REPLICATED:
        places["tp"] = range(sizes["tp"])
    ranks = range(shape.size)[::-1]
    return torch.tensor([r for r in ranks if all(i in places[axis] for axis, i in shape.coordinates(r).items())])


MISTAKES = """
returns [r for r in result if r != rank]
    Your lists leave out the rank itself. Its own gradient is a term of the sum.
        Return the ranks with this one.
axes = ["dp", "tp"] => axes = ["dp"]
    With sequence parallelism you sum norms, row biases and positions over dp alone.
        Each tp rank applied them to its own tokens, so each has a partial gradient: dp×tp.
("norm", "row bias", "positions") => ("norm",)
    Norms are right, but with sequence parallelism row biases and positions are added to a slice of the tokens as well.
        Their gradients are also partial on each tp rank.
=> ("norm", "row bias")
    Positions are missing.
        With sequence parallelism a tp rank looks up only its slice's, so tp is in their sum as well.
and sequence_parallel: => :
    You add tp without sequence parallelism.
        Then all tp ranks process all tokens, and each has the full gradient of a norm already: a sum over tp makes it t
        times too large.
kind in ("norm", "row bias", "positions") and sequence_parallel => sequence_parallel
["dp", "pp"] => [*axes, "pp"]
    With sequence parallelism you sum everything over tp, also cut matrices.
        The ranks of tp hold different elements of a cut matrix: only what they hold alike adds up.
("norm", "row bias", "positions") => ("norm", "row bias", "column bias", "positions")
    You treat every bias as replicated. The bias of a column layer belongs to its output features, and they are cut over
    tp: each rank has its own elements.
        Only the bias of a row layer is replicated.
["dp", "pp"], {"pp": (0, sizes["pp"] - 1)} => ["dp"], None
    The embedding is tied: the first stage looks tokens up in it, the last stage multiplies with it.
        You sum over the replicas of one of these uses. Its gradient is the sum over both stages.
=> ["dp", "pp"], None
    You sum the tied embedding over all stages.
        Only the first and the last use it; the others have nothing to add.
["dp", "pp"] => ["pp"]
    The tied embedding is summed over its stages alone.
        The dp ranks processed different sequences: their gradients add up too.
shape.groups(*axes, among=among) => shape.groups("dp", "pp", "tp")
    You sum over the whole world.
        Ranks of different stages hold different layers, and ranks along tp different shards of a matrix: an all-reduce
        would add gradients of unrelated weights.
=> shape.groups(*{*axes, "pp"})
    You sum over dp and pp. Stages hold different layers.
        Only the tied embedding adds up along pp.
axes, among = ["dp"], None => axes, among = ["tp"], None
axes = ["dp", "tp"] => axes = ["tp"]
["dp", "pp"] => ["tp", "pp"]
    You sum along the wrong axis.
        It is tp where it should be dp: replicas differ in their dp coordinate.
lambda sizes, *rest: by_places({axis: sizes[axis] for axis in ("dp", "pp", "tp")}, *rest)
    Right as long as the axes are dp, pp, tp.
        `sizes` names them from the outermost; ranks are counted in that order.
"""

EXERCISE = exercise(globals(), points=2, right=(ranks_to_sum, by_places), ranks=(1,))
