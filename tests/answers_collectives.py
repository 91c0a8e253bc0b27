"""Answers to the exercises of `rings` and `links`: right ones, and one for each mistake that has a name."""

from math import ceil, log2

import torch
import torch.distributed as dist

from lib import collectives, comm

# ---- 02.1


def shift(x, k, group, sign=1, step=None, own=False):
    k = (k if step is None else step) % group.size
    if own or k == 0:
        return x
    to, source = (group.rank + sign * k) % group.size, (group.rank - sign * k) % group.size
    return comm.exchange({to: x}, {source: x}, group).wait()[source]


def right_shift_starting_both(x, k, group):
    k %= group.size
    if k == 0:
        return x
    coming = comm.recv(x, group, (group.rank - k) % group.size)
    going = comm.send(x, group, (group.rank + k) % group.size)
    going.wait()
    return coming.wait()


def right_shift_by_torch_distributed(x, k, group):
    if k % group.size == 0:
        return x
    got = torch.empty_like(x)
    to, source = (group.rank + k) % group.size, (group.rank - k) % group.size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, got, source)]):
        work.wait()
    return got


def shifts_backwards(x, k, group):
    return shift(x, k, group, sign=-1)


def shifts_nothing(x, k, group):
    return shift(x, k, group, own=True)


def shifts_by_one(x, k, group):
    return shift(x, k, group, step=1)


def shifts_by_one_backwards(x, k, group):
    return shift(x, k, group, sign=-1, step=1)


# ---- 02.2


def scatter(x, group, first=1, passes="sum", steps=0, copy=True):
    n = group.size
    chunks = list((x.clone() if copy else x).chunk(n))
    sent = chunks[(group.rank - first) % n]
    for k in range(n - 1 + steps):
        i = (group.rank - first - 1 - k) % n
        got = collectives.pass_right(sent, torch.empty_like(sent), group)
        total = chunks[i].add_(got)
        sent = total if passes == "sum" else x.chunk(n)[i]
    return total.clone()


def right_scatter(x, group):
    return scatter(x, group)


