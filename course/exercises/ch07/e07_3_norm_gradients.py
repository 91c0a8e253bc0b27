"""07.3: the gradients of a LayerNorm on shards of the sequence."""

import torch
from torch import distributed as dist
from torch.nn.functional import layer_norm

from course.check.edits import exercise
from course.check.exercise import drawn, kind, several
from course.check.listen import listen
from lib import comm

B, T, D = 2, 8, 6  # of a shard; n times T tokens in all
NAMES = ("gradient of x", "gradient of the weight", "gradient of the bias")
GIVEN = ("x", "gradient", "weight", "bias")
ONE, SEVERAL, MORE = "one message, of two vectors", "more than one message", "more bytes than the two need"
FACTS = {"what was sent": ONE}


def inputs(generator, n):
    ranks = drawn(generator, n, {"weight": (D,), "bias": (D,)}, {"x": (B, T, D), "gradient": (B, T, D)})
    return [given | {"x": 1 + 2 * given["x"]} for given in ranks]  # x is not normalised


def body(answer, group, given):
    heard = listen()
    result = answer(*(given[name] for name in GIVEN), group)
    found = {"what was returned": kind(result)} | dict(zip(NAMES, several(result, 3), strict=True))
    two_bytes = 2 * D * 8
    most = {"all_reduce": two_bytes, "reduce": two_bytes}  # gathered vectors are n times that
    sent = heard.calls + [("message", n_bytes) for _, n_bytes in heard.sent]
    more = any(n_bytes > most.get(call, group.size * two_bytes) for call, n_bytes in sent)
    return found | {"what was sent": MORE if more else SEVERAL if heard.collectives > 1 else ONE}


def backward(x, gradient, weight, bias):
    """The gradients of these tokens, by autograd."""
    x, weight, bias = (tensor.detach().requires_grad_() for tensor in (x, weight, bias))
    return torch.autograd.grad(layer_norm(x, (D,), weight, bias), (x, weight, bias), gradient)


def reference(given):
    full = {name: torch.cat([g[name] for g in given], 1) for name in ("x", "gradient")}
    of_x, *two = backward(*((given[0] | full)[name] for name in GIVEN))
    returned = {"what was returned": "3 results"}
    return [returned | dict(zip(NAMES, (mine, *two), strict=True)) for mine in of_x.chunk(len(given), 1)]


def norm_gradients(x, gradient, weight, bias, group):
    inputs = [each.requires_grad_() for each in (x, weight, bias)]
    y = layer_norm(x, weight.shape, weight, bias)
    of_x, *both = torch.autograd.grad(y, inputs, gradient)
    of_weight, of_bias = comm.all_reduce(torch.stack(both), group)
    return of_x, of_weight, of_bias


def by_hand(x, gradient, weight, bias, group):
    deviation = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    normal = (x - x.mean(-1, keepdim=True)) / deviation
    both = torch.cat([(gradient * normal).sum((0, 1)), gradient.sum((0, 1))])
    dist.all_reduce(both)
    inside = gradient * weight
    along = normal * (inside * normal).mean(-1, keepdim=True)
    return [(inside - inside.mean(-1, keepdim=True) - along) / deviation, *both.chunk(2)]


def gathers_two_vectors(x, gradient, weight, bias, group):
    of_x, *two = backward(x, gradient, weight, bias)
    return of_x, *comm.all_gather(torch.stack(two)[None], group).sum(0)


def gathers_all_tokens(x, gradient, weight, bias, group):
    both = comm.all_gather(torch.stack([x, gradient]), group, dim=2)
    of_x, *two = backward(*both, weight, bias)
    return of_x.chunk(group.size, 1)[group.rank], *two


MISTAKES = """
in gradient of x, gradient of the weight, gradient of the bias:
comm.all_reduce(torch.stack(both), group) => both
    The gradients of weight and bias come from this rank's tokens alone. All met the same weight.
        Sum over the ranks.
=> comm.all_reduce(torch.stack(both), group, op="mean")
    The gradients of weight and bias are means.
        Ranks have tokens of the same sequences, partial gradients: op="sum".
return of_x, => return comm.all_reduce(of_x, group),
    You also summed the gradient of x.
        A norm works on each token alone: no other rank has a part of it.
comm.all_reduce(torch.stack(both), group) => comm.all_reduce(both[0], group), both[1]
    The gradient of the weight is summed, the bias's is this rank's. Each adds the bias to its own tokens.
        Sum both.
torch.stack(both) => torch.stack([(gradient * x).sum((0, 1)), both[1]])
    You multiplied with x as it came in. The weight multiplies the normalised x.
        Sum gradient · (x - mean)/deviation.
return of_x, => return gradient * weight,
    The gradient of x is only gradient · weight. Mean and deviation depend on x as well.
        Run backward through both.
in all:
gathers_all_tokens
    The gradients are right, but tokens were sent.
        Sum over this rank's first: two vectors of D elements are enough.
comm.all_reduce(torch.stack(both), group) => [comm.all_reduce(one, group) for one in both]
    The gradients are right, in more than one message, each with its latency.
        Put both into one tensor and sum that.
"""

EXERCISE = exercise(globals(), points=2, right=(norm_gradients, by_hand, gathers_two_vectors))
