"""`run`: what comes back, what is refused, and what becomes of it when the parent is interrupted, killed or edited."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
from conftest import nothing

from lib import comm
from lib.launch import RankError, Run, RunError, RunTimeout, close, device, init, run
from lib.mesh import Group
from lib.runtime import own_rank
from lib.runtime.pickled import Pickled
from lib.torchrun.start import NAMES
from tests.on_time import on_time

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]
OF_A_RANK = {"GLOO_SOCKET_IFNAME", *own_rank.told_to_rank({}, 0, 1)}


@dataclass
class Point:
    x: int


# ---- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("machine")
def test_results_come_back_in_rank_order(monkeypatch):
    offset = 10
    big = torch.arange(3_000_000, dtype=torch.float64)
    monkeypatch.setenv("TOLD_LATER", "yes")  # after the server has started

    def returns(world, *args):
        a, b = args
        a += world.rank  # a copy: the caller's own is not touched
        place = os.getcwd(), sys.path, {name: x for name, x in os.environ.items() if name not in OF_A_RANK}
        return world.rank + offset, a, Point(world.rank), b["big"] * 2, torch.get_num_threads(), place

    a = torch.zeros(3)
    got = run(returns, 3, a, {"big": big})
    assert isinstance(got, Run) and len(got) == 3 and got.trace is None and 0 < got.wall_s < 10
    for rank, (number, tensor, point, twice, threads, place) in enumerate(got):
        assert number == rank + 10
        assert torch.equal(tensor, torch.full((3,), float(rank)))
        assert point == Point(rank) and type(point) is Point
        assert torch.equal(twice, big * 2)
        assert threads == 1
        assert place == (os.getcwd(), sys.path, {k: x for k, x in os.environ.items() if k not in OF_A_RANK})
    assert torch.equal(a, torch.zeros(3))


@pytest.mark.usefixtures("machine")
def test_tensors_that_share_memory_share_it_over_there():
    """Weights tied through `.data`, views of one tensor, a storage itself: as arguments, and in a result."""

    def changes(world, one, other, x, views, storage):
        one.weight.data[0] = 7
        x[1] = 8
        return other.weight.data, other.weight.data[0, 1:], [view.tolist() for view in views], storage.nbytes()

    one, other, x = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.zeros(6)
    other.weight.data = one.weight.data
    ((whole, part, views, n_bytes),) = run(
        changes, 1, one, other, x[1:], [x[:3], x[2::2], x[:0]], x.untyped_storage()
    )
    whole += 1
    assert whole[0].tolist() == [8, 8] and part.tolist() == [8]
    assert (views, n_bytes) == ([[0, 0, 8], [8, 0], []], 24) and x.sum() == 0


@pytest.mark.usefixtures("machine")
def test_of_a_large_tensor_travels_what_is_sent():
    big = torch.arange(30_000_000.0)
    corner = big.view(3000, 10_000)[1:3, 2:4]
    assert Pickled((corner, corner.t(), big[5:6].to_sparse())).size_bytes < 50_000, "a row and what it is cut from"
    assert torch.equal(run(lambda world, x: x.t().contiguous().t(), 1, corner)[0], corner)


@pytest.mark.usefixtures("machine")
def test_ranks_have_the_default_dtype_of_their_caller():
    before = torch.get_default_dtype()
    for dtype in (torch.float64, before):
        torch.set_default_dtype(dtype)
        assert run(lambda world: torch.ones(1).dtype, 1) == [dtype]


@pytest.mark.timed("it measures how soon a run is done")
@pytest.mark.usefixtures("machine")
def test_a_run_is_fast_and_traced():
    best_s = min(run(nothing, 8).wall_s for _ in range(3))
    with on_time():
        assert best_s < 2, "a rank is forked from a server that has imported torch, not started"
    got = run(lambda world: comm.all_reduce(torch.ones(4), world), 2, trace=True)
    assert sorted((e.rank, e.kind, e.payload_bytes) for e in got.trace.events) == [
        (r, "all_reduce", 16) for r in (0, 1)
    ]
    assert all(0 <= e.start_s <= e.end_s <= got.wall_s for e in got.trace.events)


@pytest.mark.usefixtures("machine")
def test_the_error_of_a_rank_is_that_of_the_run():
    def fails(world):
        return 1 // world.rank

    with pytest.raises(RankError, match="rank 0 of 2") as caught:
        run(fails, 2)
    assert (caught.value.rank, caught.value.error) == (0, "ZeroDivisionError")


@pytest.mark.usefixtures("machine")
def test_a_run_ends_when_its_time_is_up():
    with pytest.raises(RunTimeout, match=r"not done after 1 s \(timeout_s\)"):
        run(lambda world: time.sleep(10), 2, timeout_s=1)


class Screen:
    """A terminal that knows no ∑, and remembers when it was written to."""

    encoding = "ascii"

    def __init__(self):
        self.shown = []

    def write(self, text):
        text.encode("ascii")
        self.shown.append((time.monotonic(), text))

    def flush(self):
        pass


@pytest.mark.usefixtures("machine")
def test_what_the_others_print_comes_in_one_piece(monkeypatch):
    """A notebook stores each write as an output of its own."""
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    run(lambda world: world.rank and print("I am", world.rank), 4)
    assert [text for _, text in screen.shown] == ["rank 1 | I am 1\nrank 2 | I am 2\nrank 3 | I am 3\n"]


@pytest.mark.usefixtures("machine")
def test_rank_0_is_heard_while_it_works(monkeypatch):
    """Its letters too are whole, though they come in pieces."""

    def speaks(world):
        for byte in "∑\n".encode():
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.buffer.flush()
            time.sleep(0.12)
        print("end")

    monkeypatch.setattr(sys, "stdout", screen := Screen())
    run(speaks, 1)
    assert "".join(text for _, text in screen.shown) == "rank 0 | ?\nrank 0 | end\n"
    assert screen.shown[-1][0] - screen.shown[0][0] > 0.1


def files_of(world):
    """The files of a nested function, of a lambda in it, and of a method."""

    class Here:
        def file(self):
            return sys._getframe().f_code.co_filename

    def nested():
        return sys._getframe().f_code.co_filename, (lambda: sys._getframe().f_code.co_filename)()

    return *nested(), Here().file(), nested


def test_code_keeps_the_name_of_its_file(monkeypatch):
    """cloudpickle 3.1.3 takes it away, and then no report and no traceback names the reader's cell."""
    table = cloudpickle.Pickler.dispatch_table
    reduce = table[types.CodeType]
    monkeypatch.setitem(table, types.CodeType, lambda code: reduce(code.replace(co_filename="<dynamic-code>")))
    *files, nested = run(files_of, 1)[0]
    assert {*files, *nested()} == {__file__}


