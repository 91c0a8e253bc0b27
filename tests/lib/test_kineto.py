"""Traces of torch.profiler: what PyTorch's own wrappers send on gloo, and small traces with the names of NCCL."""

import json
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from lib import cost, kineto
from lib.doctor.__main__ import main
from lib.doctor.traces import judge_trace
from lib.launch import run

WIDTH, LATE_S = 64, 0.5  # a rank of a busy machine may be late by a tenth of it
PARAMETER_BYTES = 4 * 2 * WIDTH * (WIDTH + 1)


def profiled(world, folder, late_s):
    """Profile a step of DDP and one of FSDP; rank 1 comes late."""
    for wrapper in ("ddp", "fsdp"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        model = (
            DistributedDataParallel(model)
            if wrapper == "ddp"
            else fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        )
        x = torch.randn(8, WIDTH)
        model(x).sum().backward()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            dist.barrier()
            time.sleep(late_s * world.rank)
            model(x).sum().backward()
            dist.barrier()
        seen.export_chrome_trace(f"{folder}/{wrapper}{world.rank}.json.gz")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    run(profiled, 2, str(folder), LATE_S, timeout_s=120)
    return {name: [folder / f"{name}{rank}.json.gz" for rank in (0, 1)] for name in ("ddp", "fsdp")}


def test_a_step_of_ddp_is_one_all_reduce_of_the_gradients(traces):
    trace = kineto.read_traces(traces["ddp"])
    for rank in (0, 1):
        (event,) = trace.select(rank=rank, kind="all_reduce").events
        assert (event.axis, event.peers, event.label) == ("world", (0, 1), "all_reduce float32")
        assert event.payload_bytes == event.wire_bytes == PARAMETER_BYTES
        assert {"aten::addmm", "aten::mm"} <= {span.label for span in trace.select(rank=rank).spans}


def test_on_gloo_the_reduce_scatter_of_fsdp_is_an_all_reduce(traces):
    """It sends twice what a reduce-scatter would, as chapter 4 says of gloo."""
    traffic = kineto.read_traces(traces["fsdp"]).select(rank=0).traffic()
    assert traffic["all_reduce", "world"] == (1, 2 * cost.wire_bytes("reduce_scatter", PARAMETER_BYTES, 2))
    calls, sent = traffic["all_gather", "world"]
    assert sent == calls * PARAMETER_BYTES / 2


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_who_is_late_is_named(traces, wrapper, capsys):
    with pytest.raises(SystemExit) as end:
        main(["trace", *map(str, traces[wrapper])])
    page = capsys.readouterr().out
    assert end.value.code == 1
    (said,) = re.findall(r"others wait up to ([\d.]+) ms for rank (\d)", page)
    assert said[1] == "1" and 1e3 * LATE_S * 0.8 < float(said[0]) < 1e3 * LATE_S * 3


# ---- NCCL: names and facts as in pytorch/pytorch#131462 (2024-07) and pytorch/kineto#1294 (2026-03) ------------------


def kernel(name, start_us, end_us, **facts):
    args = {"External id": start_us, "stream": 20, "device": 0} | facts
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 20,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": args,
    }


def facts(name, sent, got, group="1", size=2, dtype="BFloat16", **more):
    named = {
        "Collective name": name,
        "In msg nelems": sent,
        "Out msg nelems": got,
        "Group size": size,
        "dtype": dtype,
    }
    return named | {"Process Group Name": group, "Process Group Ranks": "[0, 1]", "In split size": "[]"} | more


