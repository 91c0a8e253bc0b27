"""What ends an examination that hangs, or loses a rank, and says on every host whom it lost.

The problem: a rank is killed, and gloo tells the others that a connection was closed, without a rank. torchrun then
ends the other ranks of that host, so that all of them fall silent at once; and on the other hosts it names, as the root
cause, whichever rank saw the broken connection first.
The idea: a killed rank no longer writes its row into the store, and the others do, for as long as it takes to tell:
they put torchrun's wish that they end off for some seconds.
"""

import marshal
import os
import signal
import sys
import time

import torch.distributed as dist

from lib.doctor.page import Examination, tell
from lib.doctor.settings import Finding
from lib.runtime.hang import named_ranks
from lib.torchrun.last_word import leave_last_word
from lib.torchrun.start import speaks
from lib.torchrun.watchdog import Ending, Watchdog

START_S = 25.0  # for all ranks to come
DEAD_S, FIND_S = 3.0, 12.0  # six rows are missing; the longest search
GRACE_S = 8.0  # from torchrun's wish that this process ends


class Impatient(Watchdog):
    """A watchdog that prints the page on the first rank of all that ends, and a sentence on each further host."""

    beat_s, silent_s, still_s, start_s = 0.5, 8.0, 8.0, START_S

    def __init__(self, report: Examination, path: str | None, *watched: object) -> None:
        self.report, self.path = report, path
        self._store_is_lost = False
        self._ends_s = float("inf")  # `time.monotonic()` at which torchrun's wish is granted
        self._wishes = self._hear_torchrun()
        super().__init__(*watched)

    @staticmethod
    def _hear_torchrun() -> int:
        """Where a byte can be read for each signal that came; torchrun's SIGTERM no longer ends this process."""
        wishes, wakes = os.pipe()
        os.set_blocking(wishes, False)
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(wakes)  # written at once, even while the main thread waits for a message
        return wishes

    def _write(self) -> None:
        """As `Watchdog`, and end the process when its grace is over."""
        if self._ends_s == float("inf") and self._was_told_to_end():
            self._ends_s = time.monotonic() + GRACE_S
        if time.monotonic() > self._ends_s:
            os._exit(128 + signal.SIGTERM)
        super()._write()

    def _was_told_to_end(self) -> bool:
        try:
            return signal.SIGTERM in os.read(self._wishes, 64)
        except BlockingIOError:
            return False

    def who_died(self, error: str) -> Ending:
        """The ending, after an error of this rank: those that have fallen silent since, or this one.

        Args:
            error: the error; gloo says that a connection broke, and not whose.
        """
        until_s, size = time.monotonic() + FIND_S, len(self.members)
        seen: list[tuple[int, float]] = [(-1, 0.0)] * size  # the last beat of each rank, and when it was new
        while time.monotonic() < until_s:
            try:
                rows = self._store.multi_get([f"row {rank}" for rank in range(size)])
            except dist.DistError:
                return self._without_store(error)
            now_s = time.monotonic()
            for rank, row in enumerate(rows):
                if (beat := marshal.loads(row)[0]) != seen[rank][0]:
                    seen[rank] = beat, now_s
            if silent := tuple(rank for rank, (_, since_s) in enumerate(seen) if now_s - since_s > DEAD_S):
                return Ending(f"{self._named(silent)} died: {_how(len(silent))} ({error})", silent, "died")
            time.sleep(self.beat_s / 2)
        if "onnection" in error:
            text = f"a connection of {self._named((self.rank,))} broke, and all ranks are alive: {error}"
            return Ending(text, (self.rank,), "connection")
        return Ending(f"{self._named((self.rank,))} failed: {error}", (self.rank,), "died")

    def _without_store(self, error: str) -> Ending:
        """The ending, if torchrun's store has ended, too: the host that kept it is lost."""
        self._store_is_lost = True
        lost = tuple(rank for rank, member in enumerate(self.members) if not member.address)
        text = f"{self._named(lost)} died, or the torchrun there, which kept the store of all"
        text += f": {_how(len(lost))} ({error})"
        return Ending(text, lost, "died")

    def _named(self, ranks: tuple[int, ...]) -> str:
        hosts = ", ".join(dict.fromkeys(self.members[rank].host for rank in ranks))
        return f"{named_ranks(ranks)} on {hosts}"

    def tell(self, ending: Ending) -> None:
        """Print the page on one rank of all, and the sentence on one of each further host."""
        sentence = f"python -m lib.doctor: {ending.text}"
        leave_last_word(sentence)  # torchrun shows it on each host
        speaks_here = speaks(self.rank) if self._store_is_lost else self.first(f"told on {self._machine()}")
        if speaks_here and (self._store_is_lost or self.first("told")):
            self.report.findings.append(Finding(ending.kind, ending.ranks, ending.text))
            tell(self.report, self.path)
        elif speaks_here:
            print(f"\n{sentence}", file=sys.stderr, flush=True)

    def _machine(self) -> str:
        return self.members[self.rank].machine


def _how(number: int) -> str:
    who = "it has" if number == 1 else "they have"
    return (
        f"{who} given no sign of life since a connection broke; see what torchrun says there: exit code -9 is a kill"
    )
