"""A jail for untrusted code: processes of a user without rights, with limits, all of them killed at the end.

The problem: a student's code may loop, fork, kill, write files, and change its judge. The idea: three kinds of
processes, forked from a server that already imported torch. A *warden* keeps the rights of the grader and runs no code
of the student. Its child, the *jail*, gives up all rights and forks ranks, as a notebook does; only ranks define and
call the student's code. The grader receives bytes, and reads them as data: tensors, numbers, strings.
When the answer returned, the warden kills every process of the jail's user until none is left.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import functools
import itertools
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
from importlib.util import cache_from_source
from multiprocessing import Pipe, connection
from pathlib import Path

import cloudpickle

import course.exercises
import course.practise
from course.check.compare import Data
from course.check.exercise import Exercise
from course.check.running import FAIL, NoAnswer, as_compared, for_ranks, in_ranks
from course.grade import refused, sight
from course.grade.returns import MOST_BYTES, pack, unpack
from lib.runtime import server

MOST_DISK_BYTES = 512 * 2**20  # of each folder that students' code may write to
MOST_MEMORY_BYTES = 8 * 2**30  # of all processes of a jail
LIMITS = {
    resource.RLIMIT_CPU: 60,  # seconds of one process
    resource.RLIMIT_DATA: 4 * 2**30,
    resource.RLIMIT_AS: 12 * 2**30,  # addresses: libraries, and memory that several processes share
    resource.RLIMIT_FSIZE: 2 * MOST_BYTES,
    resource.RLIMIT_NPROC: 400,  # of all processes of the user; a rank has about six threads
    resource.RLIMIT_CORE: 0,
}
SLACK_S = 10.0  # added to the limit of an exercise: for the start of ranks, and for the report of a timeout
OPEN_TO_ALL = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")  # folders where every user may write
_SUBREAPER, _DUMPABLE = 36, 4  # of prctl
_NEW_NETWORK, _NEW_IPC = 0x40000000, 0x08000000  # of unshare
_libc = ctypes.CDLL(None, use_errno=True)
# What is sent of an exercise is its body, and no module, in which ranks would have its right programs. Its globals are
# copies; so it names a list of the library, such as listeners, by the module.
cloudpickle.register_pickle_by_value(course.exercises)
cloudpickle.register_pickle_by_value(course.practise)
_CACHED = type(functools.cache(len))
copyreg.pickle(
    _CACHED, lambda f: (functools.cache, (f.__wrapped__,)) if "exercises" in f.__module__ else f.__qualname__
)


class JailError(RuntimeError):
    """No jail can start here."""


@dataclass(frozen=True)
class User:
    """The user that runs the students' code."""

    uid: int | None  # a number without a user and without processes; None: the grader's user (`--trust`)

    def check(self, submissions: Path, cases: str | None = None) -> None:
        """Raises `JailError` if this user cannot run code here, or could read the submissions or the hidden cases."""
        if self.uid is None:
            return
        if os.geteuid() != 0:
            raise JailError(
                "students' code needs a user without rights, and only root can become one: run this with sudo, or in "
                "a container as root. With --trust the code runs as you, and can read and delete all your files"
            )
        if self.uid == 0:
            raise JailError("--user 0 is root; take a number without a user, such as 54321")
        if pids := processes_of(self.uid):
            raise JailError(
                f"user {self.uid} has processes (such as {pids[0]}), which would be killed; take a free number"
            )
        if path := sight.unreadable(self.uid):
            raise JailError(
                f"user {self.uid} cannot read {path}, which holds Python or the book: chmod o+x it, or install both "
                "elsewhere, such as in /opt"
            )
        if sight.may_read(submissions, self.uid):
            raise JailError(
                f"students' code could read {submissions}, and copy a classmate's answer: chmod 700 that folder"
            )
        for path in (cases, cache_from_source(cases)) if cases else ():
            if sight.may_read(Path(path), self.uid):
                raise JailError(f"students' code could read the hidden cases in {path}: chmod 600 that file")


