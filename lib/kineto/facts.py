"""What a file says of a call beside its name, the most certain first.

The name of a kernel is the last thing to believe: RCCL has one name for all (ROCm/roctracer#101), and NCCL of 2022 and
2023 called all of its kernels `SendRecv…int8_t` (NVIDIA/nccl#739). In this order:

1. the facts of the kernel itself;
2. those of the `record_param_comms` whose `External id` it has; in old traces that id is only the correlation, and by
   chance that of another call (pytorch/pytorch#131462);
3. the call in which its launch lies, on the thread of the launch: `record_param_comms`, `c10d::…` or `nccl:…`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from lib.kineto.files import Event, File
from lib.kineto.idle import launches_of
from lib.kineto.names import kind_meant

CALLS = ("record_param_comms", "c10d::", "nccl:")
AROUND = 16  # calls that may lie within each other, before a launch


class Facts:
    """The facts of the calls of one file."""

    def __init__(self, file: File) -> None:
        self._by_id = {e.args.get("External id"): e.args for e in file.events if "Collective name" in e.args}
        self._launches = launches_of(file)
        self._calls: dict[object, list[Event]] = defaultdict(list)
        for event in file.events:
            if event.name.startswith(CALLS):
                self._calls[event.thread].append(event)
        self._starts = {thread: [event.start_ns for event in its] for thread, its in self._calls.items()}

    def of(self, event: Event) -> dict[str, object]:
        """What is said of a kernel; of a call of gloo, its own args. Without any facts, what its name means is left."""
        args = dict(event.args)
        if "Collective name" in args:
            return args
        external = args.get("External id")
        if external != args.get("correlation") and external in self._by_id:
            return self._by_id[external] | args
        if "correlation" in args:
            return self._around(self._launches.get(args["correlation"])) | args
        return args

    def _around(self, launch: Event | None) -> dict[str, object]:
        """The innermost call with facts around a launch, else the innermost that names a kind."""
        if launch is None:
            return {}
        calls, starts = (of.get(launch.thread, []) for of in (self._calls, self._starts))
        at = bisect_right(starts, launch.start_ns)
        around = [call for call in calls[max(0, at - AROUND) : at] if call.end_ns >= launch.end_ns][::-1]
        with_facts = [call.args for call in around if "Collective name" in call.args]
        if with_facts:
            return dict(with_facts[0])
        named = next((call for call in around if kind_meant(call.name)), None)
        return {} if named is None else dict(named.args) | {"Collective name": named.name}
