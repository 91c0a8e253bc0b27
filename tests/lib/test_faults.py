"""Everything that may go wrong in a rank: one clear error, soon, and nothing left behind.

Each fault is a function that every rank runs. The limits are what the reader feels: two seconds in which nothing moves
make a hang, everything else is known at once.
"""

import concurrent.futures
import ctypes
import mmap
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cloudpickle
import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from lib import comm
from lib.launch import HangError, MismatchError, RankError, RunTimeout, run
from lib.mesh import Group, second_lane
from lib.runtime import hang, record_torch_calls
from tests.on_time import on_time

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = [pytest.mark.timed("it measures how soon a fault is known"), pytest.mark.usefixtures("machine")]

SOON_S, HANG_S = 2.0, 4.0
ONES, SQUARE = torch.ones(4), torch.ones(4, 4)


def refuse(word):
    raise ValueError(f"no {word} today")


# ---- one rank ends --------------------------------------------------------------------------------------------------


def fails_alone(world, rank, does):
    """One rank does something, and returns what comes of it; the others wait for it."""
    result = does() if world.rank == rank else None
    comm.barrier(world)
    return result


def raises_after(world):
    comm.all_reduce(ONES, world)
    if world.rank == 2:
        refuse("tea")
    comm.barrier(world)


def raises_inside(world):
    """Its peers are in the middle of it: the message is larger than what sockets hold."""
    if world.rank == 1:
        comm.all_reduce_start(torch.ones(1 << 22), world)
        refuse("sugar")
    comm.all_reduce(torch.ones(1 << 22), world)


def raises_late(world):
    """The other ranks have returned already."""
    if world.rank == 0:
        time.sleep(0.3)
        refuse("milk")


def wraps_the_loss_of_a_peer(world):
    """A rank that calls its peer's death by a name of its own is not the cause."""
    if world.rank == 2:
        time.sleep(0.1)
        os._exit(7)
    try:
        comm.all_reduce(ONES, world)
    except RuntimeError as error:
        raise KeyError("my network") from error


def crashes():
    os.write(2, b"what the C++ library said last\n")
    os.abort()


