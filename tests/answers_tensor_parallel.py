"""Answers to the exercises of chapter 06: right ones, and one for each mistake that has a name."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.nn.functional import gelu

from lib import comm

# ---- 06.1


def mlp(x, up, up_bias, down, down_bias, group, act=gelu, inside=0, outside=1, op="sum", before=False, ends=True):
    """The answer to 06.1, with a place for each mistake."""
    hidden = x @ up.T + up_bias
    term = act(comm.all_reduce(hidden, group) if before else hidden) @ down.T + inside * down_bias
    return (comm.all_reduce(term, group, op) if ends else term) + outside * down_bias


def mlps(**wrong):
    return lambda *given: mlp(*given, **wrong)


def right_mlp_by_torch_distributed(x, up, up_bias, down, down_bias, group):
    y = F.linear(gelu(F.linear(x, up, up_bias)), down, down_bias if dist.get_rank() == 0 else None)
    dist.all_reduce(y)
    return y


def right_mlp_in_two_halves(x, up, up_bias, down, down_bias, group):
    hidden = torch.einsum("bd,fd->bf", x, up).add(up_bias)
    term = torch.einsum("bf,df->bd", gelu(hidden), down).flatten()
    term = F.pad(term, (0, -len(term) % group.size))
    whole = comm.all_gather(comm.reduce_scatter(term, group), group)
    return whole[: x.numel()].view(x.shape) + down_bias


def collects_the_hidden_numbers(x, up, up_bias, down, down_bias, group):
    hidden = comm.all_gather(gelu(x @ up.T + up_bias), group, dim=1)
    return hidden @ comm.all_gather(down, group, dim=1).T + down_bias


# ---- 06.2


def same(x, group):
    return x.view_as(x)


def total(x, group):
    return comm.all_reduce(x, group)


def mean(x, group):
    return comm.all_reduce(x, group, op="mean")


def nothing(x, group):
    return None


def function(there, back):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return there(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return back(gradient, ctx.group), None

    return Function


def block(before=(same, total), after=(total, same), skip="outside"):
    """The answer to 06.2, with a place for each mistake."""

    def answer(x, up, down, group):
        inside = function(*before).apply(x, group)
        term = gelu(inside @ up.T) @ down.T
        if skip == "to inside":
            return function(*after).apply(x + term, group)
        x = {"outside": x, "from inside": inside, "nowhere": 0}[skip]
        return x + function(*after).apply(term, group)

    return answer


class Before(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class After(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term):
        dist.all_reduce(term)
        ctx.mark_dirty(term)
        return term

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def right_block_by_torch_distributed(x, up, down, group):
    return After.apply(F.linear(gelu(F.linear(Before.apply(x), up)), down)).add(x)


def right_block_with_a_hook(x, up, down, group):
    inside = x.view_as(x)
    inside.register_hook(lambda gradient: comm.all_reduce(gradient, group))
    term = gelu(inside @ up.T) @ down.T
    return x + term + (comm.all_reduce(term, group) - term.detach())


# ---- 06.3


def run_of(heads, r, n):
    copies = max(1, n // heads)
    each = heads * copies // n
    return range(r // copies * each, r // copies * each + each)


def rows(weight, heads, kv_heads, d_head, group, queries=run_of, keys=run_of, order="qkv"):
    """The answer to 06.3, with a place for each mistake."""
    begin, found = 0, {}
    for name, size, deal in zip("qkv", (heads, kv_heads, kv_heads), (queries, keys, keys), strict=True):
        mine = [begin + head for head in deal(size, group.rank, group.size)]
        found[name] = [weight[head * d_head : (head + 1) * d_head] for head in mine]
        begin += size
    return torch.cat([head for name in order for head in found[name]])


def rows_by(**wrong):
    return lambda *given: rows(*given, **wrong)


def right_rows_by_repeating(weight, heads, kv_heads, d_head, group):
    n, r = dist.get_world_size(), dist.get_rank()
    q, k, v = (s.view(-1, d_head, weight.shape[1]) for s in weight.split([heads * d_head, *[kv_heads * d_head] * 2]))
    k, v = (s.repeat_interleave(max(1, n // kv_heads), 0) for s in (k, v))
    return torch.cat([s.tensor_split(n)[r].reshape(-1, weight.shape[1]) for s in (q, k, v)])


def every_nth(heads, r, n):
    return range(r % heads, heads, n)


def head_by_head(weight, heads, kv_heads, d_head, group):
    if kv_heads != heads:
        return rows(weight, heads, kv_heads, d_head, group)
    each = [weight[head * d_head :][:d_head] for head in range(3 * heads)]
    return torch.cat([each[head + k * heads] for head in run_of(heads, group.rank, group.size) for k in range(3)])


def cuts_every_section(weight, heads, kv_heads, d_head, group):
    sections = weight.split([heads * d_head, kv_heads * d_head, kv_heads * d_head])
    return torch.cat([section.tensor_split(group.size)[group.rank] for section in sections])


# ---- 06.4


def place(targets, group, size):
    here = targets - group.rank * size
    mine = (here >= 0) & (here < size)
    return torch.where(mine, here, 0), mine


def loss(
    logits,
    targets,
    group,
    largest=lambda logits, group: comm.all_reduce(logits.amax(-1, keepdim=True), group, "max"),
    places=place,
    sums=("powers", "picked"),
    pick_from="shifted",
    after=lambda loss: loss,
):
    """The answer to 06.4, with a place for each mistake."""
    shifted = logits - largest(logits, group)
    powers = shifted.exp().sum(-1)
    here, mine = places(targets, group, logits.shape[-1])
    picked = (shifted if pick_from == "shifted" else logits).gather(-1, here[:, None]).squeeze(-1) * mine
    if "powers" in sums:
        powers = comm.all_reduce(powers, group)
    if "picked" in sums:
        picked = comm.all_reduce(picked, group)
    return after(powers.log() - picked)


def losses(**wrong):
    return lambda *given: loss(*given, **wrong)


def right_loss_by_torch_distributed(logits, targets, group):
    m = logits.max(dim=-1).values
    dist.all_reduce(m, dist.ReduceOp.MAX)
    both = torch.zeros(2, len(targets), dtype=logits.dtype)
    both[0] = (logits - m[:, None]).exp().sum(-1)
    for i, target in enumerate(targets.tolist()):
        if target // logits.shape[1] == dist.get_rank():
            both[1, i] = logits[i, target % logits.shape[1]]
    dist.all_reduce(both)
    return both[0].log() + m - both[1]


def right_loss_by_logsumexp(logits, targets, group):
    of_each = comm.all_gather(logits.logsumexp(-1)[None], group)
    words = torch.arange(logits.shape[1]) + group.rank * logits.shape[1]
    picked = torch.where(words == targets[:, None], logits, 0).sum(-1)
    return of_each.logsumexp(0) - comm.all_reduce(picked, group)


def collects_the_logits(logits, targets, group):
    return F.cross_entropy(comm.all_gather(logits, group, dim=1), targets, reduction="none")


def unmasked(of):
    return losses(places=lambda targets, group, size: (of(targets, group.rank, size), 1))


# ---- 06.5


def sent(all_reduces=4, again=2, numbers=lambda tokens, width, n: tokens * width, ring=lambda n: 2 * (n - 1) / n):
    def answer(layers, tokens, width, microbatches, n, recompute):
        each = all_reduces + (again if recompute else 0)
        return layers * microbatches * each * 2 * numbers(tokens, width, n) * ring(n)

    return answer


def right_sent_by_counting(layers, tokens, width, microbatches, n, recompute):
    total = 0
    for _ in range(layers * microbatches):
        for _ in ("forward", "backward", "again") if recompute else ("forward", "backward"):
            total += 2 * 2 * (2 * tokens * width - 2 * tokens * width / n)
    return total


def one_microbatch(layers, tokens, width, microbatches, n, recompute):
    return sent()(layers, tokens, width, 1, n, recompute)


RIGHT = {
    "06.1": [mlp, right_mlp_by_torch_distributed, right_mlp_in_two_halves],
    "06.2": [block(), right_block_by_torch_distributed, right_block_with_a_hook],
    "06.3": [rows, right_rows_by_repeating],
    "06.4": [loss, right_loss_by_torch_distributed, right_loss_by_logsumexp],
    "06.5": [sent(), right_sent_by_counting],
}
WRONG = {  # in the order of the exercise's mistakes
    "06.1": [
        mlps(inside=1, outside=0),
        mlps(ends=False),
        mlps(op="mean"),
        mlps(before=True),
        mlps(before=True, ends=False),
        mlps(act=lambda hidden: hidden),
        mlps(outside=0),
        lambda x, up, up_bias, *given: mlp(x, up, 0, *given),
        collects_the_hidden_numbers,
    ],
    "06.2": [
        block(before=(same, same)),
        block(before=(same, same), after=(total, total)),
        block(after=(total, total)),
        block(before=(same, mean)),
        block(before=(total, same), after=(same, total)),
        block(before=(total, total)),
        block(before=(same, nothing)),
        block(after=(total, nothing)),
        block(after=(same, same)),
        block(skip="from inside"),
        block(skip="to inside"),
        block(skip="nowhere"),
        block(after=(total, mean)),
    ],
    "06.3": [
        lambda weight, heads, kv_heads, d_head, group: weight.tensor_split(group.size)[group.rank],
        lambda weight, heads, kv_heads, d_head, group: weight.tensor_split(group.size, dim=1)[group.rank],
        rows_by(order="kqv"),
        rows_by(queries=every_nth, keys=every_nth),
        head_by_head,
        rows_by(keys=lambda heads, r, n: range(heads)),
        rows_by(keys=lambda heads, r, n: [r % heads] if heads < n else run_of(heads, r, n)),
        cuts_every_section,
    ],
    "06.4": [
        collects_the_logits,
        losses(sums=()),
        losses(sums=("picked",)),
        losses(sums=("powers",)),
        losses(largest=lambda logits, group: logits.amax(-1, keepdim=True)),
        losses(largest=lambda logits, group: 0),
        losses(largest=lambda logits, group: comm.all_reduce(logits.max(), group, "max")),
        losses(
            largest=lambda logits, group: comm.all_reduce(logits.amax(-1, keepdim=True), group, "max").clamp(min=0)
        ),
        losses(pick_from="logits"),
        losses(places=lambda targets, group, size: (targets * (targets < size), targets < size)),
        unmasked(lambda targets, r, size: torch.where(targets // size == r, targets - r * size, 0)),
        unmasked(lambda targets, r, size: targets % size),
        unmasked(lambda targets, r, size: (targets - r * size).clamp(0, size - 1)),
        losses(after=lambda loss: -loss),
        losses(after=lambda loss: loss.mean()),
    ],
    "06.5": [
        sent(numbers=lambda tokens, width, n: width * width),
        sent(8, 4),
        sent(ring=lambda n: (n - 1) / n),
        sent(2, 2),
        sent(again=0),
        sent(again=4),
        sent(again=1),
        one_microbatch,
        sent(ring=lambda n: 2),
        sent(numbers=lambda tokens, width, n: tokens * width / n),
        sent(ring=lambda n: 2 * (n - 1)),
    ],
}
