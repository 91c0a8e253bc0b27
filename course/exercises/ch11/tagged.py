"""A step whose messages have tags, and the task of row A, with tags that are not enough: for exercise 11.1."""

import inspect
from functools import partial

import torch
from torch import distributed as dist


def from_the_first(stage, p):
    """The rank of a stage: s mod p."""
    return stage % p


def from_the_last(stage, p):
    return p - 1 - stage % p


def by_tags(group, orders, forward, backward, like, tag=lambda op, source, target, k: k, rank_of=from_the_first):
    """A receive takes the next message of its tag."""
    r, p, sends = group.rank, group.size, []
    last = max(stage for order in orders for _, stage, _ in order)
    for op, stage, k in orders[r]:
        step = 1 if op == "F" else -1
        source, target = stage - step, stage + step
        x = None
        if 0 <= source <= last:
            x = torch.empty_like(like)
            dist.recv(x, rank_of(source, p), tag=tag(op, source, stage, k))
        y = (forward if op == "F" else backward)(stage, k, x)
        if 0 <= target <= last:
            sends.append(dist.isend(y, rank_of(target, p), tag=tag(op, stage, target, k)))
    for send in sends:
        send.wait()


BY_DIRECTION = partial(by_tags, tag=lambda op, *which: op == "F")
# On the link between two stages a rank sends in one direction.
BY_LINK = partial(by_tags, tag=lambda op, source, target, k: min(source, target))

TASK = """
Stages are dealt from the last rank to the first, stage s on rank `p - 1 - s % p`, and the program is a different one.

It calls `torch.distributed`, as `dist`, and the tag of a message is the number of the stage that receives it. On three
and on four ranks this step computes the right gradients. On two ranks it ends without an error, and all gradients are
wrong:

```python
{program}```

With six microbatches, two stages on each rank, and normally distributed weights and inputs, a run had these errors:

| stage | 0 | 1 | 2 | 3 |
|---|---|---|---|---|
| rank | 1 | 0 | 1 | 0 |
| norm of the error, divided by that of the gradient | 5.25 | 3.97 | 0.70 | 0.69 |
"""
WRITTEN = {  # what stands in the right program, and what in the program of the task
    "by_tags": "wrong_order",
    ", tag=lambda op, source, target, k: k, rank_of=from_the_first": "",
    "A receive takes the next message of its tag.": "A step of this rank: work and messages in the given order.",
    "tag=tag(op, source, stage, k)": "tag=stage",
    "tag=tag(op, stage, target, k)": "tag=target",
    "rank_of(source, p)": "p - 1 - source % p",
    "rank_of(target, p)": "p - 1 - target % p",
}


def task_of_row():
    program = inspect.getsource(by_tags)
    for right, wrong in WRITTEN.items():
        program = program.replace(right, wrong)
    return TASK.format(program=program).strip()
