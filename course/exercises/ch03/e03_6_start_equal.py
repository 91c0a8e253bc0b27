"""03.6: all ranks start from the weights and buffers of rank 0, which arrive in one message for each dtype."""

import torch
from torch import distributed as dist
from torch import nn

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, DTYPE, MORE, everywhere, random, whole
from course.check.listen import listen
from lib import comm

MESSAGES, ONE_EACH = "messages", "at most one for each dtype"
BYTES, IN_PLACE, TRAINED = "bytes sent", "the parameters that an optimizer holds", "which parameters are frozen"
THE_MODELS = "those of the model"
FACTS = {MESSAGES: ONE_EACH, BYTES: AS_NEEDED, IN_PLACE: THE_MODELS, TRAINED: "as before"}


class Model(nn.Module):
    """In float64, with a norm in float32, and a seed: an integer that float64 cannot hold.

    The positions are not in its `state_dict()`.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 3, dtype=DTYPE), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2, dtype=DTYPE)
        self.layer.bias.requires_grad_(False)
        self.register_buffer("seed", torch.tensor(0))
        self.register_buffer("positions", torch.zeros(3, 2, dtype=DTYPE), persistent=False)

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
    held, frozen, heard = [*model.parameters()], [not p.requires_grad for p in model.parameters()], listen()
    answer(model, group)
    messages, dtypes = heard.collectives + len(heard.sent), len({x.dtype for x in model.tensors()})
    n_bytes = sum(n for _, n in heard.calls + heard.sent)
    now = [*model.parameters()]
    return {
        "parameters": [p.detach() for p in now],
        "buffers": [as_text(b) for b in model.buffers()],
        MESSAGES: f"{messages}, for {dtypes} dtypes" if messages > dtypes else ONE_EACH,
        BYTES: MORE if n_bytes > sum(x.nbytes for x in model.tensors()) else AS_NEEDED,
        IN_PLACE: THE_MODELS if all(a is b for a, b in zip(held, now, strict=True)) else "others, of before",
        TRAINED: "as before" if [not p.requires_grad for p in now] == frozen else "others",
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
        some = [x.data for x in [*model.buffers(), *model.parameters()] if x.dtype == dtype]
        flat = torch.cat([x.flatten() for x in some])
        dist.broadcast(flat, src=0)
        for x, piece in zip(some, flat.split([x.numel() for x in some])):
            x.copy_(piece.view(x.shape))


ALSO_RIGHT = """
comm.broadcast(flat, group, src=0) => comm.all_reduce(flat * (group.rank == 0), group)
    By a sum of zeros, except on rank 0.
"""


def with_new_parameters(model, group):
    start_equal(model, group)
    for module in model.children():
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(p.detach().clone(), p.requires_grad))


MISTAKES = """
by_dtype.setdefault(x.dtype, []) => by_dtype.setdefault(x, [])
    All ranks have rank 0's tensors, but each has its own message, and latency.
        Put all of a dtype into one flat tensor.
in buffers, messages, bytes: by_dtype.setdefault(x.dtype, []) => by_dtype.setdefault("all", [])
    You put tensors of all dtypes into one message. torch.cat converts them to float64: float32 becomes twice as long,
    and an integer above 2^53 is rounded.
        Send one message for each dtype.
in parameters, buffers:
x.copy_(piece.view_as(x)) => x = piece.view_as(x)
    Nothing changed: each rank's model has its old values.
        Copy each piece into its tensor (x.copy_(...), under no_grad()).
(*model.parameters(), *model.buffers()) => model.parameters()
    The parameters are equal, the buffers are not.
        A batch norm's running means belong to the model: model.buffers().
(*model.parameters(), *model.buffers()) => model.state_dict().values()
    The parameters and most buffers are equal, and a buffer that is not persistent is not: state_dict() has what is
    saved in a checkpoint, and this one is not saved.
        Take model.parameters() and model.buffers().
comm.broadcast(flat, group, src=0) => (comm.broadcast(flat, group, src=0) if flat.is_floating_point() else flat)
    The buffers of integers differ still, and all others are equal.
        Send them too, in a message of their own dtype.
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
in all:
with_new_parameters
    The values are right, and the parameters are new tensors: an optimizer that was made before still holds the old
    ones, and would train those.
        Write into the tensors of the model: x.copy_(...), under no_grad().
comm.broadcast(flat, group, src=0) => comm.all_gather(flat, group)[: len(flat)]
    The values are right, but each rank receives the tensors of all ranks: n times the bytes.
        A broadcast sends those of rank 0 alone.
x.copy_(piece.view_as(x)) => x.requires_grad_(x.is_floating_point()).copy_(piece.view_as(x))
    All values are right, but a frozen parameter now requires a gradient.
        Change the values alone.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(start_equal, by_torch_distributed),
    tolerances={"parameters": 0, "buffers": 0},
)
