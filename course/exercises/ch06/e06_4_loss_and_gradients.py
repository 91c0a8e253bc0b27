"""06.4: a head that is sharded by vocabulary, and its loss: the loss and its gradients, written by hand."""

import torch
from torch import distributed as dist
from torch.nn import functional

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, kind, random, several, whole
from course.check.listen import Heard, listen
from lib import comm, cost
from lib.conjugate import identity_all_reduce

ENTRIES, WIDTH = 40, 16  # of each rank; so many that logits, and the head, exceed all else
NO_TARGET = -100
CASES = {  # the factor of x, and the constant that is added to each logit
    "logits of about 1": (1.0, 0.0),
    "logits of about 10,000": (1e4, 0.0),
    "logits of about -10,000": (1.0, -1e4),
}
WHATS = "loss", "gradient of x", "gradient of head"
RETURNED = "what was returned"
LARGE, SMALL = "what was sent of the size of x, or larger", "what else was sent"
FACTS = {LARGE: AS_NEEDED, SMALL: AS_NEEDED}


def inputs(generator, n):
    targets = [r * ENTRIES + place for r in range(n) for place in (0, ENTRIES - 1)]  # each rank's first and last
    targets += [whole(generator, 0, n * ENTRIES) for _ in range(3)] + [NO_TARGET] * 3
    targets = torch.tensor(targets)[torch.randperm(len(targets), generator=generator)]
    rows = {case: random(generator, len(targets), WIDTH - 1) for case in CASES}
    # The last feature adds a constant to all logits.
    x = {case: functional.pad(scale * rows[case], (0, 1), value=1) for case, (scale, _) in CASES.items()}

    def head(scale, shift):
        rows = random(generator, ENTRIES, WIDTH)
        return torch.where(torch.arange(WIDTH) < WIDTH - 1, rows, scale * rows + shift)

    return [{"targets": targets, "x": x, "head": {c: head(*CASES[c]) for c in CASES}} for _ in range(n)]


def body(answer, group, given):
    heard = listen()
    found = {}
    for case in CASES:
        result = answer(given["x"][case].clone(), given["head"][case].clone(), given["targets"].clone(), group)
        found[f"{RETURNED}, {case}"] = kind(result)
        found |= {f"{what}, {case}": y for what, y in zip(WHATS, several(result, 3), strict=True)}
    per_token, n = 8 * len(given["targets"]), group.size
    large = Heard(calls=[call for call in heard.calls if call[1] >= WIDTH * per_token])
    small = Heard(heard.sent, [call for call in heard.calls if call not in large.calls])
    # Three values per token, in an all-gather from each rank; with the gradient of x some of them may travel.
    found[SMALL] = small.calls_if_more(n, len(CASES) * cost.wire_bytes("all_gather", 3.1 * n * per_token, n))
    most = len(CASES) * cost.wire_bytes("all_reduce", (WIDTH + 4) * per_token, n)
    return found | {LARGE: large.calls_if_more(n, most)}


def reference(given):
    found = [{} for _ in given]
    for case in CASES:
        x = given[0]["x"][case].clone().requires_grad_()
        heads = [g["head"][case].clone().requires_grad_() for g in given]
        loss = functional.cross_entropy(x @ torch.cat(heads).T, given[0]["targets"], ignore_index=NO_TARGET)
        loss.backward()
        for of_rank, head in zip(found, heads, strict=True):
            of_rank[f"{RETURNED}, {case}"] = "3 results"
            of_rank |= {f"{w}, {case}": y for w, y in zip(WHATS, (loss.item(), x.grad, head.grad), strict=True)}
    return found


def loss_and_gradients(x, head, targets, group):
    logits = x @ head.T
    logits -= comm.all_reduce(logits.amax(-1, keepdim=True), group, op="max")
    exponentials = logits.exp()
    entries = torch.arange(len(head)) + group.rank * len(head)
    is_target = (entries == targets[:, None]).double()
    both = torch.stack([exponentials.sum(-1), (logits * is_target).sum(-1)])
    total, of_target = comm.all_reduce(both, group)
    counts = targets != -100
    losses = total.log() - of_target
    of_logits = exponentials / total[:, None] - is_target
    of_logits *= counts[:, None]
    of_logits /= counts.sum()
    of_x = comm.all_reduce(of_logits @ head, group)
    return losses[counts].mean(), of_x, of_logits.T @ x


