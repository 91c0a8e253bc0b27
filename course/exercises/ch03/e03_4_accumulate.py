"""03.4: gradients of several microbatches, one at a time in memory, sent once."""

from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad
from torch.nn.functional import mse_loss

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, DTYPE, everywhere, random
from course.check.listen import listen
from course.exercises.ch08.e08_4_accumulate import Saved
from lib import comm, cost

MICROBATCHES = 5  # no number of ranks, so that a factor identifies a mistake; more than parameters: see `body`
ONCE, EACH_TIME = "at most one message for each parameter", "messages after each microbatch"
OFTEN, SENT, ROWS, KEPT = "how often was sent", "bytes sent", "a forward takes", "microbatches that wait for backward"
ONE, SEVERAL = "one microbatch", "several microbatches"
FACTS = {OFTEN: ONCE, SENT: AS_NEEDED, ROWS: ONE, KEPT: ONE}


def inputs(generator, n):
    weights = [random(generator, *shape) for shape in ((5, 4), (5,), (2, 5), (2,))]
    batches = [[(random(generator, 4, 4), random(generator, 4, 2)) for _ in range(MICROBATCHES)] for _ in range(n)]
    return [{"weights": weights, "microbatches": of_rank} for of_rank in batches]


def model_of(weights):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(DTYPE)
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    return model


def body(answer, group, given):
    (x, y), *_ = given["microbatches"]
    model, messages, rows = model_of(given["weights"]), [], []
    alone = most_saved(lambda: mse_loss(model(x), y).item())
    heard = listen(lambda call: messages.append(len(rows)))  # how many forwards there were before each
    model.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    try:
        most = most_saved(lambda: answer(model, given["microbatches"], mse_loss, group))
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        most = alone  # torch.func allows no hooks, and frees the graph at its end
        answer(model, given["microbatches"], mse_loss, group)
    params = list(model.parameters())
    # An all-gather of the gradients sends up to twice the bytes of an all-reduce.
    once = cost.wire_bytes("all_reduce", sum(p.nbytes for p in params), group.size)
    return {
        "gradients": [p.grad for p in params],
        OFTEN: how_often(messages, len(params)),
        SENT: heard.amount(group.size, 3 * once),
        ROWS: SEVERAL if max(rows, default=0) > len(x) else ONE,
        KEPT: f"{most / alone:.0f}" if most > 1.2 * alone else ONE,
    }


def how_often(messages, parameters):
    """Even one flat message for each of the microbatches is more than one for each of the parameters."""
    if len(messages) <= parameters:
        return ONCE
    return EACH_TIME if len({*messages}) >= MICROBATCHES else f"{len(messages)} messages for {parameters} parameters"


def most_saved(step):
    """The most bytes that were saved for backward at any time."""
    saved = Saved()
    with saved_tensors_hooks(saved.pack, lambda held: held.tensor):
        step()
    return saved.most


def reference(given):
    model = model_of(given[0]["weights"])
    for rank in given:
        for x, y in rank["microbatches"]:
            (mse_loss(model(x), y) / (MICROBATCHES * len(given))).backward()
    return everywhere({"gradients": [p.grad for p in model.parameters()]}, given)


def accumulate(model, microbatches, loss_fn, group):
    for x, y in microbatches:
        (loss_fn(model(x), y) / len(microbatches)).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, group, op="mean")


def in_one_message(model, microbatches, loss_fn, group):
    params = list(model.parameters())
    each = [torch.autograd.grad(loss_fn(model(x), y), params) for x, y in microbatches]
    flat = torch.stack([torch.cat([g.flatten() for g in grads]) for grads in each]).mean(0)
    pieces = comm.all_reduce(flat, group, op="mean").split([p.numel() for p in params])
    for p, piece in zip(params, pieces, strict=True):
        p.grad = piece.view_as(p)


def gathered(model, microbatches, loss_fn, group):
    """The graph of each loss ends with its loop turn; every rank gathers all gradients and takes the mean itself."""
    for x, y in microbatches:
        with torch.no_grad():
            loss_fn(model(x), y)  # a look at the loss, without a graph
        loss = loss_fn(model(x), y)
        loss.backward()
    for p in model.parameters():
        p.grad = comm.all_gather(p.grad[None], group).mean(0) / len(microbatches)