def reads_past_the_end_of_a_file():
    """What a full disk does to memory that is a file."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        memory[0]


def dies_while_it_computes(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(30)


def raises_itself():
    class OddError(Exception):
        def __str__(self):
            raise RuntimeError("cannot even be printed")

    raise OddError


def bad_to_load():
    raise OSError("not on this side")


class NeverArrives:
    def __reduce__(self):
        return bad_to_load, ()


def closes_stdout():
    sys.stdout.close()
    refuse("prints")


def says_a_tensor():
    raise ValueError("x" * 5_000_000)


def runs_inside(world):
    """All ranks do it, at about the same time: the first in rank order speaks."""
    comm.barrier(world)  # not later than the others by the time that a rank takes to start
    run(lambda inner: None, 2)


def kill(number):
    return lambda: os.kill(os.getpid(), number)


ENDS = {  # the rank to blame; what the message says; what every rank does, or this rank alone
    "raises before": (1, r"raised ValueError\n\nTraceback.*in <lambda>\n.*no coffee today", lambda: refuse("coffee")),
    "raises inside": (1, "no sugar today", raises_inside),
    "raises after": (2, "no tea today", raises_after),
    "raises late": (0, "no milk today", raises_late),
    "wraps the loss of a peer": (2, "exited without returning .* exit code 7", wraps_the_loss_of_a_peer),
    "exits": (
        1,
        r"called sys.exit\('enough'\)\n.*test_faults.py\", line \d+, in <lambda>",
        lambda: sys.exit("enough"),
    ),
    "exits in silence": (1, r"called sys.exit\(\)", sys.exit),
    "leaves": (0, r"exited without returning \(os._exit\?\), with exit code 3", lambda: os._exit(3)),
    "leaves with 0": (2, "exit code 0", lambda: os._exit(0)),
    "killed": (2, "was killed by SIGKILL; was the machine out of memory", kill(signal.SIGKILL)),
    "crashes": (1, "was killed by SIGABRT.*what the C\\+\\+ library said last", crashes),
    "reads address 0": (1, "killed by SIGSEGV\n.*Segmentation.*line \\d+ in string_at", lambda: ctypes.string_at(0)),
    "reads past the end of a file": (
        *(2, "was killed by SIGBUS; .* is its disk full\\? .* free\n.*line \\d+ in reads_p"),
        reads_past_the_end_of_a_file,
    ),
    "gets a signal without a name": (0, f"was killed by {signal.SIGRTMIN + 1}", kill(signal.SIGRTMIN + 1)),
    "dies while it computes": (
        1,
        "was killed by SIGSEGV.*line \\d+ in dies_while_it_computes",
        dies_while_it_computes,
    ),
    "closes everything": (1, "exited without returning|was killed by SIGABRT", lambda: os.closerange(3, 200)),
    "raises itself": (0, "raised OddError", raises_itself),
    "returns a socket": (1, "returned a socket that cannot be sent", lambda: socket.socket()),
    "returns a generator": (2, "returned a generator that cannot be sent", lambda: (i for i in range(3))),
    "returns what cannot be read": (0, "cannot be read here: not on this side", NeverArrives),
    "says a tensor": (1, r"Error: x{5,9999}\n\.\.\. [\d,]{9} letters left out \.\.\.\nx{10000}$", says_a_tensor),
    "closes stdout": (1, "no prints today", closes_stdout),
    "asks for all memory": (
        *(1, r"you tried to allocate 281474976710656 bytes.*\n\d.* of .* GB of memory are free\.$"),
        lambda: torch.empty(1 << 46),
    ),
    "runs inside": (0, r"RuntimeError: run\(\) was called inside a rank", runs_inside),
}


@pytest.mark.thorough("each takes a second or more, alone", keep=5)
@pytest.mark.parametrize("what", ENDS)
def test_a_rank_ends(what, capfd):
    (rank, text, fault), began = ENDS[what], time.monotonic()
    of_all = getattr(fault, "__code__", None) and fault.__code__.co_varnames[:1] == ("world",)
    with pytest.raises(RankError) as caught:
        run(*(fault, 3) if of_all else (fails_alone, 3, rank, fault))
    with on_time():
        assert time.monotonic() - began < SOON_S
    assert caught.value.rank == rank
    assert re.search(f"^rank {caught.value.rank} of 3.*({text})", str(caught.value), re.DOTALL), caught.value
    assert "lib/runtime/worker.py" not in str(caught.value), "the machine's own frames are no help"
    assert "closed by peer" not in str(caught.value)
    assert caught.value.__context__ is None
    assert capfd.readouterr() == ("", ""), "all is said by the exception"


# ---- ranks wait for ever --------------------------------------------------------------------------------------------


def all_send_first(world):
    comm.send(ONES, world, (world.rank + 1) % world.size).wait()
    comm.recv(ONES, world, (world.rank - 1) % world.size).wait()


def one_skips(world):
    if world.rank != 1:
        comm.all_reduce(ONES, world)


def one_does_another_thing(world):
    """Ranks 0 and 2 are in a collective, rank 1 waits for a message: different channels, nothing to compare."""
    if world.rank == 1:
        return comm.recv(ONES, world, 2).wait()
    comm.all_reduce(ONES, world)


def started_and_awaited(world):
    pending = comm.all_gather_start(ONES, world) if world.rank != 2 else None
    if pending:
        return pending.wait()


def exchange_without_answer(world):
    if world.rank != 2:
        comm.exchange({2: ONES}, {2: ONES}, world).wait()


def recovers_from_a_mismatch(world):
    """Rank 2 sees the error, says nothing and goes home; the others wait."""
    time.sleep(0.2 * (world.rank == 2))
    try:
        comm.all_reduce(torch.ones(4 + (world.rank == 2)), world)
    except MismatchError:
        pass


def torch_all_send_first(world):
    dist.send(ONES, (world.rank + 1) % world.size)
    dist.recv(ONES, (world.rank - 1) % world.size)


def torch_one_skips(world):
    if world.rank != 1:
        dist.all_reduce(ONES)


def torch_async(world):
    if world.rank != 1:
        work = dist.all_reduce(ONES, async_op=True)
        work.wait()


def torch_isend(world):
    if world.rank == 0:
        dist.isend(ONES, 1).wait()


def torch_irecv(world):
    if world.rank == 0:
        dist.irecv(ONES, 1).wait()


def torch_batch(world):
    """All send to the right, and wait for something from the right, too."""
    right = (world.rank + 1) % world.size
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, ONES, right), dist.P2POp(dist.irecv, ONES.clone(), right)])
    for work in works:
        work.wait()


def torch_new_group(world):
    if world.rank != 2:
        dist.new_group([0, 1, 2])


def torch_new_group_of_two(world):
    if world.rank == 0:
        dist.new_group([0, 2], use_local_synchronization=True)


def torch_monitored_barrier(world):
    if world.rank:
        dist.monitored_barrier()


def one_builds_no_mesh(world):
    if world.rank == 1:
        comm.recv(ONES, world, 0).wait()
    elif world.rank == 0:
        second_lane(Group("dp", (0, 1), 0))


def one_has_finished_outside_the_cycle(world):
    """Ranks 0 and 1 wait for each other; rank 2 has nothing to do."""
    if world.rank < 2:
        comm.recv(ONES, world, 1 - world.rank).wait()


def torch_barrier_and_reduce(world):
    if world.rank:
        dist.barrier()
    else:
        dist.recv(ONES, 1)


REPORTS = Path(__file__).with_name("golden").joinpath("hangs.txt").read_text(encoding="utf-8")
WAITS = dict(re.findall(r"^== (\w+)\n(.*?)\n(?=\n|\Z)", REPORTS, re.DOTALL | re.MULTILINE))
MEANS = {  # the same as data: for each rank that waits, in what and for whom; who has finished; the cycle
    "all_send_first": ({r: ("send", ((r + 1) % 3,)) for r in range(3)}, (), (0, 1, 2)),
    "one_skips": ({0: ("all_reduce", (1,)), 2: ("all_reduce", (1,))}, (1,), ()),
    "one_does_another_thing": ({0: ("all_reduce", (1,)), 1: ("recv", (2,)), 2: ("all_reduce", (1,))}, (), (1, 2)),
    "torch_isend": ({0: ("send", (1,))}, (1, 2), ()),
}


@pytest.mark.thorough("each takes a second or more, alone", keep=4)
@pytest.mark.parametrize("fault", WAITS)
def test_ranks_wait_for_ever(fault, capfd, monkeypatch):
    if fault != "all_send_first":  # once as it is, then in a hurry
        monkeypatch.setattr(hang, "STILL_S", 0.5)
    began = time.monotonic()
    with pytest.raises(HangError) as caught:
        run(globals()[fault], 3)
    with on_time():
        assert time.monotonic() - began < HANG_S
    source = Path(__file__).read_text().splitlines()
    for number, shown in re.findall(r"test_faults.py, line (\d+), in \w+: (.*)", str(caught.value)):
        assert source[int(number) - 1].strip().startswith(shown.rstrip("…"))
    report = re.sub(r"line \d+", "line *", str(caught.value))
    assert re.sub(r"for [\d.]+ s\b", "for * s", report) == WAITS[fault]
    if fault in MEANS:
        waits = {rank: (wait.kind, wait.late) for rank, wait in caught.value.waits.items()}
        assert (waits, caught.value.finished, caught.value.circle) == MEANS[fault]
    assert capfd.readouterr() == ("", "")


def sends_much(world, folder):
    Path(folder, f"pid{world.rank}").write_text(str(os.getpid()))
    if world.rank == 0:
        return comm.send(torch.ones(200_000_000, dtype=torch.int8), world, 1).wait()
    return comm.recv(torch.empty(200_000_000, dtype=torch.int8), world, 0).wait().sum().item()


def slow_down(folder, for_s):
    """Let rank 1 run for moments only: bytes of one message move, and all else stands still."""

    def pid(rank):
        return int(Path(folder, f"pid{rank}").read_text())

    def sent():
        return int(re.findall(r"wchar: (\d+)", Path(f"/proc/{pid(0)}/io").read_text())[0])

    while not all(Path(folder, f"pid{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    time.sleep(0.05)
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        os.kill(pid(1), signal.SIGSTOP)
        time.sleep(0.25)
        before = sent()
        os.kill(pid(1), signal.SIGCONT)
        while sent() == before:
            time.sleep(0.001)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts bytes of a process")
def test_a_message_that_moves_is_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "STILL_S", 0.5)
    thread = threading.Thread(target=slow_down, args=(tmp_path, 1.5))
    thread.start()
    got = run(sends_much, 2, str(tmp_path))
    thread.join()
    assert got == [None, 200_000_000] and got.wall_s > 1.5


def in_a_thread(function, *args, wait=True):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    if wait:
        thread.join()


def a_thread_sends_late(world):
    """Both main threads wait; only rank 0's other one can help."""

    def late():
        time.sleep(1.2)
        comm.send(ONES, world, 1).wait()

    if world.rank:
        comm.send(comm.recv(ONES.clone(), world, 0).wait(), world, 0).wait()
    else:
        in_a_thread(late, wait=False)
        comm.recv(ONES.clone(), world, 1).wait()


