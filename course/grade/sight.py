"""The disk of a jail: Python and the library, and nothing else of the machine.

The problem: a student's code could read the answer of a classmate or a second copy of the book, write into a folder
that is open to all, and send to a service of the machine through a socket that is a file. Python may be in a home that
is closed to the user who runs this code. The idea: processes of the jail get a separate root. It is an empty folder in
memory, in which only the folders that programs need are mounted, read-only. Outside the jail nothing changes.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import lib

ANSWERS = ("exercises", "practise", "assignments", "release")  # folders of `course` that have right programs
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_STANDARD = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
_EMPTY = "mode=755,size=1m"
_NEW_VIEW, _BIND, _ALL_BELOW, _PRIVATE = 0x00020000, 4096, 16384, 1 << 18  # of unshare and mount
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = (
    442,
    -100,
    0x8000,
    1,
)  # the same numbers on all machines; since Linux 5.12
_libc = ctypes.CDLL(None, use_errno=True)


def needed() -> list[Path]:
    """The folders that Python reads from, without their subfolders."""
    book = Path(lib.__file__).resolve().parents[1]
    places = {Path(one).resolve() for one in (sys.prefix, sys.base_prefix, book / "lib", book / "course")}
    found = {Path(one).resolve() for one in sys.path if one and Path(one).is_dir()} - {
        Path("/proc/self/cwd").resolve()
    }
    # Of the book Python reads only these packages, also where a program added to its path.
    found = places | {one for one in found if book not in (one, *one.parents) or places & {*one.parents}}
    found |= _of_libraries()
    return sorted(one for one in found if not any(other in one.parents for other in found))


def _of_libraries() -> set[Path]:
    """The folders of the shared libraries of this process: Python's may be outside its own folder."""
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line}
    return {Path(file).resolve().parent for file in files if os.path.isfile(file)}


def own_root(open_to_all: Iterable[str] = (), most_bytes: int = 2**20) -> bool:
    """For this process and its children, the disk is the folders of `needed` and of the system, all read-only.

    No copy of the book that Python can import has a right program there. Where the system forbids such a view, as
    in most containers, nothing changes; returns whether it allows it.

    Args:
        open_to_all: folders where every user may write: here each is in memory, with the needed folders in it.
        most_bytes: size of each of them.
    """
    system = [Path(one) for one in _SYSTEM if os.path.isdir(one) and not os.path.islink(one)]
    folders = {*needed(), *system}
    folders = [one for one in sorted(folders) if not any(other in one.parents for other in folders)]
    devices = [one for name in _DEVICES if (one := Path("/dev", name)).exists()]
    links = _links_on([sys.executable, sys.prefix, sys.base_prefix, lib.__file__, *sys.path, *_SYSTEM])
    links |= {Path("/dev", name): to for name, to in _STANDARD.items()}
    answers = [path for folder in folders for path in _answers_in(folder)]
    writable = [Path(place) for place in open_to_all if os.path.isdir(place)]
    if not new_view():
        return False
    root = Path(tempfile.gettempdir()).resolve()  # the new root covers it: folders below must be open before
    opened = {path: os.open(path, os.O_PATH) for path in (*folders, *devices)}
    before = os.umask(0o022)  # all folders on the way are open
    try:
        if _mount("none", str(root), "tmpfs", 0, _EMPTY):
            return False
        for place in writable:
            _mount("none", _make(root, place), "tmpfs", 0, f"mode=1777,{_size(most_bytes)}")
        for path, fd in opened.items():
            where = _make(root, path, is_file=path in devices)
            _mount(f"/proc/self/fd/{fd}", where, None, _BIND | _ALL_BELOW)
        for path in answers:
            _mount("none", _make(root, path), "tmpfs", 0, _EMPTY)
        read_only = struct.pack("4Q", _READ_ONLY, 0, 0, 0)
        for path in folders:
            where = os.fsencode(_inside(root, path))
            _libc.syscall(_MOUNT_SETATTR, _HERE, where, _RECURSIVE, read_only, len(read_only))
        for link, to in links.items():
            if not any(folder in link.parents for folder in folders) and not os.path.lexists(_inside(root, link)):
                _make(root, link.parent)
                _inside(root, link).symlink_to(to)
        os.chroot(root)
        os.chdir("/")
        return True
    finally:
        os.umask(before)
        for fd in opened.values():
            os.close(fd)


def own_disk(open_to_all: Iterable[str], folder: str, uid: int, most_bytes: int) -> None:
    """`own_root`, with a folder in memory for the files of user `uid`; most_bytes is the size of each folder."""
    if own_root(open_to_all, most_bytes):
        options = f"mode=700,uid={uid},gid={uid},{_size(most_bytes)}"
        _mount("none", _make(Path("/"), Path(folder)), "tmpfs", 0, options)


def new_view() -> bool:
    """Give this process and its children a separate view of the disk; returns whether the system allows it."""
    return not (_libc.unshare(_NEW_VIEW) or _mount(None, "/", None, _ALL_BELOW | _PRIVATE))


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _make(root: Path, path: Path, is_file: bool = False) -> str:
    """Make a folder, or an empty file, to mount something on; returns its place in the new root."""
    where = _inside(root, path)
    (where.parent if is_file else where).mkdir(parents=True, exist_ok=True)
    if is_file:
        where.touch()
    return str(where)


def _size(most_bytes: int) -> str:
    return f"size={most_bytes},nr_inodes=10000"


def _answers_in(folder: Path) -> list[Path]:
    """Where a copy of the book in this folder has right programs."""
    rooms = folder if folder.name == "course" else folder / "course"
    found = [folder / "solutions", *(rooms / name for name in ANSWERS)]
    return [path for path in found if path.is_dir() and (rooms / "check").is_dir()]


def _links_on(paths: Iterable[str]) -> dict[Path, str]:
    """Link -> where it leads, for each link on the way to one of these paths."""
    found: dict[Path, str] = {}
    for path in filter(None, paths):
        here, left = Path("/"), [*Path(path).absolute().parts[1:]]
        while left:
            here = here.parent if (part := left.pop(0)) == ".." else here / part
            if here.is_symlink() and here not in found:
                found[here] = to = os.readlink(here)
                left = [*Path(to).parts[os.path.isabs(to) :], *left]
                here = Path("/") if os.path.isabs(to) else here.parent
    return found


def unreadable(uid: int) -> Path | None:
    """A path that Python needs and this user cannot read, in a separate view; None if there is none."""
    files = (Path(file).resolve() for file in (sys.executable, os.__file__, torch.__file__, lib.__file__))
    return next((_closed_above(path) or path for path in files if not can_read(path, uid)), None)


def can_read(path: Path, uid: int) -> bool:
    """Whether that user can read a file, or reach the entries of a folder, in such a root."""
    return in_child(lambda: (own_root(), _read(path, uid)))


def may_read(path: Path, uid: int) -> bool:
    """The same, by the permissions alone: no private folder should depend on a root that hides it."""
    return in_child(lambda: _read(path, uid))


def _read(path: Path, uid: int) -> None:
    within = next(path.iterdir(), None) if path.is_dir() else None
    become(uid)
    if path.is_dir():
        os.lstat(within or path / "nothing")
    else:
        path.read_bytes()


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
