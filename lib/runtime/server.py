"""The server that ranks are forked from: one process that has imported torch and `lib`, once.

The problem: a fork is fast, but holds the code of the time of the import: after an edit of `lib`, ranks would still
run the old code.
The idea: a fork server (`fork_server.py`). It starts while the notebook imports torch itself, never receives a Ctrl-C,
and runs nothing of the caller's script. When a file of `lib` was added, removed or changed, a new server replaces it.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from multiprocessing import resource_tracker

from lib.runtime.errors import RunError
from lib.runtime.fork_server import ForkServer
from lib.runtime.places import LIB, PACKAGE, ROOT, packages

_one_at_a_time = threading.RLock()
_server: ForkServer | _Here | None = None
_imported: dict[str, tuple[str, ...]] = {}  # of the packages on top of `lib`, those that the server was told of
_files: dict[str, tuple] = {}  # of lib and of these, as the server read them: path -> (time, size)
_users: set[threading.Thread] = set()  # threads with a run in progress


@contextlib.contextmanager
def server():
    """Hold the server that ranks are forked from; no other thread replaces it while the body runs."""
    try:
        yield start_server(use=True)
    finally:
        _users.discard(threading.current_thread())


def start_server(use: bool = False) -> ForkServer:
    """Start the fork server, or replace it if `lib` or a package that it has imported has changed since.

    Raises:
        RunError: a file of `lib` was edited and cannot be read as Python.
    """
    global _files, _imported, _server
    while True:
        with _one_at_a_time:
            files = _look()
            is_new = _server is None or files != _files or not _server.is_alive()
            others = {t for t in _users if t.is_alive() and t is not threading.current_thread()}
            if not (is_new and others):
                if is_new:
                    ours, _imported = files, _with_modules()
                    files = _look()  # before the start: an edit during it is not in the server
                    _server, _files = _replacement(ours), files
                if use:
                    _users.add(threading.current_thread())
                return _server
        for thread in others:  # another thread's run still uses the old code
            thread.join(0.05)


class _Here:
    """Forks ranks from this process itself; it holds nothing."""

    Process = multiprocessing.get_context("fork").Process

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        pass

    abandon = close


def fork_here() -> None:
    """From now on, fork ranks from this process, which comes from a server itself and has imported all of `lib`."""
    global _files, _imported, _server
    _server, _imported = _Here(), _with_modules()
    _files = _look()


def _with_modules() -> dict[str, tuple[str, ...]]:
    """The packages on top of `lib` of which a server imports modules."""
    return {folder: modules for folder, modules in packages.items() if modules}


def _look() -> dict[str, tuple]:
    """The files of `lib`, and of the packages that the server has imported; the newest of others is read by a rank."""
    files = {}
    for path in (path for folder in (LIB, *_imported) for path in glob.glob(f"{folder}**/*.py", recursive=True)):
        with contextlib.suppress(OSError):  # an editor may be replacing the file
            seen = os.stat(path)
            files[path] = seen.st_mtime_ns, seen.st_size
    return files


def _replacement(files: dict[str, tuple]) -> ForkServer:
    global _server
    if _server is not None:
        _check_python(path for path in files if files[path] != _files.get(path))
        _server.close()
    _server = None
    resource_tracker.ensure_running()  # now: it would unblock the signal that we block
    # It never receives a Ctrl-C: on that, this process ends the ranks.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        modules = [module for of_package in _imported.values() for module in of_package]
        first = f"from {__name__} import warm\nwarm({modules!r})"
        return ForkServer(first, _paths(), {"OMP_NUM_THREADS": "1"})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _paths() -> list[str]:
    """The server's `sys.path`: this `lib` first, because the working folder may hold a different folder named lib."""
    return [ROOT, *(path for path in sys.path if isinstance(path, str))]


def _check_python(paths) -> None:
    for path in sorted(paths):
        with open(path, "rb") as file:
            source = file.read()
        try:
            compile(source, path, "exec")
        except (SyntaxError, ValueError) as error:
            name = os.path.relpath(path, ROOT)
            line = f", line {error.lineno}," if getattr(error, "lineno", None) else ""
            raise RunError(
                f"{name}{line} is not valid Python since it was edited: {getattr(error, 'msg', error)}. Fix it, or "
                "undo the edit, then run again"
            ) from None


def why_no_rank() -> str:
    """Why the server or its ranks ended before they began: the error of importing `lib` in a separate process."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(_paths())}
    program = f"import {PACKAGE}.runtime.worker"
    command = [sys.executable, "-P", "-c", program]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", timeout=60)
        if done.returncode:
            return f"`{program}` fails there:\n" + "\n".join(done.stderr.rstrip().splitlines()[-5:])
    return "the reason is printed here or in the terminal"


def warm(more: Iterable[str]) -> None:
    """In the server: import all of `lib`, and the modules that packages on top of it asked for, so that no rank has to.

    A module that cannot be imported (its file was edited) is skipped; the rank that needs it then raises the error.
    """
    modules = [name for _, name, _ in pkgutil.walk_packages([LIB], f"{PACKAGE}.", onerror=lambda name: None)]
    modules += [*more, "torch._dynamo"]  # the first step of an optimizer imports that one, for 1.5 s
    for name in modules:
        if not name.endswith("__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    # Imports leave garbage, such as copies of `sys.modules`. A rank that collects it writes into 8 MB of pages shared
    # with the server: each page is copied first, which takes longer than any other step of starting a rank.
    gc.collect()
    gc.freeze()


# ---- starting processes without harm to this one --------------------------------------------------------------------


@contextlib.contextmanager
def starting():
    """Enter this around the start of ranks: one run at a time, and no Ctrl-C in between."""
    with _one_at_a_time, uninterrupted():
        yield


@contextlib.contextmanager
def uninterrupted():
    """Delay a Ctrl-C until after the body, so that no process stays half started or half ended."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets the Ctrl-C
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


def _forget() -> None:
    """Forget the server, in a forked copy of this process, which starts its own."""
    global _one_at_a_time, _server
    if _server is not None:
        _server.abandon()
    _one_at_a_time, _server = threading.RLock(), None
    _files.clear()
    _imported.clear()
    _users.clear()


os.register_at_fork(after_in_child=_forget)
