"""When a GPU has nothing to do, and what stands before: the data, a sync, or the launch of its next kernel.

A gap ends where the next kernel begins, and a call of the CPU launched that kernel. If the call came in time, the
kernel waited for another stream. If it came late, the CPU was busy: with the data, with waiting for the GPU (a sync,
such as `loss.item()`), or with launches, each of which takes some µs of Python.
"""

from __future__ import annotations

import re
from bisect import bisect_left

from lib.kineto.files import Event, File
from lib.kineto.names import KERNEL, LAUNCH, MEMORY
from lib.kineto.times import gaps, length, union, within

OF_DEVICES = ("nccl:", "hccl:", "xccl:", "cuda_profiler_range")
CAUSES = ("data", "sync", "launch", "stream", "unknown")
DATA = re.compile("DataLoader|data_loader|dataloader")
SYNC = re.compile("Synchronize|aten::item|_local_scalar_dense|^cudaMemcpy$|^hipMemcpy$")


def on_gpu(event: Event) -> bool:
    """Whether the GPU is busy with an event: computing, communicating or copying."""
    return event.category in (*KERNEL, *MEMORY)


def idle_s(file: File) -> tuple[float, dict[str, float]]:
    """Seconds from the first work of the GPU to its last, and what stands before the gaps between → their seconds.

    (0.0, {}) for a file without kernels.
    """
    work = [event for event in file.events if on_gpu(event)]
    if not any(event.category in KERNEL for event in work):
        return 0.0, {}
    busy = union((event.start_ns, event.end_ns) for event in work)
    launches = launches_of(file)
    data, syncs = (
        union((e.start_ns, e.end_ns) for e in file.events if not on_gpu(e) and pattern.search(e.name))
        for pattern in (DATA, SYNC)
    )
    starts = [event.start_ns for event in work]
    found = dict.fromkeys(CAUSES, 0.0)
    whole = (busy[0][0], busy[-1][1]) if busy else (0, 0)
    for start, end in gaps(busy, *whole):
        launch = launches.get(work[bisect_left(starts, end)].args.get("correlation"))
        if launch is None:
            cause = "data" if 2 * length(within(data, start, end)) > end - start else "unknown"
        elif launch.start_ns <= start:
            cause = "stream"
        elif 2 * length(within(data, start, launch.start_ns)) > launch.start_ns - start:
            cause = "data"
        elif within(syncs, start, launch.start_ns):
            cause = "sync"
        else:
            cause = "launch"
        found[cause] += (end - start) / 1e9
    return (whole[1] - whole[0]) / 1e9, {cause: s for cause, s in found.items() if s > 0}


def launches_of(file: File) -> dict[object, Event]:
    """The number that links a kernel with its launch → the launch."""
    return {e.args["correlation"]: e for e in file.events if e.category in LAUNCH and "correlation" in e.args}


def not_recorded(file: File) -> int:
    """How many kernels, graphs and collectives were launched on a device without a kernel in the file.

    0 if the file has most of them: the last ones of a recording may run after it.
    """
    recorded = {event.args.get("correlation") for event in file.events if event.category in KERNEL}
    launched = [
        e for e in file.events if e.category in LAUNCH and ("LaunchKernel" in e.name or "GraphLaunch" in e.name)
    ]
    if not recorded:
        launched += [e for e in file.events if e.name == "record_param_comms" or e.name.startswith(OF_DEVICES)]
    lost = sum(event.args.get("correlation") not in recorded for event in launched)
    return lost if 2 * lost > len(launched) else 0
