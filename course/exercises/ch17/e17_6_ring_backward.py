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
    both = {"o": attend(q, k, v, scale=1), "lse": (q @ k.mT).logsumexp(-1)}
    parts = {name: x.chunk(n, 2) for name, x in both.items()}
    return [g | {name: part[rank] for name, part in parts.items()} for rank, g in enumerate(given)]


def body(answer, group, given):
    result = answer(*(given[name].clone() for name in GIVEN), group)
    return {"what was returned": kind(result)} | dict(zip(NAMES, several(result, 3), strict=True))


def reference(given):
    q, k, v, d_o = (torch.cat([g[name] for g in given], 2) for name in ("q", "k", "v", "d_o"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attend(*leaves, scale=1), leaves, d_o)
    of_ranks = zip(*(x.chunk(len(given), 2) for x in grads), strict=True)
    return [{"what was returned": "3 results"} | dict(zip(NAMES, mine, strict=True)) for mine in of_ranks]


def ring_backward(q, k, v, o, lse, d_o, group):
    kv, d_q, d_kv = torch.stack([k, v]), 0, 0
    for _ in range(group.size):
        k, v = kv
        P = (q @ k.mT - lse[..., None]).exp()
        dS = P * (d_o @ v.mT - (d_o * o).sum(-1, keepdim=True))
        d_q = d_q + dS @ k
        d_kv = d_kv + torch.stack([dS.mT @ q, P.mT @ d_o])
        kv, d_kv = comm.shift(kv, group), comm.shift(d_kv, group)
    return d_q, *d_kv


def by_autograd(q, k, v, o, lse, d_o, group):
    """A gather, and autograd: forward is computed again."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    k, v = (all_gather_reduce_scatter(x, group, 2) for x in (k, v))
    return torch.autograd.grad(attend(q, k, v, scale=1), leaves, d_o)


def by_rows(q, k, v, o, lse, d_o, group):
    """All keys are gathered, and the sum of the softmax is taken as report B has it; a reduce-scatter at the end."""
    k, v = (comm.all_gather(x, group, 2) for x in (k, v))
    P, dP = (q @ k.mT).softmax(-1), d_o @ v.mT
    dS = P * (dP - (dP * P).sum(-1, keepdim=True))
    return [dS @ k, *(comm.reduce_scatter(x, group, 2) for x in (dS.mT @ q, P.mT @ d_o))]


MISTAKES = """
k, v = kv =>
    Every step still computes with this rank's own keys and values. The blocks of all ranks arrive, and are not
    used. In forward they were used, so the loss is right.
        Take k and v from kv, which has just arrived.
k, v = kv =>
(d_o * o).sum(-1, keepdim=True) => (P * (d_o @ v.mT)).sum(-1, keepdim=True)
    You followed report B, and every step still computes with this rank's own keys and values. B is wrong: its sum goes
    over all keys of a query, and Σ dO · O is this sum. Over the keys of one block it is something else.
        Leave the sum as it was, and take k and v from kv, which has just arrived.
(d_o * o).sum(-1, keepdim=True) => (P * (d_o @ v.mT)).sum(-1, keepdim=True)
    The keys and values are right now, and you followed report B as well: you sum over the keys of one block. A softmax
    was over all keys of a query. Its sum of P · dP is the sum of dO · O, because O is the sum of P · V.
        Leave the sum as it was.
k, v = kv => k = kv[0]
    The keys of each block are right, and the values are still this rank's own.
        Take both from kv, which has just arrived.
k, v = kv => v = kv[1]
    The values of each block are right, and the keys are still this rank's own.
        Take both from kv, which has just arrived.
k, v = kv => key, v = kv
q @ k.mT => q @ key.mT
    The weights are right, and the gradient of q still comes from this rank's own keys.
        The gradient of a score goes to q through the key that it was computed with.
k, v = kv => kv = comm.shift(kv, group); k, v = kv
kv, d_kv = comm.shift(kv, group), comm.shift(d_kv, group) => d_kv = comm.shift(d_kv, group)
    Your keys are one hop ahead of their gradient: each rank ends with the gradient of the tokens of the rank before.
        Compute with the block that is here, then pass it on.
kv, d_kv = comm.shift(kv, group), comm.shift(d_kv, group) => kv = comm.shift(kv, group)
    The gradient of keys and values does not travel: each rank adds up its terms for blocks of different ranks.
        Pass d_kv on with the block that it belongs to; after n hops it is at home.
for _ in range(group.size): => for hop in range(1, group.size + 1):
comm.shift(d_kv, group) => comm.shift(d_kv, group) if hop < group.size else d_kv
    The gradient of keys and values makes one hop too few: each rank has the gradient of the next rank's tokens.
        After n hops it is at home.
(q @ k.mT - lse[..., None]).exp() => (q @ k.mT).softmax(-1)
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

EXERCISE = exercise(globals(), points=1, right=(ring_backward, by_autograd, by_rows))