def by_torch_distributed(x, head, targets, group):
    logits, counts = x @ head.T, targets != NO_TARGET
    m = logits.amax(-1)
    dist.all_reduce(m, dist.ReduceOp.MAX)
    softmax = (logits - m[:, None]).exp()
    is_target = functional.one_hot(targets.clamp(min=0), group.size * len(head)).chunk(group.size, 1)[dist.get_rank()]
    both = torch.stack([softmax.sum(-1), (logits * is_target).sum(-1)])
    dist.all_reduce(both)
    of_logits = (softmax / both[0][:, None] - is_target)[counts] / counts.sum()
    of_x = torch.zeros_like(x)
    of_x[counts] = of_logits @ head
    dist.all_reduce(of_x)
    return (both[0].log() + m - both[1])[counts].sum() / counts.sum(), of_x, of_logits.T @ x[counts]


def by_a_loss_with_the_same_gradient(x, head, targets, group):
    """Autograd goes through the matmul and f; the softmax is a constant."""
    x.requires_grad_(), head.requires_grad_()
    logits = identity_all_reduce(x, group) @ head.T
    sums = comm.all_gather(logits.detach().logsumexp(-1)[None], group).logsumexp(0)
    is_target = torch.arange(len(head)) + group.rank * len(head) == targets[:, None]
    picked = comm.all_reduce((logits.detach() * is_target).sum(-1), group)
    counts = targets != NO_TARGET
    softmax = (logits.detach() - sums[:, None]).exp()
    (logits * (softmax - is_target.double()))[counts].sum().div(counts.sum()).backward()
    return [(sums - picked)[counts].mean().item(), x.grad, head.grad]


def gathers_the_head(x, head, targets, group):
    head = comm.all_gather(head, group).requires_grad_()
    loss = functional.cross_entropy(x.requires_grad_() @ head.T, targets, ignore_index=NO_TARGET)
    loss.backward()
    return loss.detach(), x.grad, head.grad.chunk(group.size)[group.rank]


def gathers_the_logits(x, head, targets, group):
    logits = comm.all_gather(x @ head.T, group, dim=1).requires_grad_()
    loss = functional.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    loss.backward()
    of_logits = logits.grad.chunk(group.size, dim=1)[group.rank]
    return loss.detach(), comm.all_reduce(of_logits @ head, group), of_logits.T @ x


def sends_each_value_alone(x, head, targets, group):
    """Values of the loss in tables [ranks, tokens], zero but for the row of this rank, which are summed."""
    loss, of_x, of_head = loss_and_gradients(x, head, targets, group)
    logits = x @ head.T
    for values in (logits.logsumexp(-1), logits.sum(-1), logits.amax(-1)):
        table = torch.zeros(group.size, len(x), dtype=x.dtype)
        table[group.rank] = values
        comm.all_reduce(table, group)
    return loss, of_x, of_head


