"""Files that all ranks can trust: in one folder, of one run at a time, and as they were written.

The problem: a folder on the disk of each machine looks right to every rank, and each of its checkpoints lacks half of
its files. Two runs in one folder remove each other's checkpoints. A disk may flip a bit, or a copy end early or mix up
two files, and DCP loads what it finds.
The idea: before the first step each rank leaves a file, and rank 0 looks for all of them. Rank 0 holds a lock, which
the system releases when its process ends, however it ends. The thread that writes a file reads it again, and notes its
CRC-32 in one more file while training continues. Before a file is used, one rank compares it. Both take as long as
reading at 0.5 to 3 GB/s.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import IO

SEEN_S = 10.0  # until a file that another machine wrote is seen; NFS asks again after some seconds
LOCK, TOKEN, STOP, CHECKSUMS = ".lock", ".rank-", "stop", "checksums"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that is of a different run or model."""


class BrokenCheckpoint(CheckpointError):
    """A checkpoint that was complete, and of which a file is missing, damaged or cannot be read."""


def reason(error: Exception) -> str:
    """The message of the OSError that led to an error, as a full disk leads to a RuntimeError of torch; or its own."""
    cause: BaseException | None = error
    while cause is not None and not getattr(cause, "strerror", None):
        cause = cause.__context__
    return cause.strerror if cause else f"{type(error).__name__}: {error}".splitlines()[0]


# ---- in one folder --------------------------------------------------------------------------------------------------


def leave(folder: str, name: str) -> None:
    """Write a small file, and make the folder if needed."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "w") as file:
        file.write("x")  # an empty file may find room on a full disk


def cannot_write(folder: str, error: OSError) -> str:
    return f"--checkpoint {folder} cannot be written on {socket.gethostname()}: {reason(error)}"


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


def remove(folder: str, name: str) -> None:
    """Remove a file, or an empty folder, if that is possible."""
    path = os.path.join(folder, name)
    with suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            os.remove(path)


# ---- of one run -----------------------------------------------------------------------------------------------------


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
                self._file: IO[str] = open(self._path, "a+", encoding="utf-8", errors="replace")
                _lock(self._file)
            except BlockingIOError:
                self._file.seek(0)
                who = self._file.read() or "a different process"
                raise CheckpointError(
                    f"{folder} is used by {who}: wait until it has ended, or give a different folder to --checkpoint"
                ) from None
            except OSError as error:
                where = self._path if os.path.isdir(folder) else folder
                raise CheckpointError(cannot_write(where, error)) from None
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


# ---- as they were written -------------------------------------------------------------------------------------------


def checksum(folder: str, name: str) -> str:
    """The CRC-32 of a file, in hexadecimal digits."""
    with open(os.path.join(folder, name), "rb") as file:
        is_empty = os.fstat(file.fileno()).st_size == 0  # which mmap refuses
        data = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return f"{zlib.crc32(data):08x}"


def note_checksums(folder: str, sums: Mapping[str, str]) -> None:
    """Append lines to the list of checksums, on the disk."""
    write_through(os.path.join(folder, CHECKSUMS), "".join(f"{each} {name}\n" for name, each in sums.items()), "a")


def write_through(path: str, text: str, mode: str = "w") -> None:
    """Write a text, and wait until it is on the disk."""
    with open(path, mode, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_files(folder: str, names: Iterable[str]) -> None:
    """Raise BrokenCheckpoint if a file is missing, cannot be read, or differs from its checksum."""
    noted = _noted_checksums(folder)
    for name in names:
        try:
            computed = checksum(folder, name)
        except OSError as error:
            raise _unreadable(folder, name, error) from None
        if name not in noted:
            raise _damaged(folder, CHECKSUMS, f"it has no line for {name}")
        if computed != noted[name]:
            raise _damaged(folder, name, f"it is not as {CHECKSUMS} says")


def _noted_checksums(folder: str) -> dict[str, str]:
    """Name → checksum, of the files of a checkpoint."""
    try:
        with open(os.path.join(folder, CHECKSUMS), encoding="utf-8") as file:
            lines = [line.split() for line in file]
    except OSError as error:
        raise _unreadable(folder, CHECKSUMS, error) from None
    except UnicodeDecodeError:
        raise _damaged(folder, CHECKSUMS, "it is no text") from None
    for number, line in enumerate(lines, 1):
        if len(line) != 2:
            raise _damaged(folder, CHECKSUMS, f"line {number} is not a checksum and a name")
    return {name: each for each, name in lines}


def _damaged(folder: str, name: str, how: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(f"{name} of {folder} is damaged: {how}")


def _unreadable(folder: str, name: str, error: OSError) -> BrokenCheckpoint:
    if isinstance(error, FileNotFoundError):
        return BrokenCheckpoint(f"{name} of {folder} is missing")
    return BrokenCheckpoint(f"{name} of {folder} cannot be read: {reason(error)}")
