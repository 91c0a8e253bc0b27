"""Calls of torch.distributed itself: counted, named and heard as those of `lib.comm` are."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from course.check.listen import listen
from lib import comm, cost, trace
from lib.launch import HangError, MismatchError, RankError, run
from lib.mesh import Mesh, MeshShape
from lib.runtime import hang, record_torch_calls

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("machine")

N = 3
X = torch.ones(2 * N)  # 24 bytes
PARTS = [torch.ones(2) for _ in range(N)]
into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed them
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
gathered = "all_gather_single" if hasattr(functional, "all_gather_single") else "all_gather_tensor"
scattered = "reduce_scatter_single" if hasattr(functional, "reduce_scatter_single") else "reduce_scatter_tensor"


def promised(name, *args):
    """A functional collective of the world; to use its result is to wait for it."""
    return lambda rank: getattr(functional, name)(*args, dist.group.WORLD) + 1


DIRECT = {  # a call, of which 24 bytes are the whole array, and its kind
    "all_reduce": (lambda rank: dist.all_reduce(X.clone()), "all_reduce"),
    "all_reduce, awaited": (lambda rank: dist.all_reduce(X.clone(), async_op=True).wait(), "all_reduce"),
    "all_reduce_coalesced": (lambda rank: dist.all_reduce_coalesced([X[:2].clone(), X[2:].clone()]), "all_reduce"),
    "broadcast": (lambda rank: dist.broadcast(X.clone(), 1), "broadcast"),
    "reduce": (lambda rank: dist.reduce(X.clone(), 1), "reduce"),
    "all_gather": (lambda rank: dist.all_gather(list(torch.empty(N, 2)), X[:2]), "all_gather"),
    "all_gather_into_tensor": (lambda rank: into(torch.empty(2 * N), X[:2]), "all_gather"),
    "reduce_scatter": (lambda rank: dist.reduce_scatter(torch.empty(2), PARTS), "reduce_scatter"),
    "reduce_scatter_tensor": (lambda rank: scatter(torch.empty(2), X), "reduce_scatter"),
    "all_to_all_single": (lambda rank: dist.all_to_all_single(torch.empty(2 * N), X), "all_to_all"),
    "gather": (lambda rank: dist.gather(X[:2], PARTS if rank == 0 else None), "gather"),
    "scatter": (lambda rank: dist.scatter(torch.ones(2), PARTS if rank == 0 else None), "scatter"),
    "functional all_reduce": (promised("all_reduce", X, "sum"), "all_reduce"),
    "functional reduce_scatter": (promised(scattered, X, "sum", 0), "reduce_scatter"),
    "functional all_gather": (promised(gathered, X[:2], 0), "all_gather"),
    "functional all_gather, a view": (promised(gathered, X[None, :2], 1), "all_gather"),
    "functional all_gather, not awaited here": (
        lambda rank: getattr(functional, gathered)(X[:2, None], 1, dist.group.WORLD),
        "all_gather",
    ),
    "functional all_to_all": (promised("all_to_all_single", X, None, None), "all_to_all"),
}


WORLD, EMPTY = lambda: dist.group.WORLD, lambda: torch.empty(2 * N)  # noqa: E731
DIRECT |= {  # by the methods of a process group, or of its backend
    "allreduce": (lambda rank: WORLD().allreduce([X.clone()]).wait(), "all_reduce"),
    "allreduce of a tensor": (lambda rank: WORLD().allreduce(X.clone()).wait(), "all_reduce"),
    "allreduce, by keyword": (lambda rank: WORLD().allreduce(tensors=[X.clone()]).wait(), "all_reduce"),
    "allreduce, of the backend": (lambda rank: backend().allreduce([X.clone()]).wait(), "all_reduce"),
    "allreduce, a maximum": (lambda rank: backend().allreduce([X.clone()], dist.ReduceOp.MAX).wait(), "all_reduce"),
    "broadcast, of the group": (lambda rank: WORLD().broadcast(X.clone(), 1).wait(), "broadcast"),
    "allgather": (lambda rank: WORLD().allgather([list(torch.empty(N, 2))], [X[:2]]).wait(), "all_gather"),
    "_allgather_base": (lambda rank: WORLD()._allgather_base(EMPTY(), X[:2]).wait(), "all_gather"),
    "reduce_scatter, of the group": (lambda rank: WORLD().reduce_scatter([torch.empty(2)], [PARTS]).wait(),
                                     "reduce_scatter"),
    "alltoall_base": (lambda rank: WORLD().alltoall_base(EMPTY(), X, [], []).wait(), "all_to_all"),
    "gather, of the group": (lambda rank: WORLD().gather([PARTS] if rank == 0 else [], [X[:2]]).wait(), "gather"),
}  # fmt: skip


def backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def counted(world, names):
    found = {}
    for name in names:
        with trace.record(world.rank) as seen, comm.label(name):
            DIRECT[name][0](world.rank)
        found[name] = [
            (e.rank, e.kind, e.axis, e.peers, e.payload_bytes, e.wire_bytes, e.label, 0 < e.end_s - e.start_s < 5)
            for e in seen.events
        ]
    return found, len(record_torch_calls._under_way), len(record_torch_calls._promised)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_direct_calls_are_events_like_ours():
    for rank, (found, *left) in enumerate(run(counted, N, list(DIRECT))):
        for name, (_, kind) in DIRECT.items():
            wire_bytes = cost.wire_bytes(kind, 24, N)
            assert found[name] == [(rank, kind, "world", (0, 1, 2), 24, wire_bytes, name, True)], name
        assert left == [0, 0], "nothing is kept of a call that is through"


def test_unequal_rows_count_as_ours_do():
    """However a reader sends them: each rank counts the rows that leave it, one without rows too."""
    table = [[1, 2, 0], [0, 0, 0], [4, 2, 1]]

    def rows(world):
        me, heard = world.rank, listen()
        going, coming = table[me], [line[me] for line in table]
        x, out = torch.ones(sum(going), 2), torch.empty(sum(coming), 2)
        with trace.record(me) as ours:
            comm.all_to_all_rows(x, table, world)
        ways = {
            "single": lambda: dist.all_to_all_single(out, x, coming, going),
            "functional": lambda: functional.all_to_all_single(x, coming, going, dist.group.WORLD) + 1,
            "autograd": lambda: functional.all_to_all_single_autograd(x, coming, going, dist.group.WORLD) + 1,
            "method": lambda: WORLD().alltoall_base(out, x, coming, going).wait(),
        }
        same = {}
        for name, way in ways.items():
            with trace.record(me) as by_hand:
                way()
            same[name] = by_hand.traffic() == ours.traffic()
        pending = comm.all_to_all_rows_start(x, table, world)
        unfinished = heard.unfinished
        pending.wait()
        return ours.traffic()["all_to_all_rows", "world"], same, unfinished, heard.unfinished, heard.sent_bytes(N)

    results = run(rows, N)
    for (calls, n_bytes), same, unfinished, after, heard_bytes in results:
        assert (calls, unfinished, after) == (1, 1, 0), "a rank without rows waits as well"
        assert same == dict.fromkeys(same, True)
        assert heard_bytes == 6 * n_bytes
    assert [n_bytes for (_, n_bytes), *_ in results] == [16, 0, 48]


def test_one_event_where_ours_has_one():
    """The same traffic through `comm` and by hand: the tables are equal."""

    def both(world):
        right, left = (world.rank + 1) % N, (world.rank - 1) % N
        with trace.record(world.rank) as ours:
            comm.all_reduce(X, world)
            comm.exchange({right: X}, {left: X}, world).wait()
            comm.barrier(world)
        with trace.record(world.rank) as by_hand:
            dist.all_reduce(X.clone())
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, X, right), dist.P2POp(dist.irecv, X, left)]):
                work.wait()
            dist.barrier()
        to = {e.peers for e in by_hand.events if e.kind == "send"}
        return ours.traffic() == by_hand.traffic(), to == {(right,)}

    assert run(both, N) == [(True, True)] * N


def test_a_blocking_message_is_one_event_and_any_source_may_send_it():
    def messages(world):
        x = torch.full((3,), float(world.rank))
        with trace.record(world.rank) as seen:
            if world.rank:
                dist.send(x, 0)
            else:
                sources = {dist.recv(x) for _ in range(N - 1)}
                assert sources == {1, 2}
        return [(e.kind, e.peers, e.payload_bytes, e.wire_bytes) for e in seen.events]

    assert run(messages, N) == [[("recv", (), 12, 0.0)] * 2, [("send", (0,), 12, 12.0)], [("send", (0,), 12, 12.0)]]


def test_the_axis_of_a_group():
    def axes(world):
        mesh = Mesh(MeshShape(dp=2, tp=2), world)
        with trace.record(world.rank) as seen:
            unnamed = dist.new_group([0, 2, 3])  # which moves nothing
            dist.all_reduce(X.clone(), group=mesh.group("tp").pg)
            dist.all_reduce(X.clone())
            if world.rank != 1:
                dist.all_reduce(X.clone(), group=unnamed)
        return [(e.axis, e.peers) for e in seen.events]

    wanted = [("tp", (0, 1)), ("world", (0, 1, 2, 3)), ("ranks 0, 2, 3", (0, 2, 3))]
    assert run(axes, 4)[:2] == [wanted, wanted[:2]]


@pytest.mark.thorough("seconds of several processes")
def test_a_device_mesh_of_torch_is_heard_where_one_rank_builds_none():
    """`device_mesh` of torch imported `new_group` before it was watched."""

    def builds(world):
        if world.rank:
            dist.init_device_mesh("cpu", (2, 2))

    with pytest.raises(HangError, match=r"rank 2  waits in new_group\(ranks 0, 2\): rank 0 did not call it"):
        run(builds, 4)


def test_only_the_outermost_call_counts():
    """all_gather_object is made of two all-gathers, of sizes and of bytes; our own calls are counted once."""

    def objects(world):
        with trace.record(world.rank) as seen:
            dist.all_gather_object([None] * N, {"rank": world.rank})
            comm.reduce(X, world)
        return [e.kind for e in seen.events]

    assert run(objects, N) == [["all_gather", "all_gather", "reduce"]] * N


def test_a_time_is_from_the_call_to_the_end_and_not_to_the_wait():
    def late(world):
        with trace.record(world.rank) as seen:
            work = dist.all_reduce(X.clone(), async_op=True)
            time.sleep(0.5)
            work.wait()
        return seen.events[0].end_s - seen.events[0].start_s

    assert max(run(late, 2)) < 0.4


def test_an_error_has_no_frame_of_ours():
    with pytest.raises(RankError, match="Invalid function argument") as caught:
        run(lambda world: dist.all_reduce("no tensor"), 1)
    assert "lib/runtime" not in str(caught.value)


# ---- graders hear them ----------------------------------------------------------------------------------------------


NO_DATA = {
    "a message": (lambda: dist.recv(torch.empty(2), 1), lambda: dist.send(None, 0)),
    "a sum": (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(None)),
    "a list": (lambda: dist.all_gather(PARTS, PARTS[0]), lambda: dist.all_gather(PARTS, None)),
    "a promise": (
        lambda: functional.all_reduce(X, "sum", dist.group.WORLD),
        lambda: functional.all_reduce(None, "sum", dist.group.WORLD),
    ),
}


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("what", NO_DATA)
def test_what_is_no_tensor_is_torchs_error_also_where_the_peer_came_first(what):
    right, wrong = NO_DATA[what]

    def calls(world):
        if world.rank == 0:
            right()
        elif world.rank == 1:
            dist.recv(torch.empty(1), 2)  # rank 0 has entered its call long before
            wrong()
        else:
            time.sleep(0.2)
            dist.send(torch.ones(1), 1)

    with pytest.raises(RankError, match="rank 1 of 3 raised "):
        run(calls, 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_grader_hears_every_way_to_send():
    def heard(world):
        found, waits = {}, []
        seen = listen(on_wait=lambda call: waits.append(1))
        for name, (call, _) in DIRECT.items():
            call(world.rank)
            found[name] = list(seen.calls)
            seen.forget()
        for_collectives = len(waits)
        if world.rank == 0:
            dist.isend(X, 1).wait()
            dist.send(X[:2], 1)
            comm.send(X, world, 1).wait()
        elif world.rank == 1:
            for y in (X, X[:2], X):
                dist.recv(torch.empty_like(y), 0)
        return found, seen.sent, for_collectives, len(waits) - for_collectives

    ranks_heard = run(heard, N)
    for found, _, waits, _ in ranks_heard:
        assert found == {name: [(kind, 24)] for name, (_, kind) in DIRECT.items()}
        assert waits == len(DIRECT)
    assert [sent for _, sent, _, _ in ranks_heard] == [[(1, 24), (1, 8), (1, 24)], [], []]
    assert [waits for *_, waits in ranks_heard] == [3, 3, 0]


# ---- and the call table ---------------------------------------------------------------------------------------------


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1, "all_reduce sum float32[1]"),
        (lambda x: dist.all_reduce_coalesced([x, X.clone()]), "all_reduce_coalesced sum float32[1] float32[6]"),
    ],
)
def test_a_mismatch_is_refused(call, what):
    def works(world, call):
        call(torch.ones(1 + world.rank))

    with pytest.raises(MismatchError) as caught:
        run(works, 2, call)
    assert what in str(caught.value)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: dist.recv(torch.empty(3)), "waits in recv from any rank, float32[3]"),
        (lambda: dist.recv(torch.empty(3), 1, tag=7), "waits in recv from 1, float32[3], tag 7"),
        (lambda: functional.all_reduce(X, "sum", dist.group.WORLD) + 1, "all_reduce sum float32[6]: rank 1 did not"),
    ],
)
def test_a_hang_is_told(call, what, monkeypatch):
    monkeypatch.setattr(hang, "STILL_S", 0.5)

    def works(world, call):
        if world.rank == 0:
            call()

    with pytest.raises(HangError) as caught:
        run(works, 2, call)
    assert what in str(caught.value) and caught.value.finished == (1,)