MISTAKES = """
gathers_the_logits
    All is right, but you gather the logits: with a large vocabulary, the largest tensor of the model, in full on each
    rank.
        Three values per token are enough for the loss, and one all-reduce for the gradient of x.
gathers_the_head
    All is right, but you gather the head to compute the logits: one of the largest matrices of the model, in full on
    each rank.
        Three values per token are enough for the loss, and one all-reduce for the gradient of x.
comm.all_reduce(of_logits @ head, group) => comm.all_reduce(comm.all_reduce(of_logits @ head, group), group, op="mean")
or
x @ head.T => comm.all_reduce(x, group, op="mean") @ head.T
    All is right, but you send two all-reduces of the size of x. What is equal on all ranks already needs none.
        Only the partial sums of the gradient of x have that size and are to be added up.
sends_each_value_alone
    All is right, but beside the gradient of x you send more than a few values per token: all-reduces of tables with a
    row for each rank.
        All-reduce the values themselves, or gather the rows: three values per token are enough.
in loss:
comm.all_reduce(both, group) => both
    The sum of the exponentials and the logit of the target cover only the shard of this rank: nothing was summed over
    the ranks.
        One all-reduce of the two, stacked, is enough.
comm.all_reduce(both, group) => [both[0], comm.all_reduce(both, group)[1]]
    The sum of the exponentials covers only this rank's shard.
        Sum it over the ranks before the logarithm.
comm.all_reduce(both, group) => [comm.all_reduce(both, group)[0], both[1]]
    The logit of the target is right on the rank that holds it, and 0 elsewhere.
        Sum it over the ranks.
comm.all_reduce(logits.amax(-1, keepdim=True), group, op="max") => logits.amax(-1, keepdim=True)
or logits -= comm.all_reduce(logits.amax(-1, keepdim=True), group, op="max") => largest = logits.amax(-1, keepdim=True)
logits.exp() => (logits - largest).exp()
total.log() => total.log() + largest[:, 0]
    Each rank subtracts its own largest logit, and the sums do not add up.
        Take a common maximum: all-reduce, op="max".
group, op="max") => group)
or
group, op="max") => group, op="mean")
    Right for small logits; but your shift is the sum, or the mean, of the largest logits of the ranks: exponentials
    overflow, or all vanish.
        The largest logit over all ranks is a maximum: op="max".
logits -= comm.all_reduce(logits.amax(-1, keepdim=True), group, op="max") =>
    Right for small logits; exp(10,000) is infinite.
        Subtract each token's largest logit over all ranks first.
logits.amax(-1, keepdim=True) => logits.max()
    Right for small logits; but with one maximum for all tokens, some lose every exponential.
        Use a maximum per token.
group, op="max") => group, op="max").clamp(min=0)
    Your maximum is never below 0: with logits far below, every exponential vanishes.
        Let it be one of the logits.
logits -= comm => shifted = logits - comm
logits.exp() => shifted.exp()
    You subtract the maximum in the exponentials, not from the target's logit.
        Subtract it from both, or add it again.
+ group.rank * len(head) =>
    You looked the target up by its index in the full vocabulary. The first entry of rank r is r · V/n.
        Subtract that.
(logits * is_target).sum(-1) => logits.gather(-1, is_target.argmax(-1)[:, None])[:, 0]
or (logits * is_target).sum(-1) => logits.gather(-1, targets[:, None] % len(head))[:, 0]
or (logits * is_target).sum(-1) => logits.gather(-1, (targets - entries[0]).clamp(0, len(head) - 1)[:, None])[:, 0]
    Each rank adds a logit for every target.
        Only one rank has the logit of the target: all the rest must add 0.
return losses[counts] => return -losses[counts]
    The sign of the loss is wrong: you return the logarithm of the probability.
        The loss is its negative, never below 0.
losses[counts].mean() => losses * counts
or losses[counts].mean() => losses
    You return the loss of each token.
        Return the mean over the tokens that count.
losses[counts].mean() => losses[counts].sum()
    Your loss is the sum over the tokens.
        Return the mean over the tokens that count.
losses[counts].mean() => losses.mean()
    Your loss contains tokens whose target is -100. They have none.
        Leave them out of the sum, and out of the count.
losses[counts].mean() => losses[counts].sum() / len(counts)
    You divide the loss by the number of all tokens.
        Those with target -100 do not count.
in gradient:
of_logits /= counts.sum() => of_logits /= -counts.sum()
    The gradients have the wrong sign.
        A logit's gradient is softmax minus one-hot: positive, unless it is the target's.
exponentials / total[:, None] => exponentials / exponentials.sum(-1, keepdim=True)
    Each rank divides by its own sum: the softmax is over one shard.
        Divide by the sum over all ranks, as for the loss.
total[:, None] - is_target => total[:, None]
    Your gradient of a logit is the softmax alone.
        On the rank that has the target's logit, subtract 1 there.
total[:, None] - is_target => total[:, None] - functional.one_hot(is_target.argmax(-1), len(head))
or total[:, None] - is_target => total[:, None] - functional.one_hot(targets % len(head), len(head))
or total[:, None] - is_target => total[:, None] - (targets[:, None].clamp(entries[0], entries[-1]) == entries).double()
    In the gradient, every rank subtracts a 1 for every target.
        Only one rank has the logit of the target.
of_logits *= counts[:, None] =>
    Tokens with target -100 change your gradients: the softmax is left.
        They do not count: their logits' gradient is 0.
of_logits /= counts.sum() =>
    You return the gradients of the sum over tokens. The loss is a mean.
        Divide by the number of tokens that count.
of_logits /= counts.sum() => of_logits /= len(counts)
    Your gradients are divided by the number of all tokens.
        Those with target -100 do not count.
in gradient of x:
comm.all_reduce(of_logits @ head, group) => of_logits @ head
    Your gradient of x contains only the entries of this rank.
        Every logit depends on x, also the logits of the other ranks: your matmul gives a partial sum, as backward of a
        column-parallel layer does. All-reduce it.
comm.all_reduce(of_logits @ head, group) => comm.all_reduce(of_logits @ head, group, op="mean")
    Your gradient of x is n times too small.
        The terms of the ranks are a sum: all_reduce without op="mean".
in gradient of head: of_logits.T @ x => comm.all_reduce(of_logits.T @ x, group)
    You summed the gradient of the head over the ranks.
        Each rank holds the rows of different entries: their gradients are complete where they are, and must not be
        added.
"""

EXERCISE = exercise(
    globals(),
    points=3,
    right=(loss_and_gradients, by_torch_distributed, by_a_loss_with_the_same_gradient),
    tolerances={"of about -10,000": 1e-6},  # log-sum-exp of such logits loses four digits
)
