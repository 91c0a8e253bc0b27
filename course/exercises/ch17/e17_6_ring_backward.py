"""17.6: backward of ring attention that computes with the wrong keys and values, and two reports about it."""

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from course.check.edits import exercise
from course.check.exercise import drawn, kind, several
from lib import comm
from lib.conjugate import all_gather_reduce_scatter

ROWS, HEADS, TOKENS, WIDTH = 2, 2, 3, 4  # TOKENS of each rank
NAMES = ("gradient of q", "gradient of k", "gradient of v")
GIVEN = ("q", "k", "v", "o", "lse", "d_o")


def inputs(generator, n):
    """Forward is right: its output and log-sum-exp are those of one process."""
    given = drawn(generator, n, {}, dict.fromkeys(("q", "k", "v", "d_o"), (ROWS, HEADS, TOKENS, WIDTH)))
    q, k, v = (torch.cat([g[name] for g in given], 2) for name in "qkv")
    scores = q @ k.mT / WIDTH**0.5
    scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
    both = {"o": scores.softmax(-1) @ v, "lse": scores.logsumexp(-1)}
    parts = {name: x.chunk(n, 2) for name, x in both.items()}
    return [g | {name: part[rank] for name, part in parts.items()} for rank, g in enumerate(given)]


def body(answer, group, given):
    result = answer(*(given[name].clone() for name in GIVEN), group)
    return {"what was returned": kind(result)} | dict(zip(NAMES, several(result, 3), strict=True))


def reference(given):
    q, k, v, d_o = (torch.cat([g[name] for g in given], 2) for name in ("q", "k", "v", "d_o"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attend(*leaves, is_causal=True), leaves, d_o)
    of_ranks = zip(*(x.chunk(len(given), 2) for x in grads), strict=True)
    return [{"what was returned": "3 results"} | dict(zip(NAMES, mine, strict=True)) for mine in of_ranks]


def ring_backward(q, k, v, o, lse, d_o, group):
    rank, n, t = group.rank, group.size, q.shape[2]
    kv = torch.stack([k, v])
    d_q, d_kv = torch.zeros_like(q), torch.zeros_like(kv)
    share = (d_o * o).sum(-1, keepdim=True)
    for step in range(n):
        owner = (rank - step) % n
        key, value = kv
        scores = q @ key.mT / q.shape[-1] ** 0.5
        keys, queries = torch.arange(t) + owner * t, torch.arange(t) + rank * t
        scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
        weights = (scores - lse[..., None]).exp()
        d_weights = d_o @ value.mT
        d_scores = weights * (d_weights - share) / q.shape[-1] ** 0.5
        d_q += d_scores @ key
        d_kv += torch.stack([d_scores.mT @ q, weights.mT @ d_o])
        kv, d_kv = comm.shift(kv, group), comm.shift(d_kv, group)
    return d_q, *d_kv


def by_autograd(q, k, v, o, lse, d_o, group):
    """A gather, and autograd: forward is computed again."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    k, v = (all_gather_reduce_scatter(x, group, 2) for x in (k, v))
    queries = torch.arange(q.shape[2]) + group.rank * q.shape[2]
    y = attend(q, k, v, attn_mask=torch.arange(k.shape[2]) <= queries[:, None])
    return torch.autograd.grad(y, leaves, d_o)


def by_rows(q, k, v, o, lse, d_o, group):
    """All keys are gathered, and the sum of the softmax is taken as report B has it; a reduce-scatter at the end."""
    k, v = (comm.all_gather(x, group, 2) for x in (k, v))
    queries = torch.arange(q.shape[2]) + group.rank * q.shape[2]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.arange(k.shape[2]) > queries[:, None], -torch.inf)
    P, dP = scores.softmax(-1), d_o @ v.mT
    dS = P * (dP - (dP * P).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    return [dS @ k, *(comm.reduce_scatter(x, group, 2) for x in (dS.mT @ q, P.mT @ d_o))]


MISTAKES = """
key, value = kv => key, value = k, v
    Every step still computes with this rank's own keys and values. The blocks of all ranks arrive, and are not
    used. In forward they were used, so the loss is right.
        Take key and value from kv, which has just arrived.
key, value = kv => key, value = k, v
(d_weights - share) => (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    You followed report B, and every step still computes with this rank's own keys and values. B is wrong: its sum goes
    over all keys of a query, and `share` is this sum. Over the keys of one block it is something else.
        Leave `share` as it was, and take key and value from kv, which has just arrived.
(d_weights - share) => (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    The keys and values are right now, and you followed report B as well: you sum over the keys of one block. A softmax
    was over all keys of a query. Its sum of P · dP is the sum of d_o · o, because o is the sum of P · v.
        Leave `share` as it was.
key, value = kv => key, value = kv[0], v
    The keys of each block are right, and the values are still this rank's own.
        Take both from kv, which has just arrived.
key, value = kv => key, value = k, kv[1]
    The values of each block are right, and the keys are still this rank's own.
        Take both from kv, which has just arrived.
d_q += d_scores @ key => d_q += d_scores @ k
    The weights are right, and the gradient of q still comes from this rank's own keys.
        The gradient of a score goes to q through the key that it was computed with.
key, value = kv => kv = comm.shift(kv, group); key, value = kv
kv, d_kv = comm.shift(kv, group), comm.shift(d_kv, group) => d_kv = comm.shift(d_kv, group)
    Your keys are one hop too far on: the first block is from the rank before, and the mask is this rank's own.
        Compute with the block that is here, then pass it on.
owner = (rank - step) % n => owner = (rank + step) % n
    You look for the owner `step` places further on. They come from the rank before.
        After `step` hops the owner is still (rank - step) % n.
kv, d_kv = comm.shift(kv, group), comm.shift(d_kv, group) => kv = comm.shift(kv, group)
    The gradient of keys and values does not travel: each rank adds up its terms for blocks of different ranks.
        Pass d_kv on with the block that it belongs to; after n hops it is at home.
=> kv, d_kv = comm.shift(kv, group), comm.shift(d_kv, group) if step < n - 1 else d_kv
    The gradient of keys and values makes one hop too few: each rank has the gradient of the next rank's tokens.
        After n hops it is at home.
(scores - lse[..., None]).exp() => scores.softmax(-1).nan_to_num()
    You divide the weights of each block by the sum of that block. Forward divided by the sum over all keys.
        Subtract lse again.
return d_q, *d_kv => return d_q, *comm.all_reduce(d_kv, group)
    You also sum the gradients of keys and values over the ranks. On their way every rank added its
    term: now the gradients of different tokens are in one sum.
        Return them as they came home.
return d_q, *d_kv => return comm.all_reduce(d_q, group), *d_kv
    You also sum the gradient of q over the ranks. A rank's queries meet all keys here.
        Their gradient is complete.
"""

EXERCISE = exercise(globals(), points=2, right=(ring_backward, by_autograd, by_rows))
