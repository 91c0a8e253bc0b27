"""Schedules that are run, beside what was predicted: the bubble, who keeps how much, and its bytes."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from book.trials import saved
from book.trials.rehearse import Rehearsals, rehearse
from book.trials.trial import peak_bytes
from lib import run
from lib.cost import sizes
from lib.memory import MemoryTracker
from lib.model import Block, GPTConfig
from lib.pipeline.gantt import to_trace
from lib.pipeline.lower import lower, other_end, proves
from lib.pipeline.schedules.action import Op, Schedule
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from lib.pipeline.simulate import Costs, Timeline, simulate
from lib.pipeline.stage import Stage
from lib.trace import Trace
from tests.on_time import on_time

timed = pytest.mark.timed("it measures the time of ranks that sleep, and wake up late on a busy machine")
UNIT_S = 0.07  # long enough that to wake eight ranks on two cores takes a small part of it


@pytest.mark.thorough("eight ranks that sleep", keep=1)
@timed
@pytest.mark.parametrize(
    ("make", "sizes"),
    [(naive, (8, 2)), (interleaved, (8, 8, 2)), *((one, (8, 8)) for one in (gpipe, one_f_one_b, zb_h1, zb_h2, zb_v))],
)
def test_the_bubble_is_the_predicted_one(make, sizes):
    schedule = make(*sizes)
    seen, predicted = rehearse(schedule, unit_s=UNIT_S), simulate(schedule)
    for rank in range(8):
        assert seen.peak(rank) == predicted.peak(rank)
    with on_time():
        assert abs(seen.bubble - predicted.bubble) < 0.03


@pytest.mark.thorough("eight ranks that sleep", keep=1)
@timed
@pytest.mark.parametrize(("make", "microbatches"), [(gpipe, 4), (one_f_one_b, 8)])
def test_late_messages_and_unequal_stages(make, microbatches):
    schedule = make(4, microbatches)
    costs = Costs([1, 1, 2, 1], 0.5, [1, 0.5, 0.5, 0.5], latency=0.5)
    seen, predicted = rehearse(schedule, costs, UNIT_S), simulate(schedule, costs)
    with on_time():
        assert seen.makespan == pytest.approx(predicted.makespan, rel=0.06)
        assert seen.makespan > 1.05 * simulate(schedule, replace(costs, latency=0)).makespan


def test_each_further_rehearsal_takes_longer_units_in_which_ranks_are_less_late(monkeypatch):
    seen = []

    def late(schedule, costs, unit_s):
        """Every rank wakes up 5 ms late, whatever the unit."""
        seen.append(unit_s)
        slots = simulate(schedule, costs).slots
        return Timeline.of(schedule, (slot._replace(end=slot.end + 0.005 / unit_s) for slot in slots))

    monkeypatch.setattr("book.trials.rehearse.rehearse", late)
    tries, right = Rehearsals(gpipe(2, 2), Costs(), unit_s=0.01), simulate(gpipe(2, 2))
    late_by = [tries.makespan() - right.makespan for _ in range(4)]
    assert seen == [0.01, 0.02, 0.04, 0.04] and late_by == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert tries.bubble() == tries.seen[-1].bubble and len(tries.seen) == 5


CONFIG, ROWS = GPTConfig(d_model=32, num_heads=4, context=16), 2
MESSAGE = ROWS * CONFIG.context * CONFIG.d_model * 4


def peaks(schedule, recompute=False):
    """The most bytes of activations and messages in a step, on each rank."""
    x = torch.zeros(ROWS * schedule.num_microbatches, CONFIG.context, CONFIG.d_model)
    return run(peak_bytes, schedule.num_ranks, schedule, partial(Block, CONFIG), x, recompute)


def kept_by_a_microbatch():
    """Bytes between forward and backward: with a message that brought the input, and without."""
    stage = Stage(Block(CONFIG))
    with MemoryTracker(stage.module) as memory:
        stage.forward(0, torch.randn(ROWS, CONFIG.context, CONFIG.d_model))
        before = memory.live["activation"]
        stage.forward(1, torch.randn(ROWS, CONFIG.context, CONFIG.d_model))
        after = memory.live["activation"]
    return after - before


@pytest.mark.thorough("seconds of several processes")
def test_peak_bytes_grow_with_m_in_gpipe_and_stand_still_in_1f1b():
    losses, its_graph = 8, 4  # bytes of each microbatch's loss: as a result, and on the last stage in the graph
    kept = kept_by_a_microbatch()
    four, eight = (peaks(gpipe(4, m)) for m in (4, 8))
    for rank in range(4):
        per_microbatch = kept - (MESSAGE if rank == 0 else 0)  # the first stage's input is a part of the batch
        per_microbatch += its_graph if rank == 3 else 0
        assert eight[rank] - four[rank] == 4 * (per_microbatch + losses)
    alike, sixteen = (peaks(one_f_one_b(4, m)) for m in (8, 16))
    for rank in range(4):
        assert sixteen[rank] - alike[rank] == 8 * losses
        predicted = [simulate(make(4, m)).peak(rank, kept=[kept] * 4) for make, m in ((gpipe, 4), (one_f_one_b, 8))]
        fewer = predicted[0] - predicted[1]
        assert alike[rank] == pytest.approx(four[rank] - fewer, abs=2 * MESSAGE)


def test_recomputation_keeps_the_message_alone():
    kept = saved.block_saved_bytes(sizes.ModelShape.of(CONFIG), ROWS) + MESSAGE  # and its output
    for recompute, grows in (
        (False, kept - MESSAGE),
        (True, MESSAGE),
    ):  # the first stage's input is part of the batch
        four, six = (peaks(gpipe(2, m), recompute)[0] for m in (4, 6))
        assert six - four == 2 * (grows + 8), "and a reported loss"


def test_a_receive_proves_that_its_sender_has_used_what_it_was_sent():
    """By the definition: in the peer's row, what it computes with ours comes before what it sends."""
    for schedule in (lower(one_f_one_b(4, 6)), lower(interleaved(3, 6, 2)), lower(zb_h2(4, 6)), lower(gpipe(2, 3))):
        for rank, row in enumerate(schedule.actions):
            known = [(receive, send) for receive, sends in proves(schedule, rank).items() for send in sends]
            assert len({send for _, send in known}) == len(known)
            for receive, send in known:
                assert receive in row and row.index(send) < row.index(receive)
                theirs = schedule.actions[schedule.rank_of[other_end(send).stage]]
                stage, op, m = other_end(send)
                uses = {Op.RECV_F: (Op.F,), Op.RECV_B: (Op.B, Op.I)}[op]
                used = next(
                    i for i, a in enumerate(theirs) if a.stage == stage and a.microbatch == m and a.op in uses
                )
                assert used < theirs.index(other_end(receive))


def test_few_sends_are_left_without_an_answer():
    """However many microbatches there are: what grew with them would be memory."""
    for make in (one_f_one_b, zb_h1):
        for m in (8, 32):
            schedule = lower(make(4, m))
            for rank, row in enumerate(schedule.actions):
                told = {send for sends in proves(schedule, rank).values() for send in sends}
                assert len([a for a in row if a.op in (Op.SEND_F, Op.SEND_B) and a not in told]) <= 4


def test_measured_and_predicted_in_one_file(tmp_path):
    schedule = Schedule.from_text("0F0 0I0 0W0\n1F0 1B0")
    predicted = simulate(schedule)
    both = Trace.merge([to_trace(predicted, 0.5), to_trace(predicted, 2.0, "predicted")])
    both.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(set(lanes.values())) == ["compute", "predicted"]
    assert len(lanes) == 4
    slices = {(lanes[e["pid"], e["tid"]], e["name"]): e for e in events if e["ph"] == "X"}
    assert slices["compute", "1B0"]["ts"] == 1e6 and slices["predicted", "1B0"]["ts"] == 4e6
    assert slices["compute", "0W0"]["cat"] == "weight"
