"""10.2: weights that several ranks hold, and one norm for all stages."""

from collections import defaultdict
from contextlib import contextmanager

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, random, without_eps
from course.check.listen import listen
from lib import comm

MAX_NORM = 1.5
CASES = "a large gradient", "a small one"
SENT = "bytes that this rank sent"
IN_FLIGHT, NONE, SOME = "tensors that changed before their send was done", "none", "some"
NUMBER_BYTES = 8
SHAPES = {"embedding": (7, 4), "projection": (7, 4), "adapter": (2, 2)}  # of the weights that several ranks hold


def inputs(generator, n):
    """Far above MAX_NORM, then far below it; the last rank has its names in a different order."""
    holders = {"embedding": [0, n - 1], "projection": [0, n - 1], "adapter": [*range(n)]}
    own_shapes = {"weight": (4, 3), "bias": (5,)}
    found = []
    for rank in range(n):
        own = {f"{rank}.{name}": (1 + rank / 2) * random(generator, *shape) for name, shape in own_shapes.items()}
        shared = {name: random(generator, *SHAPES[name]) for name, ranks in holders.items() if rank in ranks}
        if rank == n - 1:
            shared = {"projection": shared.pop("projection")} | shared
        mine = own | shared
        cases = {
            case: {k: factor * x for k, x in mine.items()} for case, factor in zip(CASES, (1, 0.01), strict=True)
        }
        found.append({"cases": cases, "holders": holders})
    return found


def body(answer, group, given):
    found, going = {IN_FLIGHT: NONE}, InFlight()
    heard = listen(going.starts, going.waits)
    for case, gradients in given["cases"].items():
        mine = {name: x.clone() for name, x in gradients.items()}
        with going.noted():
            norm = answer({**mine}, given["holders"], MAX_NORM, group)  # its own dict: the tensors are to be changed
        own = [name for name in mine if name not in given["holders"]]  # of the others only a sum is clipped
        factor = without_eps([mine[name] for name in own], [gradients[name] for name in own], norm, MAX_NORM)
        found |= entries(case, norm, {name: factor * x for name, x in mine.items()}, given["holders"])
    found[IN_FLIGHT] = SOME if going.changed else NONE
    held = [(len(ranks) - 1) * mine[name].nbytes for name, ranks in given["holders"].items() if name in mine]
    few = len(CASES) * (sum(held) + 8 * group.size * NUMBER_BYTES)
    return found | {SENT: AS_NEEDED if heard.sent_bytes(group.size) <= few else MORE}


class InFlight:
    """The tensors that are being sent, with a copy of each: it must still be equal when its send is waited for."""

    def __init__(self):
        self.next, self.sent, self.changed = None, defaultdict(list), False

    @contextmanager
    def noted(self):
        message, isend, send = comm.message, dist.isend, dist.send

        def of_message(kind, x, *more):
            self.next = x if kind == "send" else self.next
            return message(kind, x, *more)

        def noting(start):
            def started(tensor, *args, **more):
                self.next = tensor
                return start(tensor, *args, **more)

            return started

        comm.message, dist.isend, dist.send = of_message, noting(isend), noting(send)
        try:
            yield
        finally:
            comm.message, dist.isend, dist.send = message, isend, send

    def starts(self, call):
        if call.kind == "send" and self.next is not None:
            self.sent[call.peers].append((self.next, self.next.clone()))

    def waits(self, call):
        if call.kind == "send" and self.sent[call.peers]:
            x, before = self.sent[call.peers].pop(0)
            self.changed = self.changed or not torch.equal(x, before)


def entries(case, norm, mine, holders):
    kinds = {name: "shared" if name in holders else "own" for name in mine}
    return {f"{case}: the norm": norm} | {f"{case}: {kinds[name]} {name}": x for name, x in mine.items()}


