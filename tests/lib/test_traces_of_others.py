"""Traces in the forms of public ones (`traces/README.md`): the doctor finds in them what was counted by hand."""

import pytest

from lib.doctor.__main__ import main
from lib.kineto import TraceError, exposed_s, read_traces, waits_s
from lib.kineto.times import length
from tests.lib.test_trace_forms import EXPECTED, FOLDER

NAMES = [trace["name"] for trace in EXPECTED]


def paths_of(expected):
    return [FOLDER / name for name in expected["files"]]


@pytest.mark.parametrize("expected", EXPECTED, ids=NAMES)
def test_verdict(expected, capsys):
    with pytest.raises(SystemExit) as end:
        main(["trace", *map(str, paths_of(expected))])
    said = "".join(capsys.readouterr())
    assert end.value.code in expected["exits"], said
    assert (end.value.code == 0) == said.endswith("\nnothing looks wrong\n")


@pytest.mark.parametrize("expected", [one for one in EXPECTED if "us" in one], ids=lambda one: one["name"])
def test_numbers(expected):
    trace = read_traces(paths_of(expected))
    for rank, (of_rank, us) in zip(trace.ranks, expected["us"].items(), strict=True):
        assert rank == (int(of_rank) if expected["ranks"] != [-1] else 0)
        counted = [s * 1e6 for s in exposed_s(trace)[rank]]
        assert counted == pytest.approx([us[name] for name in ("compute", "comm", "exposed")], abs=0.01)
        if rank in trace.idle_s:
            assert sum(trace.idle_s[rank].values()) * 1e6 == pytest.approx(us["idle"], abs=0.01)
            assert length(trace.windows[rank]) * 1e6 <= us["window"] + 0.01, "without copies at its ends"


@pytest.mark.parametrize("expected", [one for one in EXPECTED if "calls" in one], ids=lambda one: one["name"])
def test_calls(expected):
    trace = read_traces(paths_of(expected))
    for rank, calls in expected["calls"].items():
        found = [(e.label, round((e.end_s - e.start_s) * 1e6, 2)) for e in trace.of_rank[int(rank)].events]
        assert found == [(f"{kind} {dtype}".strip(), us) for kind, dtype, us in calls]


@pytest.mark.parametrize("expected", [one for one in EXPECTED if "waits" in one], ids=lambda one: one["name"])
def test_waits(expected):
    """Those that nothing hides; the numbers by hand have the hidden ones, too."""
    found = {pair: s * 1e6 for pair, s in waits_s(read_traces(paths_of(expected))).items()}
    most = {(rank, last): us for rank, last, us in expected["waits"]}
    assert all(us <= most.get(pair, 0.0) + 0.01 for pair, us in found.items())
    if expected["name"] == "sequence_numbers":
        assert found == pytest.approx(most, abs=0.01)


def test_two_runs_are_not_one():
    with pytest.raises(TraceError, match="of runs of different sizes: 2 and 8"):
        read_traces(paths_of(next(one for one in EXPECTED if one["name"] == "two_worlds")))
