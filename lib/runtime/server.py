"""The server that ranks are forked from: one process that has imported torch and `lib`, once.

The problem: a fresh process needs seconds to import torch. A process that is forked from one that has done so needs a
hundredth of a second, but has the code of then: edit a file of `lib`, and ranks would go on with the old one.
The idea: `multiprocessing` has such a server. Ours starts while the notebook imports torch itself, never sees a Ctrl-C,
runs nothing of the caller's script, and makes way for a new one when a file of `lib` has come, gone or changed.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from multiprocessing import forkserver, resource_tracker, util

# An optimizer's first step imports the last of them, for 1.5 s.
PRELOADED = ["lib.runtime.server", "lib.runtime.warm", "torch._dynamo"]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder lib
_one_at_a_time = threading.RLock()  # starting changes what belongs to the whole process: __main__, its environment
_files: dict[str, tuple] = {}  # of lib, as the server has read them: path -> (time, size)
_users: set[threading.Thread] = set()  # threads with a run under way


class RunError(RuntimeError):
    """A run that could not return."""


@contextlib.contextmanager
def server():
    """The context that ranks come from; nobody replaces its server while the body runs."""
    context = start_server(use=True)
    try:
        yield context
    finally:
        _users.discard(threading.current_thread())


def start_server(use: bool = False):
    """The multiprocessing context that ranks come from: a fork server that knows today's `lib`, or `spawn`.

    Raises:
        RunError: a file of `lib` was edited and cannot be read as Python.
    """
    method = os.environ.get("LIB_START") or ("forkserver" if hasattr(os, "fork") else "spawn")
    context = multiprocessing.get_context(method)
    if method != "forkserver":
        return context
    resource_tracker.ensure_running()  # now, as it would unblock the signal that we block
    while True:
        with _one_at_a_time:
            files = _look()
            if files == _files or not _files or not _others():
                _start(context, files)
                if use:
                    _users.add(threading.current_thread())
                return context
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


def _start(context, files: dict[str, tuple]) -> None:
    global _files
    if _files and files != _files:
        _must_be_python(path for path in files if files[path] != _files.get(path))
    environment = {  # only the server's: a rank gets its own from `launch`
        "PYTHONPATH": os.pathsep.join([os.path.dirname(_HERE), *sys.path]),
        "PYTHONSAFEPATH": "1",  # another folder called lib may be here
        "OMP_NUM_THREADS": "1",
        "LIB_SERVER_FOLDER": util.get_temp_dir(),
    }
    with _environment(**environment), without_main(), _blocked(signal.SIGINT):
        if _files and files != _files:
            forkserver._forkserver._stop()  # it holds the code of before the edit
        _files = files
        context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


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
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(_HERE), *sys.path])}
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
    with _one_at_a_time, uninterrupted(), without_main():
        yield


@contextlib.contextmanager
def without_main():
    """Ranks need nothing of the caller's script: functions travel by value, so it is never run again in a rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


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


@contextlib.contextmanager
def _environment(**values: str):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _tidy(folder: str, started_by: int, me: int) -> None:
    """A process that is killed leaves the folder of its server's socket behind: the server outlives it by a moment."""
    if os.getpid() == me and os.getppid() != started_by:
        shutil.rmtree(folder, ignore_errors=True)


if "LIB_SERVER_FOLDER" in os.environ:  # this is the server
    atexit.register(_tidy, os.environ.pop("LIB_SERVER_FOLDER"), os.getppid(), os.getpid())
