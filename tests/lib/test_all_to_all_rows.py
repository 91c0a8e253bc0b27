"""Unequal rows to each rank: values, gradients, bytes, seconds, and what is refused before a byte moves."""

import sys
import time
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from lib import comm, conjugate, cost, trace
from lib.doctor.traces import judge_trace
from lib.kineto import read_traces
from lib.launch import HangError, MismatchError, run
from lib.mesh import Group, Mesh, MeshShape
from lib.placement import Shard
from lib.runtime import hang
from lib.runtime.call_table import TEXT_BYTES
from lib.runtime.calls import Call
from lib.runtime.emulated_link import Link
from lib.runtime.rows import RowTable
from lib.verify import assert_adjoint
from tests.lib.sharding import said
from tests.on_time import on_time

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("machine")

TABLES = {
    "unequal": [[1, 2, 0], [3, 0, 5], [2, 4, 1]],
    "rank 1 sends nothing": [[1, 2, 3], [0, 0, 0], [2, 0, 4]],
    "rank 1 receives nothing": [[1, 0, 3], [2, 0, 1], [2, 0, 4]],
    "rank 1 has no part": [[0, 0, 3], [0, 0, 0], [2, 0, 0]],
    "all to themselves": [[2, 0, 0], [0, 0, 0], [0, 0, 3]],
    "zeros": [[0] * 3] * 3,
}
KINDS = {  # dtype and shape of a row
    "float32": (torch.float32, (4,)),
    "no trailing dims": (torch.float64, ()),
    "three trailing dims": (torch.bfloat16, (2, 1, 3)),
    "moved as bytes": (torch.int16, (3,)),
    "as bytes, no trailing dims": (torch.float8_e4m3fn, ()),
    "bool": (torch.bool, (3,)),
    "complex": (torch.complex64, (2,)),
    "empty rows": (torch.float32, (2, 0)),
}


def sent_rows(table, rank, dtype, shape):
    """The rows of a rank, each with the number 100 · sender + 10 · receiver + place, not contiguous."""
    numbers = [100 * rank + 10 * to + k for to, n in enumerate(table[rank]) for k in range(n)]
    x = torch.tensor(numbers, dtype=torch.float32).reshape(-1, *[1] * len(shape)).expand(-1, *shape)
    return (x % 7 > 3 if dtype == torch.bool else x).to(dtype).clone().movedim(0, -1).contiguous().movedim(-1, 0)


def received_rows(table, rank, dtype, shape):
    parts = [sent_rows(table, i, dtype, shape).split(table[i])[rank] for i in range(len(table))]
    return torch.cat(parts)


def equal(got, want):
    bits = (x.contiguous().view(-1).view(torch.uint8) for x in (got, want))
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(*bits)


def as_torch_does(x, table, world):
    me = world.rank
    out = functional.all_to_all_single_autograd(x, [line[me] for line in table], table[me], dist.group.WORLD)
    return functional.wait_tensor(out)


@cache
def of_three_ranks():
    """Everything that three ranks find, in one run."""
    return run(found_by, 3, trace=True)


def found_by(world):
    wrong, counted, gradients = [], {}, []
    for name, table in TABLES.items():
        for kind, facts in KINDS.items():
            x = sent_rows(table, world.rank, *facts)
            before = x.clone()
            with trace.record(world.rank) as seen, comm.label(f"{name}, {kind}"):
                y = comm.all_to_all_rows(x, table, world)
            if not equal(y, received_rows(table, world.rank, *facts)) or not y.is_contiguous() or y.requires_grad:
                wrong.append(f"{name}, {kind}: {y}")
            if not equal(x, before) or y.numel() and y.data_ptr() == x.data_ptr():
                wrong.append(f"{name}, {kind}: the argument")
            counted[name, kind] = [(e.kind, e.peers, e.payload_bytes, e.wire_bytes) for e in seen.events]
        like = torch.zeros(sum(table[world.rank]), 2).double()
        assert_adjoint(lambda x, t=table: conjugate.rows_to_ranks(x, t, world), like, world, Shard(0), Shard(0))
        results = []
        for op in (conjugate.rows_to_ranks, as_torch_does):
            x = torch.linspace(world.rank, 1 + world.rank, 2 * len(like)).double().view(-1, 2).requires_grad_()
            y = op(x, table, world)
            (y**2 + y * world.rank).sum().backward()
            results.append((y.detach(), x.grad))
        gradients.append(all(map(torch.equal, *results)))
    alone = comm.all_to_all_rows(torch.arange(3.0), [[3]], Group("tp", (world.rank,), 0)).tolist() == [0, 1, 2]
    return wrong, counted, gradients, alone


