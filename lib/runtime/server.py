"""The server that ranks are forked from: one process that has imported torch and `lib`, once.

The problem: a fresh process needs seconds to import torch. A process that is forked from one that has done so needs a
hundredth of a second, but has the code of then: edit a file of `lib`, and ranks would go on with the old one.
The idea: a fork server (`fork_server.py`). It starts while the notebook imports torch itself, never sees a Ctrl-C,
runs nothing of the caller's script, and makes way for a new one when a file of `lib` has come, gone or changed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import resource_tracker

from lib.runtime.fork_server import ForkServer

PRELOADED = ["lib.runtime.server", "lib.runtime.warm"]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder lib
_one_at_a_time = threading.RLock()
_server: ForkServer | None = None
_files: dict[str, tuple] = {}  # of lib, as the server has read them: path -> (time, size)
_users: set[threading.Thread] = set()  # threads with a run under way


class RunError(RuntimeError):
    """A run that could not return."""


@contextlib.contextmanager
def server():
    """The server that ranks come from; nobody replaces its server while the body runs."""
    try:
        yield start_server(use=True)
    finally:
        _users.discard(threading.current_thread())


def start_server(use: bool = False) -> ForkServer:
    """Where ranks come from: a fork server that knows today's `lib`.

    Raises:
        RunError: a file of `lib` was edited and cannot be read as Python.
    """
    while True:
        with _one_at_a_time:
            files = _look()
            if _serves(files) or not _others():
                _start(files)
                if use:
                    _users.add(threading.current_thread())
                return _server
            others = _others()
        for thread in others:  # an edit, and a run of another thread still goes on with the code of before
            thread.join(0.05)


def _others() -> set[threading.Thread]:
    return {t for t in _users if t.is_alive() and t is not threading.current_thread()}


def _look() -> dict[str, tuple]:
    files = {}
    for path in glob.glob(os.path.join(_HERE, "**", "*.py"), recursive=True):
        with contextlib.suppress(OSError):  # an editor puts a new file in the place of the old one
            seen = os.stat(path)
            files[path] = seen.st_mtime_ns, seen.st_size
    return files


def _serves(files: dict[str, tuple]) -> bool:
    return _server is not None and files == _files and _server.is_alive()


def _start(files: dict[str, tuple]) -> None:
    global _files, _server
    if _serves(files):
        return
    if _server is not None:
        _must_be_python(path for path in files if files[path] != _files.get(path))
        _server.close()
    _server = None
    resource_tracker.ensure_running()  # now, as it would unblock the signal that we block
    with _blocked(signal.SIGINT):
        _server, _files = ForkServer(PRELOADED, _paths(), {"OMP_NUM_THREADS": "1"}), files


def _paths() -> list[str]:
    """Where the server finds modules: first this `lib`, as another folder called lib may be here."""
    return [os.path.dirname(_HERE), *(path for path in sys.path if isinstance(path, str))]


def _must_be_python(paths) -> None:
    for path in sorted(paths):
        with open(path, "rb") as file:
            source = file.read()
        try:
            compile(source, path, "exec")
        except (SyntaxError, ValueError) as error:
            name = os.path.relpath(path, os.path.dirname(_HERE))
            line = f", line {error.lineno}," if getattr(error, "lineno", None) else ""
            raise RunError(
                f"{name}{line} is not Python since it was edited: {getattr(error, 'msg', error)}. Mend it, or undo the "
                "edit, then run again"
            ) from None


def why_no_rank() -> str:
    """Why the server or its ranks end before they have begun: what importing `lib` says, in a process of its own."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(_paths())}
    command = [sys.executable, "-P", "-c", "import lib.runtime.worker"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", timeout=60)
        if done.returncode:
            return "`import lib.runtime.worker` fails there:\n" + "\n".join(done.stderr.rstrip().splitlines()[-5:])
    return "it has printed why, here or in the terminal"


# ---- how processes are started without harm to this one -------------------------------------------------------------


@contextlib.contextmanager
def starting():
    """Around the start of ranks."""
    with _one_at_a_time, uninterrupted():
        yield


@contextlib.contextmanager
def uninterrupted():
    """A Ctrl-C comes after the body: nothing is left half started, or half ended."""
    if threading.current_thread() is not threading.main_thread():  # which gets the Ctrl-C
        yield
        return
    came: list[tuple] = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])


@contextlib.contextmanager
def _blocked(number: int):
    """A process that the body starts never sees this signal: a Ctrl-C is for us, who end the ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forget() -> None:
    """In a forked copy of this process, which starts a server of its own."""
    global _one_at_a_time, _server
    if _server is not None:
        _server.abandon()
    _one_at_a_time, _server = threading.RLock(), None
    _files.clear()
    _users.clear()


os.register_at_fork(after_in_child=_forget)
