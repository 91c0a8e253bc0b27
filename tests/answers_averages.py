"""Answers to the exercises of `averages`: right ones, and one for each mistake that has a name."""

import torch
import torch.distributed as dist

from lib import comm


def each(params, make):
    for p in params:
        if p.grad is not None:
            p.grad = make(p)


def right_average(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group, op="mean"))


def right_average_by_torch_distributed(params, group):
    for p in params:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def right_average_in_one_message(params, group):
    grads = [p.grad for p in params if p.grad is not None]
    flat = comm.all_reduce(torch.cat([g.flatten() for g in grads]), group) / group.size
    for g, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(piece.view_as(g))


def sums(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group))


def divides_twice(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group, op="mean") / group.size)


def forgets_to_assign(params, group):
    each(params, lambda p: (comm.all_reduce(p.grad, group, op="mean"), p.grad)[1])


def broadcasts(params, group):
    each(params, lambda p: comm.broadcast(p.grad, group, src=0))


def writes_into_weights(params, group):
    for p in params:
        if p.grad is not None:
            p.data = comm.all_reduce(p.grad, group, op="mean")


def averages_weights(params, group):
    for p in params:
        p.data = comm.all_reduce(p.data, group, op="mean")


def trains_the_frozen(params, group):
    for p in params:
        p.grad = comm.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, group, op="mean").detach()


def right_global(g, count, group):
    return comm.all_reduce(g, group) / comm.all_reduce(torch.tensor(count), group)


def right_global_by_weights(g, count, group):
    share = count / comm.all_gather(torch.tensor([float(count)], dtype=torch.float64), group).sum()
    return comm.all_reduce(g / max(count, 1) * share, group)


def mean_of_means(g, count, group):
    return comm.all_reduce(g / max(count, 1), group, op="mean")


def nan_of_means(g, count, group):
    return comm.all_reduce(g / count, group, op="mean")


def sum_of_means(g, count, group):
    return comm.all_reduce(g / max(count, 1), group)


def mean_count(g, count, group):
    return comm.all_reduce(g, group) / comm.all_reduce(torch.tensor(float(count)), group, op="mean")


def mean_of_sums(g, count, group):
    return comm.all_reduce(g, group, op="mean") / comm.all_reduce(torch.tensor(count), group)


def own_count(g, count, group):
    return comm.all_reduce(g, group) / max(count, 1)


def own_count_times_ranks(g, count, group):
    return comm.all_reduce(g, group) / (count * group.size)


def own_mean(g, count, group):
    return g / max(count, 1)


def undivided(g, count, group):
    return comm.all_reduce(g, group)


def right_bytes(p, b, n):
    return 2 * (n - 1) / n * p * b


def right_bytes_in_two_halves(p, b, n):
    shard = p * b / n
    return (n - 1) * shard + (n - 1) * shard


def right_start(model, group):
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.copy_(comm.broadcast(x, group, src=0))


def right_start_by_torch_distributed(model, group):
    for x in model.state_dict().values():
        dist.broadcast(x, src=0)


def copies(model, tensors, of):
    with torch.no_grad():
        for x in tensors:
            x.copy_(of(x))


RIGHT = {
    "03.1": [right_average, right_average_by_torch_distributed, right_average_in_one_message],
    "03.2": [right_global, right_global_by_weights],
    "03.5": [right_bytes, right_bytes_in_two_halves],
    "03.6": [right_start, right_start_by_torch_distributed],
}
WRONG = {  # in the order of the exercise's mistakes
    "03.1": [
        *(sums, divides_twice, forgets_to_assign, broadcasts),
        *(writes_into_weights, averages_weights, trains_the_frozen),
    ],
    "03.2": [
        *(mean_of_means, nan_of_means, sum_of_means, mean_count, mean_of_sums),
        *(own_count, own_count_times_ranks, own_mean, undivided),
    ],
    "03.5": [
        lambda p, b, n: (n - 1) / n * p * b,
        lambda p, b, n: 2 * (n - 1) * p * b,
        lambda p, b, n: 4 * (n - 1) / n * p * b,
        lambda p, b, n: 16 * (n - 1) / n * p * b,
        lambda p, b, n: 2 * p * b,
        lambda p, b, n: (n - 1) * p * b,
    ],
    "03.6": [
        lambda model, group: [comm.broadcast(p, group) for p in model.parameters()],
        lambda model, group: copies(model, model.parameters(), lambda x: comm.broadcast(x, group)),
        lambda model, group: copies(model, model.parameters(), lambda x: comm.all_reduce(x, group, op="mean")),
        lambda model, group: copies(
            model, (*model.parameters(), *model.buffers()), lambda x: comm.broadcast(x, group, src=group.size - 1)
        ),
        lambda model, group: copies(
            model,
            (*(p for p in model.parameters() if p.requires_grad), *model.buffers()),
            lambda x: comm.broadcast(x, group),
        ),
    ],
}
