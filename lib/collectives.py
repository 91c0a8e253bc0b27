"""Collectives written from send and receive: broadcast and reduce by hand and over a tree; all-reduce in three ways.

The problem: an all-reduce looks like one operation of the network. It is a program, and the same result can cost a rank
twice the array or n times the array. The idea: write it in the obvious way, then over a tree, then around a ring. Each
function is the program of *one* rank; `lib.cost.steps` lists the same moves for all ranks.

No function changes its argument. All ranks end with the same bits: they add in the same order, or one adds for all.

Shapes: x[…] has S elements, n is the size of the group; a chunk is flat.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lib import comm
from lib.mesh import Group
from lib.runtime.shapes import out_like, readable

# ---- through one rank -----------------------------------------------------------------------------------------------


def naive_broadcast(x: Tensor, group: Group, src: int = 0) -> Tensor:
    """Rank `src` sends the full tensor to each other rank: x[S] → [S]. Only `src` sends, (n−1) · S."""
    if group.rank != src:
        return comm.recv(x, group, src).wait()
    others = {rank: x for rank in range(group.size) if rank != src}
    comm.exchange(others, {}, group).wait()
    return readable(x).clone()


def naive_reduce(x: Tensor, group: Group, dst: int = 0) -> Tensor | None:
    """Every rank sends its full tensor to `dst`, which adds them: x[S] → [S]. The other ranks get None."""
    if group.rank != dst:
        return comm.send(x, group, dst).wait()
    others = {rank: x for rank in range(group.size) if rank != dst}
    total = readable(x).clone()
    for part in comm.exchange({}, others, group).wait().values():
        total += part
    return total


def naive_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Add up on rank 0, then send the sum to all: x[S] → [S]. Rank 0 receives and sends (n−1) · S, over one link.

    The α–β model: 2(n−1) · (alpha + S/bandwidth).
    """
    total = naive_reduce(x, group)
    return naive_broadcast(x if total is None else total, group)


# ---- over a tree ----------------------------------------------------------------------------------------------------


def tree_reduce(x: Tensor, group: Group, dst: int = 0) -> Tensor | None:
    """In each of ⌈log₂ n⌉ rounds half of the ranks send to the other half, until `dst` has the sum: x[S] → [S].

    The other ranks get None.
    """
    n, me = group.size, group.rank
    place = (me - dst) % n  # places are counted from dst
    total, distance = readable(x).clone(), 1
    while distance < n:
        if place % (2 * distance):  # the higher rank of a pair sends, and is done
            return comm.send(total, group, (me - distance) % n).wait()
        if place + distance < n:
            total += comm.recv(x, group, (me + distance) % n).wait()
        distance *= 2
    return total


def tree_broadcast(x: Tensor, group: Group, src: int = 0) -> Tensor:
    """In each round every rank that has x sends it, so their number doubles: x[S] → [S]. `src` sends ⌈log₂ n⌉ · S."""
    n, me = group.size, group.rank
    place, distance = (me - src) % n, 1
    while distance < n and place % (2 * distance) == 0:
        distance *= 2  # up to the distance of the rank that sends to this one
    x = comm.recv(x, group, (me - distance) % n).wait() if place else readable(x).clone()
    while distance > 1:
        distance //= 2
        if place + distance < n:
            comm.send(x, group, (me + distance) % n).wait()
    return x


def tree_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Reduce to rank 0 over the tree, then broadcast: x[S] → [S]. The busiest rank sends ⌈log₂ n⌉ · S.

    The α–β model: 2⌈log₂ n⌉ · (alpha + S/bandwidth).

    Source: Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005, sections 4.4 and 4.5 (binomial trees).
    """
    total = tree_reduce(x, group)
    return tree_broadcast(x if total is None else total, group)


# ---- around a ring --------------------------------------------------------------------------------------------------


def chunks_of(x: Tensor, n: int) -> Sequence[Tensor]:
    """x[…] → n flat views; the first are one element longer if n does not divide S."""
    return readable(x).reshape(-1).tensor_split(n)


def pass_right(x: Tensor, into: Tensor, group: Group) -> Tensor:
    """One step of a ring: send `x` to the right, receive `into` from the left."""
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    coming = comm.recv(into, group, left, out=into)
    comm.send(x, group, right).wait()
    return coming.wait()


def ring_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum each chunk on its way around the ring: x[S] → chunk r of the sum, [S/n]. Sends (n−1)/n · S, in n−1 steps."""
    n, chunks = group.size, chunks_of(x, group.size)
    total = chunks[group.rank - 1].clone()
    for step in range(n - 1):
        mine = chunks[(group.rank - 2 - step) % n]
        total = pass_right(total, torch.empty_like(mine), group).add_(mine)
    return total


def ring_all_gather(part: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """Pass each chunk around the ring, and keep a copy on every rank: part[S/n] → [S]. Sends (n−1)/n · S, in n−1 steps.

    `out`, flat, receives the S elements in the chunks of `chunks_of`; None if all chunks are equal.
    """
    n, part = group.size, readable(part).reshape(-1)
    out = out_like(part, (n * part.numel(),) if out is None else out.shape, out)
    chunks = chunks_of(out, n)
    chunks[group.rank].copy_(part)
    for step in range(n - 1):
        here = (group.rank - step) % n
        pass_right(chunks[here], chunks[here - 1], group)
    return out


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter, then all-gather: x[S] → [S].

    Each rank sends 2(n−1)/n · S, in 2(n−1) steps. The α–β model: 2(n−1) · alpha + 2(n−1)/n · S/bandwidth.

    Source: Patarasuk & Yuan, JPDC 69(2), 2009; Gibiansky, 2017.
    """
    part = ring_reduce_scatter(x, group)
    return ring_all_gather(part, group, part.new_empty(x.numel())).view(x.shape)
