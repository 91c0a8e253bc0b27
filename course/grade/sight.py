"""What a jail sees of the disk: Python and the book, even inside a home folder that is closed to other users.

The problem: a student's code runs as a user who may not enter `/root` or a teacher's home, and Python may be installed
there. The idea: processes of the jail get a separate view of the disk, in which such a folder is empty, except for the
folders that Python needs. Outside the jail nothing changes.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import lib

_NEW_VIEW, _BIND, _ALL_BELOW, _PRIVATE = 0x00020000, 4096, 16384, 1 << 18  # of unshare and mount
_MOUNT_SETATTR, _HERE, _RECURSIVE = 442, -100, 0x8000  # the same numbers on all machines; since Linux 5.12
_libc = ctypes.CDLL(None, use_errno=True)


def needed() -> list[Path]:
    """The folders that Python reads from, without their subfolders."""
    book = Path(lib.__file__).resolve().parents[1]
    places = {Path(one).resolve() for one in (sys.prefix, sys.base_prefix, book / "lib", book / "course")}
    found = {Path(one).resolve() for one in sys.path if one and Path(one).is_dir()}
    # Of the book Python reads only these packages, whatever a program has added to its path.
    found = places | {one for one in found if book not in (one, *one.parents) or places & {*one.parents}}
    return sorted(one for one in found if not any(other in one.parents for other in found))


def open_closed_folders() -> None:
    """Give this process and its children a view in which they can reach all folders of `needed`.

    Where the system forbids that, as in most containers, nothing changes.
    """
    closed = {folder for path in needed() if (folder := _closed_above(path))}
    if closed and new_view():
        for folder in closed:
            _cover(folder, "mode=755,size=1m")


def own_disk(open_to_all: Iterable[str], folder: str, uid: int, most_bytes: int) -> None:
    """For this process and its children, nothing can be written but these folders: empty, in memory, of limited size.

    Of the book they see `lib`, and of `course` what judges, but not the exercises, whose files have right programs.

    Args:
        open_to_all: folders where every user may write.
        folder: for the files of user `uid`.
        most_bytes: size of each folder.
    """
    if not new_view():
        return
    book = Path(lib.__file__).resolve().parents[1]
    kept = {above for path in needed() for above in (path, *path.parents)}
    beside = [] if book in needed() or {*book.parents} & {*needed()} else [p for p in book.iterdir() if p.is_dir()]
    answers = (book / "course" / name for name in ("exercises", "practise", "assignments", "release"))
    for closed in (*(p for p in beside if p not in kept), *(p for p in answers if p.is_dir())):
        if not closed.is_symlink():
            _cover(closed, "mode=755,size=1m")
    read_only = struct.pack("4Q", 1, 0, 0, 0)
    _libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, read_only, len(read_only))
    size = f"size={most_bytes},nr_inodes=10000"
    for place in {Path(one).resolve() for one in open_to_all if Path(one).is_dir()}:
        _cover(place, f"mode=1777,{size}")
    Path(folder).mkdir(parents=True, exist_ok=True)  # its parent may now be empty
    _mount("none", folder, "tmpfs", 0, f"mode=700,uid={uid},gid={uid},{size}")


def new_view() -> bool:
    """Give this process and its children a separate view of the disk; returns whether the system allows it."""
    return not (_libc.unshare(_NEW_VIEW) or _mount(None, "/", None, _ALL_BELOW | _PRIVATE))


def _cover(folder: Path, options: str) -> None:
    """Mount an empty folder over this one, with the folders of `needed` in it."""
    # Open, because the empty folder will cover them.
    kept = [(path, os.open(path, os.O_PATH)) for path in needed() if folder in path.parents]
    _mount("none", str(folder), "tmpfs", 0, options)
    for path, fd in kept:
        path.mkdir(parents=True)
        for made in (p for p in path.parents if folder in p.parents):
            made.chmod(0o755)  # independent of the umask
        _mount(f"/proc/self/fd/{fd}", str(path), None, _BIND | _ALL_BELOW)
        os.close(fd)


def unreadable(uid: int) -> Path | None:
    """A path that Python needs and this user cannot read, in a separate view; None if there is none."""
    files = (Path(file).resolve() for file in (sys.executable, os.__file__, torch.__file__, lib.__file__))
    return next((_closed_above(path) or path for path in files if not can_read(path, uid)), None)


def can_read(path: Path, uid: int) -> bool:
    """Whether that user, in a separate view, can read a file, or reach the entries of a folder."""
    within = next(path.iterdir(), None) if path.is_dir() else None

    def read() -> None:
        open_closed_folders()
        become(uid)
        if path.is_dir():
            os.lstat(within or path / "nothing")
        else:
            path.read_bytes()

    return in_child(read)


def become(uid: int) -> None:
    """Make this process one of that user, for good."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def in_child(does: Callable[[], None]) -> bool:
    """Whether a child process can do this without an error; this process does not change."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        does()
        os._exit(0)
    finally:
        os._exit(1)


def reachable(folders: Iterable[str]) -> str | None:
    """The first folder that other users may enter; None: no folder of these, so take the system's default."""
    return next((folder for folder in folders if not _closed_above(Path(folder, "a").absolute())), None)


def _closed_above(path: Path) -> Path | None:
    """The topmost parent of a path that other users may not enter."""
    return next((p for p in reversed(path.parents) if not p.stat().st_mode & stat.S_IXOTH), None)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> int:
    source, kind, data = (x and x.encode() for x in (source, kind, data))
    return _libc.mount(source, target.encode(), kind, ctypes.c_ulong(flags), data)
