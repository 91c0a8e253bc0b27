"""Put the messages into a schedule.

The problem: a receive in front of what needs it and a send behind what made it look right on each rank, and hang. Rank
0 sends forward while rank 1 sends back; where a send ends only when it is received, as on NCCL, neither ever does. gloo
may get away with it, so a test on a laptop would not tell.
The idea: one order for all. Simulate the schedule and go through its actions as they end. Behind each, at the same
moment, goes the send on this rank and the receive on the other. So of all messages that are not through, the first in
this order is the next one on both its ranks: somebody can always go on.
"""

from __future__ import annotations

from itertools import groupby, pairwise

from lib.pipeline.schedules.action import SENDS, Action, Op, Schedule
from lib.pipeline.simulate import Costs, simulate


def lower(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The same schedule with SEND and RECV between ranks.

    One that has them already is returned as it is.

    Args:
        costs: the times by which actions are put in order; any will do, the true ones are best.

    Raises:
        ScheduleError: it cannot run.
    """
    if schedule.is_lowered:
        return schedule
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    sums = _sums_behind(schedule)
    slots = simulate(schedule, costs).slots
    slots = [slot for slot in slots if slot.action.op != Op.REDUCE]
    slots.sort(key=lambda slot: slot.end)
    for _, together in groupby(slots, key=lambda slot: slot.end):
        ending = list(together)
        for slot in ending:  # before any message, which could mean to wait
            action = slot.action
            while action is not None:
                rows[slot.rank].append(action)
                action = sums.get(action)
        for slot in ending:
            if message := message_behind(slot.action, schedule):
                peer, send, receive = message
                rows[slot.rank].append(send)
                rows[peer].append(receive)
    return Schedule(
        schedule.name,
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.rank_of,
        tuple(map(tuple, rows)),
    )


def _sums_behind(schedule: Schedule) -> dict[Action, Action]:
    """Action → the REDUCE that stands right behind it."""
    pairs = (pair for row in schedule.actions for pair in pairwise(row))
    return {action: behind for action, behind in pairs if behind.op == Op.REDUCE}


def message_behind(action: Action, schedule: Schedule) -> tuple[int, Action, Action] | None:
    """(the other rank, send, receive) of what an action makes for a stage on another rank; None if there is nothing."""
    stage, op, m = action
    if op in (Op.W, Op.REDUCE):
        return None
    send = Action(stage, Op.SEND_F if op == Op.F else Op.SEND_B, m)
    receive = other_end(send)
    if not 0 <= receive.stage < schedule.num_stages:
        return None
    peer = schedule.rank_of[receive.stage]
    return None if peer == schedule.rank_of[stage] else (peer, send, receive)


def message_before(action: Action, schedule: Schedule) -> tuple[int, Action] | None:
    """(the other rank, its send) of what an action needs from another rank; None if there is nothing."""
    stage, op, m = action
    if op not in (Op.F, Op.B, Op.I):
        return None
    send = other_end(Action(stage, Op.RECV_F if op == Op.F else Op.RECV_B, m))
    if not 0 <= send.stage < schedule.num_stages:
        return None
    peer = schedule.rank_of[send.stage]
    return None if peer == schedule.rank_of[stage] else (peer, send)


def proves(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """What a receive tells of this rank's sends: which the peer had used.

    A send may end long after it was begun, and what it carries must be kept until then. To ask takes time, and gloo
    does not know before it is waited for. But a peer that answers has had the question.

    Args:
        schedule: with its messages.

    Returns:
        Receive → sends to the same peer that are through when it is. The last messages of a step nobody answers.
    """
    through: dict[Action, list[Action]] = {}
    pairs = pairwise(schedule.rank_of)  # of neighbouring stages
    for peer in {b if a == rank else a for a, b in pairs if rank in (a, b)} - {rank}:
        used: list[Action] = []
        for action in schedule.actions[peer]:
            receive = other_end(action) if action.op in SENDS else None
            if receive and schedule.rank_of[receive.stage] == rank:
                through[receive], used = used, []
            elif message := message_before(action, schedule):
                src, send = message
                if src == rank:
                    used.append(send)
    return through


def other_end(action: Action) -> Action:
    """The receive of a send, and the send of a receive."""
    stage, op, m = action
    step = 1 if op in (Op.SEND_F, Op.RECV_B) else -1
    return Action(stage + step, _OTHER[op], m)


_OTHER = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
