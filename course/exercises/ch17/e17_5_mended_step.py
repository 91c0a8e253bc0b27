"""17.5: a context-parallel step whose loss differs a little from that of one process: rounding, or mistakes?"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.functional import scaled_dot_product_attention as attend

from course.check.edits import exercise
from course.check.exercise import drawn, everywhere, random
from lib import comm
from lib.context_parallel.attention import gather_attention, ulysses_attention
from lib.model import rotary

ROWS, TOKENS, HEAD, WORDS = 2, 6, 4, 5  # TOKENS of each rank, features of a head
NAMES = ("qkv", "head")


def inputs(generator, n):
    """Of the targets of rank r, so many do not count; one head of attention for each rank."""
    d = n * HEAD
    ranks = drawn(generator, n, {"qkv": (3 * d, d), "head": (WORDS, d)}, {"x": (ROWS, TOKENS, d)})
    for r, given in enumerate(ranks):
        given["qkv"] = given["qkv"] / 2
        given["targets"] = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
        given["targets"][0, : 1 + 3 * r % 6] = -100
    return ranks


def body(answer, group, given):
    W = {name: nn.Parameter(given[name]) for name in NAMES}
    loss = answer(given["x"], given["targets"], W, group)
    loss = loss.detach() if torch.is_tensor(loss) else loss
    return {"the loss": loss} | {f"gradient of {name}": p.grad for name, p in W.items()}


def reference(given):
    x, targets = (torch.cat([g[name] for g in given], 1) for name in ("x", "targets"))
    qkv, head = (given[0][name].clone().requires_grad_() for name in NAMES)
    q, k, v = (x @ qkv.T).unflatten(-1, (3, -1, HEAD)).unbind(2)
    places = torch.arange(x.shape[1])
    q, k, v = (y.transpose(1, 2) for y in (rotary(q, places), rotary(k, places), v))
    y = attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    loss = cross_entropy((y @ head.T).flatten(0, 1), targets.flatten())
    loss.backward()
    return everywhere({"the loss": loss.item(), "gradient of qkv": qkv.grad, "gradient of head": head.grad}, given)


def mended_step(x, targets, W, world):
    places = torch.arange(x.shape[1]) + world.rank * x.shape[1]
    q, k, v = (x @ W["qkv"].T).unflatten(-1, (3, -1, 4)).unbind(2)
    q, k = rotary(q, places), rotary(k, places)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    y = gather_attention(q, k, v, world).transpose(1, 2).flatten(2)
    logits = (y @ W["head"].T).flatten(0, 1)
    count = comm.all_reduce((targets != -100).sum(), world)
    loss = cross_entropy(logits, targets.flatten(), reduction="sum") / count
    loss.backward()
    for p in W.values():
        p.grad = comm.all_reduce(p.grad, world)
    return comm.all_reduce(loss.detach(), world)


def by_heads(x, targets, W, world):
    """Ulysses; queries and keys are turned where all tokens are, and sums are divided at the end."""

    def turned(q, k, v, queries, keys, length):
        places = torch.arange(length)
        q, k = (rotary(y.transpose(1, 2), places).transpose(1, 2) for y in (q, k))
        return attend(q, k, v, is_causal=True)

    q, k, v = (x @ W["qkv"].T).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
    y = ulysses_attention(q, k, v, world, attend=turned).transpose(1, 2).flatten(2)
    counts = targets != -100
    loss = cross_entropy(y[counts] @ W["head"].T, targets[counts], reduction="sum")
    grads = torch.autograd.grad(loss, [*W.values()])
    total, count = comm.all_reduce(torch.stack([loss.detach(), counts.sum().to(x.dtype)]), world)
    for p, grad in zip(W.values(), grads, strict=True):
        p.grad = comm.all_reduce(grad, world) / count
    return (total / count).item()


ALSO_RIGHT = """
reduction="sum") / count => reduction="mean")
loss.backward() => loss = loss * (targets != -100).sum() / count; loss.backward()
    Each rank's mean, weighted by its tokens.
reduction="sum") / count => reduction="sum") * world.size / count
p.grad = comm.all_reduce(p.grad, world) => p.grad = comm.all_reduce(p.grad, world, op="mean")
return comm.all_reduce(loss.detach(), world) => return comm.all_reduce(loss.detach(), world, op="mean")
    The means stay, and the factor n is in the loss.
"""

FROM_0 = "torch.arange(x.shape[1]) + world.rank * x.shape[1] => torch.arange(x.shape[1])"
OF_MEANS = """reduction="sum") / count => reduction="mean")
p.grad = comm.all_reduce(p.grad, world) => p.grad = comm.all_reduce(p.grad, world, op="mean")
return comm.all_reduce(loss.detach(), world) => return comm.all_reduce(loss.detach(), world, op="mean")"""

MISTAKES = f"""
{FROM_0}
{OF_MEANS}
    Both mistakes are still in it. One is in what attention computes: it is seen where every target counts, too. The
    second is in the loss: it is seen only where ranks count different numbers of targets.
        Begin with attention. What tells a query how far away a key is?
{OF_MEANS}
    Attention is right now. The loss is still a mean of means: each rank divides by the number of its own targets, so a
    token counts for more on a rank where fewer count.
        Divide each rank's sum by the count of all ranks, and add up losses and gradients.
{FROM_0}
    The loss is a mean over all tokens now. Rotary positions still begin at 0 on each rank: a query is as far from the
    first key of a different rank as from the first of its own.
        Turn queries and keys by their places in the full sequence.
q, k = rotary(q, places), rotary(k, places) => q, k = rotary(q, places), rotary(k, places - places[0])
or q, k = rotary(q, places), rotary(k, places) => q, k = rotary(q, places - places[0]), rotary(k, places)
    Of queries and keys you turn one by its place in the full sequence, and the second still from 0.
        Both need it: their product depends on the distance.
q, k = rotary(q, places), rotary(k, places) =>
    Nothing is rotated any more: attention does not know the order of the tokens.
        Turn queries and keys by their places in the full sequence.
reduction="sum") / count => reduction="sum") / count * world.size
    Loss and gradients are n times too large: a rank's sum, divided by the mean count of the ranks, and then added up.
        Divide by the count of all ranks.
return comm.all_reduce(loss.detach(), world) => return loss.detach()
    The gradients are right, and you return this rank's part of the loss.
        Add the parts up over the ranks.
return comm.all_reduce(loss.detach(), world) => return comm.all_reduce(loss.detach(), world, op="mean")
    The gradients are right, and the loss is n times too small: its parts have been divided by the count of all ranks.
        They are terms of a sum.
p.grad = comm.all_reduce(p.grad, world) => p.grad = comm.all_reduce(p.grad, world, op="mean")
    The loss is right, and the gradients are n times too small. With the count of all ranks below it, each is a term of
    a sum. Adam hides such a factor.
        Sum them: op="sum".
count = comm.all_reduce((targets != -100).sum(), world) => count = targets.numel() * world.size
    You divide by all targets, and some do not count.
        Count those that are not -100, over all ranks.
reduction="sum") / count => reduction="sum") / (targets != -100).sum()
or reduction="sum") / count => reduction="sum") / (targets != -100).sum()
return comm.all_reduce(loss.detach(), world) => return comm.all_reduce(loss.detach(), world, op="mean")
    You sum the gradients, and each rank still divides by the number of its own targets.
        Divide by the count of all ranks.
"""

EXERCISE = exercise(globals(), points=2, right=(mended_step, by_heads))
