"""03.4: gradients of several microbatches, sent once."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from course.check.edits import exercise
from course.check.exercise import DTYPE, everywhere, random
from course.check.listen import listen
from lib import comm

MICROBATCHES = 5  # no number of ranks, so that a factor identifies a mistake; more than parameters: see `body`
ONCE, EACH_TIME = "at most one message for each parameter", "more than one message for each parameter"
FACTS = {"how often was sent": ONCE}


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
    model, messages = model_of(given["weights"]), []
    listen(lambda call: messages.append(1))
    answer(model, given["microbatches"], mse_loss, group)
    params = list(model.parameters())
    # Even one flat message for each of the microbatches is more than one for each of the parameters.
    often = ONCE if len(messages) <= len(params) else EACH_TIME
    return {"gradients": [p.grad for p in params], "how often was sent": often}


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


def after_each_microbatch(model, microbatches, loss_fn, group):
    for x, y in microbatches:
        (loss_fn(model(x), y) / len(microbatches)).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, group, op="mean")


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
in all: after_each_microbatch
    The gradients are right, and you send them several times: you communicate after every microbatch.
        The weights do not change in between, so communicating after the last is enough.
"""

EXERCISE = exercise(globals(), points=2, right=(accumulate, in_one_message))
