"""Listens to the messages of a rank while an answer runs: through `comm`, or through `torch.distributed` itself."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import distributed as dist

from course.check.compare import SEEN, Data
from course.check.exercise import AS_NEEDED, MORE
from lib import comm, cost
from lib.mesh import Group
from lib.runtime import calls, places
from lib.runtime.calls import Call, Listener, listeners

THROUGH_COMM = f"a line that calls lib.comm: {SEEN}"  # a result of a body that is `raw`


@dataclass
class Heard:
    """Global rank and bytes of each message that was sent; kind, and bytes of the whole array, of each collective.

    `unfinished` is how many calls were started and not waited for.
    """

    sent: list[tuple[int, int]] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    unfinished: int = 0

    @property
    def collectives(self) -> int:
        """How many were called."""
        return len(self.calls)

    def forget(self) -> None:
        """From here on, count anew."""
        self.sent.clear()
        self.calls.clear()

    def sent_bytes(self, n: int) -> float:
        """All bytes that this rank sent, if the collectives of n ranks are rings."""
        collectives = sum(cost.wire_bytes(kind, payload_bytes, n) for kind, payload_bytes in self.calls)
        return sum(n_bytes for _, n_bytes in self.sent) + collectives

    def amount(self, n: int, most_bytes: float) -> str:
        """Whether that is `AS_NEEDED` or `MORE`."""
        return MORE if self.sent_bytes(n) > most_bytes else AS_NEEDED

    def calls_if_more(self, n: int, most_bytes: float) -> str:
        """The same, and after `MORE` what was called: mistakes that send different things differ in it."""
        calls: dict[str, list[int]] = {}
        for kind, n_bytes in sorted([*self.calls, *(("send", n_bytes) for _, n_bytes in self.sent)]):
            calls.setdefault(kind, []).append(n_bytes)
        said = (f"{len(each)} × {kind} ({sum(each)} bytes)" for kind, each in calls.items())
        amount = self.amount(n, most_bytes)
        return amount if amount == AS_NEEDED else f"{amount}: {', '.join(said)}"


def listen(
    on_start: Callable[[Call], None] = lambda call: None, on_wait: Callable[[Call], None] = lambda call: None
) -> Heard:
    """From now on, and as long as this answer runs, count the messages of this rank.

    Args:
        on_start: called with each collective, and each message to be sent, when it begins.
        on_wait: called with each call, a receive too, when this rank begins to wait for it.
    """
    heard = Heard()

    def starts(call: Call) -> None:
        heard.unfinished += call.moves  # a message without elements needs no wait
        if call.kind == "recv":
            return
        if call.kind == "send":
            heard.sent.append((call.peers[0], call.payload_bytes))
        else:
            heard.calls.append((call.kind, call.payload_bytes))
        on_start(call)

    def waits(call: Call) -> None:
        heard.unfinished -= call.moves
        on_wait(call)

    listeners.append(Listener(starts, waits))
    return heard


def raw(body: Callable) -> Callable:
    """For an exercise in `torch.distributed` alone: its body also returns the answer's first line that calls `comm`."""

    @functools.wraps(body)
    def listening(answer: Callable, group: Group, given: Data) -> Data:
        with lines_through_comm() as lines:
            return body(answer, group, given) | {THROUGH_COMM: "".join(lines[:1])}

    return listening


@contextmanager
def lines_through_comm() -> Iterator[list[str]]:
    """The reader's lines that send through `lib.comm`, in place of `torch.distributed` itself."""
    lines: list[str] = []

    def starts(call: Call) -> None:
        frame = sys._getframe()
        while frame and frame.f_globals is not vars(comm):
            frame = frame.f_back
        if frame:
            lines.append(places.where())

    listeners.append(listener := Listener(starts, lambda call: None))
    try:
        yield lines
    finally:
        listeners.remove(listener)


@contextmanager
def own_listeners() -> Iterator[None]:
    """Who begins to listen in the body stops at its end: the next answer in this rank is none of theirs."""
    before = [*listeners]
    try:
        yield
    finally:
        listeners[:] = before


def must_be_in_step() -> None:
    """Compare with all ranks how many calls each made on each channel of the call table.

    Raises:
        RuntimeError: on one channel a rank is ahead: it sent a message that no rank receives.
    """
    everyones: list[dict[int, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, calls.table.calls())
    for channel in {channel for made in everyones for channel in made}:
        counts = [made[channel] for made in everyones if channel in made]
        if len(counts) == 1 < len(everyones) or min(counts) < max(counts):
            raise RuntimeError(f"the ranks on a channel made {counts} calls")


def is_handle(x: object) -> bool:
    """Whether this is a communication in flight, and not its result."""
    return isinstance(x, (comm.Pending, dist.Work))
