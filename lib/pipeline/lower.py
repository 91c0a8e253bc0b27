"""Lowering: insert the sends and receives between ranks into a schedule.

The problem: a receive right before its use and a send right after its action look right on each rank, and hang. Rank 0
sends an activation while rank 1 sends a gradient; if a send ends only when it is received, as on NCCL, neither ends.
gloo may not hang, so a test on a laptop does not show it.
The idea: one global order. Simulate the schedule and go through its actions in the order of their ends. After each
action, insert the send on its rank and the receive on the peer at the same position. The first message in this order
that is not done is then the next message on both its ranks: some rank can always continue.
"""

from dataclasses import replace
from itertools import groupby, pairwise

from lib.pipeline.schedules.action import SENDS, Action, Op, Schedule
from lib.pipeline.simulate import Costs, simulate


def lower(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The same schedule with SEND and RECV between ranks; unchanged if it has them.

    Args:
        costs: times for the order of actions; any times are valid, real times are best.

    Raises:
        ScheduleError: it cannot run.
    """
    if schedule.is_lowered:
        return schedule
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    pairs = (pair for row in schedule.actions for pair in pairwise(row))
    sums = {action: behind for action, behind in pairs if behind.op == Op.REDUCE}  # directly after the action
    slots = [slot for slot in simulate(schedule, costs).slots if slot.action.op != Op.REDUCE]
    slots.sort(key=lambda slot: slot.end)
    for _, together in groupby(slots, key=lambda slot: slot.end):
        ending = list(together)
        for slot in ending:  # before any message, which may have to wait
            action = slot.action
            while action is not None:
                rows[slot.rank].append(action)
                action = sums.get(action)
        for slot in ending:
            if message := message_behind(slot.action, schedule):
                peer, send, receive = message
                rows[slot.rank].append(send)
                rows[peer].append(receive)
    return replace(schedule, actions=tuple(map(tuple, rows)))


def message_behind(action: Action, schedule: Schedule) -> tuple[int, Action, Action] | None:
    """(peer, send, receive) of the result of an action for a stage on a different rank; None if there is none."""
    return _message(action, {Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B}, schedule)


def message_before(action: Action, schedule: Schedule) -> tuple[int, Action] | None:
    """(peer, its send) of the input of an action from a different rank; None if there is none."""
    message = _message(action, {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}, schedule)
    return message and (message[0], message[2])


def _message(action: Action, ops: dict[Op, Op], schedule: Schedule) -> tuple[int, Action, Action] | None:
    """(peer, this end, its end) of the message that goes with an action, whose op here is in `ops`."""
    if action.op not in ops:
        return None
    here = action._replace(op=ops[action.op])
    there = other_end(here)
    if not 0 <= there.stage < schedule.num_stages:
        return None
    peer = schedule.rank_of[there.stage]
    return None if peer == schedule.rank_of[here.stage] else (peer, here, there)


def proves(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """Receive → sends of this rank to the same peer that ended before it. The last messages of a step have none.

    A send may end long after its start, and its tensor must be kept until then. Polling takes time, and gloo reports
    the end only to a wait. But a message that the peer made from this tensor proves that it arrived.
    """
    through: dict[Action, list[Action]] = {}
    pairs = pairwise(schedule.rank_of)  # ranks of neighbouring stages
    for peer in {b if a == rank else a for a, b in pairs if rank in (a, b)} - {rank}:
        used: list[Action] = []
        for action in schedule.actions[peer]:
            receive = other_end(action) if action.op in SENDS else None
            if receive and schedule.rank_of[receive.stage] == rank:
                through[receive], used = used, []
            elif (message := message_before(action, schedule)) and message[0] == rank:
                used.append(message[1])
    return through


def other_end(action: Action) -> Action:
    """The receive of a send, and the send of a receive."""
    stage, op, m = action
    step = 1 if op in (Op.SEND_F, Op.RECV_B) else -1
    return Action(stage + step, _OTHER[op], m)


_OTHER = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