def right_scatter_by_torch_distributed(x, group):
    n, r = group.size, group.rank
    chunks, got = list(x.clone().chunk(n)), torch.empty(len(x) // n, dtype=x.dtype)
    for k in range(n - 1):
        sending = dist.isend(chunks[(r - 1 - k) % n], (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        sending.wait()
        chunks[(r - 2 - k) % n] += got
    return chunks[r]


def one_chunk_too_far(x, group):
    return scatter(x, group, first=0)


def passes_own_chunks(x, group):
    return scatter(x, group, passes="own")


def adds_nothing(x, group):
    return x.chunk(group.size)[group.rank].clone()


def gives_the_whole_sum(x, group):
    return collectives.ring_all_reduce(x, group)


def a_step_too_few(x, group):
    return scatter(x, group, steps=-1)


def scatters_by_the_library(x, group):
    return comm.reduce_scatter(x, group)


def scatters_directly(x, group):
    return all_to_all(x, group).view(group.size, -1).sum(0)


def scatters_by_whole_arrays(x, group):
    total = sent = x
    for _ in range(group.size - 1):
        sent = collectives.pass_right(sent, torch.empty_like(sent), group)
        total = total + sent
    return total.chunk(group.size)[group.rank]


def scatters_in_place(x, group):
    return scatter(x, group, copy=False)


# ---- 02.3


def gather(part, group, turn=-1, order="rank", own=False, times=1):
    n, r = group.size, group.rank
    parts, sent = {r: part}, part
    came = [part]
    for k in range(times * (n - 1)):
        to, source = (r + turn) % n, (r - turn) % n
        got = comm.exchange({to: part if own else sent}, {source: part}, group).wait()[source]
        parts[(r - turn * (k + 1)) % n] = sent = got
        came.append(got)
    if order == "came":
        return torch.cat(came)
    if order == "mirrored":
        return torch.cat([parts[(2 * r - i) % n] for i in range(n)])
    return torch.cat([parts[i] for i in range(n)])


def right_gather(part, group):
    return gather(part, group)


def right_gather_by_torch_distributed(part, group):
    n, r = group.size, group.rank
    whole = torch.empty(n, *part.shape, dtype=part.dtype)
    whole[r] = part
    for k in range(n - 1):
        sending = dist.isend(whole[(r + k) % n], (r - 1) % n)
        dist.recv(whole[(r + k + 1) % n], (r + 1) % n)
        sending.wait()
    return whole.flatten()


def gathers_to_the_right(part, group):
    return gather(part, group, turn=1)


def in_order_of_arrival(part, group):
    return gather(part, group, order="came")


def in_mirrored_order(part, group):
    return gather(part, group, order="mirrored")


def sends_its_own_each_time(part, group):
    return gather(part, group, own=True)


def gathers_by_the_library(part, group):
    return comm.all_gather(part, group)


def gathers_twice(part, group):
    return gather(part, group, times=2)[: group.size * len(part)]


# ---- 02.4


def all_to_all(x, group, chunk=None, own="kept"):
    n, r = group.size, group.rank
    chunks = x.chunk(n)
    others = [j for j in range(n) if j != r]
    sends = {j: chunks[j if chunk is None else chunk(r, j)] for j in others}
    got = comm.exchange(sends, {j: chunks[0] for j in others}, group).wait()
    mine = {"kept": [chunks[r]], "zeros": [0 * chunks[r]], "missing": [], "first": []}[own]
    first = [chunks[r]] if own == "first" else []
    return torch.cat(first + [p for j in range(n) for p in (mine if j == r else [got[j]])])


def right_all_to_all(x, group):
    return all_to_all(x, group)


def right_all_to_all_around(x, group):
    n, r = group.size, group.rank
    parts = {r: x.chunk(n)[r]}
    for k in range(1, n):
        to, source = (r + k) % n, (r - k) % n
        parts[source] = comm.exchange({to: x.chunk(n)[to]}, {source: x.chunk(n)[0]}, group).wait()[source]
    return torch.cat([parts[j] for j in range(n)])


def right_all_to_all_by_torch_distributed(x, group):
    out = torch.empty_like(x)
    out.chunk(group.size)[group.rank].copy_(x.chunk(group.size)[group.rank])
    ops = [
        dist.P2POp(op, y.chunk(group.size)[j], j)
        for j in range(group.size)
        if j != group.rank
        for op, y in ((dist.isend, x), (dist.irecv, out))
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


def sends_its_own_chunk_to_all(x, group):
    return all_to_all(x, group, chunk=lambda r, j: r)


def returns_x(x, group):
    return x


def leaves_zeros(x, group):
    return all_to_all(x, group, own="zeros")


def forgets_its_own(x, group):
    return all_to_all(x, group, own="missing")


def puts_its_own_first(x, group):
    return all_to_all(x, group, own="first")


def all_to_all_by_the_library(x, group):
    return comm.all_to_all(x, group)


def sends_whole_arrays(x, group):
    others = [j for j in range(group.size) if j != group.rank]
    got = comm.exchange(dict.fromkeys(others, x), dict.fromkeys(others, x), group).wait() | {group.rank: x}
    return torch.cat([got[j].chunk(group.size)[group.rank] for j in range(group.size)])


# ---- 02.5


def busiest(
    naive=lambda S, n: (n - 1) * S, tree=lambda S, n: ceil(log2(n)) * S, ring=lambda S, n: 2 * (n - 1) / n * S
):
    return lambda algorithm, S, n: {"naive": naive, "tree": tree, "ring": ring}[algorithm](S, n)


def right_busiest_by_counting(algorithm, payload_bytes, n):
    if algorithm == "naive":
        return (n - 1) * payload_bytes
    if algorithm == "ring":
        return 2 * (n - 1) * (payload_bytes / n)
    rounds, told = 0, 1
    while told < n:
        rounds, told = rounds + 1, 2 * told
    return rounds * payload_bytes


def everything(S, n):
    return 2 * (n - 1) * S


# ---- 02.6


def line(sizes, seconds):
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return seconds[0] - slope * sizes[0], 1 / slope


def right_fit_by_least_squares(sizes_bytes, seconds):
    t = torch.tensor(seconds, dtype=torch.float64)
    rows = torch.stack([1 / t, torch.tensor(sizes_bytes, dtype=torch.float64) / t], 1)
    alpha_s, beta = torch.linalg.lstsq(rows / rows.norm(dim=0), torch.ones_like(t)[:, None]).solution[:, 0]
    alpha_s, beta = alpha_s / rows[:, 0].norm(), beta / rows[:, 1].norm()
    return alpha_s, 1 / beta


def fit(change):
    return lambda sizes, seconds: change(*line(sizes, seconds), sizes, seconds)


RIGHT = {
    "02.1": [shift, right_shift_starting_both, right_shift_by_torch_distributed],
    "02.2": [right_scatter, collectives.ring_reduce_scatter, right_scatter_by_torch_distributed],
    "02.3": [right_gather, right_gather_by_torch_distributed],
    "02.4": [right_all_to_all, right_all_to_all_around, right_all_to_all_by_torch_distributed],
    "02.5": [busiest(), right_busiest_by_counting],
    "02.6": [line, right_fit_by_least_squares],
}
WRONG = {  # in the order of the exercise's mistakes
    "02.1": [shifts_backwards, shifts_nothing, shifts_by_one, shifts_by_one_backwards],
    "02.2": [
        *(one_chunk_too_far, passes_own_chunks, adds_nothing, gives_the_whole_sum, a_step_too_few),
        *(scatters_by_the_library, scatters_directly, scatters_by_whole_arrays, scatters_in_place),
    ],
    "02.3": [
        *(gathers_to_the_right, in_order_of_arrival, in_mirrored_order, sends_its_own_each_time),
        *(gathers_by_the_library, gathers_twice),
    ],
    "02.4": [
        *(sends_its_own_chunk_to_all, returns_x, leaves_zeros, forgets_its_own, puts_its_own_first),
        *(all_to_all_by_the_library, sends_whole_arrays),
    ],
    "02.5": [
        busiest(everything, everything, everything),
        busiest(ring=lambda S, n: (n - 1) / n * S),
        busiest(naive=everything),
        busiest(tree=lambda S, n: log2(n) * S),
        busiest(tree=lambda S, n: 2 * ceil(log2(n)) * S),
        busiest(ring=lambda S, n: 2 * S),
    ],
    "02.6": [
        fit(lambda a, b, sizes, seconds: (a, 1 / b)),
        fit(lambda a, b, sizes, seconds: (b, a)),
        fit(lambda a, b, sizes, seconds: (a, sizes[-1] / seconds[-1])),
        fit(lambda a, b, sizes, seconds: (seconds[0], b)),
        fit(lambda a, b, sizes, seconds: (1e6 * a, b)),
    ],
}
