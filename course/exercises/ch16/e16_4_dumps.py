"""16.4: three dumps of PyTorch's flight recorder: the rank at fault, the call, and the kind of fault."""

from course.check.table import findings

RIGHT = {"A": (2, "tp 5", "late"), "B": (3, "dp 3", "branch"), "C": (1, "tp 5", "order")}

MISTAKES = """
A rank: 0 | 1
    rank {} waits in dp 3. Its peer did not come to this call.
        Follow the waits: who has made fewer calls than the rank that waits for it?
A rank: 3
    rank 3 is in its call tp 5, and waits.
        Its peer in tp is rank 2.
A call: "dp 3"
    dp 3 is the call in which ranks 0 and 1 wait. But an earlier call is missing on the second machine.
        The first call in the order of the program that one rank made and its peer did not.
A call: "all 2"
    all 2 is done on every rank.
        It is the last call that rank 2 made. Asked for is the first that it did not make.
A call: "all 3" | "tp 6"
    no rank came to this call.
        The first call that one rank made and its peer did not.
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
    rank {} made all calls of the program, and waits in the last.
        Which rank is missing in it?
B call: "all 3"
    in all 3 rank 1 is missing, because it waits in dp 3.
        Begin with the call of rank 1.
B call: "tp 5" | "tp 6"
    {} is done on all ranks.
        Compare the numbers of dp.
B call: "dp 2"
    dp 2 is done on all ranks.
        Which number would come next on rank 3?
B kind: "late"
    rank 3 is not late: it made all 3, a later call of the program.
        It came past the place of dp 3 and did not make the call.
B kind: "order"
    rank 3 made no call under this number.
        In a wrong order the same number has different calls.
C rank: 0
    rank 0 made the same call as ranks 2 and 3 on the second machine.
        They run the same program: which rank differs from these three?
C rank: 2 | 3
    rank {} waits for a rank of the first machine, and it did not come.
        Follow the wait.
C call: "dp 3"
    dp 3 is the call in which the second machine waits for the first.
        On this machine an earlier call is not done.
C call: "tp 6"
    neither rank of this machine is at tp 6.
        Both are at the same number, with different calls.
C call: "tp 4"
    tp 4 is done on all ranks.
        Look at the calls that are not done.
C kind: "late"
    both ranks of tp are at the same number.
        Compare their calls.
C kind: "branch"
    rank 1 left out no call: it has as many as its peer.
        It made the second one first.
"""

EXERCISE = findings("16.4", "dumps", "Dump", ("rank", "call", "kind"), RIGHT, MISTAKES, points=3)
