"""07.1: a sequence-parallel attention block with mistakes that raise no error, to be corrected."""

import torch
from torch import nn
from torch.nn.functional import rms_norm
from torch.nn.functional import scaled_dot_product_attention as attend

from course.check.edits import exercise
from course.check.exercise import drawn, random
from lib import comm
from lib.conjugate import all_gather_reduce_scatter, reduce_scatter_all_gather

ROWS, TOKENS, HEAD = 2, 3, 4  # TOKENS for each rank, features of a head
REPLICATED = ("norm", "bias")


def inputs(generator, n):
    d = n * HEAD  # a head for each rank
    full = {name: random(generator, d, d) / d**0.5 for name in ("q", "k", "v", "out")}
    alike = {name: 1 + random(generator, d) for name in REPLICATED}
    ranks = drawn(generator, n, {}, dict.fromkeys(("x", "goal"), (ROWS, TOKENS, d)))
    for r, given in enumerate(ranks):
        qkv = torch.cat([full[name].chunk(n)[r] for name in "qkv"])
        given["W"] = alike | {"qkv": qkv, "out": full["out"].chunk(n, dim=1)[r]}
    return ranks


def body(answer, group, given):
    x, W = given["x"].requires_grad_(), {name: nn.Parameter(p) for name, p in given["W"].items()}
    found = {"the loss": answer(x, given["goal"], W, group), "gradient of x": x.grad}
    return found | {f"gradient of {name}": p.grad for name, p in W.items()}


def reference(given):
    n = len(given)
    x, goal = (torch.cat([g[name] for g in given], 1) for name in ("x", "goal"))
    qkv = torch.cat([g["W"]["qkv"].unflatten(0, (3, -1)) for g in given], 1).flatten(0, 1)
    out = torch.cat([g["W"]["out"] for g in given], 1)
    x, qkv, out, norm, bias = (p.clone().requires_grad_() for p in (x, qkv, out, *map(given[0]["W"].get, REPLICATED)))
    y = x + attention(rms_norm(x, norm.shape, norm) @ qkv.T) @ out.T + bias
    losses = (y - goal).square().sum((0, 2)).view(n, TOKENS).sum(1)
    losses.sum().backward()
    right = {
        "the loss": losses.tolist(),
        "gradient of x": x.grad.chunk(n, 1),
        "gradient of qkv": qkv.grad.unflatten(0, (3, n, HEAD)).transpose(0, 1).flatten(1, 2),
        "gradient of out": out.grad.chunk(n, 1),
    }
    alike = {"gradient of norm": norm.grad, "gradient of bias": bias.grad}
    return [alike | {name: of_ranks[r] for name, of_ranks in right.items()} for r in range(n)]


def attention(qkv):
    q, k, v = qkv.unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
    return attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def corrected_step(x, goal, W, group):
    normed = rms_norm(x, W["norm"].shape, W["norm"])
    tokens = all_gather_reduce_scatter(normed, group, dim=1)
    qkv = (tokens @ W["qkv"].T).unflatten(-1, (3, -1, 4))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    y = attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    y = x + reduce_scatter_all_gather(y @ W["out"].T, group, dim=1) + W["bias"]
    loss = (y - goal).square().sum()
    loss.backward()
    for name in ("norm", "bias"):
        W[name].grad = comm.all_reduce(W[name].grad, group)
    return loss


ALSO_RIGHT = """
q, k, v = qkv.permute(2, 0, 3, 1, 4) => y = attention(qkv.flatten(2))
y = attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2) =>
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"] / group.size, group, dim=1)
return loss => return loss.item()
    1/n of the bias in each partial sum, and the loss as a number.
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"] * (group.rank == 0), group, dim=1)
loss.backward() => x.grad, *grads = torch.autograd.grad(loss, [x, *W.values()])
for name in ("norm", "bias"): => for (name, p), p.grad in zip(W.items(), grads, strict=True):
comm.all_reduce(W[name].grad, group) => comm.all_reduce(p.grad, group) if name in REPLICATED else p.grad
    One rank adds the bias, and all have the sum of its gradients.
"""

