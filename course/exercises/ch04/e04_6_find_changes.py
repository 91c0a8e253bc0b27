"""04.6: three runs of a ZeRO-2 program that one rank ran with a changed line: which rank, and which change?"""

from dataclasses import replace

from course.check.exercise import Exercise, with_variants
from course.check.table import findings

HEAD = """
           norms of the microbatch gradients                      weights  weights
run  step  rank 0      rank 1      rank 2      rank 3      norm   changed  that differ
right  1   1.31 1.55   1.29 1.56   1.04 0.92   1.93 1.23   0.647   51      none
right  2   1.17 1.65   0.91 1.57   1.37 1.99   2.06 1.76   1.224   51      none
"""

OTHER_RANK = {  # change -> hints for another rank
    "of a shard": """
{run} rank: {other_ranks}
    no weight in that rank's shard differs in the first step that is wrong.
        Count along the flat parameter: each owns 13 elements.
""",
    "of a gradient": """
{run} rank: {other_ranks}
    that rank's gradients are right in step 1, and differ in step 2 as all weights do.
        Look for the first difference.
""",
}
REPLICAS = """
{run} change: "g"
    with that change one rank would keep its first weights, and its model would differ from the others.
"""
ON_A_SHARD = """
{run} change: "a" | "b" | "e" | "f"
    that change acts on a shard, after the reduce-scatter.
        Here a gradient is wrong before it is sent, in step 1.
"""
FROM_STEP_1 = """
{run} change: "a" | "b"
    that change makes no difference in step 1: sums begin with zeros there, and the momentum is empty.
        Step 1 is wrong.
{run} change: "c" | "d" | "h"
    that change is in a rank's gradient before it is reduced.
        All gradients of step 1 and their norm are right.
"""
OTHER_CHANGE = {  # change -> hints for the other changes
    "b": """
{run} change: "a"
    with that change step 2 would add to the gradients of step 1.
        The norm of step 2 is right.
{run} change: "c" | "d" | "h"
    that change is in the gradient of a rank before it is reduced.
        All gradients are right in both steps.
{run} change: "e"
    step 1 is right, and its norm is above 0.5: it was clipped.
        A wrong factor would be seen there.
{run} change: "f"
    with that change no rank gets the new shard in step 1.
        All weights of step 1 are right.
""",
    "c": """
{run} change: "d"
    with that change the first gradient of step 1 would be right.
        Both are twice as large.
{run} change: "h"
    with that change both gradients of step 1 would come from rank {next_rank}.
        Compare with those of that rank.
"""
    + ON_A_SHARD,
    "d": """
{run} change: "c"
    with that change both gradients of step 1 would be twice as large: neither loss is divided.
        The first is right.
{run} change: "h"
    with that change both gradients of step 1 would come from rank {next_rank}.
        The first is its own.
"""
    + ON_A_SHARD,
    "e": FROM_STEP_1
    + """
{run} change: "f"
    with that change the weights of the shard would be the old ones.
        Step 1 changed all 51 weights.
""",
    "f": FROM_STEP_1
    + """
{run} change: "e"
    with that change the shard would take a step of a wrong length.
        Step 1 left its weights as they were.
""",
}


def row(right: dict[str, tuple[int, str]], table: str = "") -> Exercise:
    """The exercise with these runs: of each the rank and the change, and its lines of the table."""
    listed = ""
    for run, (rank, change) in right.items():
        where = "of a gradient" if change in "cdh" else "of a shard"
        listed += (OTHER_RANK[where] + OTHER_CHANGE[change] + REPLICAS).format(
            run=run, other_ranks=" | ".join(str(r) for r in range(4) if r != rank), next_rank=(rank + 1) % 4
        )
    made = findings("04.6", "find_changes", "Run", ("rank", "change"), right, listed)
    return replace(made, task=f"The runs A, B and C are these.\n\n```text{HEAD}{table.strip()}\n```")


EXERCISE = with_variants(
    replace(row({"A": (2, "b"), "B": (1, "d"), "C": (3, "e")}), task=""),
    row(
        {"A": (0, "f"), "B": (3, "d"), "C": (1, "b")},
        """
A      1   1.31 1.55   1.29 1.56   1.04 0.92   1.93 1.23   0.647   38      up.weight 13
A      2   1.18 1.65   0.92 1.57   1.37 1.99   2.06 1.75   1.222   51      all 51
B      1   1.31 1.55   1.29 1.56   1.04 0.92   1.93 2.14   0.667   51      all 51
B      2   1.17 1.64   0.92 1.57   1.36 1.98   2.96 2.53   2.080   51      all 51
C      1   1.31 1.55   1.29 1.56   1.04 0.92   1.93 1.23   0.647   51      none
C      2   1.17 1.65   0.91 1.57   1.37 1.99   2.06 1.76   1.224   51      up.weight 11, up.bias 2
""",
    ),
    row(
        {"A": (1, "e"), "B": (2, "c"), "C": (0, "b")},
        """
A      1   1.31 1.55   1.29 1.56   1.04 0.92   1.93 1.23   0.647   51      up.weight 11, up.bias 2
A      2   1.17 1.65   0.91 1.57   1.37 1.99   2.06 1.76   1.224   51      all 51
B      1   1.31 1.55   1.29 1.56   2.09 1.83   1.93 1.23   0.930   51      all 51
B      2   1.17 1.65   0.91 1.57   2.75 3.98   2.05 1.76   1.804   51      all 51
C      1   1.31 1.55   1.29 1.56   1.04 0.92   1.93 1.23   0.647   51      none
C      2   1.17 1.65   0.91 1.57   1.37 1.99   2.06 1.76   1.224   51      up.weight 13
""",
    ),
)
