"""Answers to the exercises of chapter 13: right ones, and one for each mistake that has a name."""

from functools import partial
from itertools import product
from math import prod

import numpy as np
import torch
import torch.distributed as dist

from lib import comm
from lib.data import rows_of_rank
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.facts import clip
from lib.layout import Layout
from lib.mesh import Mesh, MeshShape
from lib.parallel import facts_of, parallelize
from lib.pipeline.execute import execute
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.with_reduce import with_reduce
from lib.pipeline.stage import stages_of
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.vocab import vocab_parallel_loss

# ---- 13.1


def mesh_groups(sizes, axes):
    """By coordinates: those outside of `axes` name the group."""
    places = list(product(*map(range, sizes.values())))  # the last axis counts fastest
    groups = {}
    for rank, place in enumerate(places):
        others = tuple(i for axis, i in zip(sizes, place, strict=True) if axis not in axes)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def right_groups_by_reshape(sizes, axes):
    """The way of torch's DeviceMesh: ranks as a box, whose dims outside of `axes` come first."""
    box = torch.arange(prod(sizes.values())).reshape(*sizes.values())
    dims = sorted(range(box.dim()), key=lambda i: list(sizes)[i] in axes)
    return box.permute(dims).reshape(-1, size_of(sizes, axes))


def right_groups_by_strides(sizes, axes):
    """Where each group begins, plus the steps inside; as sets, and the groups backwards."""
    stride, steps = 1, {}
    for axis, n in reversed(sizes.items()):
        steps[axis] = [stride * i for i in range(n)]
        stride *= n

    def sums(chosen):
        return [sum(parts) for parts in product(*(steps[axis] for axis in chosen))]

    begins = sums([axis for axis in sizes if axis not in axes])
    return [{begin + step for step in sums(axes)} for begin in reversed(begins)]


def right_groups_of_numpy(sizes, axes):
    return (np.array(ranks) for ranks in MeshShape(**sizes).groups(*axes))


def size_of(sizes, axes):
    return prod(sizes[axis] for axis in axes)


def first_axis_fastest(sizes, axes):
    return mesh_groups(dict(reversed(sizes.items())), axes)


def consecutive(sizes, axes):
    return torch.arange(prod(sizes.values())).reshape(-1, size_of(sizes, axes)).tolist()


def far_apart(sizes, axes):
    return torch.arange(prod(sizes.values())).reshape(size_of(sizes, axes), -1).T.tolist()


def one_for_each_rank(sizes, axes):
    groups = mesh_groups(sizes, axes)
    return [next(ranks for ranks in groups if rank in ranks) for rank in range(prod(sizes.values()))]


def all_other_axes(sizes, axes):
    return mesh_groups(sizes, [axis for axis in sizes if axis not in axes])


def lines(sizes, axes):
    return [ranks for axis in axes for ranks in mesh_groups(sizes, [axis])]


def last_member_first(sizes, axes):
    return [ranks[::-1] for ranks in mesh_groups(sizes, axes)]


# ---- 13.2

SLICED = ("norm", "row bias", "positions")


def ranks_to_sum(
    sizes,
    rank,
    kind,
    sequence_parallel,
    sliced=SLICED,
    always=(),
    stages=lambda pp, mine: (0, pp - 1),
    over_tied=("dp",),
    first="dp",
    also=(),
    order=None,
):
    """The answer to 13.2, with a place for each mistake."""
    names = order or list(sizes)
    ranks = torch.arange(prod(sizes.values())).reshape([sizes[axis] for axis in names])
    here = dict(zip(names, (ranks == rank).nonzero()[0].tolist(), strict=True))
    along = {first, *also}
    if kind == "embedding":
        along = {*over_tied, *also}
    if (sequence_parallel and kind in sliced) or kind in always:
        along.add("tp")
    places = []
    for axis in names:
        if axis in along:
            places.append(slice(None))
        elif axis == "pp" and kind == "embedding":
            places.append(sorted(set(stages(sizes["pp"], here["pp"]))))
        else:
            places.append(slice(here[axis], here[axis] + 1))
    return ranks[tuple(places)].flatten().tolist()


def summing(**wrong):
    return lambda *given: ranks_to_sum(*given, **wrong)