def reference(given):
    found = [{SENT: AS_NEEDED, IN_FLIGHT: NONE} for _ in given]
    holders = given[0]["holders"]
    for case in CASES:
        ranks = [g["cases"][case] for g in given]
        model = {name: x for mine in ranks for name, x in mine.items()}
        model |= {name: torch.stack([ranks[r][name] for r in who]).sum(0) for name, who in holders.items()}
        norm = torch.cat([x.flatten() for x in model.values()]).norm()
        factor = (MAX_NORM / norm).clamp(max=1)
        for facts, mine in zip(found, ranks, strict=True):
            facts |= entries(case, norm.item(), {name: factor * model[name] for name in mine}, holders)
    return found


def sum_and_clip(gradients, holders, max_norm, group):
    for name, ranks in holders.items():
        if group.rank in ranks:
            g = gradients[name]
            peers = {r: g for r in ranks if r != group.rank}
            came = comm.exchange(peers, peers, group).wait()
            came[group.rank] = g.clone()
            g.copy_(sum(came[r] for r in ranks))
    square = 0
    for name, g in gradients.items():
        if name not in holders or holders[name][0] == group.rank:
            square += g.square().sum()
    norm = comm.all_reduce(square, group).sqrt()
    for g in gradients.values():
        g.mul_((max_norm / norm).clamp(max=1))
    return norm


def by_torch_distributed(gradients, holders, max_norm, group):
    """The first holder adds up, and sends the sum to the others; each counts its fraction of the square."""
    rank, mine = dist.get_rank(), 0
    for name, ranks in holders.items():
        if rank == ranks[0]:
            for r in ranks[1:]:
                dist.recv(other := torch.empty_like(gradients[name]), r)
                gradients[name] += other
            for r in ranks[1:]:
                dist.send(gradients[name], r)
        elif rank in ranks:
            dist.send(gradients[name], ranks[0])
            dist.recv(gradients[name], ranks[0])
    for name, g in gradients.items():
        mine += (g * g).sum() / len(holders.get(name, "1"))
    dist.all_reduce(mine)
    norm = mine.item() ** 0.5
    for g in gradients.values():
        g.mul_(min(1.0, max_norm / norm))
    return norm


def adds_at_once(g, peers, group):
    """It adds each gradient that comes, while its own is still being sent."""
    sends = [comm.send(g, group, r) for r in peers]
    for r in peers:
        g += comm.recv(g, group, r).wait()
    for send in sends:
        send.wait()
    return g


def norm_first(gradients, holders, max_norm, group):
    norm = comm.all_reduce(sum(g.square().sum() for g in gradients.values()), group).sqrt()
    sum_and_clip(gradients, holders, float("inf"), group)
    for g in gradients.values():
        g.mul_((max_norm / norm).clamp(max=1))
    return norm


def gathers_own(gradients, holders, max_norm, group):
    """To compute the norm of all gradients in one place."""
    comm.all_gather(torch.cat([x.flatten() for name, x in gradients.items() if name not in holders]), group)
    return sum_and_clip(gradients, holders, max_norm, group)


