"""The small traces of `traces/` say what `expected.toml` says: counted from the files, without the reader of `lib`."""

import gzip
import json
import re
import tomllib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "traces"
EXPECTED = tomllib.loads((FOLDER / "expected.toml").read_text(encoding="utf-8"))["trace"]
COMMUNICATION = re.compile("nccl|multimem_all_reduce|ep::internode|^gloo:")
CATEGORIES = {"kernel", "Kernel", "gpu_memcpy", "Memcpy"}  # of what a device does


def events_of(name):
    opened = gzip.open if name.endswith(".gz") else open
    with opened(FOLDER / name, "rb") as file:
        events = json.loads(file.read(), strict=False)["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def covered(events):
    """Microseconds in which at least one event runs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def device_events(events):
    """Those of a device, or without one those of gloo's threads and the operators."""
    on_device = [event for event in events if event["cat"] in CATEGORIES]
    return on_device or [event for event in events if event["name"].startswith(("gloo:", "aten::"))]


@pytest.mark.parametrize("trace", [trace for trace in EXPECTED if "us" in trace], ids=lambda trace: trace["name"])
def test_microseconds_and_calls_are_those_of_the_files(trace):
    for name, (rank, us) in zip(trace["files"], trace["us"].items(), strict=True):
        seen = device_events(events_of(name))
        calls = [event for event in seen if COMMUNICATION.search(event["name"])]
        compute = [event for event in seen if event not in calls and "mem" not in event["cat"].lower()]
        starts, ends = [float(e["ts"]) for e in seen], [float(e["ts"]) + float(e["dur"]) for e in seen]
        window = max(ends) - min(starts)
        counted = {"window": window, "compute": covered(compute), "comm": covered(calls)}
        counted |= {"exposed": covered(calls + compute) - covered(compute), "idle": window - covered(seen)}
        assert counted == pytest.approx(us, abs=0.01)
        lasting = [call["dur"] for call in sorted(calls, key=lambda call: call["ts"])]
        assert lasting == [us for _, _, us in trace.get("calls", {}).get(rank, [])]


def test_every_file_is_expected_and_there():
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*")}
    assert files == {name for trace in EXPECTED for name in trace["files"]}
