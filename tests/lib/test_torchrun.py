"""How ranks of torchrun meet and watch each other, with a store in memory and no process; and once as torchrun does."""

import dataclasses
import json
import marshal
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lib.runtime import calls
from lib.runtime.call_table import CallTable, MismatchError
from lib.runtime.hang import RUNNING, STARTING
from lib.torchrun import meeting, start, watchdog
from lib.torchrun.first_calls import ComparedTable
from lib.torchrun.meeting import Member, choose_interface
from lib.torchrun.start import StartError
from lib.torchrun.watchdog import Watchdog

HERE = Member("node0", "a", "", {"lr": 0.1}, {"comm.py": 1})
THERE = Member("node1", "b", "10.77.0.2", {"lr": 0.1}, {"comm.py": 1})


def entered(store, rank, member, into):
    into[rank] = meeting._enter(store, rank, member, 120)


@pytest.mark.parametrize("first", ["the ranks", "rank 0"])
def test_a_round_counts_only_its_own_entries(first, monkeypatch):
    """After a restart the store still has the round of ended ranks, its entries and its roster."""
    store, found = dist.HashStore(), {}
    old = dataclasses.replace(HERE, nonce="old")
    store.set("round", "old")
    for rank in range(3):
        store.set(f"old {rank}", json.dumps(dataclasses.asdict(old)))
    store.set("old roster", json.dumps([dataclasses.asdict(old)] * 3))
    late = [threading.Thread(target=entered, args=(store, rank, THERE, found)) for rank in (1, 2)]
    zero = threading.Thread(target=lambda: found.update({0: meeting._collect(store, 3, HERE, 120)}))
    for one in (*late, zero) if first == "the ranks" else (zero, *late):
        one.start()
        time.sleep(0.05)
    for one in (*late, zero):
        one.join(10)
    assert found[0] == found[1] == found[2]
    assert [Member(**one) for one in found[0]] == [HERE, THERE, THERE]


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    assert meeting._collect(store, 2, HERE, 0.2) == [dataclasses.asdict(HERE), None]
    with pytest.raises(TimeoutError, match="rank 0 does not answer"):
        meeting._enter(dist.PrefixStore("elsewhere", with_a_round(store)), 1, THERE, -4.9)


def with_a_round(store):
    dist.PrefixStore("elsewhere", store).set("round", "nobody's")
    return store


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"settings": {"lr": 0.2}},
            "node1 was started with lr=0.2, and node0 with lr=0.1: give all machines the same",
        ),
        ({"settings": {}}, "node1 was started with lr=None"),
        ({"settings": {"lr": 0.1, "steps": 3}}, "node1 was started with steps=3, and node0 with steps=None"),
        ({"files": {"comm.py": 2}}, "lib/comm.py on node1 differs from that on node0: copy one library to all"),
        ({"files": {"comm.py": 1, "mine.py": 2}}, "lib/mine.py on node1 differs"),
        ({"problem": "no disk", "settings": {}}, "node1: no disk"),
    ],
)
def test_the_first_difference_is_said(other, says):
    meeting._check_alike([HERE, THERE, dataclasses.replace(THERE, files={})])
    with pytest.raises(StartError, match=says):
        meeting._check_alike([HERE, dataclasses.replace(THERE, **other)])


def test_a_problem_on_one_machine_needs_no_name():
    with pytest.raises(StartError, match="^no disk$"):
        meeting._check_alike([HERE, dataclasses.replace(HERE, problem="no disk")])


