"""15.15: a lab that reports too short a bubble.

In a large open textbook on machine learning systems, a lab on distributed training reports the share of a step in which
the ranks of a pipeline idle. For 4 stages and 16 microbatches it says 4.7 %, below its own limit of 10 %. Here four
ranks run such a step, and count.
"""

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "A lab that reports less waiting than the ranks do"
SOURCE = (
    "[harvard-edge/cs249r_book, labs/vol2/lab_05_dist_train.py](https://github.com/harvard-edge/cs249r_book/blob/"
    "03468a1d45b394d13ff4e227fe64c43d56099bb9/labs/vol2/lab_05_dist_train.py), commit 03468a1d, in 2026"
)
GUESSES = {
    "the formula is wrong": "All ranks have the same idle share. The report computes another from the sizes alone.",
    "a sum that is missing": "Busy and idle ticks of each rank add up to the same length of the step.",
    "something is counted twice": "Each rank is busy as long as its microbatches take, forward and backward, once.",
    "two ranks that wait for each other": "Then the step would not end.",
}
CAUSE = """
A step lasts for $m + p - 1$ turns of a forward and a backward, and each rank idles in $p - 1$ of them. So the share is
$(p-1)/(m+p-1)$. The lab divides by $p\\,m$. With one stage, or with one microbatch, both formulas agree, and one such
example proves nothing. The repair is the right denominator. Ranks that count would have found it.
"""
FIELDS = {
    "bubble": "idle share of the step, as reported",
    "busy": "ticks in which this rank computed",
    "waited": "ticks in which this rank waited for a message",
    "end": "tick at which this rank had done its last backward; the step ends with the last rank",
    "microbatches": "number of microbatches",
}
LAYOUTS = ({"pp": 4}, {"pp": 2}, {"pp": 3})
FITS = False


def program(mesh, seed):
    """A step of GPipe on ranks with a clock: a message says at which tick it was sent. F takes 1 tick, B takes 2."""
    pp, generator = mesh.group("pp"), torch.Generator().manual_seed(seed)
    p, m, last = pp.size, (16, 3, 7)[seed % 3], pp.rank == pp.size - 1
    weight = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    batch = torch.randn(m, 6, generator=generator, dtype=torch.float64)
    busy = waited = 0
    kept, sends = [], []

    def send(x, peer):
        ticks = torch.tensor([busy + waited], dtype=torch.float64)
        sends.append(comm.send(torch.cat([x, ticks]), pp, peer))

    def receive(peer):
        nonlocal waited
        message = comm.recv(torch.empty(7, dtype=torch.float64), pp, peer).wait()
        waited += max(0, int(message[-1]) - busy - waited)
        return message[:-1]

    for k in range(m):
        x = (receive(pp.rank - 1) if pp.rank else batch[k]).requires_grad_()
        y = torch.tanh(x * weight)
        busy += 1
        kept.append((x, y))
        if not last:
            send(y.detach(), pp.rank + 1)
    for x, y in kept:
        y.backward(y.detach() if last else receive(pp.rank + 1))
        busy += 2
        if pp.rank:
            send(x.grad, pp.rank - 1)
    for pending in sends:
        pending.wait()
    bubble = (p - 1) / (m + p - 1)
    return {"bubble": bubble, "busy": busy, "waited": waited, "end": busy + waited, "microbatches": m}


SICK = """
bubble = (p - 1) / (m + p - 1) => bubble = (p - 1) / (p * m)
or
bubble = (p - 1) / (m + p - 1) => bubble = (p - 1) / (m + p)
"""
WHERE = ("by one microbatch",)
DEMAND = "It must find a report that is too low by one microbatch in the denominator."


def exhibit(run):
    rows = [("rank", "busy ticks", "waits before a message", "waits after its end", "idle share")]
    step = max(known["end"] for known in run.ranks)
    for rank, known in enumerate(run.ranks):
        idle = f"{1 - known['busy'] / step:.1%}"
        rows += [(rank, known["busy"], known["waited"], step - known["end"], idle)]
    return [*rows, ("report", "", "", "", f"{run['bubble']:.1%}")]


def bubble_check(run):
    step = max(known["end"] for known in run.ranks)
    busy = sum(known["busy"] for known in run.ranks)
    idle = 1 - busy / (len(run.ranks) * step)
    if abs(idle - run["bubble"]) > 1e-9:
        return f"{run['bubble']:.1%} is reported, {idle:.1%} is counted"


def by_formula(run):
    """All ranks wait for the first microbatch to come down and for the last gradient to come up: p - 1 slots."""
    p, m = len(run.ranks), run["microbatches"]
    return "the formula is wrong" if abs(run["bubble"] * (m + p - 1) - (p - 1)) > 1e-9 else ""


MISTAKES = """
lambda run: abs(run["bubble"] - (run.layout["pp"] - 1) / run.layout["pp"] / run["microbatches"]) < 1e-9
    Your check knows one wrong formula, that of the exhibit, and misses another one.
        Compute the share from what the ranks counted, and compare with that.
abs(idle - run["bubble"]) > 1e-9 => abs(idle - run["bubble"]) > 0.02
    Your check misses a small fault: another denominator may change the share by less than a per cent.
        Both are computed from a few whole numbers, and differ by rounding alone.
lambda run: run["bubble"] < 0.06
    You compare with a number that is right of one layout and one number of microbatches.
        Compute the share from what the ranks counted, and compare with that.
"""

ROOM, EXERCISE = room(globals(), bubble_check, by_formula)
