"""Prove that a schedule is right before any process starts.

A wrong schedule does not crash. It hangs, or it trains with half of the gradients. It must satisfy:

1. In each stage each microbatch runs forward once, and backward once: B, or I and then W.
2. No rank waits forever: F before B, stage before stage, and no cycle of waiting ranks.
3. Each message between ranks is sent once, after the action that makes it, and received once, before its use.
4. Between two ranks messages are received in the order in which they are sent, because they have no tags.
5. There is no cycle of waits even if a send ends only when it is received (`lib.pipeline.rendezvous`).

3 to 5 are about schedules with messages in them, as `lower` writes them. An error shows the schedule, with the guilty
action between > and <.
"""

from collections import Counter, defaultdict

from lib.pipeline.lower import message_behind, other_end
from lib.pipeline.rendezvous import rendezvous
from lib.pipeline.schedules.action import ALL, RECVS, SENDS, Action, Fault, Op, Schedule, ScheduleError
from lib.pipeline.simulate import Slot, Timeline, simulate


def prove(schedule: Schedule) -> Schedule:
    """Return the schedule if it is right.

    Raises:
        ScheduleError: it is not; the message shows where.
    """
    _belongs(schedule)
    _once(schedule)
    _in_order(schedule)
    _sums(schedule)
    if schedule.is_lowered:
        _messages(schedule)
        _channels(schedule)
    simulate(schedule)
    if schedule.is_lowered:
        rendezvous(schedule)
    return schedule


def prove_times(timeline: Timeline) -> Timeline:
    """Return the timeline if it is possible: each action begins after its inputs exist, and a rank runs one at a time.

    For a timeline that is not from `simulate`: a drawing, or a measurement.

    Raises:
        ScheduleError: it is impossible; the message names two actions and their times.
    """
    ends = {slot.action: slot.end for slot in timeline.compute}
    busy: dict[int, Slot] = {}
    for slot in timeline.compute:
        stage, op, m = slot.action
        before = [Action(stage - 1, Op.F, m)] if op == Op.F else [Action(stage, Op.I if op == Op.W else Op.F, m)]
        if op in (Op.B, Op.I):
            before += [Action(stage + 1, Op.B, m), Action(stage + 1, Op.I, m)]
        known = [(action, ends[action]) for action in before if action in ends]
        known += [(busy[slot.rank].action, busy[slot.rank].end)] if slot.rank in busy else []
        for action, end in known:
            if end > slot.start + 1e-9:
                what = f"{slot.action} begins at {slot.start:g}, but {action}, which comes before it, ends at {end:g}"
                _fail(timeline.schedule, Fault.TIMES, what, slot.action, action)
        busy[slot.rank] = slot
    return timeline


def _fail(schedule: Schedule, kind: Fault, what: str, *about: Action, marked: Action | None = None) -> None:
    """Raise the error. Its grid marks the first action of `about`, or `marked` where the schedule lacks that action."""
    raise ScheduleError(f"{schedule.name}: {what}\n{schedule.grid(marked or about[0])}", kind, about)


def _belongs(schedule: Schedule) -> None:
    """Each action is of an existing stage and microbatch, on the rank that has the stage."""
    stages, batch = range(schedule.num_stages), range(schedule.num_microbatches)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.stage not in stages:
                _fail(schedule, Fault.NO_SUCH, f"{action}: the stages are 0 to {len(stages) - 1}", action)
            of_all = action.op == Op.REDUCE and action.microbatch == ALL
            if not of_all and action.microbatch not in batch:
                _fail(schedule, Fault.NO_SUCH, f"{action}: the microbatches are 0 to {len(batch) - 1}", action)
            if (owner := schedule.rank_of[action.stage]) != rank:
                what = f"{action} is on rank {rank}, but rank {owner} has stage {action.stage}"
                _fail(schedule, Fault.WRONG_RANK, what, action)


def _once(schedule: Schedule) -> None:
    """Each microbatch runs once forward and once backward through each stage."""
    counts = Counter(action for row in schedule.actions for action in row)
    for action, count in counts.items():
        if count > 1:
            _fail(schedule, Fault.REPEATED, f"{action} occurs {count} times", action)
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            f, b, i, w = (Action(stage, op, m) for op in (Op.F, Op.B, Op.I, Op.W))
            if f not in counts:
                _fail(schedule, Fault.MISSING, f"{f} is missing", f)
            if b in counts and (i in counts or w in counts):
                half = i if i in counts else w
                _fail(
                    schedule, Fault.HALF_AGAIN, f"{b} is the full backward, so {half} repeats a half of it", half, b
                )
            if (i in counts) != (w in counts):
                there, lacks = (i, w) if i in counts else (w, i)
                _fail(schedule, Fault.HALF, f"{there} is half a backward; {lacks} is missing", there, lacks)
            if not (b in counts or i in counts or schedule.is_forward_only):
                _fail(schedule, Fault.MISSING, f"{b} is missing, or {i} and {w}", b)