@pytest.fixture
def environment(monkeypatch):
    for name in (*NAMES, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)

    def given(text):
        for pair in text.split():
            monkeypatch.setenv(*pair.split("="))

    return given


ALONE = ["", "RANK= WORLD_SIZE=", "WORLD_SIZE=1", "RANK=0 WORLD_SIZE=1", "RANK=0 WORLD_SIZE=1 MASTER_ADDR=a"]


@pytest.mark.parametrize("variables", [*ALONE, "LOCAL_RANK=1", "SLURM_PROCID=0 SLURM_NTASKS=1"])
def test_one_process_alone(variables, environment):
    environment(variables)
    assert init() == Group()
    assert device() == torch.device("cpu")
    assert close(init(), "report") == ["report"]


SRUN = "srun started 2 tasks, and each would train alone: let srun start one torc"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            "WORLD_SIZE=2",
            "RANK is not set .the environment has WORLD_SIZE=2.; start with torchrun, which sets RANK, W",
        ),
        ("RANK=0", "WORLD_SIZE is not set .*or unset them to run without it"),
        ("RANK=0 WORLD_SIZE=", "WORLD_SIZE is not set"),
        ("RANK=1 WORLD_SIZE=1", "MASTER_PORT is not set"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", "MASTER_ADDR is not set"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=b", "MASTER_PORT='b' is not a whole number"),
        ("RANK=-1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK='-1' is not a whole number"),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK=2 must be below WORLD_SIZE=2"),
        ("SLURM_PROCID=0 SLURM_NTASKS=2", SRUN),
        ("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=2", SRUN),
        ("SLURM_PROCID=0 SLURM_NTASKS=2 RANK=5", "WORLD_SIZE is not set"),
    ],
)
def test_a_start_without_torchrun_or_with_a_part_of_it_is_refused(variables, says, environment):
    environment(variables)
    with pytest.raises(RunError, match=says):
        init()


