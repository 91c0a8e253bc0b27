"""Requests to stop a run: signals, and a file in a folder.

The problem: a signal of the terminal reaches the process that started the ranks, and not the ranks. The idea: that
process writes a file, which rank 0 looks for between two steps. A person may write it, too: `touch runs/stop`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Self

from lib.checkpoint import files

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # of Slurm before its time limit: --signal=USR1@60


@contextmanager
def on_signals(wish: Callable[[int], None]) -> Iterator[None]:
    """Inside, the first Ctrl-C and each other signal call `wish` with their number; a second Ctrl-C acts as usual."""
    came = False

    def handle(number: int, frame: object) -> None:
        nonlocal came
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came = True
        wish(number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on(path: str) -> AbstractContextManager[None]:
    """A context for the process that started the ranks, which get no signal of the terminal: a file tells rank 0."""
    name = os.path.join(path, files.STOP)

    def write(number: int) -> None:
        try:
            with open(name + ".new", "w") as file:
                file.write(str(number))
            os.replace(name + ".new", name)  # it is not read before it is complete
        except OSError as error:
            if not os.path.lexists(name):
                print(f"\n{name} could not be written, so the run goes on: {files.reason(error)}", file=sys.stderr)

    return on_signals(write)


def passed_on(path: str) -> int:
    """The number of the signal that was passed on; SIGTERM if a person made the file, whatever it is; 0 without it."""
    name, text = os.path.join(path, files.STOP), b""
    if not os.path.lexists(name):
        return 0
    if os.path.isfile(name):  # no folder, and no pipe, which would be read forever
        with suppress(OSError), open(name, "rb") as file:
            text = file.read(20).strip()
    number = int(text) if text.isdigit() else 0
    return number if number in SIGNALS else int(signal.SIGTERM)


class Requests(ExitStack):
    """Requests to stop that this rank gets. A context: inside it, Ctrl-C, SIGTERM and SIGUSR1 only store their number.

    What else is entered into the stack ends with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signal = 0

    def __enter__(self) -> Self:
        self.enter_context(on_signals(self._note))
        return self

    def _note(self, number: int) -> None:
        self._signal = number

    def asked(self, rank: int, folder: str) -> int:
        """Number of the signal that asks for a stop, 0 for none; rank 0 also looks into the folder, unless it is ""."""
        return self._signal or (passed_on(folder) if folder and rank == 0 else 0)
