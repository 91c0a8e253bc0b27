"""What `lib.doctor trace` says of files from other people's runs: seen, not seen, or not comparable.

Each run is small and was timed by hand (`recorded_runs.py`). The exit code is the verdict: 0 compared and right, 1
something looks wrong, 2 no verdict, because too little could be compared.
"""

import gzip
import json
from dataclasses import dataclass, field
from functools import partial

import pytest

from lib.doctor.__main__ import main
from lib.kineto import matched, read_traces
from lib.trace import CommEvent, Span, Trace
from tests.lib.recorded_runs import Run, written

STEPS = 5


def data_parallel(world=4, late=None, steps=STEPS, late_us=300):
    """Compute, and an all-reduce of all; one rank is late in each step."""
    everyone = tuple(range(world))
    step = [("compute", 1000), ("all_reduce", everyone, 200)]
    programs = {rank: step * steps for rank in everyone}
    if late is not None:
        programs[late] = [("sleep", late_us), *step] * steps
    return programs


WORLD4 = [("default_pg", (0, 1, 2, 3))]
MESH = [*WORLD4, ("mesh_dp", (0, 2)), ("mesh_dp", (1, 3)), ("mesh_tp", (0, 1)), ("mesh_tp", (2, 3))]


def two_axes(late=None, late_us=400):
    """tp sums inside of a step and dp at its end."""
    programs = {}
    for rank in range(4):
        tp, dp = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        step = [("compute", 500), ("all_reduce", tp, 50), ("compute", 400 + 7 * rank), ("all_reduce", dp, 150)]
        programs[rank] = ([("sleep", late_us)] if rank == late else []) + step
        programs[rank] *= STEPS
    return programs


def pipeline(stages=4, microbatches=8, slow=None, extra_us=100, mesh=False):
    """GPipe: all forwards, then all backwards; at the end the ranks sum the loss."""
    programs = {}
    for stage in range(stages):
        us = 100 + (extra_us if stage == slow else 0)
        forward, backward = [("compute", us)], [("compute", 2 * us)]
        if stage > 0:
            forward, backward = [("recv", stage - 1, 5), *forward], [*backward, ("send", stage - 1, 5)]
        if stage < stages - 1:
            forward, backward = [*forward, ("send", stage + 1, 5)], [("recv", stage + 1, 5), *backward]
        programs[stage] = forward * microbatches + backward * microbatches
        programs[stage] += [("all_reduce", tuple(range(stages)), 10)]
        programs[stage] *= 2
    return programs


def four_axes():
    """2 · 2 · 2 · 2 ranks: tp and cp sum inside, stages send, dp sums at the end."""
    programs, groups = {}, [("default_pg", tuple(range(16)))]
    for axis, step in (("tp", 1), ("cp", 2), ("pp", 4), ("dp", 8)):
        groups += [(f"mesh_{axis}", (rank, rank + step)) for rank in range(16) if not rank & step]
    of = {(desc, rank): ranks for desc, ranks in groups for rank in ranks}
    for rank in range(16):
        inside = [("compute", 300), ("all_reduce", of["mesh_tp", rank], 20), ("all_gather", of["mesh_cp", rank], 30)]
        if rank & 4:
            both = [("recv", rank - 4, 5), *inside, *inside, ("send", rank - 4, 5)]
        else:
            both = [*inside, ("send", rank + 4, 5), ("recv", rank + 4, 5), *inside]
        programs[rank] = [*both * 4, ("all_reduce", of["mesh_dp", rank], 100)]
    return Run(programs, groups)


def with_changed_names(run):
    """The second rank has made a group more, so its names are others."""
    files = run.files()
    info = files["rank1.json"]["distributedInfo"]
    for group in info["pg_config"]:
        group["pg_name"] = str(int(group["pg_name"]) + 7)
    for event in files["rank1.json"]["traceEvents"]:
        if "Process Group Name" in event["args"]:
            event["args"]["Process Group Name"] = str(int(event["args"]["Process Group Name"]) + 7)
    return files


def changed(files, *names, info=(), events=None, **top):
    """Files of which some have no facts of the run, or other events."""
    for name in names or files:
        data = files[name]
        for key in info:
            data["distributedInfo"].pop(key, None)
        if events is not None:
            data["traceEvents"] = events(data["traceEvents"])
        data |= top
    return files


def without_facts(events):
    return [event for event in events if event["name"] != "record_param_comms"]


def as_text(events):
    """Times as text, no args, and a name with a control character."""
    odd = {"ph": "X", "cat": "user_annotation", "name": "load\x01er", "ts": "5", "dur": "1", "args": None}
    return [event | {"ts": str(event["ts"]), "dur": str(event["dur"])} for event in events] + [odd]


