"""What several test files share: a machine that is watched for what a run leaves behind."""

import os
import tempfile
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest


def left_behind() -> set:
    """Processes below this one, beside the two servers, and everything in the folder for temporary files."""
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    processes = {p for p in psutil.Process().children(recursive=True) if p.pid not in servers}
    return {f"process {p.pid}: {p.name()}" for p in processes} | {
        f"file {f}" for f in os.listdir(tempfile.gettempdir())
    }


def open_files() -> list[str]:
    """What this process holds open: files, pipes, sockets."""
    fds = []
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            fds.append(f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:  # the one that listed the folder
            pass
    return fds


def nothing(world):
    pass


@pytest.fixture(scope="session")
def private_temp_folder(tmp_path_factory):
    """Temporary files of runs go where no other program's are; the server's socket, made once, stays outside."""
    from lib.processes import start_server

    start_server()
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("temp"))
    yield
    tempfile.tempdir = before


@pytest.fixture
def machine(private_temp_folder):
    """The test leaves no process, no file, no descriptor, no socket; and after it a run works."""
    from lib.launch import run
    from lib.processes import start_server

    start_server()
    if forkserver._forkserver._forkserver_pid not in _warm:  # the first test, or a file of lib was edited meanwhile
        run(nothing, 2)
        _warm.add(forkserver._forkserver._forkserver_pid)
    before = open_files()
    assert not left_behind()
    yield
    assert not left_behind()
    assert sorted(open_files()) == sorted(before)
    assert run(lambda world: world.rank, 2, timeout_s=20) == [0, 1]


_warm: set = set()
