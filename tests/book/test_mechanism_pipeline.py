"""The pictures of pipelines: what a bar, a tray and a sentence say is what the simulator says."""

import pytest

from book.figures.mechanisms.pipeline import play_gpipe, play_rounds, play_trays
from book.figures.mechanisms.split_backward import play_split_backward
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import Costs, simulate

COSTS = Costs(1, 1, 1)


@pytest.fixture(scope="module")
def both():
    return play_trays(4, 6)


@pytest.fixture(scope="module")
def timelines():
    return {schedule.name: simulate(schedule) for schedule in (gpipe(4, 6), one_f_one_b(4, 6))}


def tray(things, schedule: str, rank: int) -> list[str]:
    return [thing.words for name, thing in things.items() if name.startswith(f"{schedule} kept {rank} ")]


def test_trays_hold_what_the_simulator_keeps_and_a_frame_what_they_have_held(both, timelines):
    moments = both.scenes[0].frames
    for name, timeline in timelines.items():
        for rank in range(4):
            most = 0
            for things in moments:
                most = max(most, len(tray(things, name, rank)))
                frame = things.get(f"{name} most {rank}")
                assert (frame.width - 2) / 17 == most if frame else not most
            assert most == timeline.peak(rank), (name, rank)
    assert [tray(moments[-1], name, 0) for name in timelines] == [[], []], "all has come back"


def test_bars_end_where_the_simulator_has_them(both, timelines):
    last, timeline = both.scenes[0].frames[-1], timelines["1F1B"]
    ends = {slot.action: slot.end for slot in timeline.compute}
    bars = {action: last[f"1F1B {action}"] for action in ends}
    left = min(bar.x for bar in bars.values())
    unit = (last["1F1B playhead"].x + 1 - left) / timeline.makespan
    for action, end in ends.items():
        assert bars[action].x + bars[action].width + 2 == pytest.approx(left + end * unit), action


def test_idle_time_is_counted_while_it_happens(both, timelines):
    for name, timeline in timelines.items():
        for rank in range(4):
            for now, things in enumerate(both.scenes[0].frames):
                busy = sum(max(0, min(s.end, now) - s.start) for s in timeline.compute if s.rank == rank)
                assert things[f"{name} idle {rank}"].words == f"{now - busy:g}"
            assert things[f"{name} idle {rank}"].words == f"{timeline.idle(rank):g}"


def test_a_message_flies_from_each_bar_to_the_next_rank(both, timelines):
    for name, timeline in timelines.items():
        for slot in timeline.compute:
            goes = slot.rank + (1 if slot.action.op == Op.F else -1) in range(4)
            seen = [things.get(f"{name} message {slot.action}") for things in both.scenes[0].frames]
            there = [(k, thing.y) for k, thing in enumerate(seen) if thing]
            assert [k for k, _ in there] == [k for k in (slot.end, slot.end + 1) if goes and k <= 27]
            if len(there) == 2:
                assert (there[0][1] < there[1][1]) == (slot.action.op == Op.F), "forwards go down"


def test_its_sentences_are_the_simulators(both, timelines):
    g, f = timelines["GPipe"], timelines["1F1B"]
    assert both.sentences[-1] == (
        f"Both end at {f.makespan:g}, idle {f.bubble:.0%}. GPipe kept 6, 6, 6, 6; 1F1B kept 4, 3, 2, 1."
    )
    assert (g.makespan, g.bubble) == (f.makespan, f.bubble)
    ends = {(slot.action.op, slot.action.microbatch, slot.rank): slot.end for slot in f.compute}
    assert [beat.until for beat in both.beats] == [
        0,
        ends[Op.F, 0, 3],
        ends[Op.B, 0, 3],
        ends[Op.B, 0, 0],
        ends[Op.F, 5, 0],
        27,
    ]
    down = both.scenes[0].frames[both.beats[1].until]
    assert tray(down, "GPipe", 0) == tray(down, "1F1B", 0) == ["0", "1", "2", "3"], "so far both are the same"
    assert "idle for 9 of 27 units" in play_gpipe(4, 6).sentences[-1]


def test_stages_of_a_rank_share_its_time():
    player = play_rounds(2, 4)
    plain, cut = simulate(one_f_one_b(2, 4)), simulate(interleaved(2, 4, 2), Costs(0.5, 0.5, 0.5))
    assert player.sentences[-1] == (
        f"Interleaved ends at {cut.makespan:g}, 1F1B at {plain.makespan:g}. "
        "For that rank 0 keeps 2.5 microbatches instead of 2."
    )
    name, moments = cut.schedule.name, player.scenes[0].frames
    assert moments[-1][f"{name} 0F1"].words == "1" and moments[-1][f"{name} 2F1"].words == "1′"
    assert max(len(tray(things, name, 0)) for things in moments) == cut.peak(0)


def test_a_split_backward_goes_from_1f1b_to_zb_h1():
    player = play_split_backward(4, 5, COSTS)
    first, *_, last = moments = player.scenes[0].frames
    before, after = simulate(one_f_one_b(4, 5), COSTS), simulate(zb_h1(4, 5), COSTS)
    assert f"waits {before.bubble:.0%} of the step" in player.sentences[0]
    assert f"saves {before.makespan - after.makespan:g} of {before.makespan:g} units" in player.sentences[-1]
    left = min(thing.x for thing in last.values())
    unit = (last["saved"].x - left) / after.makespan
    for slot in after.compute:
        assert last[f"{slot.action}"].x == pytest.approx(left + slot.start * unit), slot
    assert last["paper"][:4] == last["saved"][:4], "nothing is hatched behind the end"
    assert not any(thing.ink == "weight" for thing in first.values()), "at first a backward is one block"
    assert {thing.seen for name, thing in moments[2].items() if "W" in name} == {0.25}
