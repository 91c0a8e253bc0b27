"""Everything that may go wrong in a rank: one clear error, soon, and nothing left behind.

Each fault is a function that every rank runs. The limits are what the reader feels: two seconds in which nothing moves
make a hang, everything else is known at once.
"""

import inspect
import os
import re
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from lib import comm
from lib.launch import HangError, MismatchError, RankError, RunTimeout, run

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("machine")

SOON_S, HANG_S = 2.0, 4.0
ONES = torch.ones(4)


def refuse(word):
    raise ValueError(f"no {word} today")


# ---- one rank ends --------------------------------------------------------------------------------------------------


def raises_before(world):
    if world.rank == 1:
        refuse("coffee")
    comm.all_reduce(ONES, world)


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


def exits(world):
    if world.rank == 1:
        sys.exit("enough")
    comm.barrier(world)


def exits_in_silence(world):
    if world.rank == 1:
        sys.exit()
    comm.barrier(world)


def leaves(world):
    if world.rank == 0:
        os._exit(3)
    comm.barrier(world)


def leaves_with_0(world):
    if world.rank == 2:
        os._exit(0)
    comm.barrier(world)


def killed(world):
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier(world)


def crashes(world):
    if world.rank == 1:
        os.write(2, b"what the C++ library said last\n")
        os.abort()
    comm.barrier(world)


