"""What a rank sends while an answer runs: through `comm`, or through `torch.distributed` itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch import distributed as dist

from lib import comm, cost, rank
from lib.mesh import Group

_SENDS = ("send", "isend")
_COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_single all_reduce all_to_all all_to_all_single broadcast gather "
    "reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter"
).split()
_KINDS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "reduce")


@dataclass
class Heard:
    """Global rank and bytes of each message that was sent; kind, and bytes of the whole array, of each collective."""

    sent: list[tuple[int, int]] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def collectives(self) -> int:
        """How many were called."""
        return len(self.calls)

    def forget(self) -> None:
        """From here on, count anew."""
        self.sent.clear()
        self.calls.clear()

    def sent_bytes(self, n: int) -> float:
        """All that this rank has sent, if the collectives of n ranks are rings."""
        collectives = sum(cost.wire_bytes(kind, payload_bytes, n) for kind, payload_bytes in self.calls)
        return sum(n_bytes for _, n_bytes in self.sent) + collectives


def listen(on_start: Callable[[], None] = lambda: None, on_wait: Callable[[], None] = lambda: None) -> Heard:
    """From now on, and until this rank ends, note what it sends.

    Args:
        on_start: called when a collective, or the sending of a message, begins.
        on_wait: called when this rank begins to wait for either.
    """
    heard, message, collective = Heard(), comm.message, comm.collective

    def note(where: list, what: tuple) -> None:
        where.append(what)
        on_start()

    def noted_message(kind: str, body: Tensor, group: Group, peer: int, function: Callable) -> comm.Pending:
        if kind == "send":
            note(heard.sent, (group.ranks[peer], _bytes(body)))
        return message(kind, body, group, peer, function)

    def noted_collective(what: str, x: Tensor | None, *args, times: int = 1) -> comm.Pending:
        note(heard.calls, (what.split()[0], _bytes(x) * times))
        return collective(what, x, *args, times=times)

    comm.message, comm.collective = noted_message, noted_collective

    def before(name: str, given: dict) -> None:
        if name in _SENDS:
            dst = given["group_dst"] if given.get("dst") is None else given["dst"]
            note(heard.sent, (dst, _bytes(given["tensor"])))
        elif name in _COLLECTIVES:
            kind = next((kind for kind in _KINDS if name.startswith(kind)), "broadcast")
            note(heard.calls, (kind, max(map(_bytes, given.values()))))  # of a shard and the whole

    def after(work: object) -> None:
        if work is None:
            on_wait()

    rank.listeners.append((before, after))
    wait, work_wait = comm.Pending.wait, dist.Work.wait

    def noted_wait(pending: comm.Pending) -> object:
        if pending._finish is not None:  # once: whoever asks again waits for nothing
            on_wait()
        return wait(pending)

    def noted_work_wait(work: dist.Work, *args, **kwargs) -> bool:
        if not rank.is_inside():
            on_wait()
        return work_wait(work, *args, **kwargs)

    comm.Pending.wait, dist.Work.wait = noted_wait, noted_work_wait
    return heard


def is_handle(x: object) -> bool:
    """Whether this is a communication under way, and not what comes of it."""
    return isinstance(x, (comm.Pending, dist.Work))


def _bytes(x: object) -> int:
    """Of a tensor, or of a list of them."""
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(map(_bytes, x)) if isinstance(x, (list, tuple)) else 0
