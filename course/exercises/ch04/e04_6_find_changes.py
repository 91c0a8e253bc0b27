"""04.6: three runs of a ZeRO-2 program that one rank ran with a changed line: which rank, and which change?"""

from course.check.table import findings

RIGHT = {"A": (2, "b"), "B": (1, "d"), "C": (3, "e")}

MISTAKES = """
A rank: 0
    rank 0 owns the first 13 weights, all of up.weight.
        No weight of up.weight differs.
A rank: 1
    rank 1 owns 11 weights of up.weight and the first 2 of up.bias.
        In up.bias 4 of 6 differ, and in up.weight none.
A rank: 3
    rank 3 owns half of down.weight, down.bias, and the padding.
        No down.bias differs, and 4 weights of up.bias do.
A change: "a"
    with that change step 2 would add to the gradients of step 1.
        The norm of step 2 is right.
A change: "c" | "d" | "h"
    that change is in the gradient of a rank before it is reduced.
        All gradients are right in both steps.
A change: "e"
    step 1 is right, and its norm is above 0.5: it was clipped.
        A wrong factor would be seen there.
A change: "f"
    with that change no rank gets the new shard in step 1.
        All weights of step 1 are right.
A change: "g"
    with that change one rank would keep its first weights, and its model would differ from the others.
B rank: 0 | 2 | 3
    that rank's gradients are right in step 1, and differ in step 2 as all weights do.
        Look for the first difference.
B change: "c"
    with that change both gradients of step 1 would be twice as large: neither loss is divided.
        The first is right.
B change: "h"
    with that change both gradients of step 1 would come from rank 2.
        The first is its own.
B change: "a" | "b" | "e" | "f"
    that change acts on a shard, after the reduce-scatter.
        Here a gradient is wrong before it is sent, in step 1.
B change: "g"
    with that change one rank would keep its first weights, and its model would differ from the others.
C rank: 0 | 1 | 2
    no weight in that rank's shard differs after step 1.
        Count along the flat parameter: each owns 13 elements.
C change: "a" | "b"
    that change makes no difference in step 1: sums begin with zeros there, and the momentum is empty.
        Step 1 is wrong.
C change: "c" | "d" | "h"
    that change is in a rank's gradient before it is reduced.
        All gradients of step 1 and their norm are right.
C change: "f"
    with that change the 12 weights of the shard would be the old ones.
        Step 1 changed all 51 weights.
C change: "g"
    with that change one rank would keep its first weights, and its model would differ from the others.
"""

EXERCISE = findings("04.6", "find_changes", "Run", ("rank", "change"), RIGHT, MISTAKES)