def the_main_thread_sends_late(world):
    if world.rank:
        in_a_thread(lambda: comm.recv(ONES.clone(), world, 0).wait())
    else:
        in_a_thread(lambda: comm.recv(ONES.clone(), world, 1).wait(), wait=False)
        time.sleep(1.2)
        comm.send(ONES, world, 1).wait()
        return
    comm.send(ONES, world, 0).wait()


def sends_when_its_function_has_returned(world):
    if world.rank:
        comm.recv(ONES.clone(), world, 0).wait()
    else:
        in_a_thread(lambda: (time.sleep(1.2), comm.send(ONES, world, 1).wait()), wait=False)


@pytest.mark.thorough("each takes a second or more, alone", keep=1)
@pytest.mark.parametrize(
    "legal", [a_thread_sends_late, the_main_thread_sends_late, sends_when_its_function_has_returned]
)
def test_a_thread_that_may_still_send(legal, monkeypatch):
    monkeypatch.setattr(hang, "STILL_S", 0.5)
    run(legal, 2)


def waits_in_a_thread(world):
    in_a_thread(lambda: comm.recv(ONES.clone(), world, 1 - world.rank).wait())


def waits_beside_an_idle_pool(world):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 0).result()
        comm.recv(ONES.clone(), world, 1 - world.rank).wait()


