"""18.3: outputs of experts go home: order of arrival, transposed table, weights, and a sum for each token."""

import torch
from torch import nn
from torch.nn.functional import gelu

from course.check.edits import exercise
from course.check.exercise import after_backward, drawn, whole
from lib import comm
from lib.conjugate import rows_to_ranks
from lib.expert_parallel.dispatch import Dispatch
from lib.moe import Experts

CHOICES, EACH, WIDTH, INNER = 2, 2, 4, 3  # k, experts of a rank, D, F
WEIGHTS = ("up", "down")


def inputs(generator, n):
    """No token chooses an expert of one of the ranks; ranks have different numbers of tokens."""
    experts = drawn(generator, n, {}, {"up": (EACH, INNER, WIDTH), "down": (EACH, WIDTH, INNER)})
    empty = whole(generator, 0, n)
    left = torch.tensor([e for e in range(n * EACH) if e // EACH != empty])
    found = []
    for rank, weights in enumerate(experts):
        tokens = 4 + rank
        (given,) = drawn(generator, 1, {}, {"x": (tokens, WIDTH), "gradient": (tokens, WIDTH)})
        order = torch.rand(tokens, len(left), generator=generator).argsort(1)
        gates = torch.rand(tokens, CHOICES, generator=generator, dtype=given["x"].dtype)
        found.append(weights | given | {"chosen": left[order[:, :CHOICES]], "gates": gates})
    return found


def body(answer, group, given):
    experts = Experts(EACH, WIDTH, INNER, gated=False, act=gelu)
    for name in WEIGHTS:
        setattr(experts, name, nn.Parameter(given[name]))
    leaves = {name: given[name].requires_grad_() for name in ("x", "gates")}
    y = answer(leaves["x"], leaves["gates"], given["chosen"], experts, group)
    return after_backward(y, given["gradient"], **leaves, **{name: getattr(experts, name) for name in WEIGHTS})


def reference(given):
    """All experts in one process, each for all tokens; those that a token did not choose have the weight 0."""
    leaves = [{name: one[name].clone().requires_grad_() for name in ("x", "gates", *WEIGHTS)} for one in given]
    up, down = (torch.cat([one[name] for one in leaves]) for name in WEIGHTS)
    outputs = []
    for one, mine in zip(given, leaves, strict=True):
        of_all = torch.stack([gelu(mine["x"] @ u.T) @ d.T for u, d in zip(up, down, strict=True)], 1)
        outputs.append((of_all[torch.arange(len(of_all))[:, None], one["chosen"]] * mine["gates"][..., None]).sum(1))
    torch.autograd.backward(outputs, [one["gradient"] for one in given])
    found = []
    for y, mine in zip(outputs, leaves, strict=True):
        found.append({"y": y.detach()} | {f"gradient of {name}": x.grad for name, x in mine.items()})
    return found


def bring_home(x, gates, chosen, experts, group):
    k, e, n = chosen.shape[1], len(experts.up), group.size
    order = chosen.flatten().argsort(stable=True)
    load = torch.bincount(chosen.flatten(), minlength=n * e)
    loads = comm.all_gather(load[None], group).view(n, n, e)
    table = loads.sum(2).tolist()
    arrived = rows_to_ranks(x[order // k], table, group)
    here = loads[:, group.rank]
    of_expert = torch.arange(e).repeat(n).repeat_interleave(here.flatten())
    by_expert = of_expert.argsort(stable=True)
    out = experts(arrived[by_expert], here.sum(0).tolist())
    back = [list(column) for column in zip(*table)]
    home = rows_to_ranks(out[by_expert.argsort()], back, group)
    weighted = home * gates.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, weighted)


def into_places(x, gates, chosen, experts, group):
    """By the library, and each copy back to the place of its choice: [N, k, D]."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    dispatch = Dispatch.of(torch.bincount(flat, minlength=group.size * len(experts.up)), group)
    there = dispatch.there(x.repeat_interleave(chosen.shape[1], 0)[order])
    home = dispatch.home(experts(there, dispatch.arriving_ne.sum(0).tolist()))
    return (home[order.argsort()].view(*chosen.shape, -1) * gates[..., None]).sum(1)


def as_they_arrived(out, by_expert):
    return torch.empty_like(out).index_copy(0, by_expert, out)


def overwritten(x, tokens, weighted):
    y = torch.zeros_like(x)
    y[tokens] += weighted
    return y


def without_graph(out, back, group):
    return rows_to_ranks(out.detach(), back, group)


ALSO_RIGHT = """
rows_to_ranks(out[by_expert.argsort()], back, group) => rows_to_ranks(as_they_arrived(out, by_expert), back, group)
    Written to the places, and not read from them.
"""

MISTAKES = """
rows_to_ranks(out[by_expert.argsort()], back, group) => rows_to_ranks(out, back, group)
    The outputs go home in the order of the experts. Copies arrived by sender, and the all-to-all cuts by
    receiver: each rank gets outputs of foreign copies.
        Undo the sort first: out[by_expert.argsort()].
rows_to_ranks(out[by_expert.argsort()], back, group) => rows_to_ranks(out[by_expert], back, group)
    You sort the outputs a second time. The order that undoes a sort is its inverse.
        Take by_expert.argsort().
gates.flatten()[order, None] => gates.flatten()[:, None]
    The outputs are at home, sorted by expert, and your gates are in the order of the tokens.
        Sort the gates as the copies were: gates.flatten()[order].
gates.flatten()[order, None] => gates.flatten()[order.argsort(), None]
    Your gates are in the inverse order. They must be sorted as the copies were.
        Take gates.flatten()[order].
gates.flatten()[order, None] => gates[:, :1].expand(-1, k).flatten()[order, None]
    Each output has the gate of the first choice of its token.
        A copy has the gate of its own choice: gates.flatten()[order].
home * gates.flatten()[order, None] => home
    The outputs are added without their gates.
        Multiply each by the gate of its copy.
weighted = home * gates.flatten()[order, None] => weighted = home / k
    You take the mean of the outputs. An expert counts by its gate.
        Multiply each output by the gate of its copy, and add.
.index_add(0, order // k, weighted) => .index_copy(0, order // k, weighted)
or return torch.zeros_like(x).index_add(0, order // k, weighted) => return overwritten(x, order // k, weighted)
    Each token has one of its outputs: a place that is in the index several times is written several times, and
    the last one stays.
        Add them up: index_add.
index_add(0, order // k, weighted) => index_add(0, order % len(x), weighted)
    You add outputs to the wrong tokens. Copy c of the list is a choice of token c // k.
        Take order // k.
index_add(0, order // k, weighted) => index_add(0, order.argsort() // k, weighted)
or index_add(0, order // k, weighted) => index_add(0, torch.arange(len(order)) // k, weighted)
    You add outputs as if they were in the order of the tokens, or in the inverse of the order in which they left. They
    come home as they left, sorted by expert.
        Row i belongs to token order[i] // k.
torch.zeros_like(x).index_add => x.index_add
    You add the outputs to x itself.
        The mixture is the sum of the outputs. A residual connection is outside.
in gradient of x, gradient of gates, gradient of up, gradient of down:
rows_to_ranks(out[by_expert.argsort()], back, group) => without_graph(out[by_expert.argsort()], back, group)
    y is right, and no gradient reaches the experts: the outputs came home outside the graph.
        Send them with rows_to_ranks, whose backward takes the gradients there.
gates.flatten()[order, None] => gates.detach().flatten()[order, None]
    y is right, and the gates get no gradient. The router learns through them alone.
        Do not detach them.
"""

EXERCISE = exercise(globals(), points=2, right=(bring_home, into_places))
