"""15.18: a program under parallelize_module, with sequence parallelism and a plan that forgets the norms."""

from functools import partial

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import nll_loss

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, everywhere
from course.exercises.ch15.trained import changes, right_changes
from course.practise.foreign import SmallModel, make_batches, make_model
from lib.doctor.numbers import watch

MATRICES = "elements of the matrices on this rank"
FACTS = {MATRICES: AS_NEEDED}
NORMS = [name for name, _ in SmallModel().named_parameters() if "norm" in name]


def inputs(generator, n):
    model, batches = make_model(generator), make_batches(generator, padded=False)
    runs = {"step 1": (batches[:1],), "both steps": (batches,)}
    return everywhere({"model": model, "runs": runs}, range(n))


def body(answer, group, given):
    found, elements, _ = changes(answer, given, None)
    whole = {name: p.numel() for name, p in given["model"].named_parameters() if p.ndim > 1}
    here = sum(elements[name] for name in whole)
    return found | {MATRICES: AS_NEEDED if here * group.size <= sum(whole.values()) else MORE}


reference = right_changes


def steps_under_tp(model, batches, folder):
    tp = dist.get_world_size()
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    part, full = Shard(1), Replicate()  # of the tokens
    plan = {
        "embed": RowwiseParallel(input_layouts=full, output_layouts=part),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=part),
        "blocks.*.down": RowwiseParallel(output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=full),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = watch(folder, model, optimizer)
    for x, y in batches:
        seen.batch(x, y)
        loss = nll_loss(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        seen.backward(loss)
        optimizer.step()


def norms_by_hand(model, batches, folder, add=dist.all_reduce, to="norm"):
    """The plan knows nothing of norms: after backward, ranks `add` the gradients of all that has this in its name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nll_loss(model(x).flatten(0, 1), y.flatten()).backward()
        for name, p in model.named_parameters():
            if to in name:
                add(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)
        optimizer.step()


def without_sequence_parallelism(model, batches, folder):
    """All ranks have all tokens between the layers, so all have the whole gradient of a norm."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nll_loss(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


def gathered_norms(model, batches, folder):
    """Each norm gets all tokens, and passes them on."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    everything = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": everything,
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": everything,
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nll_loss(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


MISTAKES = """
"blocks.*.norm": SequenceParallel(), =>
"norm": SequenceParallel(), =>
    The norms still have a different gradient on each rank: the term of its tokens. Nothing sums these terms.
        The plan names no norm, so its weight stays a plain parameter. Name each norm in the plan.
"norm": SequenceParallel(), =>
    The norms of the blocks are right, and the last norm is not: the pattern of a block does not match it.
        Give the last norm a separate entry.
"blocks.*.norm": SequenceParallel(), =>
    The last norm is right, and the norms of the blocks are not: the plan has to match a name as a whole.
        Name these as well: a * is any number of a block.
"blocks.*.norm": => "blocks.0.norm":
    The norm of the first block is right, and the norm of the second block is not.
        Name each block, or all of them with a *.
partial(norms_by_hand, add=lambda gradient: dist.all_reduce(gradient.div_(dist.get_world_size())))
    The copies of the norms agree now, and their gradients are the mean of the ranks' terms: tp times too small.
        The loss is divided by all tokens, so each rank has a term of the gradient: sum the terms.
partial(norms_by_hand, add=lambda gradient: dist.broadcast(gradient, 0))
    The copies of the norms agree now, and have the gradient of rank 0's tokens alone.
        A gradient over all tokens is the sum of all ranks' terms.
partial(norms_by_hand, to="")
    The norms are right now, and the matrices are wrong: you also added gradients of different shards.
        Only what each rank holds in full needs a sum: the norms.
optimizer.step() => [dist.all_reduce(model.get_parameter(name).grad.to_local()) for name in NORMS]; optimizer.step()
    The gradients of the norms are tp times too large. With SequenceParallel they are DTensors whose terms PyTorch
    sums before the step, and you sum them as well.
        One of the two is enough.
in change: lambda model, batches, folder: None
    No weight of the given model has changed.
        Train the model itself, not a copy of it.
in elements of the matrices on this rank: parallelize_module(model, mesh, plan) =>
    Each rank trains the full model. This is the right training, without tensor parallelism.
        Leave the matrices cut, and correct the norms.
optimizer.zero_grad() =>
    Step 1 is right. In step 2 each gradient still contains the gradient of step 1.
        Clear the gradients in each step.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(steps_under_tp, norms_by_hand, without_sequence_parallelism, gathered_norms),
    ranks=(2, 4),
    timeout_s=20,
)
