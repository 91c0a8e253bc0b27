"""How much memory and disk are free, one sentence when it is too little, and temporary folders that do not stay.

The problem: a rank that takes the last memory does not get an error. The system ends some process, perhaps the
notebook's kernel, without a message. A full disk is an error deep in a library that names no folder. And a process that
is killed removes no file.
The idea: look before and during a run. Linux reports free memory of the machine and of a container (Colab, Binder,
Docker). On other systems nothing is watched. A process holds a lock on its folder, which the system releases when the
process ends: the process that makes the next folder removes all folders without a lock. Nothing here knows torch.
"""

import contextlib
import errno
import fcntl
import functools
import glob
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
LEAST_FREE_BYTES = 512 * MB  # less free memory than this is too little, or 5% of all if that is more ...
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Memory:
    """Memory of the machine or the container; `free_bytes` includes memory that the system can free, as file caches."""

    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"{size_text(self.free_bytes)} of {size_text(self.total_bytes)} of memory are free"

    def floor_bytes(self) -> float:
        """Bytes that should stay free; if little is free now, a quarter of that."""
        return min(max(LEAST_FREE_BYTES, 0.05 * self.total_bytes), 0.25 * self.free_bytes)


def system_memory(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> Memory | None:
    """Memory of the machine or of the tightest container around this process; None if unknown."""
    try:
        fields = _fields(Path(proc, "meminfo"), ":")
        memory = Memory(1024 * fields["MemTotal"], 1024 * fields["MemAvailable"])
    except (OSError, KeyError):
        return None
    for total, usage, stat, cache in _limits(proc, cgroup, memory.total_bytes):
        with contextlib.suppress(OSError, ValueError, KeyError):
            used = int(usage.read_text()) - _fields(stat, None)[cache]
            if total - used < memory.free_bytes:
                memory = Memory(total, max(0, total - used))
    return memory


def held_bytes(pid: int) -> int:
    """Memory that ending this process would free: the pages that it wrote and shares with no process.

    Clean pages (of libraries) are also in files and count as free.
    """
    with contextlib.suppress(OSError):
        return 1024 * _fields(Path("/proc", str(pid), "smaps_rollup"), ":").get("Private_Dirty", 0)
    return 0


def size_text(n_bytes: float) -> str:
    """Bytes with a decimal unit: `12 MB`, `1.3 GB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}" if n_bytes < 1000 * size else f"{n_bytes / size:,.0f} {unit}"
    return f"{n_bytes:.0f} bytes"


def _fields(path: Path, separator: str | None) -> dict[str, int]:
    rows = (line.split(separator, 1) for line in path.read_text().splitlines())
    return {row[0]: int(row[1].split()[0]) for row in rows if len(row) == 2 and row[1].split()[0].isdigit()}


@functools.cache
def _limits(proc: str, cgroup: str, total_bytes: int) -> list[tuple[int, Path, Path, str]]:
    """Of each container with a limit: the limit, the files with its use and its caches, the name of the latter."""
    limits = []
    with contextlib.suppress(OSError):
        for line in Path(proc, "self", "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                base, (limit, usage, cache) = Path(cgroup), ("memory.max", "memory.current", "inactive_file")
            elif "memory" in kinds.split(","):
                base, cache = Path(cgroup, "memory"), "total_inactive_file"
                limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            inside = base / path.lstrip("/")
            for folder in [folder for folder in (inside, *inside.parents) if folder.is_relative_to(base)]:
                with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                    if (total := int((folder / limit).read_text())) < total_bytes:
                        limits.append((total, folder / usage, folder / "memory.stat", cache))
    return limits


# ---- disk -----------------------------------------------------------------------------------------------------------


def free_disk_bytes(folder: str) -> int:
    return shutil.disk_usage(folder).free


def is_full(error: OSError, folder: str) -> bool:
    """Whether an error means that the disk of `folder` is full."""
    return error.errno in _FULL and (error.errno == errno.EFBIG or free_disk_bytes(folder) < MB)


def full_disk(folder: str, needs: str) -> str:
    """One sentence: free bytes in the folder for temporary files, the bytes needed, and what to do."""
    return (
        f"the folder for temporary files, {folder}, has {size_text(free_disk_bytes(folder))} free, and {needs}. Delete "
        "files there, or set TMPDIR to a folder with more space and restart Python"
    )


RUN, SERVER = "parallel-by-hand-run-", "server-of-parallel-by-hand-"


class Folder:
    """A new folder, locked until it is removed; as a context, its path, and removed after the body.

    Its name begins with `kind`, `RUN` or `SERVER`; it lies in `place`, by default the folder for temporary files.
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

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()

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
