"""18.5: a step in which all gradients are averaged over those who hold them, and a loss curve that looks right."""

import torch
from torch import nn
from torch.nn.functional import gelu

from course.check.edits import exercise
from course.check.exercise import drawn, everywhere, whole
from lib import comm
from lib.expert_parallel.layer import ExpertGroups, ParallelMoE
from lib.mesh import Mesh, MeshShape
from lib.moe import ExpertOptions, MoE

EXPERTS, TOKENS, WIDTH, INNER = 12, 5, 4, 3  # E, of a rank, D, F
NAMES = ("router.weight", "experts.up", "experts.down")


def layouts(n):
    """The ranks that share the experts: all, and some or none."""
    return (n, 2 if n % 2 == 0 else 1)


def inputs(generator, n):
    """No token chooses the experts that one rank has where all ranks share."""
    weights = {"router.weight": (EXPERTS, WIDTH), "experts.up": (EXPERTS, INNER, WIDTH)}
    weights["experts.down"] = (EXPERTS, WIDTH, INNER)
    ranks = drawn(generator, n, weights, {"x": (1, TOKENS, WIDTH), "targets": (1, TOKENS, WIDTH)})
    each, idle = EXPERTS // n, whole(generator, 0, n)
    ranks[0]["router.weight"][idle * each : (idle + 1) * each] = -4  # the same tensor on all ranks
    return [one | {"x": one["x"].abs()} for one in ranks]


