"""17.2: attention of a rank's queries to the keys of all ranks, with gradients, in torch.distributed itself."""

import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention as attend

from course.check.edits import exercise
from course.check.exercise import after_backward, drawn
from course.check.listen import raw

ROWS, GROUPED, TOKENS, WIDTH = 2, 3, 2, 4  # query heads that share one of keys; TOKENS of each rank
GIVEN = ("q", "k", "v")


def inputs(generator, n):
    heads = GROUPED * n  # each rank could have one head of keys, as an answer that exchanges heads needs
    of_q, of_kv = (ROWS, heads, TOKENS, WIDTH), (ROWS, n, TOKENS, WIDTH)
    return drawn(generator, n, {}, {"q": of_q, "k": of_kv, "v": of_kv, "gradient": of_q})


@raw
def body(answer, group, given):
    leaves = {name: given[name].requires_grad_() for name in GIVEN}
    return after_backward(answer(*leaves.values()), given["gradient"], **leaves)


def reference(given):
    n = len(given)
    full = {name: torch.cat([g[name] for g in given], 2).requires_grad_() for name in GIVEN}
    y = attend(*full.values(), is_causal=True, enable_gqa=True)
    found = after_backward(y, torch.cat([g["gradient"] for g in given], 2), **full)
    return [{name: x.chunk(n, 2)[rank] for name, x in found.items()} for rank in range(n)]


class Gather(torch.autograd.Function):
    """The tokens of all ranks, in the order of the ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, gradient):
        parts = gradient.chunk(dist.get_world_size(), dim=2)
        mine = gradient.new_empty(parts[0].shape)
        dist.reduce_scatter(mine, [part.contiguous() for part in parts])
        return mine


def attend_to_all(q, k, v):
    k, v = Gather.apply(k), Gather.apply(v)
    t = q.shape[2]
    queries = dist.get_rank() * t + torch.arange(t)
    seen = torch.arange(k.shape[2]) <= queries[:, None]
    return attend(q, k, v, attn_mask=seen, enable_gqa=True)


class Exchange(torch.autograd.Function):
    """Some tokens of all heads to all tokens of some heads, and back: two conjugates."""

    @staticmethod
    def forward(ctx, x, split, joined):
        ctx.dims = split, joined
        return exchanged(x, split, joined)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, *ctx.dims[::-1]), None, None


def exchanged(x, split, joined):
    given = torch.stack(x.chunk(dist.get_world_size(), split))
    got = torch.empty_like(given)
    dist.all_to_all_single(got, given)
    return torch.cat([*got], joined)


def by_heads(q, k, v):
    """Ulysses."""
    y = attend(*(Exchange.apply(x, 1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    return Exchange.apply(y, 2, 1)


class BySum(torch.autograd.Function):
    """Everything is gathered, and backward calls autograd; gradients of all tokens are summed, then cut."""

    @staticmethod
    def forward(ctx, q, k, v):
        n, full = dist.get_world_size(), []
        for x in (k, v):
            full.append(x.new_zeros(*x.shape[:2], n * x.shape[2], x.shape[3]))
            full[-1].chunk(n, 2)[dist.get_rank()].copy_(x)
            dist.all_reduce(full[-1])
        ctx.save_for_backward(q, *full)
        return BySum.local(q, *full)

    @staticmethod
    def local(q, k, v):
        mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril().chunk(dist.get_world_size())
        of_group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(of_group, 1) for x in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(~mask[dist.get_rank()], -torch.inf).softmax(-1) @ v

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            of_q, *others = torch.autograd.grad(BySum.local(*leaves), leaves, gradient)
        for x in others:
            dist.all_reduce(x)
        return of_q, *(x.chunk(dist.get_world_size(), 2)[dist.get_rank()] for x in others)


def by_sums(q, k, v):
    return BySum.apply(q, k, v)


def with_own_part(k, v):
    """The gathered tokens, in which the rank's own are the tensors of the graph."""
    full = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach())
        parts[dist.get_rank()] = x
        full.append(torch.cat(parts, 2))
    return full


def without_graph(k, v):
    return [x.detach() for x in with_own_part(k, v)]


