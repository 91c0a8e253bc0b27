"""16.4: three dumps of PyTorch's flight recorder: the rank at fault, the call, and the kind of fault."""

import re
from dataclasses import replace

from course.check.exercise import several
from course.check.table import findings

RIGHT = {"A": (2, "tp 5", "late"), "B": (3, "dp 3", "branch"), "C": (1, "tp 5", "order")}

MISTAKES = """
A rank: 0 | 1
    rank {} waits in dp 3. Its peer did not come to this call.
        Follow the waits: who has made fewer calls than the rank that waits for it?
A rank: 3
    rank 3 made its calls tp 5 and tp 6, and waits.
        Its peer in tp is rank 2.
A call: "tp 6" | "dp 3" | "all 3"
    rank 2 did not make {}, but it is not the first: an earlier call is missing, too.
        The first call in the order of the program that one rank made and its peer did not.
A call: "all 2"
    all 2 is done on every rank.
        It is the last call that rank 2 made. Asked for is the first that it did not make.
A kind: "branch"
    rank 2 made no later call, so no call shows a different branch.
        It ended all 2 like every rank, and did not come to the next call.
A kind: "order"
    no two ranks made different calls under the same number.
        Rank 2 made none at all since all 2.
B rank: 1
    rank 1 waits in dp 3, as the program wants it. Its peer there is rank 3.
        Which calls did rank 3 make?
B rank: 0 | 2
    rank {} made all calls of the program, in their order, and waits in the next step.
        Which rank does not come to this step, and for whom does that rank wait?
B call: "all 4" | "tp 7" | "tp 8"
    rank 1 did not come to {}, because it waits in dp 3.
        Begin with the call in which rank 1 waits.
B call: "dp 4"
    rank 3 made no dp 4, but it is not the first call of dp that it left out.
        Which number of dp comes after dp 2?
B call: "tp 5" | "tp 6" | "all 3"
    {} is done on all ranks.
        Compare the numbers of dp.
B call: "dp 2"
    dp 2 is done on all ranks.
        Which number would come next on rank 3?
B kind: "late"
    rank 3 is not late: it made all 3, a later call of the program, and went on.
        It came past the place of dp 3 and did not make the call.
B kind: "order"
    rank 3 did not make dp 3 later, either: it waited for its last call of this step, and made the next step.
        In a wrong order all calls are there.
C rank: 0
    rank 0 made its calls as ranks 2 and 3 on the second machine did.
        They run the same program: which rank differs from these three?
C rank: 2 | 3
    rank {} waits for a rank of the first machine, and it did not come.
        Follow the wait.
C call: "dp 3" | "all 3"
    {} is a call in which the second machine waits for the first.
        On this machine an earlier call is not done.
C call: "tp 6"
    the two ranks of this machine have different calls at tp 6, too, but it is not the first.
        Compare them from the first that is not done.
C call: "tp 4" | "dp 2" | "all 2"
    {} is done on all ranks.
        Look at the calls that are not done.
C kind: "late"
    both ranks of tp have made two calls of this step.
        Compare the two, one by one.
C kind: "branch"
    rank 1 left out no call: it made both calls of tp, as its peer did.
        It made the second one first.
"""

TABLE = findings("16.4", "dumps", "Dump", ("rank", "call", "kind"), RIGHT, MISTAKES, points=3)


def body(answer, group, given):
    """A call may also be written `tp5`, `("tp", 5)`, or as in the dump, with its name behind it."""

    def as_asked():
        result = answer()
        rows = several(result, len(RIGHT))
        if not all(isinstance(row, (list, tuple)) and len(row) == 3 for row in rows):
            return result
        return [(rank, spelled(call), kind) for rank, call, kind in rows]

    return TABLE.body(as_asked, group, given)


def spelled(call):
    written = " ".join(map(str, call)) if isinstance(call, (list, tuple)) else call
    found = isinstance(written, str) and re.match(r"\s*([a-z]+)\W*(\d+)\b", written, re.IGNORECASE)
    return f"{found[1]} {found[2]}" if found else call


def in_other_words():
    return (2, "tp5", "Late"), [3, ("dp", 3), "branch"], (1, "TP 5 broadcast", " order")


EXERCISE = replace(TABLE, body=body, right=(*TABLE.right, in_other_words))
