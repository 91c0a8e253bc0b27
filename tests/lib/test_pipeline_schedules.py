"""Schedules in time: golden numbers, closed forms, and the orders of PyTorch and Megatron."""

from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import pytest

from lib.pipeline.gantt import gantt
from lib.pipeline.lower import lower
from lib.pipeline.rendezvous import rendezvous
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved, warmup
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.v_shape import dualpipe_v, v_half, v_min
from lib.pipeline.schedules.with_reduce import with_reduce
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from lib.pipeline.simulate import Costs, simulate

TWICE = Costs(F=1, I=1, W=1)  # backward takes twice as long as forward


def thirds(v):
    """Times of a stage where a rank has v of them, and all of them take 1 forward and 2 backward."""
    return Costs(1 / v, 1 / v, 1 / v)


GOLDENS = [  # schedule, made in the test, times, makespan, bubble of all, most microbatches alive on each rank
    (partial(naive, 4, 3), Costs(1, 0.5, 0.5), 24, 0.75, [1, 1, 1, 1]),
    (partial(gpipe, 4, 8), Costs(1, 0.5, 0.5), 22, 3 / 11, [8] * 4),
    (partial(gpipe, 4, 8, last_first=True), Costs(1, 0.5, 0.5), 22, 3 / 11, [8] * 4),
    (partial(one_f_one_b, 4, 8), Costs(1, 0.5, 0.5), 22, 3 / 11, [4, 3, 2, 1]),
    (partial(one_f_one_b, 4, 8), TWICE, 33, 3 / 11, [4, 3, 2, 1]),
    (partial(one_f_one_b, 2, 8), Costs(120, 110, 110), 3060, 1 / 9, [2, 1]),
    (partial(interleaved, 4, 8, 2), thirds(2), 28.5, 4.5 / 28.5, [11, 9, 7, 5]),
    (partial(interleaved, 4, 8, 4), thirds(4), 26.25, 2.25 / 26.25, [19, 17, 15, 13]),
    (partial(zb_h1, 4, 8), TWICE, 27, 3 / 27, [4, 4, 4, 4]),
    (partial(zb_h1, 4, 8), Costs(2, 3, 2), 65, 9 / 65, [4, 4, 4, 4]),
    (partial(zb_h2, 4, 8), TWICE, 27, 3 / 27, [7, 7, 7, 7]),
    (partial(zb_v, 4, 8), thirds(2), 25.5, 1.5 / 25.5, [8, 8, 8, 8]),
    (partial(v_min, 4, 8), thirds(2), 29.5, 5.5 / 29.5, [4, 4, 4, 4]),
    (partial(v_half, 4, 8), thirds(2), 28.5, 4.5 / 28.5, [6, 6, 6, 6]),
    (partial(dualpipe_v, 4, 8), thirds(2), 25.5, 1.5 / 25.5, [9, 9, 9, 9]),
]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden[0].func.__name__)
def test_golden_numbers(golden):
    make, costs, makespan, bubble, peaks = golden
    schedule = make()
    timeline = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(makespan, rel=1e-12)
    assert timeline.bubble == pytest.approx(bubble, rel=1e-12)
    assert [timeline.peak(rank) for rank in range(schedule.num_ranks)] == peaks


def test_activations_that_the_input_gradient_frees():
    timeline = simulate(zb_h1(4, 8))
    assert [timeline.peak(rank, freed_by=[Op.I]) for rank in range(4)] == [4, 3, 2, 1]


def test_messages_take_their_time():
    costs = Costs(120, 110, 110, latency=5)
    for n in (2, 4, 8):
        for m in (n, 2 * n, 4 * n):
            with_gpipe, with_1f1b = (
                simulate(s(n, m), costs).makespan - simulate(s(n, m), Costs(120, 110, 110)).makespan
                for s in (gpipe, one_f_one_b)
            )
            assert with_gpipe == 2 * (n - 1) * 5
            assert with_1f1b == (2 * (n - 2) + 2 * m * (n - 1) / n) * 5


def test_messages_queue_on_their_link():
    """Microbatches are made faster than the link carries them: the last one arrives behind all others."""
    timeline = simulate(gpipe(2, 4), Costs(1, 1, 1, transfer=3))
    arrived = [slot.start for slot in timeline.slots if slot.rank == 1 and slot.action.op == Op.F]
    assert arrived == [1 + 3, 1 + 6, 1 + 9, 1 + 12]