def test_more_ranks_than_gpus(environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environment("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 CUDA_VISIBLE_DEVICES=3")
    with pytest.raises(RunError, match="LOCAL_RANK is not set"):
        init()
    environment("LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
    gpus = r"LOCAL_RANK=1 has no GPU: 2 ranks on this machine, but 1 visible \(CUDA_VISIBLE_DEVICES=3\)"
    with pytest.raises(RunError, match=gpus + r"; start torchrun with --nproc-per-node 1, or use the CPU: init\(dev"):
        init()


MAIN = """
import torch
import torch.nn.functional as F
COUNT = 0

class Block(torch.nn.Module):
    def forward(self, x):
        return F.gelu(x)

def counts():
    global COUNT
    COUNT += 1
    return COUNT

def compiles(world):
    model = torch.compile(torch.nn.Sequential(Block(), Block()), backend="eager")
    return torch.equal(model(torch.ones(2)), F.gelu(F.gelu(torch.ones(2)))), counts(), COUNT, counts
"""


@pytest.mark.thorough("seconds of several processes")
@pytest.mark.usefixtures("machine")
def test_functions_of_a_script_find_their_globals_where_torch_compile_looks(monkeypatch):
    main = vars(sys.modules["__main__"])
    for name in ("torch", "F", "COUNT", "Block", "counts", "compiles"):
        monkeypatch.setitem(main, name, None)
    exec(MAIN, main)
    ((compiled, counted, count, counts),) = run(main["compiles"], 1)
    assert (compiled, counted, count, counts(), counts()) == (True, 1, 1, 2, 3)
    assert main["COUNT"] == 0, "what a rank does to its globals, and what it returns, changes none here"


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "timeout_s", "error", "text"),
    [
        *[
            ((nothing, n), 60, ValueError, f"world_size={n} must be between 1 and 64.*torchrun")
            for n in (0, -1, 1000)
        ],
        *[((nothing, n), 60, TypeError, f"world_size={n!r} must be a whole number") for n in (3.5, True, "2")],
        ((2, nothing), 60, TypeError, r"run needs a function .*: run\(fn, world_size, ...\)"),
        ((None, 2), 60, TypeError, "run needs a function as its first argument, but got None"),
        *[((nothing, 2), s, ValueError, f"timeout_s={s} must be above 0") for s in (0, -3, float("nan"))],
        *[((nothing, 2), s, TypeError, f"timeout_s={s!r} must be a number of seconds") for s in ("60", None)],
    ],
)
def test_bad_input(args, timeout_s, error, text, private_temp_folder):
    with pytest.raises(error, match=text):
        run(*args, timeout_s=timeout_s)
    assert not os.listdir(tempfile.gettempdir())


# ---- the parent is a script -----------------------------------------------------------------------------------------

HELPER = "def double(x):\n    return 2 * x\n"
SCRIPT = """
    import sys, time
    import torch
    print("top level", flush=True)
    from lib import comm
    from lib.launch import run
    from helper import double

    def waits(world):
        for speaker in (1, 0):  # when rank 0 is heard, both have spoken
            if world.rank == speaker:
                print("waiting", flush=True)
            comm.barrier(world)
        time.sleep(60)

    for _ in range(int(sys.argv[1])):
        try:
            run(waits, 2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    print(run(lambda world: double(world.rank), 2), flush=True)
"""


