"""Folders for temporary files, removed soon after their owner has ended.

The problem: a process that is killed removes nothing.
The idea: a process holds a lock on its folder, and the system releases the lock when the process ends. The process that
makes the next folder removes all folders without a lock.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile

RUN, SERVER = "parallel-by-hand-run-", "server-of-parallel-by-hand-"


class Folder:
    """A new folder, locked until it is removed.

    Args:
        kind: how its name begins, `RUN` or `SERVER`.
        place: parent folder; by default the folder for temporary files.
    """

    def __init__(self, kind: str, place: str | None = None) -> None:
        place = place or tempfile.gettempdir()
        for path in glob.glob(os.path.join(glob.escape(place), kind + "*")):
            _remove_if_left(path)
        hidden = tempfile.mkdtemp(prefix="." + kind, dir=place)  # hidden until it is locked
        self._lock = os.open(hidden, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems have no locks; there no process removes it
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = os.path.join(place, os.path.basename(hidden)[1:])
        os.rename(hidden, self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_left(path: str) -> None:
    with contextlib.suppress(OSError):  # of a different user, or already removed
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
