"""Pictures of schedules: a bar for each action, an arrow for each message."""

import re
from itertools import pairwise

import pytest

from book.figures.schedule import draw_block, draw_end, draw_gantt, draw_messages, schedule_bars
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_v
from lib.pipeline.simulate import Costs, simulate


@pytest.mark.parametrize(("make", "sizes"), [(one_f_one_b, (3, 3)), (zb_h1, (4, 2)), (interleaved, (2, 2, 2))])
def test_an_arrow_for_each_message_from_row_to_row(make, sizes):
    schedule = make(*sizes)
    svg = draw_messages(schedule, title="t", alt="a").svg
    (path,) = re.findall(r'<path d="([^"]*)" fill="none" stroke-width="2"', svg)
    arrows = re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", path)
    assert len(arrows) == 2 * schedule.num_microbatches * (schedule.num_stages - 1)
    down = sum(float(near) < float(far) for near, far in arrows)
    assert down == len(arrows) // 2 if schedule.num_stages == schedule.num_ranks else 0 < down < len(arrows)
    numbers = re.findall(r">(\d+)</text>", svg)
    assert {str(k + 1) for k in range(len(arrows))} <= set(numbers)


def test_a_bar_says_its_stage_where_a_rank_has_several():
    assert schedule_bars(simulate(one_f_one_b(2, 2)))[0].label == "0"
    assert schedule_bars(simulate(interleaved(2, 2, 2)), 10)[0][3:] == ("stage 0, 0", 0, 10, False)
    bars = schedule_bars(simulate(zb_v(2, 3)))
    assert {bar.label.split(",")[0] for bar in bars if bar.marked} == {"stage 2", "stage 3"}
    picture = draw_gantt(simulate(zb_v(2, 3)), title="V", alt="", caption="There and back.")
    assert picture.caption == "There and back. Underlined is everything outside the first stage of a rank."
    lines = re.findall(r'<path d="([^"]*)" fill="none" stroke="[^"]*" stroke-width="1.6"', picture.svg)
    assert "".join(lines).count("h") == sum(bar.marked for bar in bars)
    assert "Underlined" not in draw_gantt(simulate(zb_h1(2, 3)), title="H1", alt="").caption


def test_a_block_is_a_part_of_the_last_step_enlarged():
    steps = {"1F1B": simulate(one_f_one_b(4, 8)), "ZB-V": simulate(zb_v(4, 8), Costs(0.5, 0.5, 0.5))}
    figure = draw_block(steps, 9, 12, title="t", alt="a", caption="Look.")
    inside = [slot for slot in steps["ZB-V"].compute if slot.start < 12 and slot.end > 9]
    numbers = re.findall(r">(\d+)</text>", figure.svg.partition(">9</text>")[0])  # behind them: the axis from 9 on
    words = re.findall(r'text-anchor="middle"[^>]*>(.*?)</g>', figure.svg)
    assert sum(len(re.findall(r">(?:stage )?[IW\d, ]+</text>", group)) for group in words) >= len(inside), numbers
    assert "ends at 25.5 units" in figure.svg and "−7.5 units" in figure.svg and "Underlined" in figure.caption


def test_the_end_of_a_step_marks_each_wait_between_two_actions_and_nothing_else():
    timeline = simulate(zb_h1(4, 8), Costs(2, 2, 1))
    svg = draw_end(timeline, (0, 1), 32, title="t", alt="a").svg
    lines = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="2.5"', svg)
    places = {int(words): float(x) for x, words in re.findall(r'<text x="([\d.]+)" y="125"[^>]*>(\d+)<', svg)}
    unit = (places[48] - places[32]) / 16
    waits = []
    for rank in (0, 1):
        mine = [slot for slot in timeline.compute if slot.rank == rank]
        waits += [(a.end, b.start - a.end) for a, b in pairwise(mine) if 32 < a.end < b.start]
    assert len(waits) == 5
    for (x, _, long), (start, wait) in zip(lines, waits, strict=True):
        assert float(x) == pytest.approx(places[32] + (start - 32) * unit, abs=0.2)
        assert float(long) == pytest.approx(wait * unit, abs=0.2)
    cut = [slot for slot in timeline.compute if slot.rank == 1 and slot.start < 32 < slot.end]
    assert len(cut) == 1 and f'<rect x="{places[32]:g}" y="79" width="{unit - 1:.1f}"' in svg, "its rest is no wait"


def test_the_halves_of_a_backward_have_their_letters_where_there_is_room():
    labels = {bar.kind: bar.label for bar in schedule_bars(simulate(zb_h1(2, 1)))}
    assert labels == {"forward": "0", "input": "I0", "weight": "W0"}
    assert "W0" in draw_gantt(simulate(zb_h1(2, 1)), title="t", alt="a").svg
    small = draw_gantt(simulate(zb_h1(4, 10)), title="t", alt="a").svg
    assert "W0" not in small and ">7</text>" in small, "else the number alone"


def test_a_legend_calls_input_gradients_by_their_name():
    halves, whole = simulate(zb_h1(2, 2)), simulate(one_f_one_b(2, 2))
    for timelines, said in (
        ({"": halves}, ">input gradient<"),
        ({"": whole}, ">backward<"),
        ({"1F1B": whole, "ZB-H1": halves}, ">backward or input gradient<"),
    ):
        svg = draw_gantt(timelines, title="t", alt="a").svg
        names = {name for name in re.findall(r">[^<>]*<", svg) if "backward" in name or "input" in name}
        assert names == {said}