def waits_when_a_thread_has_ended(world):
    lane = second_lane(world)
    in_a_thread(lambda: (time.sleep(0.1), comm.barrier(lane)), wait=False)
    comm.all_reduce(ONES, world) if world.rank else comm.recv(ONES.clone(), world, 1).wait()


@pytest.mark.thorough("each takes a second or more, alone", keep=1)
@pytest.mark.parametrize("fault", [waits_in_a_thread, waits_beside_an_idle_pool, waits_when_a_thread_has_ended])
def test_threads_wait_for_ever(fault, monkeypatch):
    monkeypatch.setattr(hang, "STILL_S", 0.5)
    with pytest.raises(HangError, match="deadlock: ranks 0 and 1 wait for each other"):
        run(fault, 2, timeout_s=10)


@pytest.mark.thorough("each takes a second or more, alone")
def test_the_threads_of_a_rank_whose_time_is_up(monkeypatch):
    monkeypatch.setattr(hang, "STILL_S", 0.2)
    with pytest.raises(
        RunTimeout, match=r"(?s)rank 0:\n.*in a_thread_sends_late.*\nThread-\d .*:\n.*in late\n.*sleep"
    ):
        run(a_thread_sends_late, 2, timeout_s=0.5)


# ---- ranks disagree -------------------------------------------------------------------------------------------------