@pytest.mark.parametrize(
    ("rank", "members", "interface"),
    [
        (0, [HERE, HERE], "lo"),  # one machine
        (0, [HERE, THERE], "eth7"),  # its own name means 127.0.1.1 to itself: the way to the others counts
        (1, [HERE, THERE], "wifi0"),  # the way on which it found the store
        (0, [HERE, dataclasses.replace(THERE, address="")], "the network of this machine's name"),
    ],
)
def test_the_network_is_that_in_which_they_met(rank, members, interface, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    cards = {"lo": "127.0.0.1", "eth7": "10.77.0.1", "wifi0": "10.77.0.2"}
    monkeypatch.setattr(meeting, "interfaces", lambda: cards)
    monkeypatch.setattr(meeting, "address_towards", {"10.77.0.2": "10.77.0.1"}.get)
    assert choose_interface(rank, members) == interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert choose_interface(rank, members) == "mine"


def test_this_machine_reaches_itself():
    assert meeting.address_towards("localhost") == "" and meeting.address_towards("no.such.host.invalid") == ""


class Kept(dist.HashStore):
    def clone(self):
        return self


@pytest.fixture
def watched(monkeypatch):
    """A watch of rank 0 of two whose thread sleeps, and a function by which rank 1 says something."""
    monkeypatch.setattr(Watchdog, "beat_s", 1000.0)
    monkeypatch.setattr(watchdog, "written_bytes", lambda: 0)
    store = Kept()
    one = Watchdog(store, 0, [HERE, THERE], 60.0, "eth7")
    clock, beats = [time.monotonic()], iter(range(1, 1000))
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])

    def passes(seconds, other=None, stuck=False):
        clock[0] += seconds
        if other is not None:
            store.set("row 1", marshal.dumps((next(beats), 0, stuck, *other.row(1))))
        one._write()
        ending = one._judge()
        return ending.text if ending else ""

    yield one, passes
    one._end.set()


def test_the_first_calls_of_different_machines_are_compared():
    store = dist.HashStore()
    here, there = (ComparedTable(store, 2, rank) for rank in (0, 1))
    for table in (here, there):
        assert table.call("world", (0, 1), "all_reduce float32[4]", "here") == 0
    here.call("world", (0, 1), "all_reduce float32[4]", "train.py, line 7")
    with pytest.raises(MismatchError, match="ranks 0 and 1 disagree: their call number 2") as error:
        there.call("world", (0, 1), "all_reduce int32[4]", "train.py, line 8")
    assert error.value.ranks == (0, 1)
    assert "rank 0  all_reduce float32[4]  train.py, line 7" in str(error.value)
    for table in (here, there):
        table.call("dp", (0, 1), "barrier", "")  # another group has its own count


def row_of_rank_1():
    table = CallTable(None, 2, 1)
    table.state(STARTING)
    return table


def test_ranks_that_wait_for_each_other(watched):
    mine, passes = watched
    other = row_of_rank_1()
    for row, peer in ((mine.table, 1), (other, 0)):
        number = row.call("world", (0, 1), "all_reduce float32[4]", "here")
        row.waiting(f"recv from {peer}", "train.py, line 7", (peer,), f"{peer}>", number).__enter__()
    assert passes(0, other) == "" and passes(29, other) == ""
    said = passes(2, other)
    assert said.splitlines()[0] == "deadlock: ranks 0 and 1 wait for each other. Nothing has moved for 31 s."
    assert "rank 1 on node1  waits in recv from 0  for 31.0 s  train.py, line 7" in said
    other.state(RUNNING)
    assert passes(2, other) == "", "it moved"


def wait_for_each_other(mine, other):
    for row, peer in ((mine, 1), (other, 0)):
        row.waiting(f"recv from {peer}", "", (peer,), f"{peer}>", 0).__enter__()


@pytest.mark.parametrize("thread", ["none", "here", "there"])
def test_a_deadlock_that_no_thread_can_end_is_told_soon(thread, watched, monkeypatch):
    """And one with a thread that could still send has the time that it had."""
    mine, passes = watched
    other, stuck = row_of_rank_1(), thread != "there"
    monkeypatch.setattr(watchdog, "may_send", lambda: thread == "here")
    wait_for_each_other(mine.table, other)
    assert passes(0, other, stuck) == "" and passes(5, other, stuck) == ""
    assert passes(2, other, stuck).startswith("deadlock: ranks 0 and 1" if thread == "none" else "")
    assert bool(passes(0, other, stuck)) == (thread == "none")
    assert passes(24, other, stuck).startswith("deadlock: ranks 0 and 1 wait for each other.")


