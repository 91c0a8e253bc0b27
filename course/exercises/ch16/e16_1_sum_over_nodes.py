"""16.1: the sum over the ranks of several nodes, of which little crosses between them, in torch.distributed itself."""

import torch
from torch import distributed as dist
from torch.nn.functional import pad

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, everywhere, random
from course.check.listen import raw
from lib.mesh import Mesh, MeshShape
from lib.runtime import calls
from lib.runtime.calls import Listener

NODES = 2
SHAPES = (4, 3), (5, 7), (1,)  # two ranks of a node divide the first, not the others; the last is smaller than a node
SENT, UNFINISHED = "what was sent to the other node", "calls that were not waited for"
FACTS = {SENT: AS_NEEDED, UNFINISHED: 0}


def inputs(generator, n):
    return [{"tensors": [random(generator, *shape) for shape in SHAPES]} for _ in range(n)]


def name(x):
    return f"x of shape {list(x.shape)}"


@raw
def body(answer, group, given):
    per_node = group.size // NODES
    mesh = Mesh(MeshShape(across=NODES, inside=per_node), group)
    found, crossing, unfinished = {}, [], 0

    def starts(call):
        nonlocal unfinished
        unfinished += bool(call.payload_bytes)
        # Of a group on several nodes all bytes count, although a ring in the order of ranks has some links inside.
        if any(rank // per_node != group.rank // per_node for rank in call.members):
            crossing.append(call)

    def waits(call):
        nonlocal unfinished
        unfinished -= bool(call.payload_bytes)

    calls.listeners.append(Listener(starts, waits))
    needed = 0.0
    for x in given["tensors"]:
        found[name(x)] = answer(x.clone(), mesh.group("inside").pg, mesh.group("across").pg)
        part = x.numel() + -x.numel() % per_node
        needed += 2 * (NODES - 1) / NODES * 8 * part / per_node
    return found | {SENT: said(crossing, needed, group), UNFINISHED: unfinished}


def said(crossing, needed, group):
    """Whether these calls send what is needed; if more, which they are."""
    if sum(call.wire_bytes for call in crossing) <= needed + 1:
        return AS_NEEDED
    kinds = {f"{call.kind}{' over all ranks' * (call.size == group.size)}" for call in crossing}
    return f"{MORE}: {', '.join(sorted(kinds))}"


def reference(given):
    sums = map(sum, zip(*(g["tensors"] for g in given), strict=True))
    return everywhere({name(x): x for x in sums}, given)


def sum_over_nodes(x, inside, across):
    n = dist.get_world_size(inside)
    shards = list(pad(x.flatten(), (0, -x.numel() % n)).chunk(n))
    part = torch.empty_like(shards[0])
    dist.reduce_scatter(part, shards, group=inside)
    dist.all_reduce(part, group=across)
    parts = [torch.empty_like(part) for _ in range(n)]
    dist.all_gather(parts, part, group=inside)
    return torch.cat(parts)[: x.numel()].view_as(x)


def by_all_to_all(x, inside, across):
    """The reduce-scatter as an all-to-all and a sum, the all-gather as broadcasts."""
    n = dist.get_world_size(inside)
    shards = pad(x.reshape(-1), (0, -x.numel() % n)).view(n, -1)
    terms = torch.empty_like(shards)
    dist.all_to_all_single(terms, shards, group=inside)
    part = terms.sum(0)
    dist.all_reduce(part, group=across)
    shards[dist.get_rank(inside)] = part
    for i, src in enumerate(dist.get_process_group_ranks(inside)):
        dist.broadcast(shards[i], src, group=inside)
    return shards.view(-1)[: x.numel()].reshape(x.shape)


def by_all_reduces(x, inside, across):
    """All add up inside, each sums its part over the nodes, and zeros in place of the other parts add nothing."""
    n, i = dist.get_world_size(inside), dist.get_rank(inside)
    dist.all_reduce(x, group=inside)
    part = x.flatten()[i::n].clone()
    dist.all_reduce(part, group=across)
    full = torch.zeros_like(x).flatten()
    full[i::n] = part
    dist.all_reduce(full, group=inside)
    return full.view_as(x)


MISTAKES = """
in calls that were not waited for: (part, group=across) => (part, group=across, async_op=True), dist.barrier()
or (parts, part, group=inside) => (parts, part, group=inside, async_op=True), dist.barrier()
    A call was started and not waited for. The handle of async_op=True has a method wait().
        Each of the three calls needs the result of the call before.
dist.all_reduce(part, group=across) =>
    The nodes never meet: each has its own sum.
        Between the two calls inside, all-reduce the part over `across`.
torch.cat(parts)[: x.numel()].view_as(x) => part
    You return one part of the sum: that of this rank.
        The other parts are on the other ranks of this node: all-gather them over `inside`.
dist.reduce_scatter(part, shards, group=inside) => part.copy_(shards[dist.get_rank(inside)])
    Each part is summed over the nodes alone. What the other ranks of a node have for this part is missing.
        Begin with a reduce-scatter over `inside`: it adds up and leaves each rank one part.
torch.cat(parts)[: x.numel()].view_as(x) => torch.cat(parts)
or
=> torch.cat(parts)[: x.numel()]
    You return the padding as well, or a flat tensor.
        Cut to x.numel() elements, and give the result the shape of x.
=> torch.cat(parts)[: x.numel()].view_as(x) / dist.get_world_size()
    You return the mean.
        The sum is asked for.
lambda x, inside, across: sum_over_nodes(x, across, inside)
    The sum is right, but the two groups are swapped: the two large calls go over the network.
        Inside for the two large calls, across for the small one.
lambda x, inside, across: (dist.all_reduce(x), x)[1]
    The sum is right. But one all-reduce over all ranks sends the whole tensor through the network, and not a part.
        Add up inside a node first, so that each rank has only its part of the sum to send to the other node.
lambda x, inside, across: (dist.all_reduce(x, group=inside), dist.all_reduce(x, group=across), x)[2]
    The sum is right. But all ranks of a node send the same sum through the network, whole.
        Each rank of a node can send another part: a reduce-scatter leaves it just that.
"""

EXERCISE = exercise(globals(), points=3, right=(sum_over_nodes, by_all_to_all, by_all_reduces), ranks=(4, 6))