def right_sum_by_coordinates(sizes, rank, kind, sequence_parallel):
    """A set of ranks."""
    shape = MeshShape(**sizes)
    free = {"dp", "tp"} if sequence_parallel and kind in SLICED else {"dp"}
    ends = {0, sizes["pp"] - 1}

    def differ(there):
        return {axis for axis, i in there.items() if i != shape.coordinates(rank)[axis]}

    found = set()
    for r in range(shape.size):
        there = shape.coordinates(r)
        tied = {"pp"} if kind == "embedding" and there["pp"] in ends else set()
        if differ(there) <= free | tied:
            found.add(r)
    return found


def right_sum_from_groups(sizes, rank, kind, sequence_parallel):
    """A tensor, descending."""
    axes = ["dp", "tp"] if sequence_parallel and kind in SLICED else ["dp"]
    among = None
    if kind == "embedding":
        axes, among = ["dp", "pp"], {"pp": (0, sizes["pp"] - 1)}
    groups = MeshShape(**sizes).groups(*axes, among=among)
    return torch.tensor(next(ranks for ranks in groups if rank in ranks)[::-1])


# ---- 13.3


def clip_over_axes(
    gradients,
    copies,
    max_norm,
    groups,
    square=lambda x, c: (x * x).sum() / c,
    total=lambda mine, groups: dist.all_reduce(mine),
    before=lambda mine: mine,
    after=torch.sqrt,
    factor=lambda norm, max_norm: min(1.0, max_norm / norm.item()),
    in_place=True,
):
    """The answer to 13.3, with a place for each mistake."""
    mine = before(sum(square(x, c) for x, c in zip(gradients, copies, strict=True)))
    total(mine, groups)
    norm = after(mine)
    for i, x in enumerate(gradients):
        if in_place:
            x.mul_(factor(norm, max_norm))
        else:
            gradients[i] = x * factor(norm, max_norm)
    return norm


def clipping(**wrong):
    return lambda *given: clip_over_axes(*given, **wrong)


def over(*axes):
    def total(mine, groups):
        for axis in axes:
            dist.all_reduce(mine, group=groups[axis])

    return total


def right_clip_as_torch_does(gradients, copies, max_norm, groups):
    """With the small number of clip_grad_norm_, in place by copy_; the norm as a float."""
    parts = torch.stack([torch.linalg.vector_norm(x) / c**0.5 for x, c in zip(gradients, copies, strict=True)])
    mine = parts.square().sum()[None]
    dist.all_reduce(mine, op=dist.ReduceOp.SUM)
    norm = float(mine) ** 0.5
    for x in gradients:
        x.copy_(x * min(max_norm / (norm + 1e-6), 1))
    return norm


def right_clip_by_gathering(gradients, copies, max_norm, groups):
    """One number of each rank, and every rank adds them up."""
    mine = sum(x.pow(2).sum().div(c) for x, c in zip(gradients, copies, strict=True)).reshape(1)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    norm = torch.cat(everyones).sum().sqrt()
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm.item())
    return norm


def sums_along_one_axis_after_the_other(mine, groups):
    over("dp", "pp", "tp")(mine, groups)


