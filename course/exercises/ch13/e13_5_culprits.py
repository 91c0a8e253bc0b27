"""13.5: the rank at fault in two reports of a hang, and the call that it failed to make."""

from course.check.table import findings

RIGHT = {"1": (6, "tp"), "2": (5, "dp")}

MISTAKES = """
1 rank: 7
    rank 7 made the call that it waits in.
        It is the first of the program's three, of 8 elements, so rank 7 is where it should be. Which rank did not make
        that call?
1 rank: 3
    rank 3 waits in the second call for rank 7, but rank 7 is also held up.
        Which rank does rank 7 wait for?
1 rank: 0 | 1 | 2 | 4 | 5
    that rank waits in the last call of the step, over all ranks, and made every call before. Most of the ranks in a
    report are victims.
        Begin at the call that is earliest in the program.
1 axis: "dp" | "pp" | "world"
    the call that rank 6 left out is the one that rank 7 waits in: of 8 elements, in a group of ranks 6 and 7.
        Neighbours differ along the innermost axis, tp.
2 rank: 4
    it looks like the first, but rank 5 waits with 64 elements: in the second call, not the first.
        That call goes over dp, and rank 4 is not in rank 5's dp group. Rank 4 has left out nothing.
2 rank: 1
    rank 1 waits in the second call for rank 5, its peer on dp, rightly.
        Rank 5 also waits in a call: with which rank?
2 rank: 0 | 2 | 3 | 6 | 7
    that rank waits in the last call of the step.
        The mistake is earlier.
2 axis: "tp" | "pp" | "world"
    rank 5 called along tp, which is too many.
        Missing is the call that rank 1 waits in: ranks 1 and 5 differ along dp.
"""

EXERCISE = findings("13.5", "culprits", "Report", ("rank", "axis"), RIGHT, MISTAKES)
