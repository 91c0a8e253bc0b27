"""A process that forks others on demand: `multiprocessing`'s fork server, but ours alone.

The problem: `multiprocessing` has one such server for everybody in a process. Ours differs: it has imported torch, its
environment is set for ranks, it never sees a Ctrl-C. A program that starts a fork server of its own would get that one;
and a forked copy of the program holds a server that is not its child.
The idea: the same server program and the same way to ask it for a process, with a socket that only we know.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import socket
import sys
import tempfile
from multiprocessing import forkserver, popen_forkserver, process, resource_tracker, util
from multiprocessing.context import reduction, set_spawning_popen

from lib.runtime.folders import SERVER, Folder

# It begins in its own folder, as ours may be gone by now, and then torch cannot be imported.
PROGRAM = """
import os, shutil, sys
os.environ.update({0!r})
sys.path[:] = {1!r}
os.chdir({2!r})
from multiprocessing.forkserver import main
try:
    main({3}, {4}, {5!r})
finally:
    shutil.rmtree({2!r}, ignore_errors=True)
"""
MOST_LETTERS = 90  # of the path of the folder that its socket lies in: the system takes 103 or 107 in all


class ForkServer:
    """A running server.

    Args:
        preload: modules that it imports.
        path: its `sys.path`.
        variables: of its environment, beside this process's.
    """

    def __init__(self, preload: list[str], path: list[str], variables: dict[str, str]) -> None:
        self.folder = Folder(SERVER, _place())
        self._address = os.path.join(self.folder.path, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            alive, self._alive = os.pipe()  # the server ends when nobody holds the other end
            try:
                command = PROGRAM.format(variables, path, self.folder.path, listener.fileno(), alive, preload)
                args = [sys.executable, *util._args_from_interpreter_flags(), "-c", command]
                self.pid = util.spawnv_passfds(os.fsencode(sys.executable), args, [listener.fileno(), alive])
            finally:
                os.close(alive)

    def is_alive(self) -> bool:
        """Whether it can fork: it may have been killed, or its socket's folder tidied away."""
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0 and os.path.exists(self._address)
        return False

    def close(self) -> None:
        """Wait until it has ended; it waits for what it has forked."""
        self.abandon()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.folder.remove()

    def abandon(self) -> None:
        """In a forked copy of its owner: it is not ours, and should not live because of us."""
        os.close(self._alive)

    def Process(self, **options: object) -> Process:  # noqa: N802 as a context of multiprocessing has it
        """A process to be started here."""
        made = Process(**options)
        made.server, made._config["tempdir"] = (
            self,
            self.folder.path,
        )  # for its own sockets, as it ends without tidying
        return made

    def ask(self, fds: list[int]) -> tuple[int, int]:
        """A new process: where it tells its pid and how it ended, and where it reads what to do."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._address)
            status, child_w = os.pipe()
            child_r, work = os.pipe()
            try:
                reduction.sendfds(client, [child_r, child_w, self._alive, resource_tracker.getfd(), *fds])
            except BaseException:
                os.close(status)
                os.close(work)
                raise
            finally:
                os.close(child_r)
                os.close(child_w)
        return status, work


@functools.cache
def _place() -> str:
    """Where sockets lie, once and for all: the folder for temporary files, unless its name is too long for them."""
    place = tempfile.gettempdir()
    return place if len(place) + len(SERVER) < MOST_LETTERS else "/tmp"


class Process(process.BaseProcess):
    """Unlike those of `multiprocessing`, also for the worker of a pool: it ends with its parent in any case."""

    _start_method = None
    server: ForkServer | None = None

    def start(self) -> None:
        server, self.server = self.server, None  # which stays here
        self._popen = _Popen(self, server)
        self._sentinel = self._popen.sentinel


class _Popen(popen_forkserver.Popen):
    def __init__(self, process: Process, server: ForkServer) -> None:
        self._server = server
        super().__init__(process)

    def _launch(self, process: Process) -> None:
        body = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump({}, body)  # nothing of the caller's script: it is never run again
            reduction.dump(process, body)
        finally:
            set_spawning_popen(None)
        self.sentinel, work = self._server.ask(self._fds)
        parent_w = os.dup(work)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_w, self.sentinel))
        with open(work, "wb") as file:
            file.write(body.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)
