"""Links slower than this machine: when a transfer is through, what queues, what sleeps, what stays the same."""

import contextlib
import sys
import time

import cloudpickle
import pytest
import torch

from lib import comm, cost, trace
from lib.launch import run
from lib.mesh import Group, Mesh, MeshShape
from lib.runtime import emulated_link
from tests.on_time import on_time

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.timed("it measures when a transfer on an emulated link is through"),
    pytest.mark.usefixtures("machine"),
]

ALPHA_S, BANDWIDTH_BPS = 0.01, 1e6
LATE_S = 0.12  # a sleeping process wakes up late where cores are busy; everything below is told apart by more


def seconds(work):
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def about(wanted_s):
    return pytest.approx(wanted_s + LATE_S / 2, abs=LATE_S / 2 + 1e-3)


CALLS = {
    "all_reduce": lambda x, g: comm.all_reduce(x, g),
    "reduce_scatter": lambda x, g: comm.reduce_scatter(x, g),
    "all_gather": lambda x, g: comm.all_gather(x[: len(x) // g.size], g),
    "all_to_all": lambda x, g: comm.all_to_all(x, g),
    "broadcast": lambda x, g: comm.broadcast(x, g),
    "reduce": lambda x, g: comm.reduce(x, g),
}


@pytest.mark.thorough("each takes a second or more, alone", keep=1)
@pytest.mark.parametrize("n", [2, 4])
def test_each_collective_takes_the_time_of_its_formula(n):
    def works(world):
        x, took_s, same = torch.arange(50_000.0), {}, True
        for kind, call in CALLS.items():
            plain = call(x, world)
            comm.barrier(world)
            with comm.link(alpha_s=ALPHA_S, bandwidth_Bps=BANDWIDTH_BPS), trace.record() as seen:
                began_s = time.perf_counter()
                late = call(x, world)
                took_s[kind] = time.perf_counter() - began_s, seen.events[0].end_s - seen.events[0].start_s
            same &= late is plain is None or torch.equal(late, plain)
        return took_s, same

    for took_s, same in run(works, n):
        assert same
        for kind, (waited_s, counted_s) in took_s.items():
            wanted_s = cost.comm_s(kind, 200_000, n, ALPHA_S, BANDWIDTH_BPS)
            with on_time():
                assert waited_s == about(wanted_s), kind
                assert counted_s == pytest.approx(waited_s, abs=LATE_S)


def test_transfers_queue_and_only_waiting_sleeps():
    """Two all-reduces of 0.2 s each, 0.3 s of compute beside them: 0.4 s in all, of which 0.1 s are waited for."""

    def works(world):
        x = torch.ones(50_000)
        comm.barrier(world)
        with comm.link(bandwidth_Bps=BANDWIDTH_BPS):
            began_s = time.perf_counter()
            pending = [comm.all_reduce_start(x, world) for _ in range(2)]
            started_s = time.perf_counter() - began_s
            time.sleep(0.3)
            waits_s = [seconds(p.wait) for p in pending]
            return started_s, waits_s

    for started_s, (first_s, second_s) in run(works, 2):
        with on_time():
            assert started_s < LATE_S
            assert first_s < LATE_S
            assert 0.1 - LATE_S <= second_s <= 0.1 + LATE_S


def test_a_collective_begins_with_its_last_rank():
    def works(world):
        comm.barrier(world)
        began_s = time.perf_counter()
        with comm.link(bandwidth_Bps=BANDWIDTH_BPS):
            time.sleep(0.3 * world.rank)
            comm.all_reduce(torch.ones(50_000), world)  # 0.2 s
            comm.all_reduce(torch.ones(50_000), world)
        return time.perf_counter() - began_s

    with on_time():
        assert run(works, 2) == [about(0.3 + 0.2 + 0.2)] * 2


def test_a_message_arrives_when_its_senders_link_is_through():
    """A receive that was posted long before the send waits for the whole transfer; two messages queue."""

    def works(world):
        x = torch.ones(50_000)  # 0.2 s
        comm.barrier(world)
        began_s = time.perf_counter()
        with comm.link(bandwidth_Bps=BANDWIDTH_BPS):
            if world.rank:
                coming = [comm.recv(x, world, 0) for _ in range(2)]
                return [(p.wait(), time.perf_counter() - began_s)[1] for p in coming]
            time.sleep(0.3)
            for p in [comm.send(x, world, 1) for _ in range(2)]:
                p.wait()

    first_s, second_s = run(works, 2)[1]
    with on_time():
        assert first_s == about(0.5)
        assert second_s == about(0.7)


def test_both_directions_carry_at_once():
    def works(world):
        other = 1 - world.rank
        comm.barrier(world)
        with comm.link(bandwidth_Bps=BANDWIDTH_BPS):
            x = torch.ones(50_000)
            return seconds(lambda: comm.exchange({other: x}, {other: x}, world).wait())

    with on_time():
        assert run(works, 2) == [about(0.2)] * 2


def test_axes_have_links_of_their_own():
    def works(world):
        mesh = Mesh(MeshShape(dp=2, tp=2), world)
        x, took_s = torch.ones(50_000), []
        for links in ({"dp": 1e6}, {"tp": 1e6}, {None: 1e6}, {"dp": 1e6, None: 5e5}):
            comm.barrier(world)
            with contextlib.ExitStack() as stack:
                for axis, Bps in links.items():
                    stack.enter_context(comm.link(bandwidth_Bps=Bps, axis=axis))
                took_s.append([seconds(lambda a=axis: comm.all_reduce(x, mesh.group(a))) for axis in ("dp", "tp")])
        return took_s

    for dp, tp, both, nested in run(works, 4):
        with on_time():
            assert (dp, tp) == ([about(0.2), about(0)], [about(0), about(0.2)])
            assert (both, nested) == ([about(0.2)] * 2, [about(0.2), about(0.4)])


@pytest.mark.thorough("each takes a second or more, alone")
def test_a_long_transfer_is_no_hang():
    def works(world):
        with comm.link(alpha_s=1.6, bandwidth_Bps=1e12):
            return seconds(lambda: comm.all_reduce(torch.ones(4), world))

    with on_time():
        assert run(works, 2) == [about(3.2)] * 2


def test_outside_the_body_and_alone_nothing_is_slow():
    alone = Group()
    with comm.link(alpha_s=1, bandwidth_Bps=1):
        with on_time():
            assert seconds(lambda: comm.all_reduce(torch.ones(100), alone)) < LATE_S
        with comm.link(alpha_s=2, bandwidth_Bps=1, axis="tp"):
            assert emulated_link.along("tp").alpha_s == 2
            assert emulated_link.along("dp").alpha_s == 1
            with comm.link(alpha_s=3, bandwidth_Bps=1, axis="tp"):
                assert emulated_link.along("tp").alpha_s == 3
            assert emulated_link.along("tp").alpha_s == 2
    assert emulated_link.along("tp") is None


def test_a_link_that_cannot_be():
    for wrong in ({"alpha_s": -1, "bandwidth_Bps": 1}, {"bandwidth_Bps": 0}):
        with pytest.raises(ValueError, match="must be at least 0 and bandwidth_Bps="), comm.link(**wrong):
            pass
