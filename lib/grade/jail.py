"""A place for code that nobody has read: processes of a user without rights, with limits, and nothing left of them.

The problem: what a student has written may loop, fork, kill, write files, and change what judges it. The idea: three
processes, forked from one that has imported torch already. A *warden* keeps the rights of the grader and runs nothing
of the student's. Its child, the *jail*, has given up all rights; it forks ranks, as a notebook does, and the student's
code is defined and called in those alone. The grader gets bytes, and reads them as data: tensors, numbers, strings.
When the student is done, the warden kills every process of the jail's user until none is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from pathlib import Path

import cloudpickle

from lib.check.exercise import Data, Exercise
from lib.check.judge import FAIL, NoAnswer, in_ranks
from lib.grade import sight
from lib.grade.returns import MOST_BYTES, pack, unpack
from lib.runtime import server

MOST_DISK_BYTES = 512 * 2**20  # of each folder that students' code may write to
LIMITS = {
    resource.RLIMIT_CPU: 60,  # seconds of one process
    resource.RLIMIT_DATA: 4 * 2**30,
    resource.RLIMIT_FSIZE: 2 * MOST_BYTES,
    resource.RLIMIT_NPROC: 400,  # of all of the user's; a rank has about six threads
    resource.RLIMIT_CORE: 0,
}
SLACK_S = 10.0  # beside an exercise's own limit: for the start of ranks, and for saying why it took too long
OPEN_TO_ALL = ("/tmp", "/var/tmp", "/dev/shm")  # where anybody may write
_SUBREAPER, _DUMPABLE, _NO_NEW_PRIVILEGES = 36, 4, 38  # of prctl
_NEW_NETWORK = 0x40000000  # of unshare
_libc = ctypes.CDLL(None, use_errno=True)


class JailError(RuntimeError):
    """There can be no jail here."""


@dataclass(frozen=True)
class User:
    """Who runs the students' code.

    Args:
        uid: a number that belongs to no user and no process; None: whoever grades (`--trust`).
    """

    uid: int | None

    def check(self, submissions: Path) -> None:
        """Raises `JailError` where this user cannot be had, or could read the others' submissions."""
        if self.uid is None:
            return
        if os.geteuid() != 0:
            raise JailError(
                "students' code needs a user without rights, and only root can become one: run this with sudo, or in "
                "a container as root. With --trust the code runs as you, and can read and delete what you can"
            )
        if self.uid == 0:
            raise JailError("--user 0 is root; take a number that belongs to nobody, such as 54321")
        if pids := processes_of(self.uid):
            raise JailError(f"user {self.uid} has processes (such as {pids[0]}), which would be killed; take another")
        if path := sight.unreadable(self.uid):
            raise JailError(
                f"user {self.uid} cannot read {path}, where Python or the book lies: chmod o+x it, or install both "
                "elsewhere, such as in /opt"
            )
        if sight.can_read(submissions, self.uid):
            raise JailError(
                f"students' code could read what is in {submissions}: chmod 700 it, and nobody copies from a classmate"
            )


class Jail:
    """Runs answers as another user, until `close`.

    Args:
        user: whose processes they are.
    """

    def __init__(self, user: User) -> None:
        self._conn, theirs = Pipe()
        self._leash, leash = Pipe()
        place = sight.reachable([tempfile.gettempdir(), *OPEN_TO_ALL])
        self._user, self._folder = user, tempfile.mkdtemp(prefix="jail-", dir=place)
        if user.uid is not None:
            os.chown(self._folder, user.uid, user.uid)
        with server.server() as forks:
            self._warden = forks.Process(target=_warden, args=(theirs, leash, user.uid, self._folder), daemon=True)
            with server.starting():
                self._warden.start()
        theirs.close()
        leash.close()

    def returned(
        self, exercise: Exercise, answers: Sequence[Callable], inputs: list[Data]
    ) -> list[list[Data] | NoAnswer]:
        """As `lib.check.judge.in_ranks`, and whatever happens an answer to all of it."""
        limit_s = len(answers) * (exercise.timeout_s + SLACK_S)
        # The jail may be stopped between two bytes, and then neither sending nor receiving would end.
        too_late = threading.Timer(limit_s, self._leash.close)
        too_late.start()
        try:
            self._conn.send_bytes(cloudpickle.dumps((exercise.body, exercise.timeout_s, list(answers), inputs)))
            outcomes = unpack(self._conn.recv_bytes(MOST_BYTES), len(answers), len(inputs))
        except (EOFError, ConnectionError):
            ended = "Your function has ended the process that waited for it."
            why = f"Nothing came back within {limit_s:g} s." if self._leash.closed else ended
            return [NoAnswer(FAIL, why)] * len(answers)
        except Exception as error:  # whatever is wrong with bytes that may be forged: they count for nothing
            why = f"What your function returned cannot be read: {type(error).__name__}: {str(error)[:200]}"
            return [NoAnswer(FAIL, why)] * len(answers)
        finally:
            too_late.cancel()
        if faults := [x.hint for x in outcomes if isinstance(x, NoAnswer) and x.fault]:
            raise JailError(faults[0])
        return outcomes

    def close(self) -> None:
        """End it with all that has come of it."""
        self._conn.close()
        self._leash.close()  # the warden sees it, and cleans up
        self._warden.join(30)
        shutil.rmtree(self._folder, ignore_errors=True)
        for folder in {tempfile.gettempdir(), *OPEN_TO_ALL}:
            _remove_what_is_of(self._user.uid, folder)


