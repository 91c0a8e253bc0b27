"""Ctrl-C, SIGTERM and SIGUSR1 as requests: a run stops after the current step, and saves.

The problem: a signal ends each process at a different place. Ranks that stop after different steps wait for each other
forever, or save an inconsistent state.
The idea: a signal only stores a number, which the rank checks between two steps. The ranks take the maximum over all
ranks, so all stop after the same step. Ranks that `lib.launch.run` started get no signal of the terminal; the process
that started them passes it on as a file in the folder of checkpoints, which rank 0 looks for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # of Slurm before its time limit: --signal=USR1@60
STOP = "stop"  # name of the file


class Signals:
    """A context: inside it the first Ctrl-C, and each other signal, requests a stop; a second Ctrl-C acts as usual.

    Args:
        wish: function called with the number of the signal.

    Attributes:
        number: number of the received signal; 0 before.
    """

    def __init__(self, wish: Callable[[int], None] = lambda number: None) -> None:
        self._wish, self.number = wish, 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        self._wish(number)


def pass_on(folder: str) -> Signals:
    """A context for the process that started the ranks: it writes a signal to a file, which rank 0 checks."""

    def write(number: int) -> None:
        path = os.path.join(folder, STOP)
        with open(path + ".new", "w") as file:
            file.write(str(number))
        os.replace(path + ".new", path)  # it is not read before it is complete

    return Signals(write)


def wished(folder: str) -> int:
    """The number of the signal that was passed on, or 0."""
    try:
        with open(os.path.join(folder, STOP)) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0