def test_rows_arrive_in_the_order_of_ranks():
    assert [(wrong, alone) for wrong, _, _, alone in of_three_ranks()] == [([], True)] * 3


def test_values_and_gradients_are_those_of_torch():
    assert [gradients for _, _, gradients, _ in of_three_ranks()] == [[True] * len(TABLES)] * 3


def test_a_rank_counts_the_rows_that_leave_it():
    for rank, (_, counted, _, _) in enumerate(of_three_ranks()):
        for (name, kind), events in counted.items():
            table, (dtype, shape) = TABLES[name], KINDS[kind]
            row_bytes = dtype.itemsize * torch.Size(shape).numel()
            leave = [sum(line) - line[i] for i, line in enumerate(table)]
            sent = leave[rank] * row_bytes
            takes_part = sum(leave) * row_bytes > 0
            assert events == [("all_to_all_rows", (0, 1, 2), sent, sent)] * takes_part, (name, kind)
            assert sent == cost.wire_bytes("all_to_all_rows", sent, 3)


def test_a_trace_is_read_back_and_its_unequal_sizes_are_right(tmp_path):
    recorded = of_three_ranks().trace
    recorded.save(tmp_path / "trace.json")
    read = read_traces([tmp_path / "trace.json"])
    assert read.traffic() == recorded.traffic()
    rows = [calls for calls in read.pairs.together if calls[0].kind == "all_to_all_rows"]
    assert len({call.payload_bytes for calls in rows for call in calls}) > 3
    assert sum(map(len, rows)) == len([e for e in recorded.events if e.kind == "all_to_all_rows"])
    assert [finding.text for finding in judge_trace(read) if finding.kind == "mismatch"] == []


# ---- what is refused -------------------------------------------------------------------------------------------------

MUST = "rows must be 2 lines of 2 whole numbers from 0 on, one for each pair of ranks, but "
EARLY = [[1, 2], [3, 4]]  # the table of rank 0
REFUSED = {  # rows, and x, of both ranks: the error on the first
    "no table": (3, 3, f"{MUST}rows is 3"),
    "a line missing": ([[1, 2]], 3, f"{MUST}rows has 1"),
    "a number missing": ([[1, 2], [1]], 3, f"{MUST}rows[1] has 1"),
    "a line that is none": ([1, 2], 3, f"{MUST}rows[0] is 1"),
    "below 0": ([[4, -1], [1, 2]], 3, f"{MUST}rows[0][1] is -1"),
    "half a row": ([[1, 2], [1.5, 1.5]], 3, f"{MUST}rows[1][0] is 1.5"),
    "too few rows": (
        EARLY,
        2,
        "x has 2 rows on rank 0 of the group, but rows[0], its line of the table, is 1 + 2 = 3",
    ),
}


def test_what_is_no_table_is_refused_before_a_byte_moves():
    def refused(world):
        found = {}
        with trace.record(world.rank) as seen:
            for name, (rows, n, _) in REFUSED.items():
                found[name] = said(
                    lambda rows=rows, n=n: comm.all_to_all_rows(torch.ones(n), rows, world), ValueError
                )
            found["a scalar"] = said(
                lambda: comm.all_to_all_rows(torch.tensor(1.0), [[1, 0], [0, 1]], world), ValueError
            )
        comm.barrier(world)
        return found, len(seen.events)

    found, n_events = run(refused, 2)[0]
    wanted = {name: text for name, (_, _, text) in REFUSED.items()}
    assert found == wanted | {"a scalar": "dim=0 does not exist in a tensor of shape []"}
    assert n_events == 0


@pytest.mark.parametrize(
    ("late", "dtype", "row", "its", "other"),
    [
        ([[1, 2], [4, 3]], torch.float32, (2,), "[[1, 2], [4, 3]] rows of float32[2]", "[[1, 2], [3, 4]] rows of"),
        (EARLY, torch.int32, (2,), "[[1, 2], [3, 4]] rows of int32[2]", "[[1, 2], [3, 4]] rows of float32[2]"),
        (EARLY, torch.float32, (2, 1), "[[1, 2], [3, 4]] rows of float32[2, 1]", "rows of float32[2]"),
    ],
)
def test_ranks_that_differ_are_told_before_a_byte_moves(late, dtype, row, its, other):
    def differ(world):
        if world.rank:
            time.sleep(0.2)
            comm.all_to_all_rows(torch.ones(7, *row, dtype=dtype), late, world)
        comm.all_to_all_rows(torch.ones(3, 2), EARLY, world)

    with pytest.raises(MismatchError) as caught:
        run(differ, 2)
    assert caught.value.ranks == (0, 1)
    assert f"rank 1  all_to_all_rows {its}" in str(caught.value) and other in str(caught.value)


