"""What every rank does at one moment, and the report of a hang: which rank waits in which call, and for whom.

`call_table.py` reads it from the memory that the ranks of one machine share, `lib.torchrun.watchdog` from the store
that the ranks of several machines share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

STARTING, RUNNING, WAITING, FINISHED, FAILED = range(5)
SAYS = {STARTING: "is starting", RUNNING: "computes", FINISHED: "has finished", FAILED: "has failed"}


class AwaitedCall(NamedTuple):
    """The call that a rank waits in.

    Args:
        what: the call as the report shows it; its first word is its kind.
        where: the source line that made it.
        peers: the ranks that must make their call.
        late: the peers that have not.
        for_s: seconds since the wait began.
    """

    what: str = ""
    where: str = ""
    peers: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    for_s: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of call, such as `send` or `all_reduce`."""
        return re.split(r"\W", self.what, maxsplit=1)[0]


@dataclass
class View:
    """All ranks at one moment.

    Args:
        states: rank → its state.
        waits: rank → the call it waits in, for each rank that waits.
        caught: rank → the text of a call that was refused there, and that its code caught.
        hosts: rank → the name of its machine, if there are several.
        said: rank → what to say of it instead of its state.
    """

    states: Mapping[int, int]
    waits: Mapping[int, AwaitedCall]
    caught: Mapping[int, str] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    said: Mapping[int, str] = field(default_factory=dict)

    @property
    def finished(self) -> tuple[int, ...]:
        """The ranks whose function has returned."""
        return tuple(rank for rank, state in self.states.items() if state == FINISHED)

    @property
    def circle(self) -> tuple[int, ...]:
        return circle_of(self.waits)

    def summary(self) -> str:
        """One line: which ranks wait and which have finished; it is a deadlock only if there is a cycle of waits."""
        waiting, finished, circle = sorted(self.waits), self.finished, self.circle
        if circle:
            parts = [f"deadlock: {named_ranks(sorted(circle))} wait for each other"]
            if others := [rank for rank in waiting if rank not in circle]:
                parts.append(f"{named_ranks(others)} also {'wait' if len(others) > 1 else 'waits'}")
        else:
            parts = [f"hang: {named_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'}"]
        if finished:
            parts.append(f"{named_ranks(finished)} {'have' if len(finished) > 1 else 'has'} finished")
        return "; ".join(parts)

    def report(self) -> str:
        """One line per rank: the call it waits in, for how long, and where; then the cycle of waits, if any."""
        lines = []
        for rank, state in self.states.items():
            name = f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"
            if rank not in self.waits or rank in self.said:
                lines.append((name, self.said.get(rank) or SAYS.get(state, "computes"), ""))
                continue
            what, where, peers, late, for_s = self.waits[rank]
            text = f"waits in {what}" if what else "waits"
            if late and len(peers) > 1:
                text += f": {named_ranks(late)} did not call it"
            lines.append((name, text, f"for {for_s:.1f} s  {where}"))
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
        out = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in lines]
        if circle := self.circle:
            pairs = zip(circle, circle[1:] + circle[:1], strict=True)
            out.append("  the cycle: " + ", ".join(f"{a} waits for {b}" for a, b in pairs))
        for rank, note in self.caught.items():
            note = note.replace("\n", "\n    ")
            out.append(f"  rank {rank} caught this error earlier and continued:\n    {note}")
        return "\n".join(out)

    def cause(self) -> str:
        """One sentence: why these ranks wait forever, and what to change."""
        circle, waits = self.circle, self.waits
        if circle and all(waits[rank].kind == "send" for rank in circle):
            who = "Every rank" if len(circle) == len(waits) else "Every rank of the cycle"
            return f"{who} sends first, and a send ends only when it is received: start the receives too, then wait."
        if any(wait.late and len(wait.peers) > 1 for wait in waits.values()):
            return "Every rank of a group must make the same collective calls, in the same order."
        needs = "Each send needs a receive on its peer, and the reverse"
        return f"{needs}: find the call that is missing or comes too late."


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 2`."""
    listed = ", ".join(map(str, ranks[:-1])) + " and " * (len(ranks) > 1) + str(ranks[-1])
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {listed}"


def circle_of(waits: Mapping[int, AwaitedCall]) -> tuple[int, ...]:
    """The first cycle of waits: each rank waits for the next, and the last for the first; () if there is none."""
    dead_ends: set[int] = set()

    def walk(path: list[int]) -> list[int]:
        for peer in waits.get(path[-1], AwaitedCall()).late:
            if peer in path:
                return path[path.index(peer) :]
            if peer not in dead_ends and (found := walk([*path, peer])):
                return found
        dead_ends.add(path[-1])
        return []

    return tuple(next(filter(None, (walk([rank]) for rank in waits)), []))
