"""Emulated links: everything that this rank sends takes the time of a slower network.

The problem: on a laptop all ranks share one memory, and threads that move bytes compete with threads that compute:
neither a slow network nor overlap can be measured, such as NVLink against Ethernet, or how much of an all-reduce hides
behind backward.
The idea: inside `with link(...)` a transfer moves its bytes as always, and then its rank sleeps until

    due = max(when the last of its ranks called, when their links are free) + the time that `lib.cost` gives it,

so the cost model of the chapters and the emulation use one formula, and a sleeping rank leaves the processor to ranks
that compute. A rank has one link per axis, on which transfers queue; a message occupies the link of its sender.
`Link.book` gives this rank's part of the formula; the `wait` in `pending.py` takes the latest of all ranks, and sleeps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lib import cost
from lib.runtime.calls import Call


@dataclass
class Link:
    """This rank's link along one axis; `free_s` is the end of its last transfer, in `time.perf_counter`."""

    alpha_s: float
    bandwidth_Bps: float  # noqa: N815 a unit
    free_s: float = 0.0

    def book(self, call: Call, start_s: float) -> float:
        """Occupy the link with a call that starts at `start_s`, and return its end."""
        n_bytes = max(call.payload_bytes or 0, call.received_bytes)
        duration_s = cost.comm_s(call.kind, n_bytes, call.size, self.alpha_s, self.bandwidth_Bps)
        self.free_s = max(start_s, self.free_s) + duration_s
        return self.free_s


_links: dict[str | None, Link] = {}  # axis -> its link; None is every other axis


@contextmanager
def link(*, alpha_s: float = 0.0, bandwidth_Bps: float, axis: str | None = None) -> Iterator[None]:
    """Emulate a link for everything this rank sends inside the body; every rank of a group must enter it.

    Nested links for different axes hold together; for the same axis the inner link counts.

    Args:
        alpha_s: latency of a message in seconds.
        bandwidth_Bps: bytes per second in one direction.
        axis: only transfers of groups along this axis (`"dp"`, `"pp"`, `"tp"`, `"world"`); None means all axes without
            their own link.

    Raises:
        ValueError: a latency below 0, or a bandwidth that is not above 0.
    """
    global _links
    if alpha_s < 0 or bandwidth_Bps <= 0:
        raise ValueError(f"alpha_s={alpha_s} must be at least 0 and bandwidth_Bps={bandwidth_Bps} above 0")
    before, _links = _links, _links | {axis: Link(alpha_s, bandwidth_Bps)}
    try:
        yield
    finally:
        _links = before


def along(axis: str) -> Link | None:
    """The emulated link that transfers along `axis` use now, or None for the real speed of this machine.

    A group along several axes, `dp×tp`, uses the slowest of their links.
    """
    if not _links:
        return None
    links = (_links.get(name) or _links.get(None) for name in axis.split("×"))
    return min(filter(None, links), key=lambda link: link.bandwidth_Bps, default=None)