MISTAKES = """
(normed, group, dim=1) => (normed, group, dim=0)
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"], group, dim=0)
("norm", "bias") => ("norm",)
or (normed, group, dim=1) => (normed, group, dim=0)
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"], group, dim=0)
or (normed, group, dim=1) => (normed, group, dim=0)
(y @ W["out"].T, group, dim=1) => (y @ W["out"].T, group, dim=0)
("norm", "bias") => ("norm",)
or (normed, group, dim=1) => (normed, group, dim=0)
(y @ W["out"].T, group, dim=1) => (y @ W["out"].T, group, dim=0)
or (normed, group, dim=1) => (normed, group, dim=0)
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"] / group.size, group, dim=0)
("norm", "bias") => ("norm",)
    Shards are still put together along dim 0, as more sequences: attention is then within the tokens of one rank.
        An MLP would still be right. They are shards of the sequence: dim=1, in the gather and in the scatter.
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"], group, dim=1)
("norm", "bias") => ("norm",)
    The bias is in the output n times: each rank adds it to its partial sum.
        Add it after the reduce-scatter.
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"], group, dim=1)
    The bias is still added before the reduce-scatter, so it is in the output n times. Added there, its gradient already
    comes from all tokens.
        Sum it only when each rank adds it to its own tokens.
("norm", "bias") => ("norm",)
    The output is right, and the gradient of the bias is now a partial gradient: after the reduce-scatter each rank adds
    the bias to its own tokens.
        Sum it over the ranks, like the gradient of the norm.
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"] / group.size, group, dim=1)
("norm", "bias") => ("norm",)
or comm.all_reduce(W[name].grad, group) => comm.all_reduce(W[name].grad, group, op="mean" if name == "bias" else "sum")
    The output is right, and you leave 1/n of the gradient of the bias: its sum over the ranks became a mean, or each
    rank adds 1/n of the bias and nothing is summed.
        Sum it over the ranks: op="sum".
(y @ W["out"].T, group, dim=1) + W["bias"] => (y @ W["out"].T + W["bias"] * (group.rank == 0), group, dim=1)
("norm", "bias") => ("norm",)
    The output is right, but only one rank adds the bias, so only that rank has its gradient: the replicas would drift
    apart.
        Add it on every rank, after the reduce-scatter.
+ W["bias"] => + W["bias"] / group.size
    Every token gets 1/n of the bias: you divide it, and add it after the reduce-scatter.
        Only what the reduce-scatter adds up n times is to be divided.
+ W["bias"] => + 0 * W["bias"]
or + W["bias"] =>
("norm", "bias") => ("norm",)
    The bias is gone.
        Add it, once per token: after the reduce-scatter.
("norm", "bias") => ("bias",)
    The gradient of the norm is no longer summed.
        It was right as given: the norm multiplies only this rank's tokens.
("norm", "bias") => ()
    Neither replicated parameter has its full gradient: each meets only this rank's tokens.
        Sum both over the ranks.
comm.all_reduce(W[name].grad, group) => comm.all_reduce(W[name].grad, group, op="mean")
    You averaged the gradients of norm and bias.
        Tokens are of the same sequences, and the loss is a sum: op="sum".
return loss => x.grad = comm.all_reduce(x.grad, group); return loss
    You summed the gradient of x as well.
        Each rank has its own tokens, and the backward of the gather already added up what all ranks did with them.
in the loss: return loss => return comm.all_reduce(loss.detach(), group)
    You return the loss of all tokens.
        Return that of this rank's; the step has their sum without it.
("norm", "bias") => W
or ("norm", "bias") => ("norm", "bias", "qkv")
or ("norm", "bias") => ("norm", "bias", "out")
    You summed the gradient of a matrix as well.
        A rank has its own heads, and the gather and the scatter give it all tokens: no other rank has a part of its
        gradient.
"""

EXERCISE = exercise(globals(), points=2, right=(corrected_step,))
