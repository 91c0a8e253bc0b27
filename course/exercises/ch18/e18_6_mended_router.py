"""18.6: a router with two gradients, of which one is a term and one is complete, and two reports about it."""

import torch
from torch.nn.functional import gelu

from course.check.edits import exercise
from course.check.exercise import drawn, whole
from lib import comm
from lib.conjugate import all_reduce_identity, identity_all_reduce

EACH, TOKENS, WIDTH, INNER, WEIGHT = 2, 6, 4, 3, 0.1  # experts of a rank, N, D, F, of the balance loss


def inputs(generator, n):
    """All ranks have the same tokens, and none of them chooses an expert of one rank."""
    alike = {"x": (TOKENS, WIDTH), "targets": (TOKENS, WIDTH), "router": (n * EACH, WIDTH)}
    ranks = drawn(generator, n, alike, {"up": (EACH, INNER, WIDTH), "down": (EACH, WIDTH, INNER)})
    idle = whole(generator, 0, n)
    x, router = ranks[0]["x"].abs(), ranks[0]["router"].clone()
    router[idle * EACH : (idle + 1) * EACH] = -2
    return [one | {"x": x, "router": router} for one in ranks]


def body(answer, group, given):
    router = given["router"].clone().requires_grad_()
    first = group.rank * EACH

    def own_experts(x, gates, chosen):
        return weighted(x, gates, chosen, given["up"], given["down"], first)

    loss = answer(given["x"], given["targets"], router, own_experts, group)
    loss = loss.detach() if torch.is_tensor(loss) else loss
    return {"the loss": loss, "gradient of router": router.grad}


def weighted(x, gates, chosen, up, down, first):
    """The outputs of these experts, from the number `first` on, weighted and added."""
    y = torch.zeros_like(x)
    for e in range(len(up)):
        token, choice = (chosen == first + e).nonzero(as_tuple=True)
        y = y.index_add(0, token, gelu(x[token] @ up[e].T) @ down[e].T * gates[token, choice, None])
    return y


def reference(given):
    router = given[0]["router"].clone().requires_grad_()
    up, down = (torch.cat([one[name] for one in given]) for name in ("up", "down"))
    scores = (given[0]["x"] @ router.T).softmax(-1)
    gates, chosen = scores.topk(2)
    y = weighted(given[0]["x"], gates, chosen, up, down, 0)
    share = torch.stack([(chosen == e).double().mean() for e in range(len(router))])
    loss = (y - given[0]["targets"]).square().mean() + WEIGHT * len(router) * share @ scores.mean(0)
    loss.backward()
    return [{"the loss": loss.item(), "gradient of router": router.grad}] * len(given)


def mended_router(x, targets, router, own_experts, group):
    scores = (x @ router.T).softmax(-1)
    gates, chosen = scores.topk(2)
    y = all_reduce_identity(own_experts(x, gates, chosen), group)
    main = (y - targets).square().mean()
    load = torch.bincount(chosen.flatten(), minlength=len(router))
    share = load.to(x) / load.sum()
    balance = 0.1 * len(router) * (share * scores.mean(0)).sum()
    (main + balance / group.size).backward()
    router.grad = comm.all_reduce(router.grad, group)
    return (main + balance).detach()


def by_the_gates(x, targets, router, own_experts, group):
    """Where the gates split into the experts of ranks, their gradients are summed: then both losses are complete."""
    scores = (x @ router.T).softmax(-1)
    gates, chosen = scores.topk(2)
    y = all_reduce_identity(own_experts(x, identity_all_reduce(gates, group), chosen), group)
    counts = torch.nn.functional.one_hot(chosen, len(router)).sum((0, 1))
    balance = len(router) * (counts.to(x) / chosen.numel() * scores.mean(0)).sum()
    loss = (y - targets).square().mean() + 0.1 * balance
    loss.backward()
    return loss.item()


def one_by_one(x, targets, router, own_experts, group):
    """Two backward passes, and a sum between them."""
    scores = (x @ router.T).softmax(-1)
    gates, chosen = scores.topk(2)
    y = all_reduce_identity(own_experts(x, gates, chosen), group)
    main = (y - targets).square().mean()
    (term,) = torch.autograd.grad(main, router, retain_graph=True)
    share = torch.bincount(chosen.flatten(), minlength=len(router)).to(scores) / chosen.numel()
    balance = 0.1 * len(router) * (share * scores.mean(0)).sum()
    balance.backward()
    router.grad += comm.all_reduce(term, group)
    return main + balance


