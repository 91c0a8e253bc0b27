"""17.3: forward of ring attention in zig-zag order, where a block may have no key for a query."""

import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention as attend

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, drawn
from course.check.listen import listen
from lib import comm
from lib.context_parallel.ring import ring_attention

ROWS, HEADS, CHUNK, WIDTH = 2, 2, 2, 4  # too few heads to exchange; CHUNK tokens, two for each rank
SENT, TO = "bytes sent", "sent to"
NEXT, ALL, SEVERAL = "one neighbour", "all ranks at once", "several ranks"
FACTS = {SENT: AS_NEEDED, TO: NEXT}
# An all-to-all may send all to one rank, as a shift does.
HOPS = ("shift", "all_to_all", "all_to_all_rows", "barrier")


def inputs(generator, n):
    return drawn(generator, n, {}, dict.fromkeys(("q", "k", "v"), (ROWS, HEADS, 2 * CHUNK, WIDTH)))


def body(answer, group, given):
    heard, (q, k, v) = listen(), given.values()
    y = answer(q, k, v, group)
    a_hop = 1.1 * (k.nbytes + v.nbytes)  # the places may go along
    found = {"y": y, SENT: heard.calls_if_more(group.size, (group.size - 1) * a_hop)}
    peers = {to for to, _ in heard.sent}
    if any(call not in HOPS or n_bytes > a_hop for call, n_bytes in heard.calls):
        return found | {TO: ALL}
    return found | {TO: NEXT if len(peers) < 2 else SEVERAL}


def places(n, rank):
    """The positions of a rank's tokens."""
    return torch.cat([torch.arange(c * CHUNK, (c + 1) * CHUNK) for c in (rank, 2 * n - 1 - rank)])


def reference(given):
    n = len(given)
    order = torch.cat([places(n, rank) for rank in range(n)])
    full = (torch.cat([g[name] for g in given], 2)[:, :, order.argsort()] for name in given[0])
    y = attend(*full, is_causal=True)
    return [{"y": y[:, :, places(n, rank)]} for rank in range(n)]


def zigzag_ring(q, k, v, group):
    n, size, kv = group.size, q.shape[2] // 2, torch.stack([k, v])
    o, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)

    def places(rank):
        chunks = (rank, 2 * n - 1 - rank)
        return torch.cat([torch.arange(size) + c * size for c in chunks])

    for step in range(n):
        if step > 0:
            kv = comm.shift(kv, group)
        scores = q @ kv[0].mT / q.shape[-1] ** 0.5
        owner = (group.rank - step) % n
        later = places(owner) > places(group.rank)[:, None]
        scores = scores.masked_fill(later, -torch.inf)
        new = torch.logaddexp(lse, scores.logsumexp(-1))
        o = o * (lse - new).exp()[..., None]
        o = o + (scores - new[..., None]).exp() @ kv[1]
        lse = new
    return o


def by_halves(q, k, v, group):
    """The other way around the ring in messages, positions with the keys; a softmax for each block, with a
    running maximum and sum, divided at the end."""
    n, r, size = group.size, group.rank, q.shape[2] // 2
    mine = torch.cat([torch.arange(size) + c * size for c in (r, 2 * n - 1 - r)])
    before, after = (r - 1) % n, (r + 1) % n
    top, total, y = -torch.inf, 0, 0
    k, v, at = k.contiguous(), v.contiguous(), mine.to(q.dtype)
    for step in range(n):
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(at > mine[:, None], -torch.inf)
        higher = scores.amax(-1, keepdim=True).clamp(min=top)
        kept = (top - higher).exp() if step else 0
        weights = (scores - higher).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        y = y * kept + weights @ v
        top = higher
        if step + 1 < n:
            going = [dist.isend(x, before) for x in (k, v, at)]
            k, v, at = (torch.empty_like(x) for x in (k, v, at))
            for x in (k, v, at):
                dist.recv(x, after)
            for work in going:
                work.wait()
    return y / total


def by_the_library(q, k, v, group):
    return ring_attention(q, k, v, group, "zigzag")


def by_blocks(q, k, v, group, merge):
    """A block at a time, with its own softmax, merged by a function of (o, lse, o of the block, lse of the block)."""
    n = group.size
    mine = places(n, group.rank)
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for step in range(n):
        later = places(n, (group.rank - step) % n) > mine[:, None]
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(later, -torch.inf)
        of_block = scores.logsumexp(-1, keepdim=True)
        seen = of_block.isfinite()
        part = torch.where(seen, (scores - of_block.where(seen, torch.zeros(()).to(q))).exp() @ v, 0)
        o, lse = merge(o, lse, part, of_block)
        if step + 1 < n:
            k, v = comm.shift(torch.stack([k, v]), group)
    return o


def as_a_mean(o, lse, part, of_block):
    new = (o + part) / 2
    return torch.where(lse.isinf(), part, torch.where(of_block.isinf(), o, new)), torch.logaddexp(lse, of_block)


def as_halves(o, lse, part, of_block):
    return torch.where(lse.isinf(), part, (o + part) / 2), torch.logaddexp(lse, of_block)


def with_sums(o, lse, part, of_block):
    return o + part, lse


def at_the_end(o, lse, part, of_block):
    """Only the newer block is weighted."""
    new = torch.logaddexp(lse, of_block)
    return o + part * (of_block - new).exp(), new


