"""The formulas against a ring that is walked step by step, and against the numbers that the sources print."""

import pytest

from lib import cost

RINGS = range(1, 9)


def ring(kind, n, chunk=1):
    """(chunks that each rank sends, messages that follow one another) of an array of n chunks, counted step by step."""
    sent, steps = [0] * n, 0
    phases = {"reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "all_reduce": 2}[kind]
    for _ in range(phases * (n - 1)):
        steps += 1
        for rank in range(n):
            sent[rank] += chunk  # one chunk to the right neighbour
    assert len(set(sent)) == 1
    return sent[0], steps


@pytest.mark.parametrize("n", RINGS)
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "all_to_all", "all_reduce"])
def test_a_ring_walked_step_by_step(kind, n):
    chunks, steps = ring(kind, n)
    assert cost.wire_bytes(kind, 100 * n, n) == pytest.approx(100 * chunks, abs=1e-9)
    assert cost.comm_s(kind, 100 * n, n, alpha_s=7, bandwidth_Bps=50) == pytest.approx(7 * steps + 100 * chunks / 50)


@pytest.mark.parametrize("n", RINGS)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(n):
    for quantity in (lambda k: cost.wire_bytes(k, 1e6, n), lambda k: cost.comm_s(k, 1e6, n, 1e-5, 1e9)):
        assert quantity("all_reduce") == pytest.approx(quantity("reduce_scatter") + quantity("all_gather"))


def test_numbers_to_remember():
    assert cost.wire_bytes("all_reduce", 1000, 4) == 1500
    assert cost.wire_bytes("reduce_scatter", 1000, 4) == 750
    assert cost.wire_bytes("broadcast", 1000, 4) == cost.wire_bytes("send", 1000, 4) == 1000
    assert cost.wire_bytes("recv", 1000, 4) == cost.wire_bytes("barrier", 1000, 4) == 0
    assert cost.comm_s("all_reduce", 1e9, 8, alpha_s=0, bandwidth_Bps=1e9) == 1.75
    assert cost.comm_s("all_reduce", 1e9, 1, alpha_s=5, bandwidth_Bps=1e9) == 0
    assert cost.comm_s("send", 1e9, 2, alpha_s=5, bandwidth_Bps=1e9) == 6


def test_bad_input():
    with pytest.raises(ValueError, match="unknown collective 'allreduce'; known are all_reduce, "):
        cost.wire_bytes("allreduce", 1, 2)
    with pytest.raises(ValueError, match="unknown collective"):
        cost.comm_s("allreduce", 1, 2, 0, 1)
    for bandwidth in (0, -1):
        with pytest.raises(ValueError, match=f"bandwidth_Bps={bandwidth} must be above 0"):
            cost.comm_s("send", 1, 2, 0, bandwidth)


def test_overlap():
    assert cost.overlap([], []) == []
    assert cost.overlap([1, 2, 3], [0.5, 0.5, 0.5]) == [(1, 1.5), (2, 2.5), (3, 3.5)], "all hidden but the last"
    assert cost.overlap([1, 2, 3], [3, 1, 1]) == [(1, 4), (4, 5), (5, 6)], "each waits for the one ahead"
    with pytest.raises(ValueError):
        cost.overlap([1, 2], [1])