class Jail:
    """Runs answers as a user without rights, until `close`."""

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
        """As `course.check.judge.in_ranks`; a jail that dies or hangs is a `NoAnswer` for all answers."""
        limit_s = len(answers) * (exercise.timeout_s + SLACK_S)
        given = for_ranks(exercise, inputs)
        # The jail may stop between two bytes, and then neither sending nor receiving would end.
        too_late = threading.Timer(limit_s, self._leash.close)
        too_late.start()
        try:
            try:
                self._conn.send_bytes(cloudpickle.dumps((exercise.body, exercise.timeout_s, list(answers), given)))
                raw = self._conn.recv_bytes(MOST_BYTES)
            finally:
                too_late.cancel()
                too_late.join()  # or `close` might close the same descriptor again, by then perhaps another jail's
            outcomes = unpack(raw, len(answers), len(inputs))
        except (EOFError, ConnectionError):
            why = "Your function ended the process that waited for its result."
            slow = self._leash.closed
            if slow:
                why = f"Your function returned nothing within {limit_s:g} s."
            elif self._leash.poll():  # a word of the warden
                why = f"Your function took more than {MOST_MEMORY_BYTES >> 30} GiB of memory on all ranks together."
            return [NoAnswer(FAIL, why, slow=slow)] * len(answers)
        except Exception as error:  # the bytes may be forged, with any fault: they count as no answer
            why = f"The result of your function cannot be read: {type(error).__name__}: {str(error)[:200]}"
            return [NoAnswer(FAIL, why)] * len(answers)
        if faults := [x.hint for x in outcomes if isinstance(x, NoAnswer) and x.fault]:
            raise JailError(faults[0])
        return as_compared(exercise, outcomes, inputs)

    def close(self) -> None:
        """End it, with all of its processes and files."""
        self._conn.close()
        self._leash.close()  # the warden polls it, and cleans up
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
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # an orphan becomes our child, so that we can reap it
    _libc.unshare(_NEW_IPC)  # its shared memory and queues end with it
    _own_network()
    jail = os.fork()
    if jail == 0:
        try:
            _serve(conn, uid, folder)
        finally:
            os._exit(0)
    conn.close()
    looks = itertools.count()
    while not leash.poll(0.02):  # nothing is sent to us: it ends when the grader closes it, or ends
        if os.waitpid(jail, os.WNOHANG)[0]:
            jail = 0  # its number may be given to another
            break
        if uid is not None and next(looks) % 10 == 0 and _held_bytes(uid) > MOST_MEMORY_BYTES:
            with contextlib.suppress(OSError):  # the grader may have closed it meanwhile
                leash.send_bytes(b"memory")
            break
    _end_all(uid, jail)


def is_isolated() -> bool:
    """Whether the system gives a jail a separate network, a separate disk and shared memory of its own."""

    def leave() -> None:
        if _libc.unshare(_NEW_NETWORK | _NEW_IPC) or not sight.new_view():
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
    """Kill until no process is left: a process may fork before it dies, and a dead process must be reaped."""
    if jail:  # perhaps it is not the user's yet
        os.kill(jail, signal.SIGKILL)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if uid is None:
            for pid in _descendants():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        elif (killer := os.fork()) == 0:
            with contextlib.suppress(OSError):
                sight.become(uid)
                os.kill(-1, signal.SIGKILL)  # all processes of the user at once; a loop would lose the race
            os._exit(0)
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(killer, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not (_descendants() if uid is None else processes_of(uid)):
            return
        time.sleep(0.01)


def processes_of(uid: int) -> list[int]:
    """The processes of a user that are alive or not yet reaped."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if uid in (os.stat(f"/proc/{name}").st_uid, _status(name)["Uid"]):
                found.append(int(name))
    return found


def _held_bytes(uid: int) -> int:
    """Memory of a user's processes, without files; what several share counts for each."""
    found = 0
    for pid in processes_of(uid):
        with contextlib.suppress(OSError, KeyError):
            found += 1024 * sum(_status(pid)[kind] for kind in ("RssAnon", "RssShmem", "VmSwap"))
    return found


def _status(pid: int | str) -> dict[str, int]:
    with open(f"/proc/{pid}/status") as file:
        rows = (line.split() for line in file)
        return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _descendants() -> set[int]:
    """The processes that descend from this one."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found, new = set(), {os.getpid()}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


# ---- in the jail ----------------------------------------------------------------------------------------------------


def _serve(conn: connection.Connection, uid: int | None, folder: str) -> None:
    _give_up_rights(conn, uid, folder)
    server.fork_here()
    os.register_at_fork(after_in_child=conn.close)  # ranks have their own connections
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
    with contextlib.suppress(OSError):  # if memory runs out, the system ends these processes, and not the grader
        Path("/proc/self/oom_score_adj").write_text("1000")
    if uid is not None:
        sight.own_disk(OPEN_TO_ALL, folder, uid, MOST_DISK_BYTES)
    os.chdir(folder)
    os.umask(0o077)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    os.environ.clear()
    os.environ.update(kept, HOME=folder, TMPDIR=folder)
    tempfile.tempdir = folder
    for limit, most in LIMITS.items():
        if uid is not None or limit != resource.RLIMIT_NPROC:  # this limit would also count the grader's processes
            resource.setrlimit(limit, (most, most))
    if uid is not None:
        sight.become(uid)
    refused.refuse()
    _libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # or `launch` could not read the CPU time of its ranks
