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
from lib.kineto import read_traces
from lib.launch import run
from lib.mesh import Group
from lib.placement import Shard
from lib.verify import assert_adjoint

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
    from lib.doctor.traces import judge_trace

    recorded = of_three_ranks().trace
    recorded.save(tmp_path / "trace.json")
    read = read_traces([tmp_path / "trace.json"])
    assert read.traffic() == recorded.traffic()
    rows = [calls for calls in read.pairs.together if calls[0].kind == "all_to_all_rows"]
    assert len({call.payload_bytes for calls in rows for call in calls}) > 3
    assert sum(map(len, rows)) == len([e for e in recorded.events if e.kind == "all_to_all_rows"])
    assert [finding.text for finding in judge_trace(read) if finding.kind == "mismatch"] == []


# ---- seconds --------------------------------------------------------------------------------------------------------

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
        assert even_s == pytest.approx(0.2, abs=0.1) and hot_s / even_s == pytest.approx(4, abs=0.8)
