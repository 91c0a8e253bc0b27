"""16.1: the sum over the ranks of several nodes, of which little crosses between them, in torch.distributed itself."""

import math
from functools import cache

import torch
from torch import distributed as dist
from torch.nn.functional import pad

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, everywhere, random
from course.check.listen import raw
from lib.mesh import Mesh, MeshShape
from lib.runtime import calls
from lib.runtime.calls import Listener

# Two and three ranks of a node divide the second shape evenly, and not the first; the last is smaller than a node.
SHAPES = (5, 7), (4, 3), ()
CASES = [(nodes, shape) for nodes in (2, 3) for shape in SHAPES]
SENT, UNFINISHED = "what was sent to other nodes", "calls that were not waited for"


def inputs(generator, n):
    def tensors():
        return [(nodes, random(generator, math.prod(shape)).view(shape)) for nodes, shape in CASES]

    return [{"tensors": tensors()} for _ in range(n)]


def name(x, nodes):
    return f"{nodes} nodes, x of shape {list(x.shape)}"


@cache  # several answers run in the same ranks
def groups(nodes, group, world):
    """Inside a node, and across the nodes."""
    mesh = Mesh(MeshShape(across=nodes, inside=group.size // nodes), group)
    return [mesh.group(axis).pg for axis in ("inside", "across")]


@raw
def body(answer, group, given):
    found, crossing, unfinished = {}, [], 0

    def starts(call):
        nonlocal unfinished
        unfinished += call.moves
        # Of a group on several nodes all bytes count, although a ring in the order of ranks has some links inside.
        if any(rank // per_node != group.rank // per_node for rank in call.members):
            crossing.append(call)

    def waits(call):
        nonlocal unfinished
        unfinished -= call.moves

    per_node = group.size
    calls.listeners.append(Listener(starts, waits))
    for nodes, x in given["tensors"]:
        per_node = group.size // nodes
        inside, across = groups(nodes, group, dist.group.WORLD)
        crossing.clear()
        found[name(x, nodes)] = answer(x.clone(), inside, across)
        found[f"{name(x, nodes)}: {SENT}"] = said(crossing, x, nodes, group)
    return found | {UNFINISHED: unfinished}


def said(crossing, x, nodes, group):
    """Whether these calls send what is needed; if more, which they are."""
    per_node = group.size // nodes
    part = -(-x.numel() // per_node)
    part += -part % nodes  # where it is a reduce-scatter and an all-gather
    if sum(call.wire_bytes for call in crossing) <= 2 * (nodes - 1) / nodes * 8 * part + 1:
        return AS_NEEDED
    each = (
        f"{call.kind} of {call.payload_bytes // 8} elements{' over all ranks' * (call.size == group.size)}"
        for call in crossing
    )
    return f"{MORE}: {', '.join(each)}"


def reference(given):
    right = {UNFINISHED: 0}
    for of_ranks in zip(*(g["tensors"] for g in given), strict=True):
        (nodes, *_), tensors = zip(*of_ranks, strict=True)
        x = sum(tensors)
        right |= {name(x, nodes): x, f"{name(x, nodes)}: {SENT}": AS_NEEDED}
    return everywhere(right, given)


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


def by_two_calls_across(x, inside, across):
    """Over the nodes a reduce-scatter and an all-gather of the part, which have zeros at its end."""
    nodes, n = dist.get_world_size(across), dist.get_world_size(inside)
    shards = list(pad(x.flatten(), (0, -x.numel() % n)).chunk(n))
    part = torch.empty_like(shards[0])
    dist.reduce_scatter(part, shards, group=inside)
    pieces = list(pad(part, (0, -len(part) % nodes)).chunk(nodes))
    piece = torch.empty_like(pieces[0])
    dist.reduce_scatter(piece, pieces, group=across)
    dist.all_gather(pieces, piece, group=across)
    part.copy_(torch.cat(pieces)[: len(part)])
    dist.all_gather(shards, part, group=inside)
    return torch.cat(shards)[: x.numel()].view_as(x)


def leaves_the_rest(x, inside, across):
    """Sums as many elements as the ranks of a node divide evenly; those after them stay as they are."""
    n = dist.get_world_size(inside)
    flat = x.flatten()
    even = x.numel() // n * n
    if even:
        flat[:even] = sum_over_nodes(flat[:even], inside, across)
    return flat.view_as(x)


def by_rows(x, inside, across):
    """Shares out rows."""
    n, rows = dist.get_world_size(inside), x.shape[0] if x.dim() else 1
    some = x.reshape(rows, -1)
    padded = pad(some, (0, 0, 0, -rows % n))
    return sum_over_nodes(padded, inside, across)[:rows].view_as(x)


def gathers_across(x, inside, across):
    """Each node gets the parts of all others, and adds them up."""
    n = dist.get_world_size(inside)
    shards = list(pad(x.flatten(), (0, -x.numel() % n)).chunk(n))
    part = torch.empty_like(shards[0])
    dist.reduce_scatter(part, shards, group=inside)
    terms = [torch.empty_like(part) for _ in range(dist.get_world_size(across))]
    dist.all_gather(terms, part, group=across)
    dist.all_gather(shards, sum(terms), group=inside)
    return torch.cat(shards)[: x.numel()].view_as(x)


MISTAKES = """
pad(x.flatten(), (0, -x.numel() % n)) => pad(x.flatten(), (0, n - x.numel() % n))
    The sum is right, but you also add zeros where the ranks of a node divide the tensor evenly, and send more.
        The padding is -x.numel() % n elements: none, if n divides it.
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
=> torch.cat(parts)[: x.numel()].view_as(x) if dist.get_rank(inside) == 0 else x
    Only the first rank of each node returns the sum.
        Every rank returns it: all-gather the parts.
leaves_the_rest
    The last elements are not summed, where the ranks of a node do not divide the tensor evenly.
        Pad the flat tensor with zeros to a multiple of the ranks of a node, and cut the result.
torch.cat(parts)[: x.numel()].view_as(x) => torch.cat(parts)[: x.numel()].view_as(x) / dist.get_world_size()
    You return the mean.
        The sum is asked for.
lambda x, inside, across: sum_over_nodes(x, across, inside)
    The sum is right, but the two groups are swapped: the two large calls go over the network.
        Inside for the two large calls, across for the small one.
by_rows
    The sum is right, but you share out rows, with rows of zeros at the end: that is more than 1/n of the elements.
        Flatten the tensor, and pad its elements.
gathers_across
    The sum is right. But each node gets the parts of all others, and adds them up: with more than two nodes that is
    more than an all-reduce sends.
        All-reduce the part over `across`.
lambda x, inside, across: (dist.all_reduce(x), x)[1]
    The sum is right. But one all-reduce over all ranks sends the whole tensor through the network, and not a part.
        Add up inside a node first, so that each rank has only its part of the sum to send to the other node.
lambda x, inside, across: (dist.all_reduce(x, group=inside), dist.all_reduce(x, group=across), x)[2]
    The sum is right. But all ranks of a node send the same sum through the network, whole.
        Each rank of a node can send another part: a reduce-scatter leaves it just that.
"""

EXERCISE = exercise(
    globals(), points=3, right=(sum_over_nodes, by_all_to_all, by_all_reduces, by_two_calls_across), ranks=(6,)
)
