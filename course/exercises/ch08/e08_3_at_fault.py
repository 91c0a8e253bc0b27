"""08.3: three pipelines with two actions in the wrong order: one is slow, one hangs, one is silently wrong."""

from course.check.table import findings

RIGHT = {"A": (1, "1B2", 4), "B": (2, "2B0", None), "C": (2, "2F2", 0)}

MISTAKES = """
A rank: 0
    rank 0 has a long gap before its second backward: rank 1 sends late.
        Look for a rank that could continue.
A rank: 2
    rank 2 runs backward after each gradient of rank 3, without a pause.
        Who waits, although a gradient arrived?
A rank: 3
    rank 3 runs without a pause, as in GPipe.
        The first gap that GPipe does not have is later.
A action: "1B1"
    1B1 is late because a different action is in its place.
        Name the action that comes too early.
A action: "1B3"
    for 1B3 rank 1 would wait for two more backwards of rank 2, 4 units.
        It waits 2.
A units lost: 2
    rank 1 waits 2 units, then works 2 more before rank 0 can continue.
        Compare with (m + p - 1)(T_F + T_B).
A units lost: 16
    all four ranks lose the same 4 units at the same time.
        Count the step, not its sum over ranks.
A units lost: 25
    that is the whole step. GPipe takes (m + p - 1)(T_F + T_B) units.
        Name the difference.
B rank: 3
    rank 3 waits in a forward, as in GPipe.
        The rank that should send to it already waits for a gradient.
B rank: 0 | 1
    rank {} waits for its first gradient, as in GPipe, from a rank that also waits.
        Follow these waits to the cycle.
B action: "2F3"
    2F3 is missing, but it is not the action at fault.
        Name what rank 2 runs in its place: its line shows the function, the shape the microbatch.
B action: "2B1" | "2B2" | "2B3"
    the shape names the microbatch.
        Microbatch 0 has 4 sequences, microbatch 3 has one.
B units lost: 0
    no action follows a deadlock: the step never ends.
        Return None for its units.
C rank: 0 | 1
    the gradients of rank {} are wrong, but it may only pass on a wrong gradient that it received.
        Gradients travel from the last rank to the first: where does the error begin?
C rank: 3
    the gradients and losses of rank 3 are right. It got the right activations, in order.
C action: "2F1"
    2F1 comes too late; an action has taken its place and its message.
        Name the action that comes too early.
C action: "2B1" | "2B2"
    every rank's printed backwards are in order.
        Their graphs have wrong numbers, and graphs are made in forward.
C units lost: 1 | 2 | 4 | None
    its messages have no number.
        Rank 2 takes the next that arrives and computes as long as ever: no rank waits.
"""

EXERCISE = findings("08.3", "at_fault", "Pipeline", ("rank", "action", "units lost"), RIGHT, MISTAKES)