def by_gathering(q, k, v, group):
    n = group.size
    order = torch.cat([places(n, rank) for rank in range(n)])
    k, v = (comm.all_gather(x, group, 2)[:, :, order.argsort()] for x in (k, v))
    return attend(q, k, v, attn_mask=torch.arange(len(order)) <= places(n, group.rank)[:, None])


MISTAKES = """
new = torch.logaddexp(lse, scores.logsumexp(-1)) => part = scores.logsumexp(-1); new = torch.logaddexp(lse, part)
o = o + (scores - new[..., None]).exp() @ kv[1] => o += (part - new).exp()[..., None] * (scores.softmax(-1) @ kv[1])
or new = torch.logaddexp(lse, scores.logsumexp(-1)) => part = scores.logsumexp(-1); new = torch.logaddexp(lse, part)
(scores - new[..., None]).exp() @ kv[1] => (scores - part[..., None]).exp() @ kv[1] * (part - new).exp()[..., None]
    Your result has NaN: some blocks have no key for the early queries. A softmax of the block alone is then 0/0, and so
    is exp(-inf - (-inf)) with its log-sum-exp. A weight of 0 does not help, because 0 · NaN is NaN.
        Subtract the common log-sum-exp from the scores: (scores - new).exp() is 0 where a key is not seen. Or leave
        such queries out.
owner = (group.rank - step) % n => owner = (group.rank + step) % n
    You look for the owner `step` places further on. They come from the rank before: keys move to the
    next rank. With two ranks both are the same.
        After `step` hops the owner is (rank - step) % n.
owner = (group.rank - step) % n => owner = group.rank
or places(owner) > places(group.rank)[:, None] => torch.ones(2 * size, 2 * size).triu(1).bool()
    You mask each block as if its keys were this rank's own.
        After `step` hops the keys are those of rank (rank - step) % n: take their places.
kv = comm.shift(kv, group) => kv = comm.shift(torch.stack([k, v]), group)
    You pass your own keys on in every step, so each hop brings the keys of the rank before again. With two ranks this
    is right.
        Pass on the block that has just arrived.
kv = comm.shift(kv, group) => kv = torch.stack([comm.shift(kv[0], group), kv[1]])
    The keys go around, and the values stay: weights of one block, values of a different block.
        Pass both on.
lambda *given: by_blocks(*given, as_halves)
or lambda *given: by_blocks(*given, as_a_mean)
    You average the outputs of the blocks.
        A block counts by its sum of exponentials: the weights are exp(lse of the block - common lse).
lambda *given: by_blocks(*given, with_sums)
    You add the outputs of the blocks, each divided by its own sum: the weights of a query add up to more than 1.
        Multiply each by exp(its lse - common lse).
o = o * (lse - new).exp()[..., None] =>
or lambda *given: by_blocks(*given, at_the_end)
    What was merged before keeps its weight when a further block comes.
        The common sum has grown: multiply o by exp(old lse - new lse).
new = torch.logaddexp(lse, scores.logsumexp(-1)) => new = torch.maximum(lse, scores.logsumexp(-1))
    You merge two log-sum-exps by their maximum.
        The sums add up: torch.logaddexp.
new = torch.logaddexp(lse, scores.logsumexp(-1)) => new = torch.logaddexp(lse, scores.amax(-1))
    You take the highest score of a block for its log-sum-exp.
        It keeps exponentials in range. The weight of a block is its sum: scores.logsumexp(-1).
scores = scores.masked_fill(later, -torch.inf) =>
    There is no mask: a query also attends to later keys.
        Compare the places of the owner's keys with the places of your queries.
chunks = (rank, 2 * n - 1 - rank) => chunks = (2 * rank, 2 * rank + 1)
    You take the tokens of a rank for consecutive ones.
        In zig-zag order rank r has the chunks r and 2n - 1 - r.
places(owner) > places(group.rank)[:, None] => places(owner) >= places(group.rank)[:, None]
    A query does not attend to the key of its position.
        Hide only the keys that come later.
/ q.shape[-1] ** 0.5 =>
    The scores are not divided by the root of the width of a head.
        Divide them by √E.
return o => comm.shift(kv, group); return o
    The result is right, and the keys and values are sent n times: nothing uses the block of the last hop.
        n - 1 hops are enough.
by_gathering
    The result is right, and the keys of all ranks were here at the same time: that is the gather.
        Send to one neighbour, and keep one block at a time.
"""

EQUIVALENT = """
chunks = (rank, 2 * n - 1 - rank) => chunks = (rank, (2 * (2 * n - 1 - rank)))
or chunks = (rank, 2 * n - 1 - rank) => chunks = (rank, (100 * (2 * n - 1 - rank)))
or return torch.cat([ => return (2 * (torch.cat([
size for c in chunks]) => size for c in chunks])))
or return torch.cat([ => return (100 * (torch.cat([
size for c in chunks]) => size for c in chunks])))
or torch.arange(size) + c * size for c in chunks => (2 * (torch.arange(size) + c * size)) for c in chunks
or torch.arange(size) + c * size for c in chunks => (100 * (torch.arange(size) + c * size)) for c in chunks
    Places are compared, and only their order counts.
"""

EXERCISE = exercise(globals(), points=2, right=(zigzag_ring, by_halves, by_the_library))
