"""03.6: all ranks start from the weights and buffers of rank 0, which arrive in one message for each dtype."""

import torch
from torch import distributed as dist
from torch import nn

from course.check.edits import exercise
from course.check.exercise import DTYPE, everywhere, random, whole
from course.check.listen import listen
from lib import comm

MESSAGES, ONE_EACH = "messages", "at most one for each dtype"
FACTS = {MESSAGES: ONE_EACH}


class Model(nn.Module):
    """In float64, with a norm in float32, and a seed: an integer that float64 cannot hold."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 3, dtype=DTYPE), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2, dtype=DTYPE)
        self.layer.bias.requires_grad_(False)
        self.register_buffer("seed", torch.tensor(0))

    def tensors(self):
        return [*self.parameters(), *self.buffers()]


def inputs(generator, n):
    def value(x):
        if x.is_floating_point():
            return random(generator, *x.shape).to(x.dtype)
        return torch.tensor(2 * whole(generator, 2**53, 2**61) + 1)

    def tensors(like):
        return {
            "parameters": [value(p) for p in like.parameters()],
            "buffers": [value(b).abs() for b in like.buffers()],
        }

    return [tensors(Model()) for _ in range(n)]


def body(answer, group, given):
    model = Model()
    with torch.no_grad():
        for x, value in zip(model.tensors(), given["parameters"] + given["buffers"], strict=True):
            x.copy_(value)
    heard = listen()
    answer(model, group)
    many = heard.collectives + len(heard.sent) > len({x.dtype for x in model.tensors()})
    longer = sum(n_bytes for _, n_bytes in heard.calls) > sum(x.nbytes for x in model.tensors())
    worse = "more than one for each dtype" if many else "more bytes than the tensors have" if longer else ""
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "buffers": [as_text(b) for b in model.buffers()],
        MESSAGES: worse or ONE_EACH,
    }


def as_text(x):
    """Integers, to the last digit."""
    return x if x.is_floating_point() else str(x.tolist())


def reference(given):
    return everywhere(given[0] | {"buffers": [as_text(b) for b in given[0]["buffers"]]}, given)


def start_equal(model, group):
    with torch.no_grad():
        by_dtype = {}  # keeps the order of its keys: the same on all ranks
        for x in (*model.parameters(), *model.buffers()):
            by_dtype.setdefault(x.dtype, []).append(x)
        for tensors in by_dtype.values():
            flat = torch.cat([x.flatten() for x in tensors])
            pieces = comm.broadcast(flat, group, src=0).split([x.numel() for x in tensors])
            for x, piece in zip(tensors, pieces):
                x.copy_(piece.view_as(x))


def by_torch_distributed(model, group):
    for dtype in (torch.int64, torch.float32, torch.float64):
        some = [x for x in model.state_dict().values() if x.dtype == dtype]
        flat = torch.cat([x.flatten() for x in some])
        dist.broadcast(flat, src=0)
        for x, piece in zip(some, flat.split([x.numel() for x in some])):
            x.copy_(piece.view(x.shape))


ALSO_RIGHT = """
comm.broadcast(flat, group, src=0) => comm.all_reduce(flat * (group.rank == 0), group)
    By a sum of zeros, except on rank 0.
"""

MISTAKES = """
by_dtype.setdefault(x.dtype, []) => by_dtype.setdefault(x, [])
    All ranks have rank 0's tensors, but each has its own message, and latency.
        Put all of a dtype into one flat tensor.
in buffers: by_dtype.setdefault(x.dtype, []) => by_dtype.setdefault("all", [])
    You put tensors of all dtypes into one message. torch.cat converts them to float64: float32 becomes twice as long,
    and an integer above 2^53 is rounded.
        Send one message for each dtype.
in parameters, buffers:
x.copy_(piece.view_as(x)) => x = piece.view_as(x)
    Nothing changed: the model has its old values.
        Copy each piece into its tensor (x.copy_(...), under no_grad()).
(*model.parameters(), *model.buffers()) => model.parameters()
    The parameters are equal, the buffers are not.
        A batch norm's running means belong to the model: model.buffers().
in parameters:
(*model.parameters(), *model.buffers()) => model.parameters()
comm.broadcast(flat, group, src=0) => comm.all_reduce(flat, group, op="mean")
    You averaged the weights: they are equal, and much smaller than an initialisation makes them.
        Take those of rank 0.
src=0 => src=group.size - 1
    All ranks have the weights of the last rank.
        Broadcast from src=0.
*model.parameters() => *(p for p in model.parameters() if p.requires_grad)
    The frozen parameter was left out. It is not trained, but the model uses it.
        Take all parameters.
"""

EXERCISE = exercise(globals(), points=2, right=(start_equal, by_torch_distributed))
