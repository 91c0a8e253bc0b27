"""03.6: all ranks start from the weights and buffers of rank 0, which arrive in one message for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist

from course.check.exercise import DTYPE, Data, Exercise, Mistake, everywhere, random, whole
from course.check.listen import listen
from lib import comm
from lib.mesh import Group

MESSAGES = "messages"
ONE_EACH, MANY, LONGER = (
    "at most one for each dtype",
    "more than one for each dtype",
    "more bytes than the tensors have",
)


class Model(nn.Module):
    """In float64, with a norm in float32, and a seed: an integer that float64 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 3, dtype=DTYPE), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2, dtype=DTYPE)
        self.layer.bias.requires_grad_(False)
        self.register_buffer("seed", torch.tensor(0))

    def tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers()]


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    def value(x: Tensor) -> Tensor:
        return random(generator, *x.shape).to(x.dtype) if x.is_floating_point() else large()

    def large() -> Tensor:
        return torch.tensor(2 * whole(generator, 2**53, 2**61) + 1)

    like = Model()
    return [
        {
            "parameters": [value(p) for p in like.parameters()],
            "buffers": [value(b).abs() for b in like.buffers()],
        }
        for _ in range(n)
    ]


def body(answer: Callable, group: Group, given: Data) -> Data:
    model = Model()
    with torch.no_grad():
        for x, value in zip(model.tensors(), given["parameters"] + given["buffers"], strict=True):
            x.copy_(value)
    heard = listen()
    answer(model, group)
    many = heard.collectives + len(heard.sent) > len({x.dtype for x in model.tensors()})
    sent = sum(payload_bytes for _, payload_bytes in heard.calls)
    longer = sent > sum(x.nbytes for x in model.tensors())
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "buffers": [as_text(b) for b in model.buffers()],
        MESSAGES: MANY if many else LONGER if longer else ONE_EACH,
    }


def as_text(x: Tensor) -> Tensor | str:
    """Integers, to the last digit."""
    return x if x.is_floating_point() else str(x.tolist())


def reference(given: list[Data]) -> list[Data]:
    buffers = [as_text(b) for b in given[0]["buffers"]]
    return everywhere(given[0] | {"buffers": buffers, MESSAGES: ONE_EACH}, given)


# ---- programs -------------------------------------------------------------------------------------------------------


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The dtypes in the order of their first tensors: the same on all ranks."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x)
    return [*found.values()]


def together(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    return [[*tensors]]


def each(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    return [[x] for x in tensors]


def start_equal(model, group, of=comm.broadcast, buffers=True, frozen=True, messages=by_dtype, writes=True):
    tensors = [p for p in model.parameters() if frozen or p.requires_grad] + (
        list(model.buffers()) if buffers else []
    )
    with torch.no_grad():
        for some in messages(tensors):
            flat = of(torch.cat([x.flatten() for x in some]), group)
            for x, piece in zip(some, flat.split([x.numel() for x in some]), strict=True):
                if writes:
                    x.copy_(piece.view_as(x))


def start_equal_by_torch_distributed(model, group):
    state = model.state_dict()
    for dtype in (torch.int64, torch.float32, torch.float64):
        some = [x for x in state.values() if x.dtype == dtype]
        flat, begin = torch.cat([x.flatten() for x in some]), 0
        dist.broadcast(flat, src=0)
        for x in some:
            x.copy_(flat[begin : begin + x.numel()].view(x.shape))
            begin += x.numel()


def start_equal_by_a_sum(model, group):
    """Zeros, except on rank 0."""
    start_equal(model, group, of=lambda flat, group: comm.all_reduce(flat * (group.rank == 0), group))


EXERCISE = Exercise(
    id="03.6",
    title="start_equal",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(start_equal, start_equal_by_torch_distributed, start_equal_by_a_sum),
    mistakes=(
        Mistake(
            "All ranks have the tensors of rank 0, but you send a message for each tensor, and each pays its own "
            "latency. Put all tensors of a dtype into one flat tensor.",
            partial(start_equal, messages=each),
        ),
        Mistake(
            "You put tensors of all dtypes into one message. torch.cat converts them to float64: float32 becomes twice "
            "as long, and an integer above 2^53 is rounded. Send one message for each dtype.",
            partial(start_equal, messages=together),
            about=("buffers",),
        ),
        Mistake(
            "Nothing changed: the flat tensor was sent and received, and the model has its old values. Copy each piece "
            "into its tensor (x.copy_(...), under torch.no_grad()).",
            partial(start_equal, writes=False),
            about=("parameters", "buffers"),
        ),
        Mistake(
            "The parameters are equal, the buffers are not. The running means of a batch norm belong to the model too: "
            "model.buffers().",
            partial(start_equal, buffers=False),
            about=("parameters", "buffers"),
        ),
        Mistake(
            "You averaged the weights of the ranks. They are equal now, and much smaller than any initialisation makes "
            "them: take the weights of rank 0.",
            partial(start_equal, of=partial(comm.all_reduce, op="mean"), buffers=False),
            about=("parameters",),
        ),
        Mistake(
            "All ranks have the weights of the last rank. Broadcast from src=0.",
            partial(start_equal, of=lambda x, group: comm.broadcast(x, group, src=group.size - 1)),
            about=("parameters",),
        ),
        Mistake(
            "The frozen parameter was left out. It is not trained, but the model uses it: take all parameters.",
            partial(start_equal, frozen=False),
            about=("parameters",),
        ),
    ),
)
