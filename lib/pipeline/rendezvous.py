"""Simulate a schedule with blocking messages: a send ends only when it is received.

Messages of NCCL behave like this. It is a slow way to run a schedule, because forwards and backwards that could overlap
wait for messages, and the right way to test one: if this simulation ends, the schedule never hangs, also if messages
use a separate stream in the order of the schedule, which only removes waits.
"""

from lib.pipeline.lower import lower, other_end
from lib.pipeline.schedules.action import Action, Op, Schedule
from lib.pipeline.simulate import Costs, Slot, Timeline, Wait, stuck


def rendezvous(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule with messages that block both ranks until both reach the message.

    Raises:
        ScheduleError: two or more ranks wait for each other's messages.
    """
    schedule, costs = lower(schedule, costs), costs or Costs()
    takes, through = costs.of_stages(schedule.num_stages), costs.transfer + costs.latency
    clock, place = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    slots: list[Slot] = []
    awake = list(range(schedule.num_ranks))
    at: dict[Action, int] = {}  # a message that one rank reached -> this rank, which waits
    while awake:
        rank = awake.pop()
        row = schedule.actions[rank]
        while place[rank] < len(row):
            action = row[place[rank]]
            start = clock[rank]
            if action.op in takes:
                ranks = {rank: action}
                end = start + (0 if action.op == Op.REDUCE else takes[action.op][action.stage])
            else:
                other = other_end(action)
                if other not in at:
                    at[action] = rank
                    break
                peer = at.pop(other)
                ranks, start = {rank: action, peer: other}, max(start, clock[peer])
                end = start + through
                awake.append(peer)
            for who, its in ranks.items():
                slots.append(Slot(who, its, start, end))
                clock[who], place[who] = end, place[who] + 1
    if at:
        ends = ((rank, other_end(action)) for action, rank in at.items())
        raise stuck(schedule, {rank: Wait(place[rank], stage, (op,), m) for rank, (stage, op, m) in ends})
    return Timeline.of(schedule, slots)
