"""The pictures of pipelines: what a bar says is what the simulator says, and nothing leaves the drawing."""

import re

import pytest

from book.figures.mechanisms.pipeline import play_pipelines
from book.figures.mechanisms.split_backward import play_split_backward
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import Costs, simulate

COSTS = Costs(1, 1, 1)


@pytest.fixture(scope="module")
def both():
    return play_pipelines([gpipe(4, 6), one_f_one_b(4, 6)])


def tray(step, schedule: str, rank: int) -> list[str]:
    return [thing.words for name, thing in step.things.items() if name.startswith(f"{schedule} kept {rank} ")]


def test_trays_hold_what_the_simulator_keeps(both):
    timelines = {schedule.name: simulate(schedule) for schedule in (gpipe(4, 6), one_f_one_b(4, 6))}
    for name, timeline in timelines.items():
        for rank in range(4):
            most = max(len(tray(step, name, rank)) for step in both.scenes[0].steps)
            assert most == timeline.peak(rank), (name, rank)
    assert [tray(both.scenes[0].steps[-1], name, 0) for name in timelines] == [[], []], "all has come back"


def test_bars_end_where_the_simulator_has_them(both):
    last, timeline = both.scenes[0].steps[-1].things, simulate(one_f_one_b(4, 6))
    ends = {slot.action: slot.end for slot in timeline.compute}
    bars = {action: last[f"1F1B {action}"] for action in ends}
    left = min(bar.x for bar in bars.values())
    unit = (last["1F1B playhead"].x + 2 - left) / timeline.makespan
    for action, end in ends.items():
        assert bars[action].x + bars[action].width + 2 == pytest.approx(left + end * unit), action


def test_its_sentences_are_the_simulators(both):
    g, f = simulate(gpipe(4, 6)), simulate(one_f_one_b(4, 6))
    assert both.sentences[-1] == (
        f"GPipe waited {g.bubble:.0%} of {g.makespan:g} units and kept 6, 6, 6, 6 microbatches; "
        f"1F1B waited {f.bubble:.0%} of {f.makespan:g} units and kept 4, 3, 2, 1 microbatches."
    )
    assert "Time 5: rank 0 keeps 5 under GPipe, 4 under 1F1B." in both.sentences


def test_stages_of_a_rank_share_its_time():
    player = play_pipelines([one_f_one_b(2, 4), interleaved(2, 4, 2)])
    plain, cut = simulate(one_f_one_b(2, 4)), simulate(interleaved(2, 4, 2), Costs(0.5, 0.5, 0.5))
    assert f"{plain.bubble:.0%} of {plain.makespan:g} units" in player.sentences[-1]
    assert f"{cut.bubble:.0%} of {cut.makespan:g} units and kept 2.5, 1.5" in player.sentences[-1]
    name = cut.schedule.name
    last = player.scenes[0].steps[-1].things
    assert last[f"{name} 0F1"].words == "1" and last[f"{name} 2F1"].words == "1′"
    assert max(len(tray(step, name, 0)) for step in player.scenes[0].steps) == cut.peak(0)


def test_a_split_backward_goes_from_1f1b_to_zb_h1():
    player = play_split_backward(4, 5, COSTS)
    first, *_, last = player.scenes[0].steps
    before, after = simulate(one_f_one_b(4, 5), COSTS), simulate(zb_h1(4, 5), COSTS)
    assert f"waits {before.bubble:.0%} of {before.makespan:g} units" in first.sentence
    assert f"saves {before.makespan - after.makespan:g} of {before.makespan:g} units" in last.sentence
    left = min(thing.x for thing in last.things.values())
    unit = (last.things["saved"].x - left) / after.makespan
    for slot in after.compute:
        assert last.things[f"{slot.action}"].x == pytest.approx(left + slot.start * unit), slot
    assert not any(thing.ink == "weight" for thing in first.things.values()), "at first a backward is one block"
    pale = [thing.seen for name, thing in player.scenes[0].steps[2].things.items() if re.search("W", name)]
    assert set(pale) == {0.25}
