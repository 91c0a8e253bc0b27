"""Answers to the exercises of chapter 10: right ones, and one for each mistake that has a name."""

from dataclasses import replace

import torch
import torch.distributed as dist

from lib import comm
from lib.pipeline import lower as lowers
from lib.pipeline.lower import lower, message_before, message_behind, other_end
from lib.pipeline.prove import prove
from lib.pipeline.schedules import gpipe as gpipes
from lib.pipeline.schedules.action import COMPUTE, RECVS, SENDS, Action, Op, ScheduleError
from lib.pipeline.simulate import Costs, simulate

# ---- 10.1


def with_messages(schedule):
    rows = [[] for _ in schedule.actions]
    last = schedule.num_stages - 1
    for slot in sorted(simulate(schedule).slots, key=lambda slot: slot.end):
        stage, op, m = slot.action
        rows[slot.rank].append(slot.action)
        if op == Op.F and stage < last:
            rows[stage].append(Action(stage, Op.SEND_F, m))
            rows[stage + 1].append(Action(stage + 1, Op.RECV_F, m))
        if op == Op.B and stage > 0:
            rows[stage].append(Action(stage, Op.SEND_B, m))
            rows[stage - 1].append(Action(stage - 1, Op.RECV_B, m))
    return rows


def right_messages_in_words(schedule):
    """By other times, and as a text."""
    return lower(schedule, Costs(F=1.7, I=0.9, W=1.3, latency=0.4)).to_text()


def right_messages_without_times(schedule):
    """Whoever can go on does; both ends of a message are put down at once."""
    left, rows = [list(row) for row in schedule.actions], [[] for _ in schedule.actions]
    done = set()
    while any(left):
        for rank, row in enumerate(left):
            message = message_before(row[0], schedule) if row else None
            if not row or (message and message[1] not in done):
                continue
            rows[rank].append(row.pop(0))
            if message := message_behind(rows[rank][-1], schedule):
                peer, send, receive = message
                rows[rank].append(send)
                rows[peer].append(receive)
                done.add(send)
    return replace(schedule, actions=tuple(map(tuple, rows)))


def at_its_use(schedule):
    rows = []
    for row in schedule.actions:
        line = []
        for action in row:
            if message := message_before(action, schedule):
                line.append(other_end(message[1]))
            line.append(action)
            if message := message_behind(action, schedule):
                line.append(message[1])
        rows.append(line)
    return rows


def changed(change):
    """Right rows, each of which is changed: change(rank, row)."""

    def answer(schedule):
        return [change(rank, list(row)) for rank, row in enumerate(lower(schedule).actions)]

    return answer


def without(*ops):
    return changed(lambda rank, row: [a for a in row if a.op not in ops])


def twice(*ops):
    return changed(lambda rank, row: [a for a in row for _ in range(2 if a.op in ops else 1)])


def received_backwards(op):
    """All receives of this kind first, the last one in front."""

    def change(rank, row):
        return [a for a in reversed(row) if a.op == op] + [a for a in row if a.op != op]

    return changed(change)


def moved(op, by, behind):
    """Each message of this kind moved behind, or before, the action of its stage and microbatch."""

    def change(rank, row):
        out = []
        for action in row:
            message = Action(action.stage, op, action.microbatch)
            near = [message] if action.op == by and message in row else []
            out += [] if action.op == op else [action, *near] if behind else [*near, action]
        return out

    return changed(change)


def one_more(message):
    """With a message that nobody needs at the end of its rank."""

    def answer(schedule):
        stage, op = message(schedule)
        rows = [list(row) for row in lower(schedule).actions]
        rows[stage].append(Action(stage, op, 0))
        return rows

    return answer


def named_by_the_sender(schedule):
    rows = []
    for row in lower(schedule).actions:
        rows.append([Action(other_end(a).stage, *a[1:]) if a.op in RECVS else a for a in row])
    return rows


def named_by_the_sender_in_a_schedule(schedule):
    return replace(schedule, actions=tuple(map(tuple, named_by_the_sender(schedule))))


def in_another_order(schedule):
    last_first = gpipes.gpipe(schedule.num_ranks, schedule.num_microbatches, last_first=True)
    return lower(last_first)


def when_it_is_needed(schedule):
    """Both ends of a message put down where its receiver begins with it."""
    rows = [[] for _ in schedule.actions]
    for slot in simulate(schedule).slots:
        if message := message_before(slot.action, schedule):
            peer, send = message
            rows[peer].append(send)
            rows[slot.rank].append(other_end(send))
        rows[slot.rank].append(slot.action)
    return rows


def sent_later(schedule):
    """Each rank computes once more before it sends, where that makes nobody late."""
    rows = [list(row) for row in lower(schedule).actions]
    for row in rows:
        for i in range(len(row) - 1):
            if row[i].op in SENDS and row[i + 1].op in COMPUTE:
                row[i : i + 2] = row[i + 1], row[i]
                if not is_as_fast(rows, schedule):
                    row[i : i + 2] = row[i + 1], row[i]
    return rows


def is_as_fast(rows, schedule):
    try:
        lowered = prove(replace(schedule, actions=tuple(map(tuple, rows))))
    except ScheduleError:
        return False
    return simulate(lowered).makespan == simulate(schedule).makespan


def odd_ranks_receive_first(schedule):
    """As late as possible, and in turns: hangs only where messages cross on several links."""
    rows = []
    for rank, row in enumerate(schedule.actions):
        line, made = [], []
        for action in row:
            before, behind = message_before(action, schedule), message_behind(action, schedule)
            came = [other_end(before[1])] if before else []
            line += [*came, *made, action] if rank % 2 else [*made, *came, action]
            made = [behind[1]] if behind else []
        rows.append(line + made)
    return rows


