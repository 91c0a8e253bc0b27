"""08.3: three pipelines with two actions in the wrong order: one is slow, one hangs, one is silently wrong."""

from dataclasses import replace

from course.check.exercise import Exercise, with_variants
from course.check.hung import hang_report
from course.check.table import findings
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.simulate import Costs, simulate
from lib.runtime.hang import AwaitedCall

GPIPE, COSTS = gpipe(4, 4), Costs(1, 1, 1)  # a backward takes 2
CELL = "{:<3}"  # of a chart, a unit
BACKWARD = "step.py, line 41, in backward: y.backward(comm.recv(y, world, src=r + 1).wait())"
FORWARD = "step.py, line 28, in forward: x = comm.recv(like, world, src=r - 1).wait().requires_grad_()"

TASK = """
The same three stories, with other actions that come too early, on other ranks.

**A.** The step was drawn so:

{chart}

**B.** The step ended with this report:

{report}

**C.** The gradients, each time with the loss of a single microbatch:

{table}
"""

MISTAKES = """
A rank: {a_before}
    rank {{}} has a long gap: the rank behind it sends late.
        Look for a rank that could continue.
A rank: {a_behind}
    rank {{}} runs backward without a pause, as in GPipe.
        Who waits, although a gradient arrived?
A action: "{a}B{first}"
    {a}B{first} is late because a different action is in its place.
        Name the action that comes too early.
A action: {a_others}
    rank {a} would wait for a different number of backwards of the next rank.
        It waits {own} units, and a backward takes 2.
A units lost: {own}
    rank {a} waits {own} units, then works 2 more before the rank before it can continue.
        Compare with (m + p - 1)(T_F + T_B).
A units lost: {summed}
    all four ranks lose the same {lost} units at the same time.
        Count the step, not its sum over ranks.
A units lost: {step}
    that is the whole step. GPipe takes (m + p - 1)(T_F + T_B) units.
        Name the difference.
B rank: {b_behind}
    rank {{}} waits in a forward, as in GPipe.
        The rank that should send to it waits for a gradient, or for such a rank.
B rank: {b_before}
    rank {{}} waits for its first gradient, as in GPipe, from a rank that also waits.
        Follow these waits to the cycle.
B action: "{b}F3"
    {b}F3 is missing, but it is not the action at fault.
        Name what rank {b} runs in its place: its line shows the function, the shape the microbatch.
B action: {b_others}
    the shape names the microbatch.
        Microbatch 0 has 4 sequences, microbatch 3 has one.
B units lost: 0
    no action follows a deadlock: the step never ends.
        Return None for its units.
C rank: {c_before}
    the gradients of rank {{}} are wrong, but it may only pass on a wrong gradient that it received.
        Gradients travel from the last rank to the first: where does the error begin?
C rank: {c_behind}
    the gradients and losses of rank {{}} are right. It got the right activations, in order.
C action: "{c}F{late}"
    {c}F{late} comes too late; an action has taken its place and its message.
        Name the action that comes too early.
C action: "{c}B{late}" | "{c}B{early}"
    every rank's printed backwards are in order.
        Their graphs have wrong numbers, and graphs are made in forward.
C units lost: 1 | 2 | 4 | None
    its messages have no number.
        Rank {c} takes the next that arrives and computes as long as ever: no rank waits.
"""


def too_early(rank: int, action: str, place: int) -> Schedule:
    """GPipe, in which a rank runs this action as the one with this number."""
    row = [a for a in GPIPE.actions[rank] if str(a) != action]
    row.insert(place, next(a for a in GPIPE.actions[rank] if str(a) == action))
    return replace(GPIPE, actions=tuple(tuple(row) if r == rank else old for r, old in enumerate(GPIPE.actions)))


def chart(schedule: Schedule) -> str:
    """The step without numbers, a cell for each unit."""
    rows = []
    for rank in range(4):
        row, slots = f"rank {rank}  ", [slot for slot in simulate(schedule, COSTS).compute if slot.rank == rank]
        free = 0
        for slot in sorted(slots, key=lambda slot: slot.start):
            row += CELL.format("·") * int(slot.start - free)
            row += CELL.format("F") if str(slot.action.op) == "F" else "B---- "
            free = slot.end
        rows.append(row.rstrip())
    return "\n".join(["```text", *rows, "```"])


def report(rank: int, k: int) -> str:
    """Of the rank that runs the backward of microbatch k before its last forward."""
    waits = {}
    for r in range(4):
        sequences, source = (1, r - 1) if r > rank else (4 - (k if r == rank else 0), r + 1)
        what = f"recv from {source}, float64[{sequences}, 32, 32]"
        waits[r] = AwaitedCall(what, FORWARD if r > rank else BACKWARD, (source,), (source,), for_s=2.1)
    return hang_report(waits)


def table(rank: int, swapped: tuple[int, int]) -> str:
    lines = ["| loss of | rank 0 | rank 1 | rank 2 | rank 3 |", "|---|---|---|---|---|"]
    for k in range(4):
        cells = ["wrong" if k in swapped and r <= rank else "right" for r in range(4)]
        lines.append(f"| microbatch {k} | {' | '.join(cells)} |")
    return "\n".join(lines)


def alternatives(*entries: object) -> str:
    return " | ".join(map(repr, entries))


def row(slow: tuple[int, int, int], hangs: tuple[int, int], wrong: tuple[int, int]) -> Exercise:
    """The exercise with other faults.

    Args:
        slow: of A the rank, and the microbatch whose backward takes the place of this earlier one.
        hangs: of B the rank, and the microbatch whose backward comes before the last forward.
        wrong: of C the rank, and the microbatch whose forward comes before the one of the microbatch before.
    """
    (a, moved, first), (b, k), (c, early) = slow, hangs, wrong
    sick = too_early(a, f"{a}B{moved}", 4 + first)
    step = simulate(sick, COSTS).makespan
    lost = int(step - simulate(GPIPE, COSTS).makespan)
    listed = MISTAKES.format(
        **{"a": a, "b": b, "c": c, "first": first, "early": early, "late": early - 1},
        **{f"{x}_before": alternatives(*range(r)) for x, r in {"a": a, "b": b, "c": c}.items()},
        **{f"{x}_behind": alternatives(*range(r + 1, 4)) for x, r in {"a": a, "b": b, "c": c}.items()},
        a_others=alternatives(*(f"{a}B{other}" for other in range(4) if other not in (moved, first))),
        b_others=alternatives(*(f"{b}B{other}" for other in range(4) if other != k)),
        **{"own": 2 * (moved - first), "lost": lost, "summed": 4 * lost, "step": int(step)},
    )
    right = {"A": (a, f"{a}B{moved}", lost), "B": (b, f"{b}B{k}", None), "C": (c, f"{c}F{early}", 0)}
    task = TASK.format(chart=chart(sick), report=report(b, k), table=table(c, (early - 1, early)))
    made = findings("08.3", "at_fault", "Pipeline", ("rank", "action", "units lost"), right, listed)
    return replace(made, task=task.strip())


BOOK = row(slow=(1, 2, 1), hangs=(2, 0), wrong=(2, 2))
EXERCISE = with_variants(
    replace(BOOK, task=""),
    row(slow=(2, 3, 1), hangs=(1, 0), wrong=(1, 1)),
    row(slow=(1, 1, 0), hangs=(2, 1), wrong=(2, 3)),
)
