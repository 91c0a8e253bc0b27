"""13.5: the rank at fault in two reports of a hang, and the call that it failed to make."""

from dataclasses import replace

from course.check.exercise import Exercise, with_variants
from course.check.hung import hang_report
from course.check.table import findings
from lib.mesh import MeshShape
from lib.runtime.hang import AwaitedCall

SHAPE = MeshShape(dp=2, pp=2, tp=2)
WHERE = "step.py, line 8, in total: return comm.all_reduce(x, group)"

MISTAKES = """
1 rank: {neighbour}
    rank {neighbour} made the call that it waits in.
        It is the first of the program's three, of 8 elements, so rank {neighbour} is where it should be. Which rank did
        not make that call?
1 rank: {behind}
    rank {behind} waits in the second call for rank {neighbour}, but rank {neighbour} is also held up.
        Which rank does rank {neighbour} wait for?
1 rank: {others}
    that rank waits in the last call of the step, over all ranks, and made every call before. Most of the ranks in a
    report are victims.
        Begin at the call that is earliest in the program.
1 axis: "dp" | "pp" | "world"
    the call that rank {skips} left out is the one that rank {neighbour} waits in: of 8 elements, in a group of the two.
        Neighbours differ along the innermost axis, tp.
2 rank: {wanted}
    it looks like the first, but rank {astray} waits with 64 elements: in the second call, not the first.
        That call goes over dp, and rank {wanted} is not in rank {astray}'s dp group. Rank {wanted} has left nothing
        out.
2 rank: {peer}
    rank {peer} waits in the second call for rank {astray}, its peer on dp, rightly.
        Rank {astray} also waits in a call: with which rank?
2 rank: {rest}
    that rank waits in the last call of the step.
        The mistake is earlier.
2 axis: "tp" | "pp" | "world"
    rank {astray} called along tp, which is too many.
        Missing is the call that rank {peer} waits in: ranks {peer} and {astray} differ along dp.
"""


def peer_of(rank: int, axis: str) -> int:
    """The second rank of its group along this axis."""
    (peer,) = next({*ranks} - {rank} for ranks in SHAPE.groups(axis) if rank in ranks)
    return peer


def report(first: int, size: int, late: int) -> str:
    """Of a hang in which this rank waits with so many elements, its peer on dp for it, and all others for both.

    Args:
        late: the rank that the first one waits for.
    """
    behind = peer_of(first, "dp")
    waits = {}
    for rank in range(8):
        call, missing = {first: (f"[{size}]", (late,)), behind: ("[64]", (first,))}.get(
            rank, ("[]", tuple(sorted((first, behind))))
        )
        peers = (rank, *missing)
        waits[rank] = AwaitedCall(f"all_reduce sum float32{call}", WHERE, peers, missing, for_s=2.0)
    return hang_report(waits)


def row(skips: int, astray: int) -> Exercise:
    """The exercise in which one rank leaves out the first call, and another day one makes the second along tp."""
    neighbour, wanted, peer = peer_of(skips, "tp"), peer_of(astray, "tp"), peer_of(astray, "dp")
    behind = peer_of(neighbour, "dp")
    listed = MISTAKES.format(
        **{"skips": skips, "neighbour": neighbour, "behind": behind},
        others=" | ".join(str(rank) for rank in range(8) if rank not in (skips, neighbour, behind)),
        **{"astray": astray, "wanted": wanted, "peer": peer},
        rest=" | ".join(str(rank) for rank in range(8) if rank not in (astray, wanted, peer)),
    )
    made = findings("13.5", "culprits", "Report", ("rank", "axis"), {"1": (skips, "tp"), "2": (astray, "dp")}, listed)
    reports = report(neighbour, 8, skips), report(astray, 64, wanted)
    task = "The same program hung twice, because of other ranks. The first time:\n\n{}\n\nand the second time:\n\n{}"
    return replace(made, task=task.format(*reports))


EXERCISE = with_variants(replace(row(skips=6, astray=5), task=""), row(skips=1, astray=2), row(skips=3, astray=4))