def by_torch_func(model, microbatches, loss_fn, group):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = {name: torch.zeros_like(w) for name, w in weights.items()}
    for x, y in microbatches:
        loss = partial(lambda x, y, by_name: loss_fn(functional_call(model, by_name, x), y), x, y)
        for name, gradient in grad(loss)(weights).items():
            found[name] += gradient / len(microbatches)
    for name, p in model.named_parameters():
        p.grad = comm.all_reduce(found[name], group, op="mean")


def after_each_microbatch(model, microbatches, loss_fn, group):
    for x, y in microbatches:
        (loss_fn(model(x), y) / len(microbatches)).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, group, op="mean")


def before_one_backward(model, microbatches, loss_fn, group):
    sum(loss_fn(model(x), y) / len(microbatches) for x, y in microbatches).backward()
    accumulate(model, [], loss_fn, group)


def graphs_retained(model, microbatches, loss_fn, group):
    for x, y in microbatches:
        loss = loss_fn(model(x), y) / len(microbatches)  # only then is the loss before forgotten, with its graph
        loss.backward(retain_graph=True)
    accumulate(model, [], loss_fn, group)


def as_one_batch(model, microbatches, loss_fn, group):
    x, y = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    accumulate(model, [(x, y)], loss_fn, group)


def all_of_them_sent(model, microbatches, loss_fn, group):
    for p in (params := list(model.parameters())):
        p.grad = torch.zeros_like(p)
    for x, y in microbatches:
        for p, gradient in zip(params, torch.autograd.grad(loss_fn(model(x), y), params), strict=True):
            p.kept = [*getattr(p, "kept", []), gradient]
    for p in params:
        p.grad = comm.all_reduce(torch.stack(p.kept), group, op="mean").mean(0)


MISTAKES = f"""
in gradients:
/ len(microbatches) =>
    Exactly {MICROBATCHES} times too large, and there are {MICROBATCHES} microbatches: backward adds up, and a sum of
    mean losses is not a mean.
        Divide each loss by their number.
op="mean" => op="sum"
    Exactly as many times too large as there are ranks: you summed over them and did not divide.
        Take the mean over the ranks.
/ len(microbatches) => / len(microbatches) ** 2
    Exactly {MICROBATCHES} times too small: you divided by the number of microbatches twice.
        The mean over the ranks divides by the ranks alone: divide by the microbatches once, in the loss or after the
        sum.
/ len(microbatches) =>
op="mean" => op="sum"
    Too large by ranks times microbatches: nothing was divided.
        Divide each loss by the number of microbatches, and take the mean over the ranks.
model.parameters(): => []:
or p.grad = comm.all_reduce(p.grad, group, op="mean") => comm.all_reduce(p.grad, group, op="mean")
    Each rank has the mean over its own microbatches: no mean over the ranks is in p.grad.
        All-reduce each gradient after the loop, and assign the result: comm.all_reduce does not change its argument.
(loss_fn(model(x), y) => model.zero_grad(); (loss_fn(model(x), y)
    Only the last microbatch is in the gradients: they are emptied before each backward, and their sum is then divided
    by the number of microbatches.
        Backward must add to p.grad here: zero_grad belongs between two steps.
(loss_fn(model(x), y) / len(microbatches)) => model.zero_grad(); loss_fn(model(x), y)
    You have the gradient of the last microbatch alone: gradients are emptied before each backward.
        Backward must add to p.grad here, one microbatch's share at a time.
in all:
before_one_backward
    The gradients are right, but the graphs of all microbatches are in memory at the same time, as with the batch that
    does not fit.
        Run backward with each microbatch's own loss before the next one's forward, and retain no graph.
graphs_retained
    The gradients are right, but the graph of a microbatch is still in memory when the next one runs forward.
        Run backward without retain_graph: it frees the graph.
as_one_batch
    The gradients are right, but you put all microbatches into one batch, and that is the batch that does not fit into
    memory.
        Run forward and backward of one microbatch before the next.
all_of_them_sent
    The gradients are right, but you send the gradients of each microbatch: as many times the bytes as there are
    microbatches.
        Add them up on each rank first.
after_each_microbatch
    The gradients are right, and you send them several times: you communicate after every microbatch.
        The weights do not change in between, so communicating after the last is enough.
"""

EXERCISE = exercise(globals(), points=2, right=(accumulate, in_one_message, gathered, by_torch_func))
