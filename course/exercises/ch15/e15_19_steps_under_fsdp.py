"""15.19: a program under fully_shard, with microbatches and a clip, that is wrong in two places."""

import copy

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import nll_loss

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, everywhere
from course.exercises.ch15.trained import changes, right_changes
from course.practise.foreign import ROWS, make_batches, make_model, one_process
from lib.doctor.numbers import watch

CLIPPED, LOOSE = "both steps, with a clip", "step 1, with nothing to clip"
MICROBATCHES = 3
FORWARD, SHARDS = "sequences in one forward", "elements on this rank"
FACTS = {FORWARD: AS_NEEDED, SHARDS: AS_NEEDED}


def inputs(generator, n):
    model, batches = make_model(generator), make_batches(generator, padded=False)
    norm = min(one_process(copy.deepcopy(model), batches))
    # A clip hides a factor on all gradients: so also a step in which there is nothing to clip.
    runs = {LOOSE: (batches[:1], 8 * norm), CLIPPED: (batches, 0.5 * norm)}
    return everywhere({"model": model, "runs": runs}, range(n))


def body(answer, group, given):
    found, elements, rows = changes(answer, given, None)
    whole = sum(p.numel() for p in given["model"].parameters())
    found[SHARDS] = AS_NEEDED if sum(elements.values()) * group.size <= whole else MORE
    found[FORWARD] = AS_NEEDED if rows <= ROWS // group.size // MICROBATCHES else MORE
    return found


reference = right_changes


def steps_under_fsdp(model, batches, max_norm, folder):
    rank, dp = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (dp,), mesh_dim_names=("dp",))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = watch(folder, model, optimizer)
    for x, y in batches:
        x, y = x.chunk(dp)[rank], y.chunk(dp)[rank]
        seen.batch(x, y)
        optimizer.zero_grad()
        mean = 0.0
        for few_x, few_y in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = nll_loss(model(few_x).flatten(0, 1), few_y.flatten()) / 3
            loss.backward()
            mean += loss.item()
        seen.backward(mean)
        gradients = [p.grad for p in model.parameters()]
        square = sum(g.to_local().square().sum() for g in gradients)
        dist.all_reduce(square)
        norm = square.sqrt().item()
        seen.norm(norm)
        for g in gradients:
            g.mul_(min(1.0, max_norm / (norm + 1e-6)))
        optimizer.step()


def by_torch(model, batches, max_norm, folder):
    """One reduce-scatter for all microbatches, and PyTorch's clip."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dp,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        x, y = x.chunk(dp)[rank], y.chunk(dp)[rank]
        optimizer.zero_grad()
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            loss = nll_loss(model(x.chunk(3)[i]).flatten(0, 1), y.chunk(3)[i].flatten())
            loss.backward()
        for p in model.parameters():
            p.grad /= 3
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def by_full_gradients(model, batches, max_norm, folder):
    """A sum over tokens, divided by the number of all; and the norm of gathered gradients."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (dp,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    for x, y in batches:
        model.zero_grad()
        x, targets = x.chunk(dp)[rank], y.chunk(dp)[rank]
        for few_x, few_y in zip(x.split(2), targets.split(2), strict=True):
            loss = nll_loss(model(few_x).flatten(0, 1), few_y.flatten(), reduction="sum")
            (loss * dp / y.numel()).backward()
        norm = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).norm().item()
        for p in model.parameters():
            p.data -= 0.1 * p.grad * min(1.0, max_norm / norm)


MISTAKES = """
few_y.flatten()) / 3 => few_y.flatten())
dist.all_reduce(square) =>
    Both mistakes are still in it.
        One is in the gradients before the clip: they are too large by one factor. The second is in the norm: each rank
        has a different one.
few_y.flatten()) / 3 => few_y.flatten())
or few_y.flatten()) / 3 => few_y.flatten())
mean += loss.item() => mean += loss.item() / 3
    The norm is right now, and the gradients before the clip are three times too large: they are the sum of three means.
    A clip hides that, and where there is nothing to clip it shows.
        Divide the loss of each microbatch by their number, before backward.
dist.all_reduce(square) =>
    The gradients before the clip are right now. Then each rank scales its shards by a different factor.
        The square of the norm is a sum over the shards of all ranks.
few_y.flatten()) / 3 => few_y.flatten()) / 3 / dp
    The gradients are dp times too small: fully_shard takes the mean over the ranks already, and you divide again.
        Divide by the number of microbatches, and by nothing else.
few_y.flatten()) / 3 => few_y.flatten()) / dp
    You divide by the number of ranks. fully_shard does that; the sum over microbatches is still not divided.
        Divide by the number of microbatches.
few_y.flatten()) / 3 => few_y.flatten()) * dp / 3
    The gradients are dp times too large: fully_shard takes the mean over the ranks, and you undo it.
        The means of the ranks are over equally many tokens: leave their mean as it is.
dist.all_reduce(square) => square = square.sqrt(); dist.all_reduce(square); square = square.square()
    Your norm is the sum of the ranks' norms, which is larger than the norm of all shards.
        Sum the squares, and take the root of the sum.
dist.all_reduce(square) => dist.all_reduce(square); square /= dp
    Your norm is too small: you take the mean of the squares. The shards are different elements, each in the norm once.
        Sum the squares of all shards, and divide by nothing.
dist.all_reduce(square) => dist.all_reduce(square, dist.ReduceOp.MAX)
    Your norm is the largest of the ranks' norms. All ranks scale alike now, but not by enough.
        The square of the norm is the sum of the squares of all shards.
loss = nll_loss( => model.set_requires_gradient_sync(few_x.data_ptr() == x.data_ptr()); loss = nll_loss(
    Only the gradients of the first microbatch are summed over the ranks. Those of the others wait for a sum that never
    comes.
        Without a sum gradients accumulate on their rank: let the last microbatch sum them all.
loss = nll_loss( => optimizer.zero_grad(); loss = nll_loss(
    The gradients of all microbatches but the last are cleared.
        Clear them once in a step, before its first microbatch.
in sequences in one forward: x.chunk(3), y.chunk(3) => [x], [y]
few_y.flatten()) / 3 => few_y.flatten())
    A forward gets all sequences of the rank. The gradient is right, and the activations take three times the memory.
        Keep the microbatches, and divide by their number.
in change: lambda model, batches, max_norm, folder: None
    No weight of the given model has changed.
        Train the model itself, not a copy of it.
in elements on this rank: fully_shard(module, mesh=mesh) => pass
square = sum(g.to_local().square().sum() for g in gradients) => [dist.all_reduce(g.div_(dp)) for g in gradients]
dist.all_reduce(square) => square = sum(g.square().sum() for g in gradients)
    Each rank holds the full model. The numbers are right, and each rank needs the memory of one process.
        Leave fully_shard as it is.
optimizer.zero_grad() =>
    Step 1 is right. In step 2 each gradient still contains the gradient of step 1.
        Clear the gradients in each step.
"""

EQUIVALENT = """
for module in (*model.blocks, model): => for module in [*((*model.blocks, model))][1:]:
    The first block is then a part of the model's unit.
"""

EXERCISE = exercise(
    globals(),
    points=3,
    right=(steps_under_fsdp, by_torch, by_full_gradients),
    ranks=(2,),
    timeout_s=20,
    tolerances={"change": 1e-5},  # with and without the 1e-6 that PyTorch's clip adds to the norm
)