def dies_while_it_computes(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(30)


def closes_everything(world):
    if world.rank == 1:
        os.closerange(3, 200)
    comm.barrier(world)


def raises_itself(world):
    class OddError(Exception):
        def __str__(self):
            raise RuntimeError("cannot even be printed")

    if world.rank == 0:
        raise OddError


def returns_a_lambda_of_a_socket(world):
    import socket

    if world.rank == 1:
        return socket.socket()


def returns_a_generator(world):
    return (i for i in range(3)) if world.rank == 2 else None


def bad_to_load():
    raise OSError("not on this side")


class NeverArrives:
    def __reduce__(self):
        return bad_to_load, ()


def returns_what_cannot_be_read(world):
    return NeverArrives()


def runs_inside(world):
    run(lambda inner: None, 2)


ENDS = [  # fault, the rank to blame, what the message says
    (raises_before, 1, r"raised ValueError\n\nTraceback.*in raises_before\n    refuse\(\"coffee\"\).*no coffee today"),
    (raises_inside, 1, "no sugar today"),
    (raises_after, 2, "no tea today"),
    (raises_late, 0, "no milk today"),
    (wraps_the_loss_of_a_peer, 2, "left without returning .* exit code 7"),
    (exits, 1, r"called sys.exit\('enough'\)\n.*test_faults.py\", line \d+, in exits"),
    (exits_in_silence, 1, r"called sys.exit\(\)"),
    (leaves, 0, r"left without returning \(os._exit\?\), with exit code 3"),
    (leaves_with_0, 2, "exit code 0"),
    (killed, 2, "was killed by SIGKILL; was the machine out of memory"),
    (crashes, 1, "was killed by SIGABRT.*what the C\\+\\+ library said last"),
    (dies_while_it_computes, 1, "was killed by SIGSEGV.*line \\d+ in dies_while_it_computes"),
    (closes_everything, 1, "left without returning"),
    (raises_itself, 0, "raised OddError"),
    (returns_a_lambda_of_a_socket, 1, "returned a socket, which cannot be sent"),
    (returns_a_generator, 2, "returned a generator, which cannot be sent"),
    (returns_what_cannot_be_read, 0, "cannot be read here: not on this side"),
    (runs_inside, 0, r"RuntimeError: run\(\) was called inside a rank"),
]


@pytest.mark.parametrize(("fault", "rank", "text"), ENDS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_rank_ends(fault, rank, text, capfd):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(fault, 3)
    assert time.monotonic() - began < SOON_S
    assert caught.value.rank == rank
    assert re.search(f"^rank {rank} of 3.*{text}", str(caught.value), re.DOTALL), caught.value
    assert "lib/rank.py" not in str(caught.value), "the machine's own frames are no help"
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
        dist.new_group([0, 1])


def torch_barrier_and_reduce(world):
    if world.rank:
        dist.barrier()
    else:
        dist.recv(ONES, 1)


WAITS = {
    all_send_first: """
  rank 0  waits in send to 1, float32[4]  {0}
  rank 1  waits in send to 2, float32[4]  {0}
  rank 2  waits in send to 0, float32[4]  {0}
  the circle: 0 waits for 1, 1 waits for 2, 2 waits for 0""",
    one_skips: """
  rank 0  waits in all_reduce sum float32[4]: rank 1 did not call it  {1}
  rank 1  has finished
  rank 2  waits in all_reduce sum float32[4]: rank 1 did not call it  {1}""",
    one_does_another_thing: """
  rank 0  waits in all_reduce sum float32[4]: rank 1 did not call it  {4}
  rank 1  waits in recv from 2, float32[4]                            {3}
  rank 2  waits in all_reduce sum float32[4]: rank 1 did not call it  {4}
  the circle: 1 waits for 2, 2 waits for 1""",
    started_and_awaited: """
  rank 0  waits in all_gather dim=0 float32[4]: rank 2 did not call it  {0}
  rank 1  waits in all_gather dim=0 float32[4]: rank 2 did not call it  {0}
  rank 2  has finished""",
    exchange_without_answer: """
  rank 0  waits in send to 2, float32[4]  {1}
  rank 1  waits in send to 2, float32[4]  {1}
  rank 2  has finished""",
    recovers_from_a_mismatch: """
  rank 0  waits in all_reduce sum float32[4]  {3}
  rank 1  waits in all_reduce sum float32[4]  {3}
  rank 2  has finished
  rank 2 caught this error before, and went on:
    ranks 0 and 2 disagree: their call number 1 in this group is not the same.
      rank 0  all_reduce sum float32[4]  {3}
      rank 2  all_reduce sum float32[5]  {3}
      Every rank of a group makes the same calls, in the same order, with the same shape and dtype.""",
    torch_all_send_first: """
  rank 0  waits in send to 1, float32[4]  {0}
  rank 1  waits in send to 2, float32[4]  {0}
  rank 2  waits in send to 0, float32[4]  {0}
  the circle: 0 waits for 1, 1 waits for 2, 2 waits for 0""",
    torch_one_skips: """
  rank 0  waits in all_reduce sum float32[4]: rank 1 did not call it  {1}
  rank 1  has finished
  rank 2  waits in all_reduce sum float32[4]: rank 1 did not call it  {1}""",
    torch_async: """
  rank 0  waits in all_reduce sum float32[4]: rank 1 did not call it  {1}
  rank 1  has finished
  rank 2  waits in all_reduce sum float32[4]: rank 1 did not call it  {1}""",
    torch_isend: """
  rank 0  waits in send to 1, float32[4]  {1}
  rank 1  has finished
  rank 2  has finished""",
    torch_irecv: """
  rank 0  waits in recv from 1, float32[4]  {1}
  rank 1  has finished
  rank 2  has finished""",
    torch_batch: """
  rank 0  waits in send to 1, float32[4]  {2}
  rank 1  waits in send to 2, float32[4]  {2}
  rank 2  waits in send to 0, float32[4]  {2}
  the circle: 0 waits for 1, 1 waits for 2, 2 waits for 0""",
    torch_new_group: """
  rank 0  waits in new_group [0, 1]: rank 2 did not call it  {1}
  rank 1  waits in new_group [0, 1]: rank 2 did not call it  {1}
  rank 2  has finished""",
    torch_barrier_and_reduce: """
  rank 0  waits in recv from 1, float32[4]            {3}
  rank 1  waits in barrier: rank 0 did not call it    {1}
  rank 2  waits in barrier: rank 0 did not call it    {1}
  the circle: 0 waits for 1, 1 waits for 0""",
}


def line_of(fault, index):
    """How a report names a line of a function's body."""
    lines, first = inspect.getsourcelines(fault)
    body = next(i for i, line in enumerate(lines[1:], 1) if '"""' not in line)
    source = lines[body + index].strip()
    source = source if len(source) <= 100 else source[:99] + "…"
    return f"test_faults.py, line {first + body + index}, in {fault.__name__}: {source}"


@pytest.mark.parametrize("fault", WAITS, ids=lambda x: x.__name__)
def test_ranks_wait_for_ever(fault, capfd):
    began = time.monotonic()
    with pytest.raises(HangError) as caught:
        run(fault, 3)
    assert time.monotonic() - began < HANG_S
    lines = [line_of(fault, i) for i in range(5) if i + 1 < len(inspect.getsource(fault).splitlines())]
    expected = "deadlock: every rank waits, and nothing has moved for 2 s." + WAITS[fault].format(*lines, *"-" * 5)
    assert re.sub(" +", " ", str(caught.value)) == re.sub(" +", " ", expected)
    assert capfd.readouterr() == ("", "")