@pytest.fixture
def tmp_path(tmp_path_factory):
    """A short one: the server's socket lies in it, and the path of a socket has at most 107 letters."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def script(tmp_path):
    """Starts the script above, in a session of its own and with a folder for temporary files of its own."""
    (tmp_path / "temp").mkdir()
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    started = []

    def start(*args):
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temp")}
        command = [sys.executable, tmp_path / "script.py", *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=variables, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


def gone(processes, within_s):
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.thorough("each takes a second or more, alone")
@pytest.mark.timed("it presses Ctrl-C at certain moments, and measures how soon all has ended")
def test_a_script_lives_through_ctrl_c_and_dies_with_its_ranks(script, tmp_path):
    """Ctrl-C while the server starts, Ctrl-C while ranks work, then SIGKILL."""
    process = script("3")
    line = process.stdout.readline
    assert line() == "top level\n"
    while len(psutil.Process(process.pid).children()) < 2:
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does it
    assert [line(), line()] == ["interrupted\n", "rank 0 | waiting\n"]
    ranks = {p for child in psutil.Process(process.pid).children() for p in child.children()}
    assert len(ranks) == 2
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    assert [line(), line(), line()] == ["rank 1 | waiting\n", "interrupted\n", "rank 0 | waiting\n"]
    with on_time():
        assert time.monotonic() - began < 2
    assert not gone(ranks, 0)
    assert len(list((tmp_path / "temp").glob("parallel-by-hand-*"))) == 1
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4, "the two servers and two ranks"
    ranks = {p for p in family if p.ppid() != process.pid}
    process.kill()
    assert len(ranks) == 2 and not gone(ranks, 2), "nobody is left to end the ranks, so they end themselves"
    assert not gone(family, 10)
    left = {path.name for path in (tmp_path / "temp").iterdir()}
    assert not {name for name in left if not name.startswith("torchinductor_")}, "torch's own cache, for all to use"
    assert process.communicate(timeout=5) == ("", "")


@pytest.mark.thorough("seconds of several processes")
def test_a_script_needs_no_main_guard(script):
    """It runs once: functions travel by value, and ranks never see the script."""
    process = script("0")
    assert process.communicate(timeout=100) == ("top level\n[0, 2]\n", "")
    assert process.returncode == 0


ODD_PLACES = """
    import os, pathlib, sys
    import torch
    from lib.launch import run

    def works(world):
        print("heard by nobody")
        return os.getcwd() != "", sys.argv

    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
    sys.path.append(pathlib.Path("/nowhere"))
    stdout, sys.stdout = sys.stdout, None
    first = run(works, 2)
    sys.stdout = open(os.devnull)
    sys.stdout.close()
    second = run(works, 2)
    sys.stdout = stdout
    print(first == second == [(True, sys.argv)] * 2)
"""


# There Python's own resource tracker cannot import `socket` in a folder that is gone (python/cpython#130932). It prints
# so, twice, and runs go on without it.
TRACKER_COMPLAINS = (3, 13) <= sys.version_info < (3, 13, 3)


@pytest.mark.thorough("a process that imports torch")
def test_a_script_in_an_odd_place(tmp_path):
    """It is in no folder, temporary files are in one whose name no socket takes, no stdout, and a path that is none."""
    (tmp_path / "script.py").write_text(textwrap.dedent(ODD_PLACES))
    long = tmp_path / ("x" * 100)
    long.mkdir()
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", "argument"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(long)},
    )  # fmt: skip
    assert done.stdout == "True\n", done.stderr
    assert done.stderr == "" or TRACKER_COMPLAINS


# ---- the parent is a notebook ---------------------------------------------------------------------------------------


@pytest.mark.timed("it presses Ctrl-C at certain moments, and measures how soon all has ended")
def test_a_notebook(start_notebook, tmp_path):
    """Interrupted while the server starts, and while ranks run; errors name cells; nothing is left."""
    notebook = start_notebook()
    starts = "from lib.launch import run\nimport time\ntime.sleep(9)"
    assert notebook(starts, 0.7) == ("KeyboardInterrupt", "", "", "")
    assert notebook("print(run(lambda world: world.rank, 2))") == ("", "", "[0, 1]\n", "")
    family = set(psutil.Process(notebook.pid).children(recursive=True))
    began = time.monotonic()
    text = """
        def loops(world):
            print("here", flush=True)
            while True:
                pass
        run(loops, 2)
    """
    assert notebook(text, 1) == ("KeyboardInterrupt", "", "rank 0 | here\nrank 1 | here\n", "")
    with on_time():
        assert time.monotonic() - began < 4
    assert set(psutil.Process(notebook.pid).children(recursive=True)) == family
    assert not list(tmp_path.glob("parallel-by-hand-*"))

    text = """
        import torch, torch.distributed as dist
        def sends(world):
            dist.send(torch.ones(2), 1 - world.rank)
        run(sends, 2)
    """
    name, report, *_ = notebook(text)
    assert name == "HangError"
    assert "rank 0  waits in send to 1, float32[2]  for " in report
    assert " s  Cell In[4], line 3, in sends: dist.send(torch.ones(2)" in report
    name, report, *_ = notebook("def fails(world):\n    1 / world.rank\nrun(fails, 2)")
    assert name == "RankError"
    raised = "rank 0 of 2 raised ZeroDivisionError\n\nTraceback (most recent call last):\n  Cell In[5], "
    assert report.startswith(raised)
    assert "1 / world.rank" in report and report.endswith("ZeroDivisionError: division by zero")
    assert notebook("def fails(world):\n    return 1\nprint(run(fails, 2))") == ("", "", "[1, 1]\n", "")
    assert set(psutil.Process(notebook.pid).children(recursive=True)) == family