def longer(world):
    return torch.ones(4 if world.rank else 6)


def one_of_integers(world):
    return torch.ones(4, dtype=torch.int32 if world.rank == 1 else torch.float32)


def other_op(world):
    comm.reduce_scatter(torch.ones(6), world, op="max" if world.rank == 0 else "sum")


def other_order(world):
    first, second = (comm.all_gather, comm.all_reduce) if world.rank == 2 else (comm.all_reduce, comm.all_gather)
    first(ONES, world)
    second(ONES, world)


def other_message(world):
    if world.rank == 0:
        comm.send(ONES, world, 1).wait()
    elif world.rank == 1:
        comm.recv(torch.ones(2, 2), world, 0).wait()


def far_ahead(world):
    """Rank 0 has started 40 calls when the others come to a wrong one among them."""
    time.sleep(0.2 * (world.rank > 0))
    for i in range(40):
        pending = comm.all_reduce_start(torch.ones(3 if i == 5 and world.rank else 4), world)
    pending.wait()


def torch_other_history(world):
    """torch names such a group by the number of groups of a process, and would wait forever."""
    if world.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.new_group([0, 1, 2], use_local_synchronization=True)


def other_group(world):
    second_lane(Group("tp" if world.rank else "dp", (0, 1, 2), world.rank))


def torch_other_order(world):
    if world.rank:
        dist.barrier()
    dist.all_reduce(ONES.clone())
    if not world.rank:
        dist.barrier()


def torch_other_message(world):
    if world.rank == 0:
        dist.isend(ONES, 1).wait()
    elif world.rank == 1:
        dist.recv(torch.ones(5), 0)


@pytest.mark.thorough("each takes a second or more, alone", keep=4)
@pytest.mark.parametrize(
    ("one", "other", "fault"),
    [
        ("all_reduce sum float32[6]", "all_reduce sum float32[4]", lambda w: comm.all_reduce(longer(w), w)),
        ("all_reduce sum float32[4]", "all_reduce sum int32[4]", lambda w: comm.all_reduce(one_of_integers(w), w)),
        ("all_reduce sum float32[4]", "all_gather dim=0 float32[4]", other_order),
        ("all_gather dim=0 float32[4, 4]", "all_gather dim=1", lambda w: comm.all_gather(SQUARE, w, w.rank % 2)),
        ("broadcast src=", "broadcast src=", lambda w: comm.broadcast(ONES, w, src=w.rank)),
        ("reduce_scatter max, dim=0 float32[6]", "reduce_scatter sum, dim=0 float32[6]", other_op),
        ("message float32[4]", "message float32[2, 2]", other_message),
        ("float32[0]", "float32[3]", lambda w: comm.all_gather(torch.ones(0 if w.rank == 1 else 3), w)),
        ("all_reduce sum float32[4]", "all_reduce sum float32[3]", far_ahead),
        ("all_reduce sum float32[6]", "all_reduce sum float32[4]", lambda w: dist.all_reduce(longer(w))),
        ("all_reduce sum float32[4]", "all_reduce sum int32[4]", lambda w: dist.all_reduce(one_of_integers(w))),
        ("new_group(ranks 0, 1)", "new_group(ranks 0, 2)", lambda w: dist.new_group([0, 1 + w.rank % 2])),
        ("a process with 2 groups, by which torch names it", "in a process with 1 groups", torch_other_history),
        ("for a second lane of dp", "for a second lane of tp", other_group),
        ("broadcast src=", "broadcast src=", lambda w: dist.broadcast(ONES.clone(), src=w.rank)),
        ("all_reduce sum float32[4]", "barrier", torch_other_order),
        ("message float32[4]", "message float32[5]", torch_other_message),
    ],
)
def test_ranks_disagree(one, other, fault, capfd):
    began = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        run(fault, 3)
    with on_time():
        assert time.monotonic() - began < SOON_S
    text = str(caught.value)
    assert re.match(r"ranks \d and \d disagree: their call number \d in this group differs\.\n", text)
    assert one in text and other in text
    line = rf"^  rank \d  \S.*test_faults.py, line \d+, in {fault.__name__}: "
    assert len(re.findall(line, text, re.MULTILINE)) == 2
    assert capfd.readouterr() == ("", "")