# Schedule, times, microbatches from which it holds; units that rank 0 waits, microbatches that a rank keeps at most (in
# each stage). Other closed forms: test_cost_bubble.py. V-Min and V-Half wait about 2/3 and 1/2 of 1F1B's 3(p-1).
WAITS = [
    (zb_h2, TWICE, lambda n: 2 * n - 1, lambda n: n - 1, lambda n: 2 * n - 1),  # no hole in any rank
    (zb_v, thirds(2), lambda n: 2 * n - 1, lambda n: (n - 1) / 2, lambda n: 2 * n),
    (v_min, thirds(2), lambda n: 2 * n, lambda n: 2 * n - (2.5 if n % 3 else 1.5), lambda n: 2 * ((n + 4) // 3)),
    (
        v_half,
        thirds(2),
        lambda n: 2 * n,
        lambda n: 1.5 * (n - 1) - (0.5 if n % 2 else 0),
        lambda n: 2 * ((n + 2) // 2),
    ),
    (dualpipe_v, thirds(2), lambda n: 2 * n, lambda n: (n - 1) / 2, lambda n: 2 * n + 1),
]


@pytest.mark.parametrize(("make", "costs", "fewest", "waits", "keeps"), WAITS)
def test_a_rank_waits_and_keeps_as_the_authors_say(make, costs, fewest, waits, keeps):
    for n in range(2, 13):
        for m in (fewest(n), fewest(n) + 1, 25):
            seen = simulate(make(n, m), costs)
            assert seen.idle(0) == pytest.approx(waits(n)), (n, m)
            assert max(seen.peak(rank) for rank in range(n)) == keeps(n), (n, m)


def test_stages_of_unequal_length():
    """The slowest sets the pace: its own work, and the way of the first microbatch there and of the last one back."""
    costs = Costs(F=[1, 3, 1], I=[1, 2, 1], W=[0.5, 2, 0.5])
    assert simulate(gpipe(3, 5), costs).makespan == 1 + 5 * (3 + 4) + 1 + 1.5 + 1.5
    with pytest.raises(ValueError, match="F has 3 numbers for 2 stages"):
        simulate(gpipe(2, 5), costs)


# ---- others' orders -------------------------------------------------------------------------------------------------


def order_of(rows):
    """Stage, op and microbatch of PyTorch's actions, without its holes and its sums of gradients."""
    # PyTorch may have a forward and a backward in one action.
    single = [one for a in rows if a is not None for one in getattr(a, "sub_actions", None) or [a]]
    return [
        (a.stage_index, a.computation_type.value, a.microbatch_index)
        for a in single
        if a.computation_type.value in tuple(Op)
    ]


def test_a_backward_in_one_piece_takes_what_it_is_said_to_take():
    for forward, backward in ((1, 3), (Fraction(5, 3), Fraction(1, 7)), ([1, 3, 1], [2, 5, 1])):
        costs = Costs.of(forward, backward, latency=0.5)
        for slot in simulate(one_f_one_b(3, 4), costs).compute:
            takes = forward if slot.action.op == Op.F else backward
            expected = takes[slot.action.stage] if isinstance(takes, list) else takes
            assert slot.end - slot.start == pytest.approx(expected), slot
        assert costs.latency == 0.5
    with pytest.raises(ValueError, match="must be above 0"):
        Costs.of(1, 0)


def test_the_orders_are_pytorchs():
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    names = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
    if not all(hasattr(theirs, name) for name in names):
        pytest.skip("PyTorch has renamed its schedules")
    for n in (1, 2, 3, 4, 8):
        for m in (8, 12, 24):
            fake = SimpleNamespace(_num_stages=n, _n_microbatches=m)
            order = theirs.ScheduleGPipe._get_pipeline_order(fake)
            assert [order_of(order[r]) for r in range(n)] == [list(row) for row in gpipe(n, m).actions]
            order = theirs.Schedule1F1B._get_pipeline_order(fake)
            *rows, last = (order_of(order[r]) for r in range(n))
            *mine, my_last = map(list, one_f_one_b(n, m).actions)
            assert rows == mine
            if last != my_last:  # PyTorch 2.13 prints the last stage's forwards as 1, 2, 3 …, and runs 0, 1, 2 …
                assert last == [(stage, op, k + (op == Op.F)) for stage, op, k in my_last]
            for v in (2, 3):
                if m % n == 0:
                    fake = SimpleNamespace(
                        n_local_stages=v, pp_group_size=n, _n_microbatches=m, microbatches_per_round=n
                    )
                    rank_of = theirs.ScheduleInterleaved1F1B._calculate_single_rank_operations
                    order = [order_of(rank_of(fake, rank)) for rank in range(n)]
                    assert order == [list(row) for row in interleaved(n, m, v).actions]


@pytest.mark.parametrize(
    ("name", "make", "fewest"),
    [("ScheduleZBVZeroBubble", zb_v, lambda n: 1), ("ScheduleDualPipeV", dualpipe_v, lambda n: 2 * n)],
)
def test_vs_are_pytorchs(name, make, fewest):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    order = getattr(getattr(theirs, name, None), "_calculate_single_rank_operations", None)
    if order is None:
        pytest.skip("this PyTorch does not have it, or has renamed it")
    for n in (1, 2, 3, 4, 8):
        for m in sorted({1, 2, n, 2 * n, 2 * n + 1, 24}):
            if m >= fewest(n):
                fake = SimpleNamespace(pp_group_size=n, _n_microbatches=m, _num_stages=2 * n, num_stages=2 * n)
                rows = [order_of(order(fake, rank)) for rank in range(n)]
                assert rows == [list(row) for row in make(n, m).actions]


def test_megatrons_warm_up():
    """`get_pp_rank_microbatches`: (P-r-1)·2 + (V-1)·P forwards, of which the last pairs with the first backward."""
    assert [warmup(rank, 4, 2) for rank in range(4)] == [10, 8, 6, 4]
    for rank, row in enumerate(interleaved(4, 8, 2).actions):
        assert [a.op for a in row].index(Op.B) == warmup(rank, 4, 2) + 1


# ---- messages -------------------------------------------------------------------------------------------------------


def test_in_a_good_order_blocking_messages_that_take_no_time_cost_nothing():
    for schedule in (gpipe(4, 8), one_f_one_b(4, 8), zb_h1(4, 8)):
        assert rendezvous(lower(schedule)).makespan == simulate(schedule).makespan
        assert simulate(lower(schedule)).makespan == simulate(schedule).makespan


def test_where_messages_take_time_blocking_ones_cost_it_twice_over():
    costs = Costs(latency=0.5)
    for schedule in (one_f_one_b(4, 8), interleaved(4, 8, 2), zb_h1(4, 8)):
        assert rendezvous(schedule, costs).makespan > 1.1 * simulate(schedule, costs).makespan


def test_messages_stand_in_the_order_in_which_actions_end():
    """On rank 1, microbatch 2 runs forward until after the gradient of microbatch 1 is sent to it."""
    rows = lower(one_f_one_b(3, 3), Costs(1, 1, 1)).to_text().splitlines()
    assert rows[0] == "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2"
    assert "1SEND_B0 1F2 1RECV_B1 1SEND_F2 1B1" in rows[1], "and not 1RECV_B1 1F2, which is the order of their starts"


def test_one_rank_sends_nothing():
    assert not lower(one_f_one_b(1, 3)).is_lowered
    assert not lower(naive(1)).is_lowered


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpipe(0, 4), "num_ranks=0 must be at least 1"),
        (lambda: one_f_one_b(4, 0), "num_microbatches=0 must be at least 1"),
        (lambda: interleaved(4, 6, 2), "num_microbatches=6 must be a multiple of the 4 ranks, such as 8"),
        (lambda: interleaved(4, 8, 1), "stages_per_rank=1 must be at least 2"),
        (lambda: Costs(F=0), "F=0 must be above 0"),
        (lambda: Costs(W=[1, 0]), r"W=\[1, 0\] must be above 0"),
        (lambda: Costs(latency=-1), "latency=-1"),
    ],
)
def test_wrong_use_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- in letters -----------------------------------------------------------------------------------------------------