def renamed(files, name):
    return {name.format(i): data for i, data in enumerate(files.values())}


def gapped(name=None, category="cpu_op", gap=900):
    """A GPU that works 100 of 1000 µs, because its kernels are launched late, with what the CPU does meanwhile."""
    events = []
    for i in range(20):
        start = 1000 * i
        events.append({"ph": "X", "cat": "kernel", "name": "gemm", "ts": start, "dur": 1000 - gap})
        events[-1]["args"] = {"correlation": i}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start - 10, "dur": 5}
        events.append(launch | {"args": {"correlation": i}})
        if name:
            busy = {"ph": "X", "cat": category, "name": name, "ts": start + 90, "dur": gap - 110, "args": {}}
            events.append(busy)
    return {"rank0.json": {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}}


def two_cycles():
    """`schedule(repeat=2)` writes a file for each cycle."""
    first, second = Run(data_parallel(2), [("default_pg", (0, 1))]), Run(data_parallel(2), [("default_pg", (0, 1))])
    files = {f"rank{rank}.first.json": first.file(rank) for rank in (0, 1)}
    for rank in (0, 1):
        later = second.file(rank)
        for event in later["traceEvents"]:
            event["ts"] += 1e6
            if "Seq" in event["args"]:
                event["args"]["Seq"] += 100
        files[f"rank{rank}.second.json"] = later
    return files


def of_our_own(late=None):
    """What `lib.train --profile` writes."""
    trace = Trace()
    for step in range(4):
        for rank in range(3):
            start_s, wait_s = step / 100, 0.004 if rank == late else 0.0
            trace.spans.append(Span(rank, "forward", f"{step}F0", start_s + wait_s, start_s + wait_s + 0.004))
            call = "all_reduce", "dp", (0, 1, 2), 400, 400.0, "gradients"
            end_s = start_s + (0.01 if late is not None else 0.006)
            trace.events.append(CommEvent(rank, *call, start_s + wait_s + 0.004, end_s))
    return {"profile.json": json.dumps({"traceEvents": trace.chrome(), "displayTimeUnit": "ms"})}


def lost(events):
    """One call in the middle is not in the file: neither the kernel nor its facts."""
    at = [i for i, event in enumerate(events) if event["name"] == "record_param_comms"][2]
    return events[:at] + events[at + 2 :]


def captured(events):
    """A CUDA graph: the CPU launches, and no kernel is recorded."""
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "dur": 5, "args": {"correlation": 1}}
    return [launch | {"ts": event["ts"]} for event in events if event["cat"] == "kernel"]


def of_the_cpu(events):
    return [event for event in events if event["cat"] != "kernel"]


def generic(events):
    """RCCL: one kernel for everything, and facts that were not recorded."""
    name = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
    return [event | {"name": name} if "nccl" in event["name"] else event for event in without_facts(events)]


def uneven(events):
    """Experts: each rank gives as many tokens as it has."""
    for i, event in enumerate(events):
        if "In msg nelems" in event["args"]:
            event["args"] |= {"Collective name": "all_to_allv", "In msg nelems": 10 + i, "Out msg nelems": 17 * i}
    return events


def other_dtype(events):
    for event in events:
        if "dtype" in event["args"]:
            event["args"]["dtype"] = "BFloat16"
    return events