def test_a_refused_call_may_be_made_again():
    """A mismatch is noticed before a byte moves: who catches it can still make the right call."""

    def asks_twice(world):
        time.sleep(0.2 * (world.rank == 2))
        try:
            return comm.all_reduce(torch.ones(4 + (world.rank == 2)), world)
        except MismatchError:
            return comm.all_reduce(torch.ones(4), world)

    assert torch.equal(torch.stack(run(asks_twice, 3)), torch.full((3, 4), 3.0))


# ---- ranks compute for ever -----------------------------------------------------------------------------------------


def loops(world):
    while world.rank == 1:
        pass
    comm.barrier(world)


def sleeps(world):
    time.sleep(60)


def test_time_is_up():
    for fault, line in [(loops, "while world.rank == 1:|pass"), (sleeps, r"time.sleep\(60\)")]:
        began = time.monotonic()
        with pytest.raises(RunTimeout, match=r"not done after 0.5 s \(timeout_s\)") as caught:
            run(fault, 3, timeout_s=0.5)
        with on_time():
            assert time.monotonic() - began < 0.5 + SOON_S
        assert isinstance(caught.value, TimeoutError)
        stack = str(caught.value).partition("rank 1:\n")[2]
        assert re.match(rf'  File "tests/lib/test_faults.py", line \d+, in {fault.__name__}\n    ({line})', stack)
        assert "multiprocessing" not in str(caught.value)
        if fault is loops:  # beside those who wait for it
            table = str(caught.value).splitlines()[1:4]
            assert table[0].startswith("  rank 0  waits in barrier: rank 1 did not call it  for 0.")
            assert table[1] == "  rank 1  computes"


class Slow:
    """An argument that takes a second to arrive."""

    def __reduce__(self):
        return time.sleep, (1,)


def test_the_start_does_not_count():
    assert run(lambda world, slow: world.rank, 2, Slow(), timeout_s=0.5) == [0, 1]


def test_a_start_that_does_not_end(monkeypatch):
    monkeypatch.setattr("lib.runtime.ranks.START_S", -0.3)
    with pytest.raises(RunTimeout, match="rank 0  is starting"):
        run(lambda world, slow: None, 2, Slow(), timeout_s=0.5)


def test_a_hang_that_began_in_time_is_told_as_a_hang(monkeypatch):
    """A limit that passes while ranks are still says nothing; the cycle of waits says all."""
    monkeypatch.setattr(hang, "STILL_S", 0.6)
    with pytest.raises(HangError, match="deadlock: ranks 0 and 1 wait for each other"):
        run(all_send_first, 2, timeout_s=0.3)


def ask_and_answer(world):
    while True:
        time.sleep(0.01 * world.rank)
        comm.all_reduce(ONES, world)


def test_ranks_that_only_communicate_have_no_more_time():
    began = time.monotonic()
    with pytest.raises(RunTimeout):
        run(ask_and_answer, 2, timeout_s=0.5)
    with on_time():
        assert time.monotonic() - began < 0.5 + SOON_S


# ---- what cannot be sent --------------------------------------------------------------------------------------------


def test_a_function_that_cannot_be_sent():
    lock = __import__("threading").Lock()
    with pytest.raises(TypeError, match="asks_lock or its arguments cannot be sent to another process: .*lock"):

        def asks_lock(world):
            return lock.locked()

        run(asks_lock, 2)
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        run(sleeps, 2, (i for i in range(3)))


