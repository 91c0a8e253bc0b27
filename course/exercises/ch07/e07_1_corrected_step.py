"""07.1: a sequence-parallel attention block with mistakes that raise no error, to be corrected."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss, rms_norm
from torch.nn.functional import scaled_dot_product_attention as attend

from course.check.edits import exercise
from course.check.exercise import drawn, random, with_variants
from lib import comm
from lib.conjugate import (
    all_gather_reduce_scatter,
    all_gather_split,
    identity_all_reduce,
    reduce_scatter_all_gather,
)

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


def reference(given, is_mean=False):
    n = len(given)
    x, goal = (torch.cat([g[name] for g in given], 1) for name in ("x", "goal"))
    qkv = torch.cat([g["W"]["qkv"].unflatten(0, (3, -1)) for g in given], 1).flatten(0, 1)
    out = torch.cat([g["W"]["out"] for g in given], 1)
    x, qkv, out, norm, bias = (p.clone().requires_grad_() for p in (x, qkv, out, *map(given[0]["W"].get, REPLICATED)))
    y = x + attention(rms_norm(x, norm.shape, norm) @ qkv.T) @ out.T + bias
    terms = y.numel() if is_mean else 1
    losses = (y - goal).square().sum((0, 2)).view(n, TOKENS).sum(1) / terms
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

SPLIT = "all_gather_reduce_scatter(normed => all_gather_split(normed"
OWN_MEAN = ".square().sum() => .square().mean()"
AVERAGED = 'comm.all_reduce(W[name].grad, group) => comm.all_reduce(W[name].grad, group, op="mean")'
SUMMED_X = "return loss => x.grad = comm.all_reduce(x.grad, group); return loss"

ALSO_RIGHT_IN_ROW = f"""
{OWN_MEAN}
{AVERAGED}
return loss => [p.grad.div_(group.size) for p in (x, W["qkv"], W["out"])]; return loss / group.size
    Everything that is n times too large is divided at the end.
all_gather_reduce_scatter(normed, group, dim=1) => identity_all_reduce(all_gather_split(normed, group, dim=1), group)
(y - goal).square().sum() => mse_loss(y, goal) / group.size
    An all-reduce, then the slice: together a reduce-scatter.
"""

MISTAKES_IN_ROW = f"""
{SPLIT}
{OWN_MEAN}
{AVERAGED}
    Both mistakes are still in it. One is in the backward of the gather: the gradient of the norm is wrong, the gradient
    of the bias is right. The second is in the loss: the gradients of qkv and out are n times too large.
        Begin with the gather. What did the heads of the other ranks do with this rank's tokens?
in gradient:
{OWN_MEAN}
{AVERAGED}
("norm", "bias") => W
or {SPLIT}
{OWN_MEAN}
{AVERAGED}
("norm", "bias") => W
    You average the gradients of the matrices as well. That does not divide them by n: each rank has heads of its own,
    so a mean over ranks mixes the gradients of different weights.
        The factor n is in the loss. Divide that by n before backward.
{OWN_MEAN}
{AVERAGED}
return loss => W["qkv"].grad /= group.size; W["out"].grad /= group.size; return loss
    You divided the gradients of the matrices by n, and the gradient of x is still n times too large.
        All of them have this factor from the loss: divide it there, before backward, and sum the gradients
        that you averaged.
in gradient of x:
{SPLIT}
{SUMMED_X}
or {SPLIT}
{OWN_MEAN}
{SUMMED_X}
or all_gather_reduce_scatter(normed, group, dim=1) => all_gather_split(identity_all_reduce(normed, group), group, dim=1)
    You sum gradients over the ranks after the slice is taken: they are of different tokens. The remaining slices of
    each rank's partial gradient are lost.
        Sum before the slice is taken: that is a reduce-scatter, the backward of all_gather_reduce_scatter.
{SPLIT}
or {SPLIT}
{OWN_MEAN}
    The backward of the gather still keeps this rank's slice of this rank's gradient. Each rank uses all tokens, for its
    own heads, so that gradient is partial: x and the norm miss the share of all heads on different ranks.
        The slices of all ranks are to be added: a reduce-scatter, the backward of all_gather_reduce_scatter.
