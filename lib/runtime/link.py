"""A slower network than this machine's: links of a chosen latency and bandwidth.

The problem: on a laptop all ranks share one memory, and the threads that move bytes take the processor from those that
compute. So neither a slow network nor overlap can be seen: what NVLink against Ethernet does to a layout, or how much
of an all-reduce hides behind backward.

The idea: inside `with comm.link(...)` a transfer really takes place, and then is *late*: its `wait` sleeps until the
moment at which the emulated link would have delivered it. That moment is

    due = max(when the last of its ranks called, when their links are free) + the time that `lib.cost` gives it,

so the model of the chapters and the emulation are one formula, and a sleeping rank leaves the processor to those who
compute. Each rank enters its own `due` into the call table, as the others may call later; the latest counts. A rank has
one link for each axis, on which transfers queue; a message occupies the link of its sender. Under torchrun there is no
table, and each rank knows of its own calls only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lib import cost


@dataclass
class Link:
    """This rank's link along one axis; `free_s` is when its last transfer is through, in `time.perf_counter`."""

    alpha_s: float
    bandwidth_Bps: float  # noqa: N815 a unit
    free_s: float = 0.0

    def book(self, kind: str, payload_bytes: int, n: int, start_s: float) -> float:
        """When a transfer that this rank starts at `start_s` would be through; the link is taken until then."""
        lasts_s = cost.comm_s(kind, payload_bytes, n, self.alpha_s, self.bandwidth_Bps)
        self.free_s = max(start_s, self.free_s) + lasts_s
        return self.free_s


_links: dict[str | None, Link] = {}  # axis -> its link; None is every other axis


@contextmanager
def link(*, alpha_s: float = 0.0, bandwidth_Bps: float, axis: str | None = None) -> Iterator[None]:
    """Make what this rank sends inside the body as slow as such a link; every rank of a group must enter it.

    Nested links for different axes hold side by side; for the same axis the inner one counts.

    Args:
        alpha_s: latency of a message in seconds.
        bandwidth_Bps: bytes a second, in one direction.
        axis: only transfers of groups along this axis (`"dp"`, `"pp"`, `"tp"`, `"world"`); None is all that have no
            link of their own.

    Raises:
        ValueError: a latency below 0, or a bandwidth that is not above 0.
    """
    if alpha_s < 0 or bandwidth_Bps <= 0:
        raise ValueError(f"alpha_s={alpha_s} must be at least 0 and bandwidth_Bps={bandwidth_Bps} above 0")
    before = _links.get(axis)
    _links[axis] = Link(alpha_s, bandwidth_Bps)
    try:
        yield
    finally:
        del _links[axis]
        if before is not None:
            _links[axis] = before


def along(axis: str) -> Link | None:
    """The link that transfers along `axis` take now, or None where this machine's own speed counts.

    A group along several axes, `dp×tp`, takes the slowest of theirs.
    """
    if not _links:
        return None
    found = [one for name in axis.split("×") if (one := _links.get(name) or _links.get(None))]
    return min(found, key=lambda one: one.bandwidth_Bps, default=None)


def sleep_until(due_s: float) -> None:
    """Return at `due_s` of `time.perf_counter`, at once if that is over."""
    left_s = due_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
