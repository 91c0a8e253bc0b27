"""The server that ranks come from: it knows today's `lib`, comes back when it is killed, and serves many at once."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch

from lib import comm
from lib.launch import RankError, run
from lib.runtime import server
from lib.runtime.headroom import RUN, Folder

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]


def python(*args, cwd=None, **variables):
    """What a Python of its own says."""
    pipes = {"capture_output": True, "text": True, "timeout": 280}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=os.environ | variables, **pipes)


# ---- a file of lib is edited ----------------------------------------------------------------------------------------

SCRIPT = """
    import os, pathlib, signal, threading, time
    from lib.runtime import server as servers
    from lib.launch import RunError, run

    HERE = pathlib.Path("lib")

    def asks(world):
        import importlib.util
        from lib import trace
        found = importlib.util.find_spec("lib.added") is not None
        return getattr(trace, "VERSION", None), found, os.getppid()

    def see():
        version, found, server = run(asks, 1)[0]
        assert server == servers._server.pid
        return version, found, server

    def refused():
        try:
            run(asks, 1)
        except RunError as error:
            return str(error)

    source = (HERE / "trace.py").read_text()
    first = see()
    assert first[:2] == (None, False) and see() == first

    print("edited, and a file added")
    (HERE / "trace.py").write_text(source + "VERSION = 2\\n")
    (HERE / "added.py").write_text("")
    second = see()
    assert second[:2] == (2, True) and second[2] != first[2] and see() == second

    print("no longer Python")
    (HERE / "trace.py").write_text(source + "not Python at all\\n")
    number = len(source.splitlines()) + 1
    start = f"lib/trace.py, line {number}, is not valid Python since it was edited: invalid syntax. Fix"
    for _ in range(2):
        assert refused().startswith(start)

    print("a file is removed that another imports")
    (HERE / "trace.py").write_text(source + "import lib.added\\n")
    (HERE / "added.py").unlink()
    said = refused()
    assert said.startswith("rank 0 of 1 could not start; `import lib.runtime.worker` fails there:\\n"), said
    assert said.endswith("ModuleNotFoundError: No module named 'lib.added'"), said

    print("an error when it is imported")
    (HERE / "trace.py").write_text(source + "1 / 0\\n")
    said = refused()
    assert said.startswith("rank 0 of 1 could not start; `import lib.runtime.worker` fails there:\\n"), said
    assert said.endswith("ZeroDivisionError: division by zero"), said

    print("an error that the server itself cannot do without")
    package = (HERE / "__init__.py").read_text()
    (HERE / "__init__.py").write_text(package + "1 / 0\\n")
    said = refused()
    says = "the server that ranks come from could not start; `import lib.runtime.worker` fails there:\\n"
    assert said.startswith(says), said
    (HERE / "__init__.py").write_text(package)

    print("an older file is put in its place")
    (HERE / "trace.py").write_text(source)
    os.utime(HERE / "trace.py", (1e9, 1e9))
    third = see()
    assert third[:2] == (None, False)

    print("touched while a run of another thread goes on")

    begun, ends = pathlib.Path("begun"), pathlib.Path("ends")

    def wait_for(file):
        while not file.exists():
            time.sleep(0.01)

    def lasts(world):
        begun.touch()
        wait_for(ends)
        return asks(world)

    results = []
    thread = threading.Thread(target=lambda: results.append(run(lasts, 2)))
    thread.start()
    wait_for(begun)
    os.utime(HERE / "trace.py")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        see()
        raise AssertionError("it did not wait")
    except KeyboardInterrupt:
        pass  # and a Ctrl-C meanwhile breaks nothing
    threading.Timer(0.2, ends.touch).start()
    fourth = see()
    assert fourth[:2] == third[:2] and fourth[2] != third[2]
    thread.join()
    assert results == [[third, third]], "it went on with the server and the code that it began with"