in gradient of qkv, gradient of out, gradient of bias:
{OWN_MEAN}
{AVERAGED}
    The loss from which backward runs is still n times too large: the mean over this rank's tokens is n times its part
    of the mean over all. Where gradients are averaged over the ranks, this is not seen.
        Divide it by n before backward, and sum the gradients that you averaged.
in gradient of qkv, gradient of bias:
{OWN_MEAN}
    Each gradient is n times too large. You sum the gradients of norm and bias, and backward still runs from the
    mean over this rank's tokens.
        The sum is right once that loss is divided by n, before backward.
in the loss:
(y - goal).square().sum() => torch.sum((y - goal).square())
{AVERAGED}
    Your loss is a sum, as in the task of the book.
        Here the loss of the step is the mean over sequences, features and the tokens of all ranks.
.square().sum() => .square().sum(-1).mean() / group.size
    Your loss is D times too large: you add up the features of a token.
        It is the mean over the features as well.
.square().sum() => .square().mean() * group.size
    You multiply the loss by n. The mean over this rank's tokens is already n times its part of the mean over all.
        Divide it by n.
return loss => return loss * group.size
    You return the mean over this rank's tokens: over the ranks, that adds up to n times the loss of the step.
        Return this rank's part: 1/n of it.
in all:
"""

WORDS = {  # a phrase of the book's list → the same in the row
    "are still put": "are put",
    "is still added": "is added",
    "is now a partial gradient": "is a partial gradient",
    "became a mean": "is a mean",
    "It was right as given: the norm": "The norm",
    f"{AVERAGED}\n": f"in the loss, gradient of norm, gradient of bias: {AVERAGED}\n",
    "You averaged the gradients": "You still average the gradients",
    "Tokens are of the same sequences, and the loss is a sum:": "The loss is divided by n now, and a sum of n parts:",
}

# The table is of the inputs of seed 0, as in the book: norm of the difference / norm of the right gradient.
TASK = """
The loss of the step is the mean over all tokens, and the program has two different mistakes.

```python
from lib.conjugate import all_gather_split


{program}```

The loss of the step is the mean of the squares over all sequences, tokens (of all ranks) and features. Return this
rank's part of it: the parts of all ranks add up to the loss of the step. `all_gather_split(x, group, dim)` is
an all-gather whose backward sends nothing: each rank keeps its own slice of its gradient.

On one rank the program agrees with one process. On four ranks `y` is right, and these are wrong:

| | loss of all ranks | gradient of `norm` | `bias` | `qkv` | `out` | `x` |
|---|---|---|---|---|---|---|
| wrong by | 300% | 51% | 0% | 300% | 300% | 137% to 220% |

One mistake is in the backward of a collective, one in the loss. When you correct the loss, something that was
right becomes wrong.
"""


def of_row(program):
    """The program with the loss of the row instead of the book's."""
    return replace(program, text=program.text.replace(".square().sum()", ".square().mean() / group.size"))


def row():
    """The exercise with a mean as its loss, and a program with two different mistakes."""
    listed = MISTAKES
    for said, says in WORDS.items():
        listed = listed.replace(said, says)
    named = {"reference": partial(reference, is_mean=True), "MISTAKES": MISTAKES_IN_ROW + listed}
    also = {"ALSO_RIGHT": ALSO_RIGHT + ALSO_RIGHT_IN_ROW}
    made = exercise(globals() | named | also, points=2, right=(corrected_step,))
    mistakes = [replace(m, wrong=of_row(m.wrong)) for m in made.mistakes]
    head, says = "def corrected_step(x, goal, W, group):\n", "This rank's part of the loss; gradients are left in W."
    wrong = f'def wrong_step(x, goal, W, group):\n    """{says}"""\n'
    return replace(
        made,
        right=tuple(map(of_row, (made.solution, *made.right[1:]))),
        mistakes=tuple(mistakes),
        task=TASK.format(program=mistakes[0].wrong.text.replace(head, wrong)).strip(),
    )


EXERCISE = with_variants(exercise(globals(), points=2, right=(corrected_step,)), row())