def test_a_large_table_is_compared_to_its_last_number():
    n, row = 9, "float32[1024]"
    table = [[100 * i + j for j in range(n)] for i in range(n)]

    def text(rows):
        return RowTable(tuple(map(tuple, rows)), 0).compared("all_to_all_rows", row)

    texts = {text(table)}
    for i in range(n):
        for j in range(n):
            texts.add(text([[x + (i == k and j == m) for m, x in enumerate(line)] for k, line in enumerate(table)]))
    texts.add(text([*zip(*table, strict=True)]))
    assert len(texts) == n * n + 2 and all(len(one.encode()) <= TEXT_BYTES for one in texts)
    assert f"all_to_all_rows {sum(map(sum, table))} rows by a table of 9×9" in text(table) and row in text(table)
    assert RowTable(tuple(map(tuple, table)), 3).compared("all_to_all_rows", row) == text(table), "equal on all ranks"


def test_a_hang_says_how_many_rows(monkeypatch):
    monkeypatch.setattr(hang, "STILL_S", 0.5)

    def works(world):
        if world.rank != 1:
            table = TABLES["rank 1 has no part"]
            comm.all_to_all_rows(torch.ones(sum(table[world.rank]), 4), table, world)

    with pytest.raises(HangError) as caught:
        run(works, 3)
    assert caught.value.finished == caught.value.ranks == (1,)
    wanted = "waits in all_to_all_rows, 3 rows to the others and 2 from them, each float32[4]: rank 1 did not call it"
    assert wanted in str(caught.value)
    assert {wait.kind for wait in caught.value.waits.values()} == {"all_to_all_rows"}


def test_in_the_background_and_along_an_axis():
    def works(world):
        group = Mesh(MeshShape(dp=2, tp=2), world).group("tp")
        x = torch.arange(3.0) + 10 * world.rank
        pending = [comm.all_to_all_rows_start(x, [[1, 2], [0, 3]], group) for _ in range(2)]
        return [p.wait().tolist() for p in pending], all(p.ended_s > 0 for p in pending)

    got = run(works, 4)
    assert got[0] == ([[0.0]] * 2, True) and got[3] == ([[21.0, 22.0, 30.0, 31.0, 32.0]] * 2, True)


# ---- seconds --------------------------------------------------------------------------------------------------------


def test_a_link_is_busy_as_long_as_its_fuller_direction():
    call = Call("all_to_all_rows", 1000, "tp", 0, 4, "channel", (0, 1, 2, 3), "", (), "", received_bytes=4000)
    for sent, received, longest in ((1000, 4000, 4.0), (3000, 2000, 3.0), (0, 4000, 4.0), (0, 0, 0.0)):
        busy = Link(alpha_s=0.5, bandwidth_Bps=1000)
        assert busy.book(call._replace(payload_bytes=sent, received_bytes=received), 10.0) == 10 + 3 * 0.5 + longest


EVEN, HOT = [[18] * 4] * 4, [[72, 0, 0, 0]] * 4


@pytest.mark.timed("it measures when rows on an emulated link are through")
def test_a_rank_that_receives_everything_makes_all_wait():
    """Each rank sends 72 rows, and from the others gets 54; or rank 0 gets 216: it takes four times as long for all."""

    def both(world):
        took_s = []
        for table in (EVEN, HOT):
            x = torch.ones(sum(table[world.rank]), 250)  # 1 kB a row
            comm.barrier(world)
            with comm.link(bandwidth_Bps=270e3):
                began_s = time.perf_counter()
                comm.all_to_all_rows(x, table, world)
                took_s.append(time.perf_counter() - began_s)
        return took_s

    for even_s, hot_s in run(both, 4):
        with on_time():
            assert even_s == pytest.approx(0.2, abs=0.1) and hot_s / even_s == pytest.approx(4, abs=0.8)