def gathers_gradients(gradients, copies, max_norm, groups):
    """Those that all ranks have are sent, and the norm is made of what each holds."""
    everyones = [torch.empty_like(gradients[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, gradients[0])
    return clip_over_axes(gradients, copies, max_norm, groups)


# ---- 13.4


def wrong_step(world, model, inputs, targets, max_norm):
    """As the exercise gives it."""
    mesh = Mesh(MeshShape(dp=2, pp=2, tp=2), world)
    dp, pp, tp = (mesh.group(axis) for axis in ("dp", "pp", "tp"))

    schedule = one_f_one_b(pp.size, 2)
    tensor_parallel(model, tp, sequence_parallel=True)
    stages = stages_of(model, schedule, pp.rank)
    facts = facts_of(stages, mesh, schedule.rank_of)
    parameters = [fact.parameter for fact in facts]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    mine = rows_of_rank(len(inputs), dp.rank, dp.size)
    x, y = inputs[mine], targets[mine]
    count = dp.size * (y != -100).sum()
    loss = partial(vocab_parallel_loss, group=tp, count=count)
    result = execute(schedule, stages, pp, x, y, loss)

    for p in parameters:
        p.grad = comm.all_reduce(p.grad, dp)
    squares = [fact.square(fact.parameter.grad) for fact in facts]
    clip([p.grad for p in parameters], squares, world, max_norm)
    optimizer.step()
    return comm.all_reduce(result.loss, dp), facts


def step_on_eight(
    world,
    model,
    inputs,
    targets,
    max_norm,
    count_of=lambda mine, whole: (whole != -100).sum(),
    over=lambda fact, mesh: fact.sum_over,
    op="sum",
    square=lambda fact: fact.square(fact.parameter.grad),
    clips=True,
    returns=comm.all_reduce,
):
    """The answer to 13.4, with a place for each mistake."""
    mesh = Mesh(MeshShape(dp=2, pp=2, tp=2), world)
    dp, pp, tp = (mesh.group(axis) for axis in ("dp", "pp", "tp"))
    schedule = one_f_one_b(pp.size, 2)
    tensor_parallel(model, tp, sequence_parallel=True)
    stages = stages_of(model, schedule, pp.rank)
    facts = facts_of(stages, mesh, schedule.rank_of)
    mine = rows_of_rank(len(inputs), dp.rank, dp.size)
    loss = partial(vocab_parallel_loss, group=tp, count=count_of(targets[mine], targets))
    result = execute(schedule, stages, pp, inputs[mine], targets[mine], loss)
    for fact in facts:
        fact.parameter.grad = comm.all_reduce(fact.parameter.grad, over(fact, mesh), op=op)
    if clips:
        clip([fact.parameter.grad for fact in facts], [square(fact) for fact in facts], world, max_norm)
    torch.optim.SGD([fact.parameter for fact in facts], lr=0.1).step()
    return returns(result.loss, dp), facts


def stepping(**wrong):
    return lambda *given: step_on_eight(*given, **wrong)


def local_count(mine, whole):
    return 2 * (mine != -100).sum()


def dp_for(*, norms=False, tied=False):
    """dp alone, where others have to be added."""

    def over(fact, mesh):
        return mesh.group("dp") if (tied if fact.crosses else norms) else fact.sum_over

    return over


def right_step_by_parallelize(world, model, inputs, targets, max_norm):
    """By the library, with another schedule and number of microbatches, without sequence parallelism."""
    layout = Layout(dp=2, pp=2, tp=2, schedule="gpipe", microbatches=4)
    ours = parallelize(model, Mesh(MeshShape(**layout.sizes), world), layout, partial(torch.optim.SGD, lr=0.1))
    return ours.step(inputs, targets, max_norm), ours.facts


def right_step_by_gradients(world, model, inputs, targets, max_norm):
    """Sums inside the schedule, by `Gradients`; a list, with the loss as a float."""
    mesh = Mesh(MeshShape(dp=2, pp=2, tp=2), world)
    dp, pp, tp = (mesh.group(axis) for axis in ("dp", "pp", "tp"))
    schedule = with_reduce(one_f_one_b(pp.size, 4))
    stages = stages_of(tensor_parallel(model, tp, sequence_parallel=True), schedule, pp.rank)
    facts = facts_of(stages, mesh, schedule.rank_of)
    sums = Gradients(facts)
    optimizer = ShardedOptimizer(sums, partial(torch.optim.SGD, lr=0.1))
    x, y = (part.chunk(dp.size)[dp.rank] for part in (inputs, targets))
    loss = partial(vocab_parallel_loss, group=tp, count=(targets != -100).sum())
    term = execute(schedule, stages, pp, x, y, loss, sums).loss
    sums.finish()
    sums.clip(world, max_norm)
    optimizer.step()
    return [comm.all_reduce(term, dp).item(), facts]


# ---- 13.5


def culprits():
    return (6, "tp"), (5, "dp")


def right_culprits_in_lists():
    return [[torch.tensor(6), "TP"], [np.int64(5), "DP"]]


def blames(*which):
    """Another pair for one of the two reports."""
    report, pair = which
    return lambda: tuple(pair if i == report else right for i, right in enumerate(culprits()))


# ---- 13.6

SLIM = {"sequence_parallel": True, "recompute": "selective"}


def choose_layout():
    return Layout(dp=2, pp=4, tp=8, microbatches=32, zero=1, **SLIM)


def choosing(**fields):
    return lambda: Layout(**fields)


right_choice_without_replicas = choosing(pp=8, tp=8, microbatches=64, **SLIM)
right_choice_of_short_stages = choosing(
    dp=2, pp=8, tp=4, microbatches=32, zero=1, schedule="interleaved", stages_per_rank=2, **SLIM
)
right_choice_with_replicas_inside_a_node = choosing(
    dp=2, pp=8, tp=4, order="pp,dp,tp", microbatches=32, schedule="interleaved", stages_per_rank=5, **SLIM
)


RIGHT = {
    "13.1": [mesh_groups, right_groups_by_reshape, right_groups_by_strides, right_groups_of_numpy],
    "13.2": [ranks_to_sum, right_sum_by_coordinates, right_sum_from_groups],
    "13.3": [clip_over_axes, right_clip_as_torch_does, right_clip_by_gathering],
    "13.4": [step_on_eight, right_step_by_parallelize, right_step_by_gradients],
    "13.5": [culprits, right_culprits_in_lists],
    "13.6": [
        choose_layout,
        right_choice_without_replicas,
        right_choice_of_short_stages,
        right_choice_with_replicas_inside_a_node,
    ],
}
WRONG = {  # in the order of the exercise's mistakes
    "13.1": [
        first_axis_fastest,
        consecutive,
        far_apart,
        lambda sizes, axes: mesh_groups(sizes, axes)[:1],
        one_for_each_rank,
        all_other_axes,
        lambda sizes, axes: mesh_groups(sizes, axes[:1]),
        lambda sizes, axes: mesh_groups(sizes, axes[-1:]),
        lines,
        last_member_first,
    ],
    "13.2": [
        summing(sliced=()),
        summing(sliced=["norm"]),
        summing(sliced=["norm", "row bias"]),
        summing(always=SLICED),
        summing(sliced=[*SLICED, "column weight", "column bias", "row weight", "embedding"]),
        summing(sliced=[*SLICED, "column bias"]),
        summing(stages=lambda pp, mine: [mine]),
        summing(stages=lambda pp, mine: range(pp)),
        summing(over_tied=()),
        summing(also=["dp", "pp", "tp"]),
        summing(also=["pp"]),
        summing(first="tp", over_tied=["tp"]),
        summing(order=["dp", "pp", "tp"]),
    ],
    "13.3": [
        clipping(square=lambda x, c: x.square().sum()),
        clipping(square=lambda x, c: x.square().sum() / 2),
        clipping(square=lambda x, c: (x / c).square().sum()),
        clipping(square=lambda x, c: x.square().sum(), total=lambda mine, groups: None),
        clipping(total=lambda mine, groups: None),
        clipping(before=torch.sqrt, after=lambda norm: norm),
        clipping(after=lambda square: square),
        *(clipping(total=over(axis)) for axis in ("dp", "pp", "tp")),
        clipping(total=over("pp", "tp")),
        clipping(factor=lambda norm, max_norm: max_norm / norm),
        clipping(in_place=False),
        gathers_gradients,
        clipping(total=sums_along_one_axis_after_the_other),
    ],
    "13.4": [
        wrong_step,
        stepping(count_of=local_count),
        stepping(over=lambda fact, mesh: mesh.group("tp")),
        stepping(over=dp_for(norms=True, tied=True)),
        stepping(over=dp_for(norms=True)),
        stepping(over=dp_for(tied=True)),
        stepping(returns=lambda loss, dp: loss),
        stepping(clips=False),
        stepping(op="mean"),
        stepping(square=lambda fact: fact.parameter.grad.square().sum()),
    ],
    "13.5": [
        *(blames(0, (rank, "tp")) for rank in (7, 3, 0, 1, 2, 4, 5)),
        *(blames(0, (6, axis)) for axis in ("dp", "pp", "world")),
        *(blames(1, (rank, "dp")) for rank in (4, 1, 0, 2, 3, 6, 7)),
        *(blames(1, (5, axis)) for axis in ("tp", "pp", "world")),
    ],
    "13.6": [
        lambda: {"dp": 2, "pp": 4, "tp": 8},
        choosing(dp=2, pp=2, tp=8, microbatches=32, **SLIM),
        choosing(dp=1, pp=32, tp=2, microbatches=64, **SLIM),
        choosing(dp=2, pp=4, tp=8, microbatches=32, schedule="zb-h1", sequence_parallel=True),
        choosing(dp=2, pp=2, tp=16, microbatches=32, zero=1, **SLIM),
        choosing(dp=8, tp=8, microbatches=8, **SLIM),
        choosing(dp=16, pp=2, tp=2, microbatches=4, zero=1, **SLIM),
        choosing(dp=2, pp=4, tp=8, microbatches=32, zero=1),
        choosing(dp=2, pp=8, tp=4, microbatches=32, zero=1, **SLIM),
        choosing(dp=2, pp=4, tp=8, microbatches=32, zero=2, **SLIM),
        choosing(dp=4, pp=2, tp=8, microbatches=16, zero=1, **SLIM),
        choosing(pp=8, tp=8, microbatches=64, schedule="interleaved", stages_per_rank=5, recompute="selective"),
    ],
}
