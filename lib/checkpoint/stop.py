"""Ctrl-C and SIGTERM as a wish: a run stops after the step that it is in, and saves.

The problem: a signal ends a process wherever it is, on one rank earlier than on another. Ranks that stop after
different steps wait for each other for ever, or save what never was together.
The idea: a signal only leaves a number, at which the rank looks between two steps. Ranks then take the largest that any
of them has, so all stop after the same one. Ranks that `lib.launch.run` started get no signal of the terminal; the
process that started them passes it on as a file in the folder of checkpoints, which rank 0 looks for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP = "stop"  # name of the file


class Signals:
    """A context: in it the first Ctrl-C, and each SIGTERM, is a wish to stop; a second Ctrl-C is what it was before.

    Args:
        wish: what is to be done with the signal's number, besides keeping it.

    Attributes:
        number: of the signal that came; 0 before.
    """

    def __init__(self, wish: Callable[[int], None] = lambda number: None) -> None:
        self._wish, self.number = wish, 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # no other thread may
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
    """A context for the process that has started ranks: a signal becomes a file that they look for."""

    def write(number: int) -> None:
        path = os.path.join(folder, STOP)
        with open(path + ".new", "w") as file:
            file.write(str(number))
        os.replace(path + ".new", path)  # nobody reads it before the number is in it

    return Signals(write)


def wished(folder: str) -> int:
    """The number of the signal that was passed on, or 0."""
    try:
        with open(os.path.join(folder, STOP)) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0