def body(answer, group, given):
    found = {}
    for ep in layouts(group.size):
        mesh = Mesh(MeshShape(holders=group.size // ep, ep=ep), group)
        moe = ParallelMoE(of_weights(given), ExpertGroups(ep=mesh.group("ep")))
        loss = answer(given["x"], given["targets"], moe, mesh.group("holders"), group)
        found[f"ep {ep}: the loss"] = loss.detach() if torch.is_tensor(loss) else loss
        found |= {f"ep {ep}: gradient of {name}": p.grad for name, p in moe.named_parameters()}
    return found


def of_weights(given):
    """The mixture of one process."""
    moe = MoE(ExpertOptions(experts=EXPERTS, top_k=2), WIDTH, INNER, gelu)
    for name in NAMES:
        module, _, last = name.rpartition(".")
        setattr(moe.get_submodule(module), last, nn.Parameter(given[name].clone()))
    return moe


def reference(given):
    moe = of_weights(given[0])
    x, targets = (torch.cat([one[name] for one in given]) for name in ("x", "targets"))
    loss = (moe(x) - targets).square().mean()
    loss.backward()
    found = everywhere({}, given)
    for ep in layouts(len(given)):
        for rank in range(len(given)):
            mine = {f"ep {ep}: the loss": loss.item()}
            for name, p in moe.named_parameters():
                part = p.grad.chunk(ep)[rank % ep] if "experts" in name else p.grad
                mine[f"ep {ep}: gradient of {name}"] = part
            found[rank] = found[rank] | mine
    return found


def mended_experts(x, targets, moe, holders, world):
    loss = (moe(x) - targets).square().mean()
    loss.backward()
    for name, p in moe.named_parameters():
        over = holders if "experts" in name else world
        p.grad = comm.all_reduce(p.grad, over) / world.size
    return comm.all_reduce(loss.detach(), world, op="mean")


def by_sums(x, targets, moe, holders, world):
    """The loss is divided by the elements of all ranks, and all else is a sum."""
    loss = (moe(x) - targets).square().sum() / (x.numel() * world.size)
    loss.backward()
    for p in moe.experts.parameters():
        p.grad = comm.all_reduce(p.grad, holders)
    moe.router.weight.grad = comm.all_reduce(moe.router.weight.grad, world)
    return comm.all_reduce(loss.detach(), world).item()


def by_ep(x, targets, moe, holders, world):
    """The means stay, and the terms of experts are divided by ep."""
    loss = (moe(x) - targets).square().mean()
    loss.backward()
    for name, p in moe.named_parameters():
        is_expert = "experts" in name
        p.grad = comm.all_reduce(p.grad, holders if is_expert else world, op="mean")
        if is_expert:
            p.grad *= holders.size / world.size
    return comm.all_reduce(loss.detach(), world, op="mean")


def without_experts(grad, over, world):
    return comm.all_reduce(grad, world) / world.size if over is world else grad / world.size


MEAN = 'p.grad = comm.all_reduce(p.grad, over) / world.size => p.grad = comm.all_reduce(p.grad, over, op="mean")'
ADD = "p.grad = comm.all_reduce(p.grad, over) / world.size => p.grad = comm.all_reduce(p.grad, over)"

MISTAKES = f"""
{MEAN}
    The gradients of experts are still ep times too large. Copies of the tokens of all these ranks came to an expert, so
    its gradient has their terms, and each is of a mean over one rank's tokens.
        Divide the sum of an expert by all ranks too, and not by its holders.
over = holders if "experts" in name else world => over = world
    You average experts over all ranks. Ranks that share the experts have different ones: their gradients are mixed up.
        Sum over the ranks with the same experts, and divide by all ranks.
p.grad = comm.all_reduce(p.grad, over) / world.size => p.grad = without_experts(p.grad, over, world)
    You do not sum the gradients of experts. Where there are several holders, each has the terms of its ep group.
        Sum over the holders, and divide by all ranks.
{MEAN}
comm.all_reduce(p.grad, over, op="mean") => comm.all_reduce(p.grad, over, op="sum" if "experts" in name else "mean")
    You sum the gradients of experts, and divide them by nothing: they are as many times too large as there are ranks.
        The loss of a rank is a mean over its tokens. Divide the sum by all ranks.
{MEAN}
comm.all_reduce(p.grad, over, op="mean") => comm.all_reduce(p.grad, over, op="mean") * (world.size / over.size)
    You multiply by ep. The gradients of experts were ep times too large, and are now ep² times.
        Divide.
{MEAN}
comm.all_reduce(p.grad, over, op="mean") => comm.all_reduce(p.grad, over, op="mean") / over.size
    You divide by the size of the group twice.
        Divide each sum once, by all ranks.
{MEAN}
loss.backward() => (loss * holders.size / world.size).backward()
or {MEAN}
over, op="mean") => over, op="mean") / (world.size / holders.size)
    You divide everything by ep. Experts are right now, and the router is ep times too small.
        Divide the gradients of experts, or the loss by all ranks, and then sum everywhere.
{MEAN}
loss.backward() => (loss / world.size).backward()
    You divide the loss by n, and average afterwards as well: gradients are divided twice.
        After such a loss all ranks only sum.
over = holders if "experts" in name else world => over = holders
    You sum the router over the holders of the same experts. It is on every rank, and each rank has its tokens.
        Sum the router over all ranks.
{ADD}
    You sum all gradients, and divide none. The loss of a rank is a mean over its tokens.
        Divide by all ranks, experts and router.
if "experts" in name else world => if "up" in name else world
or if "experts" in name else world => if "down" in name else world
    You treat one of the two weights of the experts like the router.
        Both are on the holders only.
{MEAN}
return comm.all_reduce => moe.experts.up.grad *= holders.size / world.size; return comm.all_reduce
or {MEAN}
return comm.all_reduce => moe.experts.down.grad *= holders.size / world.size; return comm.all_reduce
    One of the two weights of the experts is right, and one is still ep times too large.
        Divide both.
return comm.all_reduce(loss.detach(), world, op="mean") => return loss.detach()
    The gradients are right, and you return the loss of this rank's tokens.
        Return the mean over all ranks.
return comm.all_reduce(loss.detach(), world, op="mean") => return comm.all_reduce(loss.detach(), world)
    The gradients are right, and the loss is a sum of means.
        Return the mean over all ranks.
"""

EXERCISE = exercise(globals(), points=1, right=(mended_experts, by_sums, by_ep))
