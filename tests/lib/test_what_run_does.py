"""What `run` does to a program: its variables, its groups, its debugger, and how pytest shows its failures."""

import io
import os
import pdb
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from lib.launch import RunError, init, run
from lib.runtime import own_rank
from lib.torchrun.start import of_torchrun

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]
NESTED = "from lib.torchrun.start import of_torchrun; print(of_torchrun())"


def asks(world):
    """What this rank is told, and a program that it starts, which torchrun did not."""
    told = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GROUP_WORLD_SIZE")]
    nested = subprocess.run([sys.executable, "-c", NESTED], cwd=ROOT, capture_output=True, text=True).stdout
    try:
        init()
    except RunError as error:
        return told, nested, str(error)


@pytest.mark.usefixtures("machine")
def test_a_rank_knows_its_number_and_that_torchrun_did_not_start_it(monkeypatch):
    of_the_caller = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "GROUP_WORLD_SIZE": "2"}
    for name, value in of_the_caller.items():
        monkeypatch.setenv(name, value)
    for rank, (told, nested, refused) in enumerate(run(asks, 2)):
        assert told == [str(rank), str(rank), "2", None, None]
        assert nested == "(0, 0)\n"
        assert refused.startswith("run() has started and connected this rank: use the `world` that it gives")


def test_a_torchrun_inside_a_rank_is_a_torchrun(monkeypatch):
    for name, value in own_rank.told_to_rank({}, 1, 2).items():
        monkeypatch.setenv(name, value)
    assert of_torchrun() == (0, 0)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert of_torchrun() == (1, 2)


def stops(world):
    texts = []
    for call in (lambda: dist.init_process_group("gloo"), lambda: breakpoint(), lambda: pdb.set_trace()):  # noqa: T100
        try:
            call()
        except RuntimeError as error:
            texts.append(str(error))
    said = io.StringIO()
    answer = 42
    pdb.Pdb(stdin=io.StringIO("p answer\nc\n"), stdout=said, nosigint=True).set_trace()  # as one over a socket
    os.environ["PYTHONBREAKPOINT"] = "0"
    breakpoint()  # noqa: T100
    return texts, said.getvalue(), answer


@pytest.mark.usefixtures("machine")
def test_what_cannot_work_in_a_rank_is_refused():
    ((texts, said, _),) = run(stops, 1)
    twice, *no_terminal = texts
    assert twice.startswith(
        "run() has connected its ranks already: drop init_process_group() from the function, and "
    )
    assert len(no_terminal) == 2 and no_terminal[0] == no_terminal[1]
    assert no_terminal[0].startswith(
        "a rank of run() has no terminal, so no debugger can stop here. Call the function"
    )
    assert "(Pdb) 42\n" in said, "a debugger that brings its own input works"


def steps(world):
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))(torch.ones(4)).sum().backward()
    dist.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("machine")
def test_the_gradients_that_cpp_sends_are_in_no_trace():
    """The day that they are, the page and the docstring of `run` must say so."""
    sums = [event.payload_bytes for event in run(steps, 2, trace=True).trace.events if event.kind == "all_reduce"]
    assert sums == [4, 4]


FAILS = """
from lib.launch import run

def adds(world):
    total = world.rank + 2
    assert total == 2, "of rank 1"

def test_sum():
    run(adds, 2)
"""


def test_pytest_shows_the_line_and_the_values_of_the_rank_that_failed(tmp_path):
    """A function at the top of a test's file, which a rank would import without pytest."""
    (tmp_path / "test_mine.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", "test_mine.py"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert "1 failed" in done.stdout, done
    assert "E       lib.runtime.errors.RankError: rank 1 of 2 raised AssertionError" in done.stdout
    assert "line 6, in adds" in done.stdout and "assert 3 == 2" in done.stdout
    assert "lib/launch.py" not in done.stdout and "lib/runtime/ranks.py" not in done.stdout
