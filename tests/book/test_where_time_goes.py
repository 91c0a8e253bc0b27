"""The meter of the benchmark of a step's parts: each CPU second once, for the innermost part; and what it watches."""

import time

import pytest

from benchmarks.where_time_goes import LIBRARY, Meter


def busy(seconds):
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_each_second_counts_once_for_the_innermost():
    meter = Meter()
    inner = meter.counted(lambda: busy(0.02), "inner")

    def both():
        busy(0.01)
        inner()
        time.sleep(0.05)  # is not CPU time

    began_s = time.thread_time()
    meter.counted(both, "outer")()
    assert sum(meter.spent.values()) == pytest.approx(time.thread_time() - began_s, abs=0.005)
    assert meter.spent["inner"] == pytest.approx(0.02, abs=0.005)
    assert meter.spent["outer"] == pytest.approx(0.01, abs=0.005)


def test_what_is_watched_is_there():
    assert all(
        hasattr(owner, name) for places in LIBRARY.values() for owner, names in places for name in names.split()
    )