# ---- 10.2


def both_ends(gradients, tied, group, op=torch.Tensor.add_):
    """The two ends exchange their gradients, and `op` changes theirs by the other's."""
    if tied is not None:
        peer = group.size - 1 - group.rank
        op(tied, comm.exchange({peer: tied}, {peer: tied}, group).wait()[peer])


def square(tensors):
    return sum((x * x).sum() for x in tensors)


def sum_and_clip(
    gradients,
    tied,
    max_norm,
    group,
    together=both_ends,
    norm_first=False,
    counts=lambda group: group.rank == 0,
    total=lambda mine, group: comm.all_reduce(mine, group).sqrt(),
    factor_of=lambda norm, max_norm: (max_norm / norm).clamp(max=1),
    tied_too=lambda group: True,
    in_place=True,
):
    """The answer to 10.2, with a place for each mistake."""
    if not norm_first:
        together(gradients, tied, group)
    counted = [*gradients, tied] if tied is not None and counts(group) else gradients
    norm = total(square(counted), group)
    if norm_first:
        together(gradients, tied, group)
    for i, x in enumerate(gradients):
        if in_place:
            x *= factor_of(norm, max_norm)
        else:
            gradients[i] = x * factor_of(norm, max_norm)
    if tied is not None and tied_too(group):
        tied *= factor_of(norm, max_norm)
    return norm


def clipping(**wrong):
    return lambda *given: sum_and_clip(*given, **wrong)


def right_by_torch_distributed(gradients, tied, max_norm, group):
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        other = torch.empty_like(tied)
        dist.recv(other, last)
        dist.send(tied, last)
        tied += other
    elif dist.get_rank() == last:
        other = torch.empty_like(tied)
        dist.send(tied, 0)
        dist.recv(other, 0)
        tied += other
    mine = square(gradients) + (square([tied]) if dist.get_rank() == 0 else 0)
    dist.all_reduce(mine)
    norm = mine.item() ** 0.5
    if norm > max_norm:
        for x in gradients if tied is None else [tied, *gradients]:
            x.mul_(max_norm / norm)
    return norm


def right_by_halves(gradients, tied, max_norm, group):
    """Each end counts a half of the weight's square."""
    both_ends(gradients, tied, group)
    mine = square(gradients) + (0 if tied is None else square([tied]) / 2)
    norm = comm.all_gather(mine[None], group).sum().sqrt()
    for x in filter(torch.is_tensor, [*gradients, tied]):
        x.copy_(x * min(1.0, max_norm / norm.item()))
    return norm.item()


def only_to(end):
    """One end sends, the other one adds."""

    def together(gradients, tied, group):
        to, src = (0, group.size - 1) if end == 0 else (group.size - 1, 0)
        if group.rank == src:
            comm.send(tied, group, to).wait()
        elif group.rank == to:
            tied += comm.recv(tied, group, src).wait()

    return together


def all_take_part(gradients, tied, group):
    """The ranks in the middle know the shape, and add zeros."""
    mine = torch.zeros(7, 4, dtype=torch.float64) if tied is None else tied
    total = comm.all_reduce(mine, group)
    if tied is not None:
        tied.copy_(total)


RIGHT = {
    "10.1": [with_messages, right_messages_in_words, right_messages_without_times, lowers.lower],
    "10.2": [sum_and_clip, right_by_torch_distributed, right_by_halves],
}
WRONG = {  # in the order of the exercise's mistakes
    "10.1": [
        at_its_use,
        lambda schedule: schedule,
        without(Op.SEND_F, Op.RECV_F),
        without(Op.SEND_B, Op.RECV_B),
        without(*RECVS),
        without(Op.RECV_B),
        *map(twice, (*SENDS, *RECVS)),
        received_backwards(Op.RECV_F),
        received_backwards(Op.RECV_B),
        moved(Op.RECV_F, Op.F, behind=True),
        moved(Op.RECV_B, Op.B, behind=True),
        moved(Op.SEND_F, Op.F, behind=False),
        moved(Op.SEND_B, Op.B, behind=False),
        one_more(lambda schedule: (schedule.num_stages - 1, Op.SEND_F)),
        one_more(lambda schedule: (0, Op.SEND_B)),
        named_by_the_sender,
        named_by_the_sender_in_a_schedule,
        in_another_order,
        when_it_is_needed,
    ],
    "10.2": [
        clipping(together=lambda gradients, tied, group: None),
        clipping(together=lambda *given: both_ends(*given, op=lambda mine, other: mine.add_(other).div_(2))),
        clipping(together=only_to(0)),
        clipping(together=only_to(1)),
        clipping(together=lambda *given: both_ends(*given, op=torch.Tensor.copy_)),
        clipping(counts=lambda group: True),
        clipping(norm_first=True, counts=lambda group: True),
        clipping(counts=lambda group: False),
        clipping(total=lambda mine, group: mine.sqrt(), counts=lambda group: True),
        clipping(total=lambda mine, group: comm.all_reduce(mine.sqrt(), group)),
        clipping(total=lambda mine, group: comm.all_reduce(mine, group)),
        clipping(tied_too=lambda group: False),
        clipping(tied_too=lambda group: group.rank == 0),
        clipping(in_place=False),
        clipping(factor_of=lambda norm, max_norm: max_norm / norm),
        clipping(factor_of=lambda norm, max_norm: 1),
        clipping(together=all_take_part),
    ],
}
