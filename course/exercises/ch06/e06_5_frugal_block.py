"""06.5: a block that is right and sends three and a half times too much; two all-reduces are enough."""

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from course.check.edits import exercise
from course.check.exercise import after_backward, drawn
from course.check.listen import listen
from lib import comm, cost
from lib.conjugate import all_reduce_identity as g
from lib.conjugate import identity_all_reduce as f

WIDTH, EACH = 6, 4  # of x; features of a head, and of the MLP, on each rank
ONE = "1 × an all-reduce of x"
FACTS = {"forward sends": ONE, "backward sends": ONE}
SHAPES = dict.fromkeys(("q", "k", "v", "gate", "up"), (EACH, WIDTH)) | dict.fromkeys(("out", "down"), (WIDTH, EACH))


def inputs(generator, n):
    tensors = dict.fromkeys(("x", "gradient"), (2, 3, WIDTH))
    each = zip(drawn(generator, n, tensors, {}), drawn(generator, n, {}, SHAPES), strict=True)
    return [given | {"weights": weights} for given, weights in each]


def body(answer, group, given):
    x = given["x"].clone().requires_grad_()
    weights = {name: w.clone().requires_grad_() for name, w in given["weights"].items()}
    heard = listen()
    y, forward = answer(x, weights, group), amount(heard, x, group.size)
    heard.forget()
    found = after_backward(y, given["gradient"], x=x, **weights)
    return found | {"forward sends": forward, "backward sends": amount(heard, x, group.size)}


def amount(heard, x, n):
    """To a tenth: a few numbers more do not count."""
    return f"{round(heard.sent_bytes(n) / cost.wire_bytes('all_reduce', x.nbytes, n), 1):g} × an all-reduce of x"


def reference(given):
    x = given[0]["x"].clone().requires_grad_()
    each = [{name: w.clone().requires_grad_() for name, w in g["weights"].items()} for g in given]
    found = after_backward(x + sum(partial_sum(x, w) for w in each), given[0]["gradient"], x=x)
    return [found | {f"gradient of {name}": w.grad for name, w in weights.items()} for weights in each]


def partial_sum(x, w):
    q, k, v, gate, up = (x @ w[name].T for name in ("q", "k", "v", "gate", "up"))
    return scaled_dot_product_attention(q, k, v, is_causal=True) @ w["out"].T + (silu(gate) * up) @ w["down"].T


def frugal_block(x, w, group):
    shared = f(x, group)
    q, k, v = (shared @ w[name].T for name in ("q", "k", "v"))
    heads = scaled_dot_product_attention(q, k, v, is_causal=True)
    hidden = silu(shared @ w["gate"].T) * (shared @ w["up"].T)
    term = heads @ w["out"].T + hidden @ w["down"].T
    return x + g(term, group)


def with_a_hook(x, w, group):
    inside = x.view_as(x)
    inside.register_hook(lambda gradient: comm.all_reduce(gradient, group))
    term = partial_sum(inside, w)
    return x + term + (comm.all_reduce(term, group) - term).detach()


MISTAKES = """
shared @ w[name].T => f(x, group) @ w[name].T
silu(shared @ w["gate"].T) * (shared @ w["up"].T) => silu(f(x, group) @ w["gate"].T) * (f(x, group) @ w["up"].T)
g(term, group) => g(heads @ w["out"].T, group) + g(hidden @ w["down"].T, group)
    That is still as much as the given block: two all-reduces in forward, and five in backward.
        Each f sums a separate term of the same gradient.
shared = f(x, group) => shared, another = f(x, group), f(x, group)
shared @ w[name].T => another @ w[name].T
g(term, group) => g(heads @ w["out"].T, group) + g(hidden @ w["down"].T, group)
    Two all-reduces in forward and two in backward are what the usual block sends, with one f and one g for each pair.
        But both pairs read the same x, and both results are added to the same tensor. Share f between the pairs, and
        add before g.
=> g(heads @ w["out"].T, group) + g(hidden @ w["down"].T, group)
    One all-reduce in backward is right; forward has two.
        One g is enough: add the partial sums of both pairs on each rank first.
shared @ w[name].T => f(x, group) @ w[name].T
silu(shared @ w["gate"].T) * (shared @ w["up"].T) => silu(f(x, group) @ w["gate"].T) * (f(x, group) @ w["up"].T)
    One all-reduce in forward is right; backward has five, as many as matrices that read x.
        They read the same x: call f once.
shared = f(x, group) => shared, another = f(x, group), f(x, group)
shared @ w[name].T => another @ w[name].T
    One all-reduce in forward is right; backward has two.
        Attention and MLP read the same x: one f is enough.
g(term, group) => g(term, group) + 0 * comm.all_reduce(hidden.detach(), group).sum()
    One all-reduce in backward is right; forward sends a tensor of hidden features, too.
        Each rank computes with its own: they are not to be summed.
in y, gradient: shared = f(x, group) => shared = x
    Backward sends nothing, so the gradient of x is only the term of this rank.
        One f is necessary.
in y: x + g(term, group) => g(x + term, group)
    The residual path goes through g, and x is added n times. It is replicated.
        Add it after the all-reduce.
in y, gradient: x + g(term, group) => shared + g(term, group)
    The residual path also goes through f: its gradient, equal on all ranks already, is summed.
        Add the x before f.
in y, gradient: g(term, group) => comm.all_reduce(term, group)
    The output is right, and autograd does not differentiate comm.all_reduce: behind it, all gradients end.
        g has a backward: it passes the gradient on.
in y, gradient: g(term, group) => term
    Forward sends nothing: each rank adds only its own partial sum.
        Each term of the sum is on one rank: one g is necessary.
in y: g(term, group) => g(heads @ w["out"].T, group) + hidden @ w["down"].T
    The output of the MLP is added without g: each rank has only its partial sum of it.
        Let it go through the g of the pair.
in y: g(term, group) => heads @ w["out"].T + g(hidden @ w["down"].T, group)
    The output of attention is added without g: each rank has only its partial sum of it.
        Let it go through the g of the pair.
"""

EXERCISE = exercise(globals(), points=2, right=(frugal_block, with_a_hook))
