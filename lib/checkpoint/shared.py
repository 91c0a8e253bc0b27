"""One folder for all ranks: the same on every machine, and used by one run at a time.

The problem: a folder on the disk of each machine looks right to every rank, and each of its checkpoints lacks half of
its files. Two runs in one folder remove each other's checkpoints.
The idea: before the first step each rank leaves a file, and rank 0 looks for all of them. Rank 0 holds a lock, which
the system releases when its process ends, however it ends.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from lib.checkpoint.settings import CheckpointError, reason

SEEN_S = 10.0  # until a file that another machine wrote is seen; NFS asks again after some seconds
LOCK, TOKEN = ".lock", ".rank-"


def unseen(folder: str, sizes: Mapping[str, int]) -> list[str]:
    """The files that this rank cannot read, or that have fewer bytes; a file may take some seconds to appear."""
    until, left = time.monotonic() + SEEN_S, list(sizes)
    while left := [name for name in left if _size(os.path.join(folder, name)) < sizes[name]]:
        if time.monotonic() > until:
            break
        with suppress(OSError):
            os.listdir(folder)  # so that NFS looks again
        time.sleep(0.05)
    return left


def _size(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError:
        return -1


def leave_token(folder: str, name: str) -> str:
    """Write an empty file; return why that failed, or ""."""
    try:
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, name), "w").close()
    except OSError as error:
        return cannot_write(folder, error)
    return ""


def cannot_write(folder: str, error: OSError) -> str:
    return f"--checkpoint {folder} cannot be written on {socket.gethostname()}: {reason(error)}"


def remove(folder: str, name: str) -> None:
    with suppress(OSError):
        os.remove(os.path.join(folder, name))


class Lock:
    """The lock of a folder, held until `release`, or until this process ends.

    Raises:
        CheckpointError: a different process holds it, or the folder cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, LOCK)
        while True:
            try:
                os.makedirs(folder, exist_ok=True)
                self._file: IO[str] = open(self._path, "a+")
                _lock(self._file)
            except BlockingIOError:
                self._file.seek(0)
                who = self._file.read() or "a different process"
                raise CheckpointError(
                    f"{folder} is used by {who}: wait until it has ended, or give a different folder to --checkpoint"
                ) from None
            except OSError as error:
                raise CheckpointError(cannot_write(folder, error)) from None
            with suppress(OSError):  # the last holder may have removed it meanwhile
                if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                    break
            self._file.close()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        with suppress(OSError):
            os.remove(self._path)
        self._file.close()


def _lock(file: IO[str]) -> None:
    """Raises BlockingIOError if a different process holds it; does nothing on a disk that knows no locks."""
    with suppress(ImportError):  # not on Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return