def _in_order(schedule: Schedule) -> None:
    """On a rank: forward before backward, and the input gradient before the weight gradients."""
    for row in schedule.actions:
        place = {action: i for i, action in enumerate(row)}
        for action, i in place.items():
            stage, op, m = action
            before = {Op.B: Op.F, Op.I: Op.F, Op.W: Op.I}.get(op)
            if before and place[needs := Action(stage, before, m)] > i:
                _fail(schedule, Fault.TOO_EARLY, f"{action} comes before {needs}", action, needs)


def _sums(schedule: Schedule) -> None:
    """If there are REDUCEs: one for each stage and microbatch, after the backward that computes its gradients."""
    if not any(action.op == Op.REDUCE for row in schedule.actions for action in row):
        return
    for stage, rank in enumerate(schedule.rank_of):
        row = [action for action in schedule.actions[rank] if action.stage == stage]
        for m in range(schedule.num_microbatches):
            made = max(i for i, a in enumerate(row) if a.microbatch == m and a.op in (Op.B, Op.W))
            sums = [i for i, a in enumerate(row) if a.op == Op.REDUCE and a.microbatch in (m, ALL)]
            if len(sums) != 1:
                what = f"the weight gradients of stage {stage}, microbatch {m}, are reduced {len(sums)} times"
                guilty = row[sums[-1]] if sums else row[made]
                _fail(schedule, Fault.REPEATED if sums else Fault.MISSING, what, guilty)
            if sums[0] < made:
                what = f"{row[sums[0]]} comes before {row[made]}, whose gradients it reduces"
                _fail(schedule, Fault.TOO_EARLY, what, row[sums[0]], row[made])


def _messages(schedule: Schedule) -> None:
    """Each message between ranks is sent after the action that makes it, and received before its use."""
    places = [{action: i for i, action in enumerate(row)} for row in schedule.actions]
    wanted = set()
    for rank, action in ((rank, action) for rank, row in enumerate(schedule.actions) for action in row):
        if not (message := message_behind(action, schedule)):
            continue
        peer, send, receive = message
        wanted |= {send, receive}
        if send not in places[rank]:
            what = f"{send} is missing: rank {peer} needs the result of {action}"
            _fail(schedule, Fault.MISSING, what, send, marked=action)
        if receive not in places[peer]:
            what = f"{receive} is missing on rank {peer}: {send} has no receive"
            _fail(schedule, Fault.MISSING, what, receive, marked=send)
        if places[rank][send] < places[rank][action]:
            what = f"{send} comes before {action}, whose result it sends"
            _fail(schedule, Fault.TOO_EARLY, what, send, action)
        ops = (Op.F,) if receive.op == Op.RECV_F else (Op.B, Op.I)
        user = next(user for op in ops if (user := receive._replace(op=op)) in places[peer])
        if places[peer][user] < places[peer][receive]:
            what = f"{receive} comes after {user}, which needs its message"
            _fail(schedule, Fault.TOO_LATE, what, receive, user)
    for action in (action for row in schedule.actions for action in row):
        if action.op in SENDS + RECVS and action not in wanted:
            _fail(schedule, Fault.NEEDLESS, f"{action} is a message that no rank needs", action)


def _channels(schedule: Schedule) -> None:
    """Between two ranks, messages are received in the order in which they are sent."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.op in SENDS:
                sent[rank, schedule.rank_of[other_end(action).stage]].append(other_end(action))
            elif action.op in RECVS:
                received[schedule.rank_of[other_end(action).stage], rank].append(action)
    for (src, dst), order in sent.items():
        for theirs, mine in zip(order, received[src, dst], strict=True):
            if theirs != mine:
                send = other_end(theirs)
                what = f"rank {src} sends {send} next, but rank {dst} receives {mine}: messages between two "
                what += "ranks arrive in the order in which they are sent"
                _fail(schedule, Fault.CROSSED, what, mine, send)