def test_a_row_that_is_old_is_no_proof(watched, monkeypatch):
    """The rank may have moved on since it wrote it."""
    mine, passes = watched
    other = row_of_rank_1()
    monkeypatch.setattr(watchdog, "may_send", lambda: False)
    wait_for_each_other(mine.table, other)
    assert passes(0, other, True) == ""
    assert passes(10) == "", "it has written nothing since"
    assert passes(0, other, True).startswith("deadlock")


def test_a_call_that_all_have_made_may_only_be_slow(watched, monkeypatch):
    mine, passes = watched
    other = row_of_rank_1()
    monkeypatch.setattr(watchdog, "may_send", lambda: False)
    for row in (mine.table, other):
        number = row.call("world", (0, 1), "all_reduce float32[4]", "here")
        row.waiting("all_reduce", "", (0, 1), "world", number).__enter__()
    assert [passes(9, other, True) for _ in range(4)] == [""] * 4
    assert "Nothing has moved for 36 s" in passes(9, other, True)


def test_a_second_thread_in_a_call_is_no_proof(watched, monkeypatch):
    mine, passes = watched
    other = row_of_rank_1()
    monkeypatch.setattr(watchdog, "may_send", lambda: False)
    mine.table.waiting("all_reduce", "", (0, 1), "world", 0).__enter__()
    wait_for_each_other(mine.table, other)
    assert passes(0, other, True) == passes(10, other, True) == ""


def test_a_rank_that_says_nothing(watched):
    mine, passes = watched
    other = row_of_rank_1()
    mine.table.waiting("all_reduce", "", (0, 1), "world", mine.table.call("world", (0, 1), "", "")).__enter__()
    assert passes(0, other) == ""
    said = passes(31)
    assert "rank 1 gave no sign of life for 30 s: its process is stopped, or its machine or network is gone" in said
    assert "rank 0 on node0  waits in all_reduce: rank 1 did not call it" in said
    assert "rank 1 on node1  has said nothing for 31 s" in said


def test_a_rank_that_computes_has_until_the_limit(watched):
    mine, passes = watched
    other = row_of_rank_1()
    other.state(RUNNING)
    mine.table.waiting("all_reduce", "", (0, 1), "world", 0).__enter__()
    assert passes(50, other) == ""
    assert "rank 0 has waited for 61 s, the limit; the others wait for rank 1." in passes(11, other)
    assert "rank 1 on node1  computes" in passes(0, other)


def test_a_rank_that_cannot_connect(watched):
    mine, passes = watched
    other = row_of_rank_1()
    assert passes(100, other) == ""
    said = passes(21, other)
    says = "rank 0 on node0 cannot connect to the other ranks over eth7: no connection for 120 s; set GLOO_"
    assert said.startswith(says)


# ---- a start --------------------------------------------------------------------------------------------------------


def test_a_start_is_over_when_the_ranks_are_connected(watched, monkeypatch):
    """And not with the first call: before it a rank may compute for longer than a start may take."""
    one, passes = watched
    monkeypatch.setattr(calls, "table", one.table)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **more: None)
    monkeypatch.setattr("lib.mesh.timeout", None)
    monkeypatch.setattr(start, "_watchdogs", [])
    start.connect("gloo", Kept(), one)
    other = row_of_rank_1()
    other.state(RUNNING)
    assert [passes(25, other) for _ in range(6)] == [""] * 6 and 6 * 25 > one.start_s


PROGRAM = """
    import torch
    from lib import comm
    from lib.launch import close, init

    world = init(device="cpu", settings={"lr": 0.1})
    total = comm.all_reduce(torch.tensor([1.0 + world.rank]), world)
    reports = close(world, {"rank": world.rank, "total": total.item()})
    if world.rank == 0:
        print(reports)
"""


def test_torchrun_starts_two_ranks(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[{'rank': 0, 'total': 3.0}, {'rank': 1, 'total': 3.0}]\n"
