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
SENT, ONE = "what was sent", "one collective, to which each rank gives at most two vectors"
REPLICAS, EQUAL, UNLIKE = (
    "gradients of weight and bias among ranks",
    "equal",
    "different, if only in their last digits",
)
FACTS = {SENT: ONE, REPLICAS: EQUAL}
GATHERS = "all_gather", "gather"  # of their arrays a rank gives its shard


def inputs(generator, n):
    ranks = drawn(generator, n, {"weight": (D,), "bias": (D,)}, {"x": (B, T, D), "gradient": (B, T, D)})
    return [given | {"x": 1 + 2 * given["x"]} for given in ranks]  # x is not normalised


def body(answer, group, given):
    heard = listen()
    result = answer(*(given[name] for name in GIVEN), group)
    found = {"what was returned": kind(result)} | dict(zip(NAMES, several(result, 3), strict=True))
    found[SENT] = said_of(heard, group.size)
    everyones = [None] * group.size
    dist.all_gather_object(everyones, [x.tolist() if torch.is_tensor(x) else None for x in several(result, 3)[1:]])
    return found | {REPLICAS: EQUAL if all(one == everyones[0] for one in everyones) else UNLIKE}


def said_of(heard, n):
    """`ONE`, or how many calls and vectors there were."""
    given = [n_bytes / (n if call in GATHERS else 1) / (8 * D) for call, n_bytes in heard.calls]
    if len(given) == 1 and given[0] <= 2 and not heard.sent:
        return ONE
    messages = f", and {len(heard.sent)} messages to single ranks" if heard.sent else ""
    return f"{len(given)} collective{'s' * (len(given) != 1)}, of {sum(given):g} vectors of each rank{messages}"


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


def only_rank_0_has(both):
    dist.reduce(both, 0)
    return both


def sums_in_its_own_order(x, gradient, weight, bias, group):
    of_x, *two = backward(x, gradient, weight, bias)
    return of_x, *comm.all_gather(torch.stack(two)[None], group).roll(group.rank, 0).sum(0)


def gathers_all_tokens(x, gradient, weight, bias, group, at_once=True):
    if at_once:
        both = comm.all_gather(torch.stack([x, gradient]), group, dim=2)
    else:
        both = [comm.all_gather(one, group, dim=1) for one in (x, gradient)]
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
comm.all_reduce(torch.stack(both), group) => both[0], comm.all_reduce(both[1], group)
    The gradient of the bias is summed, the weight's is this rank's. The weight meets this rank's tokens alone, too.
        Sum both.
return of_x, of_weight, of_bias => return of_x, of_bias, of_weight
    The gradients of weight and bias have changed places.
        Return that of x, of the weight, of the bias, in this order.
layer_norm(x, weight.shape, weight, bias) => layer_norm(x, weight.shape, weight, bias, eps=1e-12)
or layer_norm(x, weight.shape, weight, bias) => layer_norm(x, weight.shape, weight, bias, eps=1e-6)
    Your layer_norm has another eps.
        Leave it at the default, 1e-5.
in all:
gathers_all_tokens
or lambda *given: gathers_all_tokens(*given, at_once=False)
    The gradients are right, and each rank sent all its tokens and their gradients.
        Sum over this rank's first: two vectors of D elements are enough.
comm.all_reduce(torch.stack(both), group) => [comm.all_reduce(one, group) for one in both]
    The gradients are right, in two messages of one vector, each with its latency.
        Put both into one tensor and sum that.
comm.all_reduce(torch.stack(both), group) => comm.all_reduce(torch.stack([*both, torch.ones_like(weight)]), group)[:2]
    The gradients are right, and each rank gives three vectors.
        Two are enough: the gradients of weight and bias.
comm.all_reduce(torch.stack(both), group) => only_rank_0_has(torch.stack(both))
    Only rank 0 has the sums; the others have their own gradients of weight and bias.
        All ranks need them: all-reduce.
sums_in_its_own_order
    The gradients are right to all digits but the last: each rank adds them up in an order of its own. The ranks have
    different bits, and the replicas drift apart.
        Add up in the same order on all ranks, or leave the sum to an all-reduce.
"""

EXERCISE = exercise(globals(), points=2, right=(norm_gradients, by_hand, gathers_two_vectors))
