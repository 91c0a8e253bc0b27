"""10.3: two reports of a hang; in each, one action is missing from one rank's list."""

from dataclasses import replace

from course.check.exercise import Exercise, with_variants
from course.check.hung import hang_report
from course.check.table import findings
from lib.pipeline.lower import lower, other_end
from lib.pipeline.schedules.action import RECVS, SENDS, Action, Schedule
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.runtime.hang import AwaitedCall

RANKS, MICROBATCHES = 4, 4
SCHEDULE = lower(one_f_one_b(RANKS, MICROBATCHES))  # a stage has the number of its rank
WHERE = "executor.py, line {line}, in messages: comm.{call}(x, world, peer).wait()"
LOST = (("1SEND_F3", "3RECV_F2"), ("2SEND_F2", "2RECV_F3"), ("3SEND_B2", "2RECV_B2"))  # of the book, rows A and B


def messages(schedule: Schedule) -> list[list[Action]]:
    return [[a for a in row if a.op in (*SENDS, *RECVS)] for row in schedule.actions]


def left_without(lost: str) -> list[list[Action]]:
    """The messages of each rank, from that in which it waits, if each message takes both its ranks."""
    rows = [[a for a in row if str(a) != lost] for row in messages(SCHEDULE)]
    while ready := [row for row in rows if row and other_end(row[0]) in [row[0] for row in rows if row]]:
        for row in ready:
            row.pop(0)
    return rows


def report(lost: str) -> str:
    waits = {}
    for rank, (action, *_) in enumerate(left_without(lost)):
        call, line, way = ("send", 14, "to") if action.op in SENDS else ("recv", 16, "from")
        peer, size = other_end(action).stage, 16 * (action.microbatch + 1)
        what, where = f"{call} {way} {peer}, float32[{size}]", WHERE.format(line=line, call=call)
        waits[rank] = AwaitedCall(what, where, (peer,), (peer,), for_s=2.1)
    return hang_report(waits)


MISTAKES = """
{report}: {waiting}
    a rank waits in this call, so the call was made.
        Which call should meet it on the peer?
{report}: {later}
    this action comes later in its rank's list.
        Find the call in which that rank waits now, and its partner.
{report}: {others}
    that is the message of a different microbatch.
        Microbatches are numbered from 0: a message of 16 · (k + 1) elements belongs to microbatch k.
{report}: {back}
    that message goes the other way.
        F is the direction of activations, from rank 0 to rank 3; B is the direction of gradients, back to rank 0.
"""


def listed(report: str, lost: str) -> str:
    """The mistakes of one report: each wrong action is in one of the four lists."""
    rows, seen = left_without(lost), {lost}

    def new(*actions: Action | str) -> str:
        found = [action for action in dict.fromkeys(map(str, actions)) if action not in seen]
        seen.update(found)
        return " | ".join(f'"{action}"' for action in found)

    return MISTAKES.format(
        report=report,
        waiting=new(*(row[0] for row in rows)),
        others=new(*(f"{lost[:-1]}{int(lost[-1]) + step}" for step in (1, -1))),
        back=new(lost.translate(str.maketrans("FB", "BF"))),
        later=new(*(action for row in rows for action in row)),
    )


def row(*lost: str) -> Exercise:
    """The exercise in which these actions were lost."""
    right = {str(i): action for i, action in enumerate(lost, 1)}
    reports = "\n\nand another day:\n\n".join(map(report, lost))
    table = findings("10.3", "missing_calls", "Report", (), right, "\n".join(map(listed, right, lost)))
    task = f"The same lists, and other actions were lost.\n\nFirst:\n\n{reports}"
    return replace(table, parts=("Report 1", "Report 2"), task=task)


EXERCISE = with_variants(replace(row(*LOST[0]), task=""), *(row(*lost) for lost in LOST[1:]))