"""


@pytest.mark.thorough("four servers start, and each imports torch anew")
@pytest.mark.slow("each edit starts a server that imports torch anew")
@pytest.mark.timeout(300)
def test_a_file_of_lib_is_edited_between_two_runs(tmp_path):
    """The server holds the code that it started with: when a file is another one, it starts anew."""
    shutil.copytree(ROOT / "lib", tmp_path / "lib", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = python("script.py", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


REGISTERS = """
    import os, pathlib, sys
    from lib.runtime import server
    from lib.runtime.places import stands_on_lib

    upper = pathlib.Path("upper")
    stands_on_lib("upper", "upper.one", "upper.is_not_python", "upper.is_not_there")
    from lib.launch import run

    def see(world):
        return "torch._dynamo" in sys.modules, "upper.one" in sys.modules, "later.two" in sys.modules

    assert run(see, 2) == [(True, True, False)] * 2
    first = server._server.pid

    stands_on_lib("later", "later.two")
    assert run(see, 2) == [(True, True, False)] * 2
    assert server._server.pid == first, "what is registered later is worth no new server"

    (pathlib.Path("later") / "two.py").write_text("edited = True")
    run(see, 2)
    assert server._server.pid == first, "it holds no file of this package"

    (upper / "one.py").write_text("edited = True")
    assert run(see, 2) == [(True, True, True)] * 2
    assert server._server.pid != first, "it held a file that is another one now"
"""


@pytest.mark.thorough("a process that imports torch twice")
def test_a_package_on_top_of_lib_tells_the_server_what_to_import(tmp_path):
    for package, module in (("upper", "one"), ("upper", "is_not_python"), ("later", "two")):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / f"{module}.py").write_text("this is" if "not" in module else "")
    (tmp_path / "script.py").write_text(textwrap.dedent(REGISTERS))
    done = python("script.py", cwd=tmp_path, PYTHONPATH=os.pathsep.join(map(str, (tmp_path, ROOT))))
    assert done.returncode == 0, done.stderr


FIRST_CHECK = """
    import sys
    from lib.runtime import server
    started = []
    original = server.ForkServer
    server.ForkServer = lambda *args: (started.append(args[0]), original(*args))[1]
    from course.check import check, find
    from lib import run
    check("01.1", find("01.1").right[0])
    assert len(started) == 1, started
    ranks = run(lambda world: [name for name in sys.modules if name.startswith("course.")], 2)
    assert "course.check.running" in ranks[0] and "course.check.catalogue" not in ranks[0]
    assert not [name for name in ranks[0] if name.startswith("course.exercises")]
    assert len(started) == 1
"""


def test_the_first_check_of_a_notebook_starts_one_server(tmp_path):
    """In which is all that judges; and no right program, which a grader's ranks would have."""
    (tmp_path / "script.py").write_text(textwrap.dedent(FIRST_CHECK))
    done = python("script.py", cwd=tmp_path, PYTHONPATH=str(ROOT), CHECK_STRICT="1")
    assert done.returncode == 0, done.stdout + done.stderr


# ---- many at once ---------------------------------------------------------------------------------------------------


def adds(world, mark):
    total = comm.all_reduce(torch.full((1000,), float(mark)), world)
    print("mark", mark)
    return mark, world.rank, total[999].item()