# ---- what ranks print, start and open -------------------------------------------------------------------------------


def prints_garbage(world):
    os.write(1, bytes(range(256)) * 100)  # past Python, as a C library does
    os.write(2, b"[W socket.cpp:200] C++ chatter\n")
    sys.stdout.buffer.write(b"\xff\xfe\x00 not text\n")
    sys.stdout.flush()
    print("é" * 2_000, end="")
    print("🧮", "\ud800")
    sys.stderr.write("to stderr\n")
    for _ in range(100):
        print("x" * 10)
    return comm.all_reduce(ONES, world)


def test_garbage_prints(capfd):
    assert torch.equal(run(prints_garbage, 2)[1], 2 * ONES)
    out, err = capfd.readouterr()
    assert "chatter" not in out + err and err == ""
    for rank in range(2):
        lines = [line for line in out.split("\n") if line.startswith(f"rank {rank} | ")]
        assert len(lines) == 103, "each line says whose it is"
        assert lines[0].endswith(" not text")
        assert lines[1] == f"rank {rank} | " + "é" * 2_000 + "🧮 \\ud800", "no letter was cut in two"
        assert lines[2].endswith("to stderr")
    assert out.index("rank 0 | x") < out.index("rank 1 | x")


def test_prints_of_all_ranks_are_shown_when_one_fails(capfd):
    def speaks(world):
        print("I am", world.rank)
        comm.barrier(world)
        if world.rank == 1:
            refuse("cake")
        comm.barrier(world)

    with pytest.raises(RankError, match="no cake"):
        run(speaks, 3)
    assert capfd.readouterr().out == "rank 0 | I am 0\nrank 1 | I am 1\nrank 2 | I am 2\n"


@pytest.mark.thorough("each takes a second or more, alone", keep=1)
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rank_has_started_ends_with_it(fails):
    def starts_a_program(world):
        pids = [subprocess.Popen(["sleep", "100"]).pid, os.fork() or time.sleep(100)]
        if fails:
            raise ValueError(str(pids))
        return pids

    try:
        text = str(run(starts_a_program, 2))
    except RankError as error:
        text = re.findall(r"ValueError: (.*)", str(error))[0]
    pids = [int(pid) for pid in re.findall(r"\d+", text)]
    assert len(pids) >= 2
    until = time.monotonic() + 2
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


def forks_and_comes_back(world, how):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "raises":
        refuse("lunch")
    elif how == "exits":
        sys.exit(3)
    elif how == "exits well":
        sys.exit()
    return "the copy's"


@pytest.mark.thorough("each takes a second or more, alone", keep=1)
@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("exits well", 0), ("exits", 3), ("raises", 1)])
def test_a_forked_copy_of_a_rank_has_no_part_in_the_run(how, code, capfd):
    assert run(forks_and_comes_back, 2, how) == [code] * 2
    out, err = capfd.readouterr()
    assert ("no lunch today" in out) == (how == "raises") and err == ""


@pytest.mark.thorough("each takes a second or more, alone")
def test_an_error_comes_out_of_a_pool_of_processes_whole():
    def fails(world):
        raise ValueError("the cause")

    with pytest.raises(RankError) as caught:
        run(fails, 1)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert vars(copied) == vars(caught.value) and str(copied) == str(caught.value)
    assert copied.rank == 0 and copied.error == "ValueError" and "the cause" in copied.trace_back


def test_numpy_draws_other_numbers_on_each_rank_and_in_each_run():
    drawn = [number for _ in range(3) for number in run(lambda world: numpy.random.randint(2**31), 2)]
    assert len(set(drawn)) == len(drawn)


# ---- torch.distributed, rightly used, is left alone -----------------------------------------------------------------


