"""03.7: a program whose replicas are equal after one step and differ after two: find the mistake."""

import torch
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course.check.edits import exercise
from course.check.exercise import everywhere, random
from course.exercises.ch03.e03_4_accumulate import model_of
from lib import comm

STEPS = 3


def inputs(generator, n):
    weights = [random(generator, *shape) for shape in ((5, 4), (5,), (2, 5), (2,))]
    batches = [[(random(generator, 6, 4), random(generator, 6, 2)) for _ in range(STEPS)] for _ in range(n)]
    return [{"weights": weights, "batches": of_rank} for of_rank in batches]


def body(answer, group, given):
    """The gradients of the last step, and the weights, after one step, after two, and after three from the start.

    AdamW divides by the size of the gradients, so the weights alone would not show a factor.
    """
    found = {}
    for steps in range(1, STEPS + 1):
        model, seen = model_of(given["weights"]), []
        params = list(model.parameters())

        def sees(*_, params=params, seen=seen):
            seen[:] = [None if p.grad is None else p.grad.clone() for p in params]

        hook = register_optimizer_step_pre_hook(sees)
        answer(model, given["batches"][:steps], group)
        hook.remove()
        found[f"weights after step {steps}"] = [p.detach() for p in params]
        found[f"gradients that step {steps} used"] = seen
    return found


def reference(given):
    model, found = model_of(given[0]["weights"]), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for k in range(STEPS):
        optimizer.zero_grad()
        for g in given:
            x, y = g["batches"][k]
            (mse_loss(model(x), y) / len(given)).backward()
        found[f"gradients that step {k + 1} used"] = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        found[f"weights after step {k + 1}"] = [p.detach().clone() for p in model.parameters()]
    return everywhere(found, given)


def train_replicas(model, batches, group):
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.01)
    sizes = [p.numel() for p in params]
    bucket = torch.zeros(sum(sizes), dtype=params[0].dtype)
    for p, piece in zip(params, bucket.split(sizes), strict=True):
        p.grad = piece.view_as(p)
    for x, y in batches:
        mse_loss(model(x), y).backward()
        bucket.copy_(comm.all_reduce(bucket, group, op="mean"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def replace_weights(params, by):
    for p in params:
        p.data = by(p.data)


def average_gradients(params, group):
    for p in params:
        p.grad = comm.all_reduce(p.grad, group, op="mean")


def averages_weights_at_the_end(model, batches, group):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    replace_weights(model.parameters(), lambda w: comm.all_reduce(w, group, op="mean"))


ALSO_RIGHT = """
p.grad = piece.view_as(p) => p.grad = None
bucket.copy_(comm.all_reduce(bucket, group, op="mean")) => average_gradients(params, group)
set_to_none=False =>
    Without a bucket, parameter by parameter.
"""

MISTAKES = """
in gradients:
comm.all_reduce(bucket, group, op="mean") => comm.all_reduce(bucket, group)
    The replicas are equal, and step with the sum of the gradients, n times too large. AdamW nearly hides that.
        Take the mean: a clip, a log of the norm, or another optimizer would feel the factor.
in weights, gradients:
torch.optim.AdamW(params, lr=0.01) => torch.optim.AdamW(params)
    You train with another learning rate than 0.01: without lr= AdamW takes 0.001.
        Pass lr=0.01.
torch.optim.AdamW(params, lr=0.01) => torch.optim.Adam(params, lr=0.01)
    You train with Adam, which does not decay the weights.
        Use torch.optim.AdamW.
in all:
set_to_none=False =>
    The replicas still differ from step 2 on: then nothing of a rank's gradient is in the bucket. Where is the memory
    that backward writes to?
        Compare p.grad.data_ptr() with bucket.data_ptr() at the start of each step.
optimizer.zero_grad(set_to_none=False) =>
    The replicas are equal, but backward adds to the previous mean in the bucket.
        Write zeros before each backward.
set_to_none=False =>
optimizer.step() => optimizer.step(); replace_weights(params, lambda w: comm.broadcast(w, group))
    You broadcast weights after each step. The replicas are equal, and follow rank 0, which from step 2 on uses its own
    gradient alone.
        Repair the gradient.
set_to_none=False =>
optimizer.step() => optimizer.step(); replace_weights(params, lambda w: comm.all_reduce(w, group, op="mean"))
    You average the weights after each step. The replicas are equal, but from step 2 on each steps with its own
    gradient, and AdamW is not linear: a mean of steps is not the step of the mean gradient.
        Repair the gradient.
bucket.copy_(comm.all_reduce(bucket, group, op="mean")) => pass
optimizer.step() => optimizer.step(); replace_weights(params, lambda w: comm.all_reduce(w, group, op="mean"))
    You average the weights after each step, and no gradient. The replicas are equal, but each stepped with its own
    gradient, and AdamW is not linear: a mean of steps is not the step of the mean gradient.
        Average the gradients before the step; then all replicas take the same step.
bucket.copy_(comm.all_reduce(bucket, group, op="mean")) => pass
optimizer.step() => optimizer.step(); replace_weights(params, lambda w: comm.broadcast(w, group))
    You broadcast the weights after each step, and average no gradient. The replicas are equal, and all ranks but one
    train for nothing.
        Average the gradients before the step; then all replicas take the same step.
averages_weights_at_the_end
    You average the weights once, at the end, and no gradient: until then each rank trains alone.
        Average the gradients before each step; then all replicas take the same step.
bucket.copy_(comm.all_reduce(bucket, group, op="mean")) => bucket = comm.all_reduce(bucket, group, op="mean")
or bucket.copy_(comm.all_reduce(bucket, group, op="mean")) => comm.all_reduce(bucket, group, op="mean")
    The replicas now differ from step 1 on: each p.grad is the rank's own gradient, and no mean is in it.
        Either backward writes into the bucket and the mean is copied into the bucket, or its pieces are copied to
        p.grad after the all-reduce.
"""

EXERCISE = exercise(globals(), points=2, right=(train_replicas,))