# Where nothing is clipped, a wrong norm changes no gradient.
MISTAKES = """
in tensors that changed:
peers = {r: g for r in ranks if r != group.rank} => adds_at_once(g, [r for r in ranks if r != group.rank], group)
came = comm.exchange(peers, peers, group).wait() => came = {r: 0 * g for r in ranks}
    A tensor changes while you still send it: some rank gets a part of the sum in place of your gradient.
        Wait for the send first, or send a copy.
in all:
g.copy_(sum(came[r] for r in ranks)) => gradients[name] = sum(came[r] for r in ranks)
for g in gradients.values(): => for name, g in gradients.items():
g.mul_((max_norm / norm).clamp(max=1)) => gradients[name] = g * (max_norm / norm).clamp(max=1)
    All tensors are as they were. gradients[name] = … puts a new tensor into the dict, which the optimizer never reads.
        Change the tensor in place, with copy_, add_ or mul_.
in a small one: shared:
g.copy_(sum(came[r] for r in ranks)) => pass
    The shared gradients are not summed: each holder has its own, and the copies drift apart from the first step on.
        One weight is used on several ranks, so its gradient is the sum of theirs.
sum(came[r] for r in ranks) => sum(came[r] for r in ranks) / len(ranks)
    You took the mean of the shared gradients.
        They are not gradients of the same loss term, as on replicas: each is one use of the weight, and autograd would
        add them.
sum(came[r] for r in ranks) => sum(came[r] for r in ranks) if group.rank == ranks[0] else g
or
sum(came[r] for r in ranks) => sum(came[r] for r in ranks) if group.rank == ranks[-1] else g
    Only one of the holders has the sum.
        The copies of the weight on the other ranks would drift apart.
sum(came[r] for r in ranks) => sum(came[r] for r in peers)
    Each holder has the gradients of its peers without its own.
        Add the gradients that you received to your own.
holders.items() => [(name, holders[name]) for name in gradients if name in holders]
    Two shared gradients are mixed up. Messages carry no names, and each rank sent in the order of its dict.
        Go through holders, which has the same order on all ranks.
holders.items() => [(name, [ranks[0], ranks[-1]]) for name, ranks in holders.items()]
    The adapter is summed on the first and the last of its holders alone.
        All ranks in the list hold it.
in all:
if name not in holders or holders[name][0] == group.rank: => if True:
    A shared weight is in your norm once for each rank that holds it. It is one weight.
        Count it on one of them.
norm_first
    You took the norm before the shared gradients were summed. The optimizer reads the sums.
        Take the norm of the sums.
if name not in holders or holders[name][0] == group.rank: => if name not in holders:
    Shared weights are not in your norm.
        Each is a part of the gradient, counted on one of its ranks.
if name not in holders or holders[name][0] == group.rank: => if True:
comm.all_reduce(square, group).sqrt() => square.sqrt()
    Each rank has its own norm: the norm of its stage. Each then scales by a different factor, and the step changes its
    direction.
        Add the squares over all ranks, one all-reduce of one number.
comm.all_reduce(square, group).sqrt() => comm.all_reduce(square.sqrt(), group)
    You added the norms of the ranks.
        Only squares add up: all-reduce the sum of the squares, then take the root.
comm.all_reduce(square, group).sqrt() => comm.all_reduce(square, group)
    That is the square of the norm.
        Take the root.
for g in gradients.values(): => for name, g in gradients.items():
(max_norm / norm).clamp(max=1) => 1 if name in holders else (max_norm / norm).clamp(max=1)
    Shared gradients are not scaled.
        One factor scales the full gradient.
for g in gradients.values(): => for name, g in gradients.items():
(max_norm / norm).clamp(max=1) => 1 if group.rank in holders.get(name, [])[1:] else (max_norm / norm).clamp(max=1)
    Shared gradients are scaled on their first rank alone, so copies drift apart.
        Count once, and scale on every holder.
returns result.clamp(max=max_norm)
    You return the norm after scaling.
        Return the norm that the gradients had before.
(max_norm / norm).clamp(max=1) => max_norm / norm
    Small gradients got larger.
        Clipping never scales up: the factor is at most 1.
g.mul_((max_norm / norm).clamp(max=1)) => g = g * (max_norm / norm).clamp(max=1)
    The norm is right, but nothing is scaled. `x = x * factor` makes a new tensor.
        Use x.mul_(factor).
if group.rank in ranks: => if True:
g = gradients[name] => g = gradients.get(name, torch.zeros(SHAPES[name]).double())
comm.exchange(peers, peers, group).wait() => {}
sum(came[r] for r in ranks) => comm.all_reduce(g, group)
or
gathers_own
    All numbers are right, but a rank sends more than needed.
        A shared gradient concerns its holders alone; of everything else one number is enough, the sum of the squares.
"""

ALSO_RIGHT = """
(max_norm / norm).clamp(max=1) => (max_norm / (norm + 1e-6)).clamp(max=1)
    With the small number of clip_grad_norm_.
"""

EXERCISE = exercise(globals(), points=3, right=(sum_and_clip, by_torch_distributed))