def two_hosts(late=None, host=lambda rank: f"host{rank // 2}", ahead_us=50_000.0, seq=True):
    run = Run(data_parallel(late=late), WORLD4, seq=seq, host=host, ahead=lambda rank: ahead_us * (rank // 2))
    return run.files()


def hidden_wait():
    """The all-reduce of rank 0 waits on its own stream while the rank computes."""
    files = Run(data_parallel(2, late=1), [("default_pg", (0, 1))]).files()
    computes = {"ph": "X", "cat": "kernel", "name": "gemm", "args": {}, "tid": 7}
    calls = [event for event in files["rank0.json"]["traceEvents"] if "nccl" in event["name"]]
    files["rank0.json"]["traceEvents"] += [computes | {"ts": e["ts"], "dur": e["dur"]} for e in calls]
    return files


def uneven_on_gloo():
    """Along tp the ranks send unequal numbers of rows, as to experts."""
    programs = {
        rank: [("all_to_all", *op[1:]) if op[1] in ((0, 1), (2, 3)) else op for op in program]
        for rank, program in two_axes(3).items()
    }
    files = Run(programs, MESH, "gloo").files()
    for rank, file in enumerate(files.values()):
        for event in file["traceEvents"]:
            if event["name"] == "gloo:all_to_all":
                event["args"]["Input Dims"] = [[3 * rank, 4]]
    return files


@dataclass
class Case:
    files: object
    code: int
    says: list = field(default_factory=list)
    never: list = field(default_factory=list)


NOTHING = ["looks wrong:", "could not see"]
DP4 = partial(Run, groups=WORLD4)
CASES = {
    # healthy and complete
    "data parallel": Case(lambda: DP4(data_parallel()).files(), 0, ["compared: 5 collectives of ranks 0 to 3"]),
    "data parallel on gloo": Case(lambda: DP4(data_parallel(), backend="gloo").files(), 0, ["compared: 5 coll"]),
    "two axes": Case(lambda: Run(two_axes(), MESH).files(), 0, ["compared: 20 collectives"]),
    "two axes on gloo": Case(lambda: Run(two_axes(), MESH, "gloo").files(), 0, ["compared: 20 collectives"]),
    "without numbers": Case(lambda: Run(two_axes(), MESH, seq=False).files(), 0, ["compared: 20 collectives"]),
    "pipeline": Case(lambda: DP4(pipeline()).files(), 0, ["96 messages"]),
    "pipeline on gloo": Case(lambda: DP4(pipeline(), backend="gloo").files(), 0, ["96 messages"]),
    "four axes": Case(lambda: four_axes().files(), 0, ["64 messages"]),
    "two hosts": Case(two_hosts, 0, ["clocks that are ahead", "rank 2 +50.0 ms, rank 3 +50.0 ms"]),
    "hosts without names": Case(lambda: two_hosts(host=lambda rank: ""), 0, ["rank 2 +50.0 ms"]),
    "hosts of one name": Case(lambda: two_hosts(host=lambda rank: "localhost"), 0, ["rank 2 +50.0 ms"]),
    "other names of groups": Case(lambda: with_changed_names(Run(two_axes(), MESH)), 0, ["compared: 20 collectives"]),
    "a wait behind computing": Case(hidden_wait, 0),
    "uneven all-to-all": Case(lambda: changed(DP4(data_parallel()).files(), events=uneven), 0),
    "cycles": Case(two_cycles, 0, ["a trace of 12.0 ms", "compared: 10 collectives"]),
    "times as text": Case(lambda: changed(DP4(data_parallel()).files(), events=as_text), 0),
    "without facts": Case(
        lambda: changed(DP4(data_parallel()).files(), info=["pg_config"], events=without_facts), 0, ["no file names a"]
    ),
    "a file of our own": Case(of_our_own, 0, ["compared: 4 collectives"]),
    "a window that begins a step later": Case(
        lambda: changed(DP4(data_parallel()).files(), "rank2.json", events=lambda events: events[3:]),
        0,
        ["compared: 4 collectives", "3 calls of ranks 0, 1 and 3: they have no partner"],
    ),
    "a window that begins a step later on the other host": Case(
        lambda: changed(two_hosts(), "rank2.json", events=lambda events: events[3:]), 0, ["compared: 4 collectives"]
    ),
    "a lost event": Case(
        lambda: changed(DP4(data_parallel(), seq=False).files(), "rank2.json", events=lost),
        0,
        ["compared: 4 collectives"],
    ),
    "no rank inside": Case(
        lambda: renamed(changed(DP4(data_parallel()).files(), info=["rank"]), "worker{}.pt.trace.json"), 0
    ),
    # something is wrong
    "a late rank": Case(lambda: DP4(data_parallel(late=1)).files(), 1, ["for rank 1, 20% of the trace"]),
    "a late rank of two axes": Case(lambda: Run(two_axes(3), MESH).files(), 1, ["for rank 3,"], ["for rank 2,"]),
    "a late rank of two axes on gloo": Case(
        lambda: Run(two_axes(3), MESH, "gloo").files(), 1, ["for rank 3,", "mesh_dp      5", "mesh_tp      5"], ["? "]
    ),
    "a late rank, with uneven all-to-alls of two axes on gloo": Case(
        uneven_on_gloo, 1, ["for rank 3,", "compared: 20 collectives", "mesh_tp      5"], ["? "]
    ),
    "a late rank on the other host": Case(lambda: two_hosts(late=3), 1, ["for rank 3,"], ["for rank 2,"]),
    "a slow stage": Case(lambda: DP4(pipeline(slow=2)).files(), 1, ["for rank 2,", "longer than the"], ["for rank 1,"]),
    "a slow stage on gloo": Case(
        lambda: DP4(pipeline(slow=2), backend="gloo").files(), 1, ["for rank 2,"], ["for rank 3,", "for rank 1,"]
    ),
    "a late rank of ours": Case(lambda: of_our_own(late=1), 1, ["for rank 1,"]),
    "no rank inside, in the order of a shell": Case(
        lambda: dict(sorted(changed(Run(data_parallel(12, 2), [("default_pg", (*range(12),))]).files(),
                                    info=["rank"]).items())), 1, ["for rank 2,"], ["for rank 4,"]
    ),
    "one file is missing, and a rank late": Case(
        lambda: DP4(data_parallel(late=1)).files(but=[3]), 1, ["for rank 1,", "the file of rank 3 of 4"]
    ),
    "an idle GPU": Case(gapped, 1, ["nothing to do in 90% of", "because the CPU launched late"]),
    "a GPU that waits for data": Case(
        lambda: gapped("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation"),
        1,
        ["ms for data"],
        ["launched late"],
    ),
    "a GPU that is synced": Case(lambda: gapped("cudaStreamSynchronize", "cuda_runtime"), 1, ["after a sync"]),
    "ranks that differ": Case(
        lambda: changed(DP4(data_parallel()).files(), "rank1.json", events=other_dtype), 1, ["bfloat16", "differ"]
    ),
    # not seen
    "one file is missing": Case(lambda: DP4(data_parallel()).files(but=[1]), 2, ["the file of rank 1 of 4", "no verd"]),
    "the file of the late rank is missing": Case(lambda: DP4(data_parallel(late=1)).files(but=[1]), 2, ["of rank 1"]),
    "one of eight": Case(
        lambda: Run(data_parallel(8), [("default_pg", tuple(range(8)))]).files(but=range(1, 8)),
        2,
        ["the files of ranks 1 to 7 of 8"],
    ),
    "metadata only": Case(lambda: changed(DP4(data_parallel()).files(), events=lambda events: []), 2, ["no operator"]),
    "a captured graph": Case(
        lambda: changed(DP4(data_parallel()).files(), events=captured), 2, ["40 kernels or graphs"], ["no operator"]
    ),
    "only the CPU was profiled": Case(
        lambda: changed(DP4(data_parallel()).files(), events=of_the_cpu), 2, ["profile with ProfilerActivity.CUDA"]
    ),
    "kernels that do not say what they are": Case(
        lambda: changed(DP4(data_parallel()).files(), events=generic), 2, ["do not name their group"]
    ),
    "hosts, no numbers, and a lost event": Case(
        lambda: changed(two_hosts(seq=False), "rank2.json", "rank3.json", events=lost), 2, ["that nothing aligns"]
    ),
    "a file of a different run": Case(
        lambda: DP4(data_parallel(), ahead=lambda rank: 6e7 * (rank == 3)).files(), 2, ["calls of rank 3: they were"]
    ),
    "one rank of the CPU": Case(
        lambda: {"rank0.json": {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5}]}}, 2, ["no verdict"]
    ),
    "of another program": Case(
        lambda: {"rank0.json": {"traceEvents": [{"ph": "X", "name": "frame", "ts": 0, "dur": 5, "cat": "gpu"}]}}, 2
    ),
    # refused
    "cut off": Case(lambda: {"rank0.json.gz": gzip.compress(b'{"traceEvents": []}' * 99)[:40]}, 2, ["is cut off"]),
    "cut off, as text": Case(lambda: {"rank0.json": '{"traceEvents": [{"ph": "X"'}, 2, ["is no trace of torch"]),
    "no rank in files or names": Case(
        lambda: dict(zip(("a.json", "b.json", "c.json", "d.json"),
                         changed(DP4(data_parallel()).files(), info=["rank"]).values(), strict=True)),
        2,
        ["does not say of which rank it is"],
    ),
    "the same file twice": Case(
        lambda: {"rank0.json": DP4(data_parallel()).file(0), "again.json": DP4(data_parallel()).file(0)},
        2,
        ["two files are of one rank"],
    ),
    "a time that is none": Case(lambda: {"rank0.json": '{"traceEvents": [{"ph": "X", "ts": NaN}]}'}, 2, ["is no tr"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdict(name, tmp_path, capsys):
    case = CASES[name]
    with pytest.raises(SystemExit) as end:
        main(["trace", *map(str, written(tmp_path, case.files()))])
    said = "".join(capsys.readouterr())
    assert end.value.code == case.code, said
    for words in case.says:
        assert words in said
    for words in case.never + (NOTHING if case.code == 0 else []):
        assert words not in said
    assert case.code == 0 or "nothing looks wrong\n" not in said


@pytest.mark.parametrize("name", ["a lost event", "two hosts", "hosts of one name", "two axes on gloo", "cycles"])
def test_what_is_paired_ends_together(name, tmp_path):
    pairs = matched(read_traces(written(tmp_path, CASES[name].files())))
    ends = [[call.end_s for call in calls] for calls in pairs]
    assert pairs and all(max(some) - min(some) < 1e-6 for some in ends)


def test_every_kind_of_verdict_is_tried():
    codes = [case.code for case in CASES.values()]
    assert all(codes.count(code) >= 10 for code in (0, 1, 2)) and len(codes) > 40
