"""What a rank sends while an answer runs: through `comm`, or through `torch.distributed` itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch import distributed as dist

from lib import comm
from lib.mesh import Group

_SENDS = ("send", "isend")
_COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_single all_reduce all_to_all all_to_all_single broadcast gather "
    "reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter"
).split()


@dataclass
class Heard:
    """Global rank and bytes of each message that was sent, and how many collectives were called."""

    sent: list[tuple[int, int]] = field(default_factory=list)
    collectives: int = 0


def listen() -> Heard:
    """From now on, and until this rank ends, note what it sends."""
    heard, message, collective = Heard(), comm.message, comm.collective

    def noted_message(kind: str, body: Tensor, group: Group, peer: int, function: Callable) -> comm.Pending:
        if kind == "send":
            heard.sent.append((group.ranks[peer], _bytes(body)))
        return message(kind, body, group, peer, function)

    def noted_collective(*args, **kwargs) -> comm.Pending:
        heard.collectives += 1
        return collective(*args, **kwargs)

    comm.message, comm.collective = noted_message, noted_collective
    inside: list[str] = []  # a call may be made of others: send of isend

    def noted(name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            if not inside and name in _SENDS:
                given = dict(zip(("tensor", "dst"), args, strict=False)) | kwargs
                dst = given["group_dst"] if given.get("dst") is None else given["dst"]
                heard.sent.append((dst, _bytes(given["tensor"])))
            elif not inside:
                heard.collectives += 1
            inside.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        return call

    for name in (*_SENDS, *_COLLECTIVES):
        if hasattr(dist, name):
            # In both places: batch_isend_irecv compares with the one that it knows.
            call = noted(name, getattr(dist, name))
            setattr(dist, name, call)
            setattr(dist.distributed_c10d, name, call)
    return heard


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