def _remove_what_is_of(uid: int | None, folder: str) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == uid:
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


# ---- in the warden --------------------------------------------------------------------------------------------------


def _warden(conn: connection.Connection, leash: connection.Connection, uid: int | None, folder: str) -> None:
    os.setsid()
    multiprocessing.current_process().daemon = False  # or the jail could not have ranks
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # whoever loses its parent becomes our child, and can be reaped
    _own_network()
    if uid is not None:
        sight.open_closed_folders()
        sight.limit_disk(OPEN_TO_ALL, folder, uid, MOST_DISK_BYTES)
    jail = os.fork()
    if jail == 0:
        try:
            _serve(conn, uid, folder)
        finally:
            os._exit(0)
    conn.close()
    while not leash.poll(0.02):  # nothing is ever sent: it ends when the grader closes it, or is gone
        if os.waitpid(jail, os.WNOHANG)[0]:
            break
    _end_all(uid, jail)


def is_apart() -> bool:
    """Whether the system lets a jail have a network and a disk of its own."""

    def leave() -> None:
        if _libc.unshare(_NEW_NETWORK) or not sight.new_view():
            raise OSError("not allowed")

    return sight.in_child(leave)


def _own_network() -> None:
    """A loopback interface and nothing else, where the system allows it."""
    if _libc.unshare(_NEW_NETWORK):
        return
    with contextlib.suppress(OSError), socket.socket() as s:
        import fcntl

        fcntl.ioctl(s, 0x8914, struct.pack("16sH14s", b"lo", 0x49, b""))  # up


def _end_all(uid: int | None, jail: int) -> None:
    """Kill until nobody is left: what is killed may have forked meanwhile, and what is dead must be reaped."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if uid is None:
            for pid in _children(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        elif (killer := os.fork()) == 0:
            with contextlib.suppress(OSError):
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
                os.kill(-1, signal.SIGKILL)  # all of the user's at once; one after the other would lose the race
            os._exit(0)
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(killer, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not (processes_of(uid) if uid is not None else _children(os.getpid())):
            return
        time.sleep(0.01)


def processes_of(uid: int) -> list[int]:
    """The processes of a user that are alive or not yet reaped."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid or _real_user(name) == uid:
                found.append(int(name))
    return found


def _real_user(pid: str) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Uid:"))


def _children(pid: int) -> list[int]:
    """All that have come of a process."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


# ---- in the jail ----------------------------------------------------------------------------------------------------


def _serve(conn: connection.Connection, uid: int | None, folder: str) -> None:
    _give_up_rights(conn, uid, folder)
    server.fork_here()
    os.register_at_fork(after_in_child=conn.close)  # ranks have their own ways to answer
    while True:
        try:
            body, timeout_s, answers, inputs = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            return
        exercise = Exercise("", "", 0, body, None, (), timeout_s=timeout_s)
        conn.send_bytes(pack(in_ranks(exercise, answers, inputs)))


def _give_up_rights(conn: connection.Connection, uid: int | None, folder: str) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.closerange(3, conn.fileno())
    os.closerange(conn.fileno() + 1, 4096)
    os.chdir(folder)
    os.umask(0o077)
    with contextlib.suppress(OSError):  # where memory ends, the system ends these processes, and not the grader
        Path("/proc/self/oom_score_adj").write_text("1000")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    os.environ.clear()
    os.environ.update(kept, HOME=folder, TMPDIR=folder)
    tempfile.tempdir = folder
    for limit, most in LIMITS.items():
        if uid is not None or limit != resource.RLIMIT_NPROC:  # which would count the grader's own, too
            resource.setrlimit(limit, (most, most))
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # or `launch` could not see how busy its own ranks are