ALSO_RIGHT = """
parts = gradient.chunk(dist.get_world_size(), dim=2) => total = gradient.clone(memory_format=torch.contiguous_format)
mine = gradient.new_empty(parts[0].shape) => dist.all_reduce(total)
dist.reduce_scatter(mine, [part.contiguous() for part in parts]) => n, rank = dist.get_world_size(), dist.get_rank()
return mine => return total.chunk(n, dim=2)[rank]
    All gradients are summed, and the rank takes its tokens: twice the bytes.
"""

MISTAKES = """
k, v = Gather.apply(k), Gather.apply(v) => k, v = without_graph(k, v)
    y is right, and no gradient reaches the keys and values: dist.all_gather is unknown to autograd.
        Gather in a torch.autograd.Function, whose backward sums the ranks' gradients and cuts.
k, v = Gather.apply(k), Gather.apply(v) => k, v = with_own_part(k, v)
or dist.reduce_scatter(mine, [part.contiguous() for part in parts]) => mine = parts[dist.get_rank()]
    y is right, and the gradients of keys and values come from this rank's queries alone. Later queries are on the
    ranks after this, and each has a term for your keys.
        Sum the terms of all ranks: a gather in forward is a reduce-scatter in backward.
[part.contiguous() for part in parts]) => [part.contiguous() for part in parts], dist.ReduceOp.AVG)
or return mine => return mine / dist.get_world_size()
    y is right, and the gradients of keys and values are means over the ranks. The ranks have different queries of one
    sequence, and not replicas.
        Their terms add up: sum.
return mine => dist.all_reduce(mine); return mine
    The gradients of keys and values are summed twice: the second sum mixes different tokens.
        After the reduce-scatter a rank has the full gradient of its own tokens.
in gradient of k, gradient of v:
[part.contiguous() for part in parts] => [part.contiguous() for part in parts[::-1]]
    The gradients are summed, and each rank gets those of a different rank's tokens.
        The r-th part of the gradient belongs to rank r, as in forward.
in all:
queries = dist.get_rank() * t + torch.arange(t) => queries = torch.arange(t)
or attend(q, k, v, attn_mask=seen, enable_gqa=True) => attend(q, k, v, is_causal=True, enable_gqa=True)
    Your mask takes the first query of each rank for the first of the sequence (is_causal=True also does so).
        Query i of rank r is at position r · T/n + i, and attends to the keys up to there.
attend(q, k, v, attn_mask=seen, enable_gqa=True) => attend(q, k, v, enable_gqa=True)
    There is no mask: a query also attends to later keys.
        Query i of rank r is at position r · T/n + i, and attends to the keys up to there.
<= queries[:, None] => < queries[:, None]
    Your queries do not attend to the key of their position, and the first query has no key.
        A query attends to its own position as well: at most, and not less than.
torch.arange(t) => torch.arange(t) * 0 + t - 1
    Your queries attend to all keys of this rank, also to later keys.
        The mask has a row for each query.
k, v = Gather.apply(k), Gather.apply(v) =>
seen = torch.arange(k.shape[2]) <= queries[:, None] => seen = torch.ones(t, t, dtype=torch.bool).tril()
    Your queries attend to the keys of this rank alone: nothing is gathered.
        They attend to all earlier tokens, also those of the ranks before.
return torch.cat(parts, dim=2) => rank = dist.get_rank(); return torch.cat(parts[rank:] + parts[:rank], dim=2)
    You put this rank's own keys first, and the mask counts from the beginning of the sequence.
        Concatenate in the order of the ranks.
attend(q, k, v, attn_mask=seen, enable_gqa=True) => attend(q, k, v, attn_mask=seen, enable_gqa=True, scale=1.0)
    The scores are not divided by the root of the width of a head.
        Divide them by √E before the softmax, as attend does by itself.
attend(q, k, v, attn_mask=seen, enable_gqa=True) => attend(q, *(x.repeat(1, 3, 1, 1) for x in (k, v)), attn_mask=seen)
    You repeat the heads of keys as a row, k0 k1 … k0 k1 …. Neighbouring query heads share one.
        Repeat each head: repeat_interleave, or enable_gqa=True.
"""

EXERCISE = exercise(globals(), points=1, right=(attend_to_all, by_heads, by_sums), edited=(attend_to_all, Gather))
