"""06.6: low-rank adapters in a column–row pair: half of each adapter is replicated, and its gradient is partial."""

import torch
from torch.nn.functional import gelu

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, after_backward, drawn
from course.check.listen import listen
from lib import comm, cost
from lib.conjugate import all_reduce_identity as g
from lib.conjugate import identity_all_reduce as f
from lib.conjugate import pair

TOKENS, WIDTH, EACH, LOW = 12, 12, 5, 2  # EACH: hidden features of a rank
REPLICATED = {"up A": (LOW, WIDTH), "down B": (WIDTH, LOW)}
SHARDED = {"up": (EACH, WIDTH), "up B": (EACH, LOW), "down": (WIDTH, EACH), "down A": (LOW, EACH)}
ADAPTERS = ("up A", "up B", "down A", "down B")
MOST = 1.7  # all-reduces of x in each direction: the adapters, or their results, have a third of its elements
FORWARD, BACKWARD = "what forward sends", "what backward sends"
FACTS = {FORWARD: AS_NEEDED, BACKWARD: AS_NEEDED}


def inputs(generator, n):
    tensors = dict.fromkeys(("x", "gradient"), (TOKENS, WIDTH))
    weights = drawn(generator, n, REPLICATED, SHARDED)
    return [given | {"weights": w} for given, w in zip(drawn(generator, n, tensors, {}), weights, strict=True)]


def body(answer, group, given):
    x, n = given["x"].clone().requires_grad_(), group.size
    weights = {name: w.clone().requires_grad_(name in ADAPTERS) for name, w in given["weights"].items()}
    heard, most = listen(), MOST * cost.wire_bytes("all_reduce", x.nbytes, n)
    y, forward = answer(x, weights, group), heard.calls_if_more(n, most)
    heard.forget()
    found = after_backward(y, given["gradient"], x=x, **{k: weights[k] for k in ADAPTERS})
    return found | {FORWARD: forward, BACKWARD: heard.calls_if_more(n, most)}


def reference(given):
    x = given[0]["x"].clone().requires_grad_()
    both = {name: given[0]["weights"][name].clone().requires_grad_() for name in REPLICATED}
    each = [{k: w.clone().requires_grad_() for k, w in g["weights"].items()} | both for g in given]
    found = after_backward(sum(partial_sum(x, w) for w in each), given[0]["gradient"], x=x)
    return [found | {f"gradient of {name}": w[name].grad for name in ADAPTERS} for w in each]


def partial_sum(x, w):
    hidden = gelu(x @ w["up"].T + x @ w["up A"].T @ w["up B"].T)
    return hidden @ w["down"].T + hidden @ w["down A"].T @ w["down B"].T


def adapted_mlp(x, w, group):
    up_a, down_b = f(w["up A"], group), f(w["down B"], group)
    x = f(x, group)
    hidden = gelu(x @ w["up"].T + x @ up_a.T @ w["up B"].T)
    low = hidden @ w["down A"].T
    return g(hidden @ w["down"].T + low @ down_b.T, group)


def with_small_sums(x, w, group):
    """Replicated matrices multiply replicated tensors, outside the pair."""
    low = f(x @ w["up A"].T, group)
    inside = gelu(f(x, group) @ w["up"].T + low @ w["up B"].T)
    return g(inside @ w["down"].T, group) + g(inside @ w["down A"].T, group) @ w["down B"].T


def with_hooks(x, w, group):
    for name in REPLICATED:
        w[name].register_hook(lambda gradient: comm.all_reduce(gradient, group))
    return g(partial_sum(f(x, group), w), group)


def averaged(x, group):
    return pair(x, lambda x: x.view_as(x), lambda gradient: comm.all_reduce(gradient, group, op="mean"))


MISTAKES = """
in y, gradient:
f(w["up A"], group), f(w["down B"], group) => w["up A"], w["down B"]
    That is still the given program: the gradients of two replicated matrices are only the term of this rank.
        Which of the four is replicated, and used between f and g?
=> f(w["up A"], group), w["down B"]
    The gradient of A of the first layer is right now; the gradient of B of the second is still only the term of this
    rank.
        B is replicated, and each rank multiplies it with a different partial sum.
=> w["up A"], f(w["down B"], group)
    The gradient of B of the second layer is right now; the gradient of A of the first is still only the term of this
    rank.
        A is replicated, but each rank uses its result for different hidden features.
w["up B"].T => f(w["up B"], group).T
w["down A"].T => f(w["down A"], group).T
    You sum the gradients of all four matrices.
        B of the first layer and A of the second are shards: on each rank their elements belong to different hidden
        features, and must not be added.
f(w["up A"], group), f(w["down B"], group) => averaged(w["up A"], group), averaged(w["down B"], group)
    You took the mean over the ranks. Each has a term of the gradient.
        Add them up.
in y: => g(w["up A"], group), g(w["down B"], group)
    You passed the matrices through g, which sums in forward: adapters n times too large. They are replicated.
        Use f.
x @ up_a.T => f(x @ w["up A"].T, group)
    Through the adapter, the gradient of x is n times too large: x passes f, and then x @ A.T passes f again.
        Use the x before f for A, or pass A itself.
in y, gradient:
return g(hidden @ w["down"].T + low @ down_b.T, group) => return hidden @ w["down"].T + low @ down_b.T
    The output is only the partial sum of this rank: nothing was summed over the ranks in forward.
        The pair ends with g.
=> return comm.all_reduce(hidden @ w["down"].T + low @ down_b.T, group)
    The output is right, and autograd does not differentiate comm.all_reduce: behind it, all gradients end.
        g has a backward: it passes the gradient on.
=> return g(hidden @ w["down"].T, group) + low @ down_b.T
    The second adapter is added without g: each rank has only its own term of it.
        A of the second layer is a shard, so low is a partial sum: add before g, or let low go through g.
x = f(x, group) =>
    The gradient of x is only the term of this rank: x enters the pair without f.
        Each rank uses x for different hidden features: f sums its gradient.
in all:
g(hidden @ w["down"].T + low @ down_b.T, group) => g(hidden @ w["down"].T, group) + g(low @ down_b.T, group)
    All values are right, but you send three all-reduces of the size of x: two in forward, one of them for the adapter.
        Add the two partial sums on the rank first, or sum `low`, which is smaller, before the last matrix.
x @ w["up"].T + x @ up_a.T => f(x, group) @ w["up"].T + f(x, group) @ up_a.T
x = f(x, group) =>
    All values are right, but you send three all-reduces of the size of x: two in backward, one for each f of x.
        Let x go through one f, and use the result twice.
in y, gradient:
x @ up_a.T => f(x @ w["up A"].T, group)
x = f(x, group) =>
    The adapters are right, and now the gradient of x is not.
        The path through the first matrix itself needs f as well.
"""

EXERCISE = exercise(globals(), points=3, right=(adapted_mlp, with_small_sums, with_hooks))
