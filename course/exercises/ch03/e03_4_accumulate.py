"""03.4: gradients of several microbatches, sent once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course.check.exercise import DTYPE, Data, Exercise, Mistake, everywhere, random
from course.check.listen import listen
from lib import comm
from lib.mesh import Group

MICROBATCHES = 5  # no number of ranks, so that a factor identifies a mistake; more than parameters: see `body`
ONCE, EACH_TIME = "at most one message for each parameter", "more than one message for each parameter"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    weights = [random(generator, 5, 4), random(generator, 5), random(generator, 2, 5), random(generator, 2)]

    def microbatch() -> tuple:
        return random(generator, 4, 4), random(generator, 4, 2)

    return [{"weights": weights, "microbatches": [microbatch() for _ in range(MICROBATCHES)]} for _ in range(n)]


def model_of(weights: list[Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(DTYPE)
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    return model


def body(answer: Callable, group: Group, given: Data) -> Data:
    model, messages = model_of(given["weights"]), []
    listen(lambda: messages.append(1))
    answer(model, given["microbatches"], mse_loss, group)
    params = list(model.parameters())
    # Even one flat message for each of the microbatches is more than one for each of the parameters.
    return {
        "gradients": [p.grad for p in params],
        "how often was sent": ONCE if len(messages) <= len(params) else EACH_TIME,
    }


def reference(given: list[Data]) -> list[Data]:
    model = model_of(given[0]["weights"])
    for rank in given:
        for x, y in rank["microbatches"]:
            (mse_loss(model(x), y) / (MICROBATCHES * len(given))).backward()
    return everywhere({"gradients": [p.grad for p in model.parameters()], "how often was sent": ONCE}, given)


# ---- programs -------------------------------------------------------------------------------------------------------


def accumulate(model, microbatches, loss_fn, group, power=1, op="mean", each_time=False):
    for i, (x, y) in enumerate(microbatches, 1):
        (loss_fn(model(x), y) / len(microbatches) ** power).backward()
        if each_time or i == len(microbatches):
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, group, op=op)


def accumulate_in_one_message(model, microbatches, loss_fn, group):
    params = list(model.parameters())
    each = [torch.autograd.grad(loss_fn(model(x), y), params) for x, y in microbatches]
    flat = torch.stack([torch.cat([g.flatten() for g in grads]) for grads in each]).mean(0)
    pieces = comm.all_reduce(flat, group, op="mean").split([p.numel() for p in params])
    for p, piece in zip(params, pieces, strict=True):
        p.grad = piece.view_as(p)


EXERCISE = Exercise(
    id="03.4",
    title="accumulate",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(accumulate, accumulate_in_one_message),
    mistakes=(
        Mistake(
            f"Exactly {MICROBATCHES} times too large, and there are {MICROBATCHES} microbatches: backward adds up, and "
            "a sum of mean losses is not a mean. Divide each loss by their number.",
            partial(accumulate, power=0),
            about=("gradients",),
        ),
        Mistake(
            "Exactly as many times too large as there are ranks: you summed over them and did not divide.",
            partial(accumulate, op="sum"),
            about=("gradients",),
        ),
        Mistake(
            f"Exactly {MICROBATCHES} times too small: you divided by the number of microbatches twice.",
            partial(accumulate, power=2),
            about=("gradients",),
        ),
        Mistake(
            "Too large by ranks times microbatches: nothing was divided.",
            partial(accumulate, power=0, op="sum"),
            about=("gradients",),
        ),
        Mistake(
            "The gradients are right, and you send them several times: you communicate after every microbatch. The "
            "weights do not change in between, so communicating after the last is enough.",
            partial(accumulate, each_time=True),
        ),
    ),
)