def uses_torch_distributed(world):
    from torch.distributed import all_reduce, isend

    me, n, x = world.rank, world.size, torch.full((3,), float(world.rank))
    right, left, seen = (me + 1) % n, (me - 1) % n, []
    for size in (1, 2, 3):  # isend against recv, send against irecv: one message each
        request = isend(torch.full((size,), float(me)), right)
        got = torch.empty(size)
        dist.recv(got, left)
        request.wait()
        seen.append(got[0].item() == left)
    y = torch.empty(3)
    request = dist.irecv(y, src=left)
    dist.send(x, dst=right)
    request.wait()
    seen.append(torch.equal(y, torch.full((3,), float(left))))
    a, b = torch.ones(1), torch.ones(2)  # tags: out of order, rightly
    works = [dist.isend(a, right, tag=1), dist.isend(b, right, tag=2)]
    dist.recv(torch.empty(2), left, tag=2)
    dist.recv(torch.empty(1), left, tag=1)
    [w.wait() for w in works]
    dist.isend(a, right)  # nobody waits for it, and it arrives
    dist.recv(torch.empty(1), left)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)])
    [w.wait() for w in works]
    total = x.clone()
    all_reduce(total)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    work.wait()
    seen.append(total[0].item() == n * sum(range(n)))
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    seen.append(objects == [{"rank": i} for i in range(n)])
    box = [("from", 1) if me == 1 else None]
    dist.broadcast_object_list(box, src=1)
    seen.append(box == [("from", 1)])
    parts = [torch.empty(1) for _ in range(n)] if me == 0 else None
    dist.gather(torch.full((1,), float(me)), parts)
    dist.scatter(torch.empty(1), parts)
    dist.all_to_all_single(torch.empty(n), torch.ones(n))
    pair, all_again = dist.new_group([0, 1]), dist.new_group()
    if me < 2:
        dist.all_reduce(torch.ones(2), group=pair)
        dist.broadcast(torch.ones(1), group_src=1, group=pair)
    dist.all_reduce(torch.ones(2), group=all_again)
    dist.barrier()
    seen.append(len(record_torch_calls._under_way))
    dist.destroy_process_group()
    return seen


@pytest.mark.thorough("each takes a second or more, alone")
def test_torch_distributed_is_left_alone(capfd):
    assert run(uses_torch_distributed, 2) == [[True] * 7 + [1]] * 2
    assert run(uses_torch_distributed, 3)[2][:7] == [True] * 7
    assert capfd.readouterr() == ("", "")


def uses_two_groups_of_the_same_ranks(world):
    """Rank 1 starts everything in the other order."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1], use_local_synchronization=True)]
    calls = [(torch.full((size,), 1.0), group) for size, group in zip((2, 3), groups, strict=True)]
    calls = calls[:: 1 - 2 * world.rank]
    works = [dist.all_reduce(x, group=group, async_op=True) for x, group in calls]
    [work.wait() for work in works]
    move = dist.irecv if world.rank else dist.isend
    works = [move(x, 1 - world.rank, group=group) for x, group in calls]
    [work.wait() for work in works]
    return sorted((x.tolist() for x, _ in calls), key=len)


def test_each_process_group_has_an_order_of_its_own():
    assert run(uses_two_groups_of_the_same_ranks, 2) == [[[2, 2], [2, 2, 2]]] * 2


def destroys_too_early(world, all_of_them):
    if world.rank == 0 or all_of_them:
        dist.destroy_process_group()
    if world.rank or all_of_them:
        comm.all_reduce(ONES, world)


def test_groups_that_are_destroyed_too_early():
    with pytest.raises(RankError, match="a rank closed its connections, as destroy_process_group does, while others"):
        run(destroys_too_early, 2, False)
    with pytest.raises(RankError, match="no process groups here: start ranks with .* destroy the groups last"):
        run(destroys_too_early, 2, True)


@pytest.mark.thorough("each takes a second or more, alone")
def test_a_data_loader_may_have_workers():
    def loads(world):
        return [x.tolist() for x in torch.utils.data.DataLoader(range(4), batch_size=2, num_workers=1)]

    assert run(loads, 2) == [[[0, 1], [2, 3]]] * 2
