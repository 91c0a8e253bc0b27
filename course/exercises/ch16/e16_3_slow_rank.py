"""16.3: the slow rank, found in the collectives of four ranks on two hosts whose clocks differ."""

from collections import Counter, defaultdict

import numpy as np
import torch

from course.check.edits import exercise
from course.check.exercise import several, whole

PAIRS, ACROSS, ALL = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)
STEPS, TRANSFER_S, HALT_S, SLOWER = 6, 0.002, 0.3, 1.2
WHATS = RANK, WAITED = "the slow rank", "seconds that the others wait for it"


def traced(generator, slow):
    """The collectives of each rank: `slow` needs a fifth more, another rank halts once, and two clocks differ."""
    ahead_s = (1 if whole(generator, 0, 2) else -1) * whole(generator, 400, 900) / 1000  # of the second host's clock
    halts = (slow + whole(generator, 1, 4)) % 4, whole(generator, 1, STEPS - 1)  # not in the last: there slow is last
    now_s, events = [0.0] * 4, [[] for _ in range(4)]
    for step in range(STEPS):
        for seconds, groups in ((0.05, PAIRS), (0.03, ACROSS), (0.01, ALL)):
            for rank in range(4):
                noise = 1 + whole(generator, 0, 40) / 1000
                now_s[rank] += seconds * noise * (SLOWER if rank == slow else 1)
                now_s[rank] += HALT_S * (groups == PAIRS and (rank, step) == halts)
            for group in groups:
                end_s = max(now_s[rank] for rank in group) + TRANSFER_S
                for rank in group:
                    clock_s = ahead_s * (rank // 2)
                    events[rank].append((group, now_s[rank] + clock_s, end_s + clock_s))
                    now_s[rank] = end_s
    return events


def inputs(generator, n):
    while True:
        slow = torch.randperm(4, generator=generator)[:3].tolist()
        runs = [traced(generator, rank) for rank in slow]
        if are_told_apart(runs, slow):
            return [{"runs": runs}]


def are_told_apart(runs, slow):
    """Whether the hints are about different results, and none about the right one."""

    def results(program, what):
        return tuple(round(program(run)[WHATS.index(what)], 6) for run in runs)

    hints = {(what, results(slow_rank, what)): "right" for what in WHATS}
    about = [(m.hint, m.about[0], results(m.wrong.load(), m.about[0])) for m in EXERCISE.mistakes]
    apart = all(hints.setdefault((what, found), hint) == hint for hint, what, found in about)
    return apart and results(slow_rank, RANK) == tuple(slow)


def body(answer, group, given):
    found = {}
    for i, run in enumerate(given["runs"], 1):
        results = several(answer([list(events) for events in run]), len(WHATS))
        found |= {f"run {i}: {what}": x for what, x in zip(WHATS, results, strict=True)}
    return found


def slow_rank(traces):
    calls, made = defaultdict(dict), Counter()
    for rank, events in enumerate(traces):
        for group, start, end in events:
            made[rank, group] += 1
            number = made[rank, group]
            calls[group, number][rank] = end - start

    times, waited = Counter(), Counter()
    for seconds in calls.values():
        last = min(seconds, key=seconds.get)
        times[last] += 1
        waits = [s - seconds[last] for s in seconds.values()]
        waited[last] += sum(waits)
    rank = max(times, key=times.get)
    return rank, waited[rank]


def by_clocks(traces):
    """Sets the clocks by the end of a call of all ranks, then compares starts; numbers of numpy's."""
    everyone = tuple(range(len(traces)))
    ends = [next(end for group, _, end in events if group == everyone) for events in traces]
    times, waited = np.zeros((2, len(traces)))
    for group in {group for events in traces for group, _, _ in events}:
        starts = np.array([[start - ends[rank] for g, start, _ in traces[rank] if g == group] for rank in group])
        last = np.array(group)[starts.argmax(0)]
        np.add.at(times, last, 1)
        np.add.at(waited, last, (starts.max(0) - starts).sum(0))
    return times.argmax(), waited[times.argmax()]


MISTAKES = """
in the slow rank:
last = min(seconds, key=seconds.get) => last = max(seconds, key=seconds.get)
    You name the rank that is longest in its collectives.
        It waits there: the others wait for the rank whose collectives are short.
= end - start => = -start
    You compare times of two clocks. The host whose clock is ahead seems to be late.
        A collective ends on all its ranks at the same moment. So compare how long they were in it, or set the clocks
        by an end.
max(times, key=times.get) => max(waited, key=waited.get)
or
waited[last] += sum(waits) => waited[last] = max(waited[last], *waits)
max(times, key=times.get) => max(waited, key=waited.get)
    One rank halted a single time, for a third of a second, and you name it or one that waited for it.
        A slow rank comes last again and again: count.
calls[group, number] => calls[sum(made[rank, g] for g in PAIRS + ACROSS + ALL)]
    You compare the first call of a rank with the first of all others, though their groups differ.
        A call has its counterparts in its own group: match the k-th of each group.

in seconds that the others wait for it:
waits = [s - seconds[last] for s in seconds.values()] => waits = [s for r, s in seconds.items() if r != last]
or
=> waits = seconds.values()
    You count the transfer as waiting.
        The last rank is in the call only as long as the transfer takes: what the others are in it longer, they wait.
sum(waits) => max(waits)
    In a group of four, three wait, and you count one.
        Add up the waits of all others.
in calls.values() => in [s for s in calls.values() if len(s) > 2]
    You look only at the calls of all ranks.
        Most of the waiting is in smaller groups, before.
return rank, waited[rank] => return rank, sum(waited.values())
    You add up the waits for all ranks.
        Count the collectives to which the slow rank comes last.
=> return rank, sum(s - of[rank] for of in calls.values() if rank in of for s in of.values())
    You add up over all collectives of the slow rank. To some of them another rank comes last.
        Count those to which it comes last itself.
=> return rank, sum(of[rank] - min(of.values()) for of in calls.values() if rank in of)
    That is how long the slow rank waits for others.
        Add up how long the others wait for it.
=> return rank, waited[rank] / times[rank]
    That is the mean of its calls.
        Return the sum.
"""

EXERCISE = exercise(globals(), points=3, right=(slow_rank, by_clocks), ranks=(1,))
