"""Row A of exercise 10.1: a pipeline from the last rank to rank 0, and a program that is silently wrong."""

import inspect
import re
from dataclasses import replace

import torch
from torch import distributed as dist

SWAPPED = {  # changed by the direction: in a program
    "rank > 0": "rank < last",
    "rank - 1": "rank + 1",
    "min(last - rank": "min(rank",
}
IN_LIST = {  # in the book's list of mistakes: here GPipe may still have its one tensor, and new memory is NaN
    "min(last - rank, m) => m\n": "in order of work: min(last - rank, m) => m\n",
    "g = torch.empty_like(like) => g = torch.zeros_like(like)\n": "",
}
IN_WORDS = {  # in its hints
    "It hangs in the calls in which the program of the task hangs: neighbours": "It hangs, because neighbours",
    "It no longer hangs, because all": "All",
    "It no longer hangs, because one": "The order of work is not that of 1F1B: one",
    "how messages are sent": "how messages are received and sent",
    "The previous rank": "The stage before",
}


def wrong_step(forward, backward, like, m):
    """1F1B on this rank: forward and backward of m microbatches."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    warmup, x, g = min(rank, m), torch.empty_like(like), torch.empty_like(like)

    for i in range(m + warmup):
        if i < m:
            if rank < last:
                dist.irecv(x, src=rank + 1).wait()
            y = forward(i, x)
            if rank > 0:
                dist.isend(y, dst=rank - 1)
        if i >= warmup:
            if rank > 0:
                dist.irecv(g, src=rank - 1).wait()
            of_x = backward(i - warmup, g)
            if rank < last:
                dist.isend(of_x, dst=rank + 1)


# What the program gave is measured, with the normally distributed weights and batch of seed 0.
TASK_OF_ROW = f"""
The pipeline runs the other way, from the last rank to rank 0, and the program does not hang: it is silently wrong.

The last rank reads the batch and ignores `x`; rank 0 computes the loss and ignores `g`. `forward` and `backward` always
return a new tensor: that of forward on rank 0, and that of backward on the last rank, is not needed. This is the
program. Its order of work is right.

```python
{inspect.getsource(wrong_step)}```

On four ranks with eight microbatches it returned, and this was found. The error is the norm of the difference from the
right gradient, divided by the norm of the right gradient.

```text
rank  error of the gradient  messages sent  sends not waited for
0             0.00                 8                  8
1             1.11                16                 16
2             1.34                16                 16
3             0.00                 8                  8
```

Which ranks are right is a clue. All else is as above: the name `repaired_step`, what `forward` keeps, the order of
work, and that every send and receive is waited for.
""".strip()

# The edits are of the book's solution, in its direction; `mirrored` turns what they make of it.
MISTAKES_OF_ROW = """
wrong_step
    The program of the task gives this: ranks in the middle are wrong, and no send is waited for.
        They alone receive several inputs and keep them at the same time: allocate a tensor per message. Then keep the
        handle of each send, and wait for all of them.
min(last - rank, m) => min(rank, m)
hangs
    It hangs, because the warmup is the one of the book's direction.
        Rank 0 computes the loss, and runs backward after its first forward; the last rank runs most forwards before.
warmup, sends = min(last - rank, m), [] => warmup, sends, used = min(last - rank, m), [], {}
x = torch.empty_like(like) => x = used.setdefault(k % max(warmup, 1), torch.empty_like(like))
or
warmup, sends = min(last - rank, m), [] => warmup, sends, used = min(last - rank, m), [], {}
x = torch.empty_like(like) => x = used.setdefault(k % 2, torch.empty_like(like))
    Activations are received into a few tensors in turn: too few, because one is overwritten while it is still kept.
        A rank keeps up to warmup + 1 inputs: as many tensors, or one per message.

in sends that were not waited for:
sends.append((dist.isend(y, dst=rank + 1), y)) => dist.isend(y, dst=rank + 1)
    The sends of activations are not waited for.
        Keep their handles as well.
sends.append((dist.isend(g, dst=rank - 1), g)) => dist.isend(g, dst=rank - 1)
    The sends of gradients are not waited for.
        Keep their handles as well.
for send, _ in sends: => for send, _ in sends[-1:]:
or
min(last - rank, m), [] => min(last - rank, m), {}
sends.append((dist.isend(y, dst=rank + 1), y)) => sends[0] = dist.isend(y, dst=rank + 1)
sends.append((dist.isend(g, dst=rank - 1), g)) => sends[1] = dist.isend(g, dst=rank - 1)
for send, _ in sends: => for send in sends.values():
    Only the last send is waited for, or the last in each direction.
        A handle is about one message: keep all of them in a list, and wait for each.
min(last - rank, m), [] => min(last - rank, m), {}
sends.append((dist.isend(y, dst=rank + 1), y)) => 0 in sends and sends[0].wait(); sends[0] = dist.isend(y, dst=rank + 1)
sends.append((dist.isend(g, dst=rank - 1), g)) => 1 in sends and sends[1].wait(); sends[1] = dist.isend(g, dst=rank - 1)
for send, _ in sends: => for send in sends:
send.wait() => pass
    Each send is waited for before the next in its direction, and so the last is not.
        After the loop, wait for the last one as well.

in all:
"""
ALSO_RIGHT_OF_ROW = """
x = torch.empty_like(like) => x = like
y = forward(k, x) => y = forward(k, x.clone())
    What forward keeps is a copy.
g = torch.empty_like(like) => g = like
    Backward no longer needs a gradient when the next one is received.
warmup, sends = min(last - rank, m), [] => warmup, sends, used = min(last - rank, m), [], {}
x = torch.empty_like(like) => x = used.setdefault(k % (warmup + 1), torch.empty_like(like))
    As many tensors as inputs are kept.
sends.append((dist.isend(y, dst=rank + 1), y)) => dist.send(y, dst=rank + 1)
or sends.append((dist.isend(g, dst=rank - 1), g)) => dist.send(g, dst=rank - 1)
    Blocking in one direction is no cycle.
"""


def mirrored(program):
    """The program in the row's direction."""
    both = SWAPPED | {new: old for old, new in SWAPPED.items()}
    return replace(program, text=re.sub("|".join(map(re.escape, both)), lambda found: both[found[0]], program.text))


def changed(text, by):
    """The text with these pieces replaced."""
    for old, new in by.items():
        text = text.replace(old, new)
    return text


def in_words(mistake):
    """A mistake of the book, in the words of the row."""
    return replace(mistake, hint=changed(mistake.hint, IN_WORDS), repair=changed(mistake.repair, IN_WORDS))