def test_a_gantt_in_letters():
    assert gantt(simulate(one_f_one_b(3, 3))).splitlines() == [
        "rank 0  F0 F1 F2 ·  ·  ·  ·  B0--- ·  B1--- ·  B2---",
        "rank 1  ·  F0 F1 ·  ·  B0--- F2 B1--- ·  B2---",
        "rank 2  ·  ·  F0 B0--- F1 B1--- F2 B2---",
    ]
    assert gantt(simulate(zb_h1(2, 3))).splitlines() == [
        "rank 0  F0 F1 ·  I0 W0 F2 I1 W1 I2 W2",
        "rank 1  ·  F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert gantt(simulate(interleaved(2, 2, 2))).splitlines()[1] == (
        "rank 1  ·   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1----"
    )


def test_what_is_kept_may_differ_from_stage_to_stage():
    seen = simulate(interleaved(2, 2, 2))  # rank 0 has stages 0 and 2
    assert seen.peak(0) == 4
    assert seen.peak(0, kept=[100, 0, 1, 0]) == 202
    assert seen.alive(1, kept=[0, 5, 0, 7])[-1][1] == 0


def test_sums_of_gradients_take_their_time_one_after_the_other_beside_the_work():
    """One rank, one stage, two microbatches, a sum after each: backward takes 2, a sum 5, and the second waits."""
    timeline = simulate(with_reduce(gpipe(1, 2), each=True), Costs(reduce=5))
    sums = [(slot.start, slot.end) for slot in timeline.slots if slot.action.op == Op.REDUCE]
    works = [slot.end for slot in timeline.slots if slot.action.op != Op.REDUCE]
    assert sums == [(4, 9), (9, 14)] and max(works) == 6 and timeline.makespan == 14


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1])
def test_pauses_are_the_idle_time_between_the_first_action_and_the_last(make):
    seen = simulate(make(4, 7), Costs(2, 1, 1, latency=0.5))
    for rank in range(4):
        mine = [slot for slot in seen.compute if slot.rank == rank]
        between = mine[-1].end - mine[0].start - sum(slot.end - slot.start for slot in mine)
        assert sum(slot.start - start for start, slot in seen.pauses(rank)) == between
        assert all(slot in mine and slot.start > start for start, slot in seen.pauses(rank))
    assert seen.pauses(0), "rank 0 waits for the first gradient"