@pytest.mark.thorough("seconds of several processes")
@pytest.mark.usefixtures("machine")
def test_two_threads_run_at_once(capsys):
    """Each gets its own results; the prints of both appear, each line whole."""
    results, errors = {}, {}

    def work(mark, ranks):
        for i in range(4):
            results[mark, i] = run(adds, ranks, mark)
            try:
                run(lambda world: 1 / (mark * world.rank), ranks)
            except RankError as error:
                errors[mark, i] = str(error)

    threads = [threading.Thread(target=work, args=(mark, ranks)) for mark, ranks in ((1, 2), (1000, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for mark, ranks in ((1, 2), (1000, 3)):
        for i in range(4):
            assert results[mark, i] == [(mark, rank, float(mark * ranks)) for rank in range(ranks)]
            assert errors[mark, i].startswith(f"rank 0 of {ranks} raised ZeroDivisionError")
    wanted = [f"rank {r} | mark 1" for r in range(2)] * 4 + [f"rank {r} | mark 1000" for r in range(3)] * 4
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(wanted)


TWO = """
    from lib import comm, run
    import torch, time

    def adds(world, mark):
        total = comm.all_reduce(torch.full((1000,), float(mark)), world)
        print("mark", mark)
        return mark, world.rank, total[999].item()

    def slow(world):
        time.sleep(2)
        return world.rank

    def fails(world):
        comm.barrier(world)
        if world.rank == 1:
            raise ValueError({mark})
        comm.barrier(world)
"""


@pytest.mark.thorough("two notebooks with kernels of their own")
def test_two_notebooks_at_once(start_notebook, tmp_path):
    """The same folder for temporary files, the same names, the same machine: neither notices the other."""
    marks = (1, 1000)
    cells = [start_notebook() for _ in marks]
    heard = {mark: [] for mark in marks}

    def work(cell, mark):
        heard[mark].append(cell(TWO.replace("{mark}", str(mark))))
        for i in range(5):
            heard[mark].append(cell(f"print(run(adds, 3, {mark}))"))
            if i == 2:
                heard[mark].append(cell("run(fails, 3)"))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cells, marks, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for cell, mark in zip(cells, marks, strict=True):
        assert heard[mark].pop(0) == ("", "", "", "")
        name, text, *said = heard[mark].pop(3)
        assert (name, said) == ("RankError", ["", ""])
        assert text.startswith("rank 1 of 3 raised ValueError") and text.endswith(f"ValueError: {mark}")
        prints = "".join(f"rank {rank} | mark {mark}\n" for rank in range(3))
        rows = [(mark, rank, 3.0 * mark) for rank in range(3)]
        assert heard[mark] == [("", "", f"{prints}{rows}\n", "")] * 5
        assert len(psutil.Process(cell.pid).children(recursive=True)) == 2, "its two servers"
    assert not list(tmp_path.glob("parallel-by-hand-*"))

    one, other = cells  # and when one is killed, the other goes on
    box = []
    thread = threading.Thread(target=lambda: box.append(other("print(run(slow, 3))")))
    thread.start()
    time.sleep(1)
    os.kill(one.pid, signal.SIGKILL)
    thread.join(60)
    assert box == [("", "", "[0, 1, 2]\n", "")]


@pytest.mark.thorough("seconds of several processes")
@pytest.mark.usefixtures("private_temp_folder")
def test_the_server_is_killed_between_two_runs():
    assert run(lambda world: world.rank, 2) == [0, 1]
    os.kill(server._server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server._server.pid, os.WEXITED | os.WNOWAIT)  # on a busy machine it ends later
    assert run(lambda world: world.rank, 2) == [0, 1]


@pytest.mark.thorough("a server starts and imports torch anew")
@pytest.mark.usefixtures("private_temp_folder")
def test_the_folder_of_its_socket_is_tidied_away():
    before = server.start_server().pid
    shutil.rmtree(server._server.folder.path)
    assert run(lambda world: world.rank, 2) == [0, 1] and server._server.pid != before


# ---- the process that it belongs to ---------------------------------------------------------------------------------


def runs_here(_):
    return run(lambda world: world.rank, 2)


@pytest.mark.thorough("seconds of several processes")
@pytest.mark.usefixtures("private_temp_folder")
def test_a_forked_copy_of_the_process_starts_its_own():
    """Such as the worker of a pool, which may have no children by the rules of `multiprocessing`."""
    run(lambda world: None, 1)
    before = server._server.pid
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(runs_here, range(2)) == [[0, 1]] * 2
        pool.close()
        pool.join()
    assert run(lambda world: world.rank, 2) == [0, 1] and server._server.pid == before


@pytest.mark.thorough("seconds of several processes")
@pytest.mark.usefixtures("machine")
def test_the_rest_of_the_process_notices_nothing():
    """A fork server of the program's own is another one, and a thread that pickles finds `__main__` in its place."""
    seen, over = set(), threading.Event()

    def looks():
        while not over.is_set():
            seen.add((id(sys.modules["__main__"]), os.environ.get("PYTHONSAFEPATH")))

    thread = threading.Thread(target=looks)
    thread.start()
    for _ in range(5):
        run(lambda world: None, 4)
    over.set()
    thread.join()
    assert seen == {(id(sys.modules["__main__"]), os.environ.get("PYTHONSAFEPATH"))}
    assert forkserver._forkserver._forkserver_pid is None


# ---- folders of processes that were killed --------------------------------------------------------------------------

KILLED = "import os; from lib.runtime.headroom import *; print(Folder(RUN).path, flush=True); os.kill(os.getpid(), 9)"


def test_who_makes_a_folder_removes_those_of_the_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = python("-c", KILLED, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path)).stdout.strip()
    assert os.listdir(tmp_path) == [os.path.basename(left)]
    mine, other = Folder(RUN), Folder(RUN)
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(folder.path) for folder in (mine, other))
    mine.remove()
    other.remove()
    assert not os.listdir(tmp_path)
