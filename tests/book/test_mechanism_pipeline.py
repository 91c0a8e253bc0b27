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
from tests.book.drawn import collisions

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


def test_a_message_is_between_two_ranks_when_its_bar_ends_and_never_on_a_number(both, timelines):
    for name, timeline in timelines.items():
        for slot in timeline.compute:
            down = slot.action.op == Op.F
            goes = slot.rank + (1 if down else -1) in range(4)
            seen = [things.get(f"{name} message {slot.action}") for things in both.scenes[0].frames]
            assert [k for k, thing in enumerate(seen) if thing] == [slot.end] * goes
            for thing in filter(None, seen):
                bar = both.scenes[0].frames[int(slot.end)][f"{name} {slot.action}"]
                assert thing.y == (bar.y + bar.height if down else bar.y - thing.height), "forwards go down"
    for scene in both.scenes:
        for things in scene.frames:
            on_each_other = collisions(things, "comm", "forward", "backward")
            assert [pair for pair in on_each_other if " message " in "".join(pair)] == []


def test_the_gain_is_a_bracket_between_the_two_states(both, timelines):
    *_, before, last = both.scenes[0].frames
    assert not [name for name in before if name.startswith("gain")], "at the end"
    for rank, saved in enumerate((2, 3, 4, 5)):
        of_gpipe, of_1f1b = (last[f"{name} most {rank}"] for name in timelines)
        line = last[f"gain {rank} line"]
        assert last[f"gain {rank} words"].words == f"−{saved}"
        assert of_1f1b.x + of_1f1b.width < line.x < line.x + line.width < of_gpipe.x + of_gpipe.width
    last = play_rounds(2, 4).scenes[0].frames[-1]
    own, others = last["end of the second"], last["end of the first"]
    plain, cut = simulate(one_f_one_b(2, 4)), simulate(interleaved(2, 4, 2), Costs(0.5, 0.5, 0.5))
    left = min(last[f"1F1B {slot.action}"].x for slot in plain.compute)
    assert (own.x + 1 - left) / (others.x + 1 - left) == pytest.approx(cut.makespan / plain.makespan)
    assert last["gain words"].words == f"−{plain.makespan - cut.makespan:g}" == "−1.5"
    assert own.x < last["gain line"].x < last["gain line"].x + last["gain line"].width < others.x


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
    assert moments[-1][f"{name} 0F1"].words == "1" and moments[-1][f"{name} 2F1"].words == "1\u0332", "underlined"
    assert max(len(tray(things, name, 0)) for things in moments) == cut.peak(0)


def test_a_split_backward_goes_from_1f1b_to_zb_h1():
    player = play_split_backward(4, 5, COSTS)
    first, *_, last = moments = player.scenes[0].frames
    before, after = simulate(one_f_one_b(4, 5), COSTS), simulate(zb_h1(4, 5), COSTS)
    assert f"waits {before.bubble:.0%} of the step" in player.sentences[0]
    assert f"saves {before.makespan - after.makespan:g} of {before.makespan:g} units" in player.sentences[-1]
    left = min(thing.x for thing in last.values())
    unit = (last["end of ZB-H1"].x - left) / after.makespan
    for slot in after.compute:
        assert last[f"{slot.action}"].x == pytest.approx(left + slot.start * unit), slot
    assert last["paper"].x == last["end of ZB-H1"].x, "nothing is hatched behind the end"
    assert last["end of 1F1B"].x + 3 == pytest.approx(left + before.makespan * unit)
    assert last["gain words"].words == f"−{before.makespan - after.makespan:g}"
    assert not any(thing.ink == "weight" for thing in first.values()), "at first a backward is one block"
    assert {thing.seen for name, thing in moments[2].items() if "W" in name} == {0.25}
