"""The schedule in time where a send ends only when it is received, and nobody does anything else meanwhile.

That is how NCCL's messages meet, and a pipeline that sends and receives with blocking calls. It is a bad way to run a
schedule: forwards and backwards that could overlap have to wait for each other's messages. It is the right way to test
one. What gets through here hangs nowhere: also not where messages go through a stream of their own, in the order of the
schedule, beside the computing, as that only takes waits away.
"""

from __future__ import annotations

from lib.pipeline.lower import lower, other_end
from lib.pipeline.schedules.action import Action, Op, Schedule
from lib.pipeline.simulate import Costs, Slot, Timeline, Wait, stuck


def rendezvous(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The schedule in time, with messages that block both sides from the moment when both are there.

    Raises:
        ScheduleError: two or more ranks wait for each other's messages.
    """
    schedule, costs = lower(schedule, costs), costs or Costs()
    takes, through = costs.of_stages(schedule.num_stages), costs.transfer + costs.latency
    clock, place = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    slots: list[Slot] = []
    awake = list(range(schedule.num_ranks))
    at: dict[Action, int] = {}  # a message that has come first -> its rank, which waits
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
            for one, its in ranks.items():
                slots.append(Slot(one, its, start, end))
                clock[one], place[one] = end, place[one] + 1
    if at:
        waits = {}
        for action, rank in at.items():
            stage, op, m = other_end(action)
            waits[rank] = Wait(place[rank], stage, (op,), m)
        raise stuck(schedule, waits)
    return Timeline.of(schedule, slots)