ALSO_RIGHT = """
(main + balance / group.size).backward() => (main + balance * (group.rank == 0)).backward()
    One rank alone has the gradient of the balance loss.
y = all_reduce_identity( => y = identity_all_reduce(all_reduce_identity(
chosen), group) => chosen), group), group)
(main + balance / group.size).backward() => (main + balance).backward()
comm.all_reduce(router.grad, group) => comm.all_reduce(router.grad, group, op="mean")
    The gradient of y is summed over the ranks, which all have the same, and a mean makes both right.
"""

SUM_ALL = "(main + balance / group.size).backward() => (main + balance).backward()"
MISTAKES = f"""
{SUM_ALL}
    The balance loss still acts n times as strongly as in one process. Each rank has all tokens and all scores, so its
    gradient is complete on every rank, and the sum counts it n times.
        Divide the balance loss by n for backward, or sum the gradient of the main loss alone.
{SUM_ALL}
router.grad = comm.all_reduce(router.grad, group) =>
    You followed report A. The balance gradient is right now, and that of the main loss is this rank's term: a rank
    has the gates of its own experts alone. Routers of the ranks then drift apart.
        Sum the gradient of the main loss, and not that of the balance loss.
{SUM_ALL}
comm.all_reduce(router.grad, group) => comm.all_reduce(router.grad, group, op="mean")
or (main + balance / group.size).backward() => ((main + balance) / group.size).backward()
    You divide both by n. The balance gradient is right now, and that of the main loss is n times too small.
        The terms of the main loss add up: divide the balance loss only.
router.grad = comm.all_reduce(router.grad, group) =>
    You divide the balance loss by n, and nothing is summed over the ranks.
        Sum the gradients afterwards.
(main + balance / group.size).backward() => (main / group.size + balance).backward()
    You divide the wrong loss by n.
        The gradient of the main loss is a term on each rank; that of the balance loss is complete.
(main + balance / group.size).backward() => main.backward()
    The balance loss has no gradient any more.
        Leave it in, divided by n.
(main + balance / group.size).backward() => balance.backward()
    The main loss has no gradient any more.
        Leave it in.
(main + balance / group.size).backward() => (main + balance / group.size**2).backward()
    You divide the balance loss by n twice.
        The sum counts it n times: divide once.
(main + balance / group.size).backward() => (main + balance * group.size).backward()
    You multiply the balance loss by n.
        Divide.
return (main + balance).detach() => return (main + balance / group.size).detach()
    The gradient is right, and in the loss that you return the balance loss is divided by n.
        Return the loss of one process.
return (main + balance).detach() => return main.detach()
    The gradient is right, and you return the main loss alone.
        Return the sum of both.
return (main + balance).detach() => return comm.all_reduce((main + balance).detach(), group)
    The gradient is right, and you sum the loss over the ranks. All have the same tokens, and so the same loss.
        Return it as it is.
all_reduce_identity(own_experts(x, gates, chosen), group) => own_experts(x, gates, chosen)
    You compare the outputs of this rank's experts with the targets. A token may have its second expert on a different
    rank.
        Leave the sum over the ranks as it was.
y = all_reduce_identity( => y = identity_all_reduce(all_reduce_identity(
chosen), group) => chosen), group), group)
or own_experts(x, gates, chosen) => own_experts(x, identity_all_reduce(gates, group), chosen)
    You sum the gradient of y, or of the gates, over the ranks, and that of the router afterwards. The gradient of the
    main loss is n times too large.
        Sum it once.
{SUM_ALL}
own_experts(x, gates, chosen) => own_experts(x, identity_all_reduce(gates, group), chosen)
    You sum the gradient of the gates over the ranks, and then the router was complete. The sum at the end makes both
    gradients n times too large.
        Remove that one.
"""

EXERCISE = exercise(globals(), points=2, right=(mended_router, by_the_gates, one_by_one))
