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
from contextlib import AbstractContextManager, contextmanager, suppress

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