def nccl(rank, shift_us=0, host="node0"):
    """A rank of two: an all-gather whose facts its kernel has, a reduce-scatter whose facts its launch has, a send."""
    late = 40 * rank
    events = [
        kernel("ampere_bf16_gemm", 0, 30 + late),
        kernel(
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            20 + late,
            100,
            **facts("_allgather_base", 100, 200),
        ),
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "record_param_comms",
            "ts": 5,
            "dur": 2,
            "args": {"External id": 110 + late} | facts("_reduce_scatter_base", 400, 200, dtype="Float"),
        },
        kernel(
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", 110 + late, 200
        ),
        kernel(
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
            210,
            220,
            **facts("recv" if rank else "send", 50, 50, "0", **{"Src Rank" if rank else "Dst Rank": 1 - rank}),
        ),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", 230, 240),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500, "args": {}},
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "tid": 0, "args": {"name": "python"}},
    ]
    for event in events:
        event["ts"] += shift_us
    groups = [("0", "default_pg", [0, 1]), ("1", "mesh_dp", [0, 1])]
    told = [{"pg_name": name, "pg_desc": desc, "ranks": ranks} for name, desc, ranks in groups]
    info = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": told}
    return {"distributedInfo": info, "host_name": host, "baseTimeNanoseconds": 10**18, "traceEvents": events}


def written(tmp_path, *files):
    paths = [tmp_path / f"trace{i}.json" for i in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        path.write_text(json.dumps(data))
    return paths


def test_the_names_of_nccl(tmp_path):
    trace = kineto.read_traces(written(tmp_path, nccl(0), nccl(1)))
    seen = [(e.kind, e.axis, e.peers, e.payload_bytes, e.wire_bytes, e.label) for e in trace.select(rank=0).events]
    assert seen == [
        ("all_gather", "mesh_dp", (0, 1), 400, 200.0, "all_gather bfloat16"),
        ("reduce_scatter", "mesh_dp", (0, 1), 1600, 800.0, "reduce_scatter float32"),
        ("send", "world", (1,), 100, 100.0, "send bfloat16"),
        ("all_reduce", "?", (0, 1), 0, 0.0, "all_reduce float32"),  # without facts: its name has the dtype
    ]
    assert trace.select(rank=1).events[2].kind == "recv" and trace.select(rank=1).events[2].peers == (0,)
    assert [span.label for span in trace.spans] == ["ampere_bf16_gemm"] * 2, (
        "with a GPU, operators of the CPU only launch"
    )


def test_what_is_exposed_and_who_waits(tmp_path):
    trace = kineto.read_traces(written(tmp_path, nccl(0), nccl(1)))
    seconds = kineto.exposed_s(trace)
    assert seconds[0] == pytest.approx((30e-6, 190e-6, 180e-6), rel=1e-2)  # the first 10 µs of the gather are hidden
    assert seconds[1] == pytest.approx((70e-6, 110e-6, 100e-6), rel=1e-2)
    assert kineto.waits_s(trace) == {(0, 1): pytest.approx(70e-6, rel=1e-2)}, "40 + 40, of which 10 are hidden"


def test_hosts_whose_clocks_differ_are_aligned(tmp_path):
    """An hour and a half: the ends of their collectives are the same moment."""
    trace = kineto.read_traces(written(tmp_path, nccl(0), nccl(1, 5_400_000_000, "node1")))
    assert kineto.waits_s(trace) == {(0, 1): pytest.approx(70e-6, rel=1e-2)}


def test_ranks_that_do_not_send_the_same(tmp_path):
    one, other = nccl(0), nccl(1)
    other["traceEvents"][1]["args"]["dtype"] = "Float"
    (found,) = [x for x in judge_trace(kineto.read_traces(written(tmp_path, one, other))) if x.kind == "mismatch"]
    assert (
        found.ranks == (0, 1)
        and "400 bytes, all_gather bfloat16" in found.text
        and "800 bytes, all_gather float32" in found.text
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather"),
        ("gloo:reduce_scatter", "reduce_scatter"),
        ("nccl:_all_to_all_single", "all_to_all"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_bf16_RING_LL", "reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send"),
        ("aten::mm", ""),
    ],
)
def test_kinds(name, kind):
    assert kineto.kind_meant(name) == kind


def test_what_is_no_trace(tmp_path, capsys):
    path = tmp_path / "no.json"
    path.write_text("[1]")
    with pytest.raises(SystemExit) as end:
        main(["trace", str(path)])
    assert end.value.code == 2 and f"{path} is no trace of torch.profiler" in capsys.readouterr().err
    with pytest.raises(kineto.TraceError, match="two files are of one rank: they are of ranks 0, 0"):
        kineto.read_traces(written(tmp_path, nccl(0), nccl(0)))
