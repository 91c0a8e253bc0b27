"""A process that forks ranks on demand: the fork server of `multiprocessing`, as a separate instance.

`multiprocessing` has one such server per process. Ours differs: it has imported torch, its environment is set for
ranks, and it never receives a Ctrl-C. A program that uses a fork server for its own processes would get ours; and a
forked copy of the program holds a server that is not its child. So: the same program, over a private socket.
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

from lib.runtime.headroom import SERVER, Folder

# It starts in its own folder: if ours was removed, torch could not be imported there.
PROGRAM = """
import os, shutil, sys
os.environ.update({0!r})
sys.path[:] = {1!r}
os.chdir({2!r})
from multiprocessing.forkserver import main
try:
    exec({5!r})
    main({3}, {4}, [])
finally:
    shutil.rmtree({2!r}, ignore_errors=True)
"""
MOST_LETTERS = 90  # in the path of its socket's folder: the system allows 103 or 107 in all


class ForkServer:
    """A running server, with this `sys.path`, and these variables added to the environment of this process.

    It runs the program `first` before it forks, to import what its processes need.
    """

    def __init__(self, first: str, path: list[str], variables: dict[str, str]) -> None:
        self.folder = Folder(SERVER, _place())
        self._address = os.path.join(self.folder.path, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            alive, self._alive = os.pipe()  # the server ends when no process holds the other end
            try:
                command = PROGRAM.format(variables, path, self.folder.path, listener.fileno(), alive, first)
                args = [sys.executable, *util._args_from_interpreter_flags(), "-c", command]
                self.pid = util.spawnv_passfds(os.fsencode(sys.executable), args, [listener.fileno(), alive])
            finally:
                os.close(alive)

    def is_alive(self) -> bool:
        """Whether it can fork: it may have been killed, or the folder of its socket removed."""
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0 and os.path.exists(self._address)
        return False

    def close(self) -> None:
        """Wait until it has ended; it first waits for the processes that it forked."""
        self.abandon()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.folder.remove()

    def abandon(self) -> None:
        """Release it in a forked copy of its owner, so that the copy does not keep it alive."""
        os.close(self._alive)

    def Process(self, **options: object) -> Process:  # noqa: N802 the name in a context of multiprocessing
        """A process that this server will fork."""
        made = Process(**options)
        made.server = self
        made._config["tempdir"] = self.folder.path  # for its own sockets, because it ends without removing them
        return made

    def ask(self, fds: list[int]) -> tuple[int, int]:
        """Fork a process; return the pipe with its pid and exit code, and the pipe that it reads its work from."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._address)
            status, child_w = os.pipe()
            child_r, work = os.pipe()
            try:
                reduction.sendfds(client, [child_r, child_w, self._alive, resource_tracker.getfd(), *fds])
            except BaseException:
                util.close_fds(status, work)
                raise
            finally:
                util.close_fds(child_r, child_w)
        return status, work


@functools.cache
def _place() -> str:
    """The folder for sockets: the folder for temporary files, unless its path is too long for a socket."""
    place = tempfile.gettempdir()
    return place if len(place) + len(SERVER) < MOST_LETTERS else "/tmp"


class Process(process.BaseProcess):
    """A process that also a worker of a pool may fork, unlike those of `multiprocessing`: it ends with its parent."""

    _start_method = None
    server: ForkServer | None = None

    def start(self) -> None:
        server, self.server = self.server, None  # the server stays in this process
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
            reduction.dump({}, body)  # without the caller's script, which must not run again
            reduction.dump(process, body)
        finally:
            set_spawning_popen(None)
        self.sentinel, work = self._server.ask(self._fds)
        parent_w = os.dup(work)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_w, self.sentinel))
        with open(work, "wb") as file:
            file.write(body.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)
