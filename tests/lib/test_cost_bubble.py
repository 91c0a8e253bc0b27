"""The closed forms are what the simulator finds, for every size."""

import math

import pytest

from lib.cost import bubble
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_v
from lib.pipeline.simulate import Costs, simulate

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 25)]


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_steps_and_what_is_kept(stages_per_rank):
    forward, backward = 1.5, 3.5
    costs = Costs(F=forward / stages_per_rank, I=2 / stages_per_rank, W=1.5 / stages_per_rank)
    for p, m in SIZES:
        if stages_per_rank == 1:
            seen = [simulate(make(p, m), costs) for make in (gpipe, one_f_one_b)]
        elif m % p == 0:
            seen = [simulate(interleaved(p, m, stages_per_rank), costs)]
        else:
            continue
        for one in seen:
            assert one.bubble == pytest.approx(bubble.bubble(p, m, stages_per_rank))
            assert one.makespan == pytest.approx(bubble.pipeline_s(p, m, forward, backward, stages_per_rank))
        for rank in range(p):
            assert seen[-1].peak(rank) / stages_per_rank == bubble.kept_by(rank, p, m, stages_per_rank), (p, m, rank)


def test_microbatches_for_a_bubble():
    for p in range(1, 65):
        for most in (0.5, 0.2, 0.1, 0.05, 1 / 3):
            m = bubble.microbatches_for(p, most)
            assert bubble.bubble(p, m) <= most + 1e-12
            assert m == 1 or bubble.bubble(p, m - 1) > most
    assert (
        bubble.microbatches_for(8, math.nextafter(0.05, 0) - 1e-9) == 134 and bubble.microbatches_for(8, 0.05) == 133
    )


def test_zero_bubble():
    for p in range(1, 9):
        for m in (p, p + 1, 2 * p + 3):
            for costs in (Costs(1, 1, 1), Costs(2, 3, 2), Costs(2, 3, 1), Costs(3, 4, 3)):
                seen = simulate(zb_h1(p, m), costs)
                wait = bubble.zero_bubble_wait_s(p, costs.F, costs.I, costs.W)
                assert seen.makespan - m * (costs.F + costs.I + costs.W) == pytest.approx(wait), (p, m, costs)


def test_zero_bubble_in_a_v():
    for p in range(1, 9):
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            for costs in (Costs(1, 1, 1), Costs(2, 3, 2), Costs(3, 4, 1), Costs(4, 5, 3), Costs(10, 11, 5)):
                seen = simulate(zb_v(p, m), costs)
                wait = bubble.v_wait_s(p, 2 * costs.I, 2 * costs.W)  # of two stages
                assert seen.makespan - 2 * m * (costs.F + costs.I + costs.W) == pytest.approx(wait), (p, m, costs)
