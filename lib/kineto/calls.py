"""The communication and the computation of one rank, from the events of its file.

The problem: a message is a call of c10d, an event of a thread of gloo, or a kernel of NCCL, and each names the same
facts differently. The idea: keep the events of the link and those that compute, in the terms of `lib.trace`:

            the link                                            computation            its facts
    gloo    `gloo:all_reduce`                                   `aten::…` operators    its input; `c10d::send`
    NCCL    kernels `ncclDevKernel_AllReduce_Sum_bf16_RING_LL`  all other kernels      `facts.py`

Sources: traces of torch 2.13 on gloo, made by `tests/lib/test_kineto.py`; for NCCL pytorch/pytorch#111843 (2023-10) and
pytorch/kineto#1294 (2026-03, `Seq`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from lib import cost
from lib.kineto.facts import Facts
from lib.kineto.files import Event, File
from lib.kineto.idle import not_recorded
from lib.kineto.names import (
    KERNEL,
    PEER_TO_PEER,
    communicates,
    dtype_meant,
    dtype_of_kernel,
    is_dtype,
    kind_meant,
)
from lib.trace import CommEvent, Span

OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce")
IN_PARTS = ("all_gather", "reduce_scatter")  # `_allgather_base` has parts of one size, `allgather` takes a list
IN_SHARDS = ("all_gather", "gather", "scatter")  # the input of a rank is its part
ON_CALLS = ("c10d::send", "c10d::recv_")  # their inputs have the peer, which `gloo:send` has not


@dataclass(frozen=True)
class RecordedCall(CommEvent):
    """A communication as a file has it.

    Args:
        group: name of its process group in this file; "" if it does not say it.
        number: `Seq`, its number in the group, equal on all ranks; None if it does not say it.
        thread: of gloo, or stream of NCCL.
        of_gloo: gloo names neither group nor peer; its bytes are those of one rank until the group is known.
        peer_in_group: of a send or recv of gloo: the peer's rank in the group.
        of_one_size: whether its bytes must be equal on all ranks; not if each rank may give a tensor of its own size.
    """

    group: str = ""
    number: int | None = None
    thread: object = None
    of_gloo: bool = False
    peer_in_group: int | None = None
    of_one_size: bool = False

    def placed(self, axis: str, ranks: tuple[int, ...]) -> RecordedCall:
        """The same call, in a group that its file does not name."""
        if self.kind in PEER_TO_PEER:
            k = self.peer_in_group
            peers = self.peers if k is None else ranks[k : k + 1]
            return replace(self, axis=axis, peers=peers)
        times = len(ranks) if self.of_gloo and self.kind in IN_SHARDS else 1
        payload_bytes = self.payload_bytes * times
        wire_bytes = cost.wire_bytes(self.kind, payload_bytes, len(ranks)) if self.kind else 0.0
        return replace(self, axis=axis, peers=ranks, payload_bytes=payload_bytes, wire_bytes=wire_bytes)


def spans_of(file: File, zero_ns: int) -> Iterator[Span]:
    """What computes: kernels; without them, operators of the CPU, which otherwise only launch."""
    on_gpu = any(event.category in KERNEL for event in file.events)
    if not on_gpu and not_recorded(file):
        return  # its operators ran on a GPU, of which nothing was recorded
    for event in file.events:
        is_ours = event.category in KERNEL if on_gpu else event.name.startswith("aten::")
        if is_ours and not communicates(event.category, event.name):
            yield Span(file.rank, "compute", event.name, *_when(event, zero_ns))


def calls_of(file: File, zero_ns: int) -> Iterator[RecordedCall]:
    """What communicates, in the order of its start."""
    facts = Facts(file)
    latest: dict[object, Event] = {}  # the last send or recv that each thread has called
    for event in file.events:
        if event.name.startswith(ON_CALLS):
            latest[event.thread] = event
        if communicates(event.category, event.name):
            yield _call(file, event, facts.of(event), latest.get(event.thread), zero_ns)


def _call(file: File, event: Event, args: Mapping, called: Event | None, zero_ns: int) -> RecordedCall:
    kind = kind_meant(str(args.get("Collective name") or "")) or kind_meant(event.name)
    of_gloo, group = event.name.startswith("gloo:"), str(args.get("Process Group Name", ""))
    axis, ranks = file.groups.get(group, ("?", ()))
    told = str(args.get("dtype") or next(filter(is_dtype, args.get("Input type") or []), ""))
    dtype, itemsize = dtype_meant(told or dtype_of_kernel(kind, event.name))
    n = int(args.get("Group size") or len(ranks) or 1)
    if of_gloo:
        count = sum(map(prod, args.get("Input Dims") or []))
    else:
        count = max(int(args.get("In msg nelems") or 0), int(args.get("Out msg nelems") or 0))
    peer_in_group = None
    if kind in PEER_TO_PEER:
        key = "Dst Rank" if kind == "send" else "Src Rank"
        ranks = (int(args[key]),) if key in args else ()
        if of_gloo and called is not None:
            peer_in_group = _peer(called)
    payload_bytes, number = 0 if kind == "barrier" else count * itemsize, args.get("Seq")
    return RecordedCall(
        file.rank,
        kind,
        axis,
        ranks,
        payload_bytes,
        cost.wire_bytes(kind, payload_bytes, n) if kind else 0.0,
        f"{kind} {dtype}".strip(),
        *_when(event, zero_ns),
        group if group in file.groups else "",
        int(number) if number is not None and kind not in PEER_TO_PEER else None,
        event.thread,
        of_gloo,
        peer_in_group,
        kind in OF_ONE_SIZE or kind in IN_PARTS and "base" in str(args.get("Collective name")),
    )


def _peer(called: Event) -> int | None:
    """The peer's rank in the group: the first number of the inputs of c10d::send and c10d::recv_."""
    inputs = called.args.get("Concrete Inputs") or []
    return next((int(one) for one in inputs if str(one).isdigit()), None)


def _when(event: Event, zero_ns: int) -> tuple[float, float]:
    return (event.start_ns - zero_ns) / 1e9, (event.end_ns - zero_ns) / 1e9
