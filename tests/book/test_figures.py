"""Timelines, curves and bars are drawn to scale, and what they cannot show is refused."""

import itertools
import math
import re
import warnings

import pytest

from book.figures.curves import draw_bars, draw_curves
from book.figures.plot import marks
from book.figures.svg import Figure, text_width, variables
from book.figures.timeline import draw_timeline
from lib.trace import CommEvent, Span, Trace
from tests.book.drawn import parse, paths, texts


def measured() -> Trace:
    """Two ranks: 10 ms forward, 20 ms backward, one all-reduce over its end; the run starts 100 ms late."""
    spans = [Span(r, "forward", "", 0.1, 0.11) for r in (0, 1)] + [
        Span(r, "backward", "", 0.11, 0.13) for r in (0, 1)
    ]
    events = [CommEvent(r, "all_reduce", "dp", (0, 1), 8, 8.0, "bucket 0", 0.12, 0.135) for r in (0, 1)]
    return Trace(events, spans)


def rects(figure: Figure, name: str) -> list[dict[str, float]]:
    """The rectangles of the group filled with a colour of the palette."""
    groups = [g for g in parse(figure).iter("g") if g.get("fill", "").startswith(f"var(--pbh-{name},")]
    found = [r for g in groups for r in g.iter("rect")]
    return [{key: float(r.get(key)) for key in ("x", "y", "width", "height")} for r in found]


def test_two_figures_do_not_share_an_id():
    figures = [draw_timeline(measured(), title=words, alt=words) for words in "ab"]
    drawings = [drawing for figure in figures for drawing in (figure.svg, figure.narrow)]
    ids = [re.search(r' id="([\w-]+)"', drawing).group(1) for drawing in drawings]
    assert len(set(ids)) == 4
    for one, drawing in zip(ids, drawings, strict=True):
        assert set(re.findall(r"url\(#([\w-]+)\)", drawing)) == {one}
        assert set(re.findall(r"var\((--pbh-[\w-]+)", drawing)) <= set(variables("light"))


# ---- Timelines


def test_trace_is_drawn_to_scale():
    figure = draw_timeline(measured(), title="t", alt="a")
    forward, backward, comm = (rects(figure, name) for name in ("forward", "backward", "comm"))
    assert [len(part) for part in (forward, backward, comm)] == [2, 2, 2]
    scale = (forward[0]["width"] + 1) / 10  # pixels a millisecond; a bar leaves one pixel to the next
    assert (backward[0]["width"] + 1) / scale == pytest.approx(20, abs=0.1)
    assert (comm[0]["x"] - forward[0]["x"]) / scale == pytest.approx(20, abs=0.1)  # counted from the first span
    assert (comm[0]["width"] + 1) / scale == pytest.approx(15, abs=0.1)
    assert forward[0]["y"] < comm[0]["y"] < forward[1]["y"] < comm[1]["y"]  # rank 0 on top, its network below it
    labels = {t.text: float(t.get("y")) for t in parse(figure).iter("text")}
    assert forward[0]["y"] < labels["rank 0"] < comm[0]["y"] and forward[1]["y"] < labels["rank 1"] < comm[1]["y"]
    marks_at = {t.text: float(t.get("x")) for t in parse(figure).iter("text") if t.text in ("0", "10", "30")}
    ends = [forward[0]["x"], backward[0]["x"], backward[0]["x"] + backward[0]["width"] + 1]
    assert [marks_at[words] for words in ("0", "10", "30")] == [pytest.approx(x, abs=0.2) for x in ends]
    assert {"rank 0", "rank 1", "network", "ms", "forward", "backward", "bucket 0", "communication", "idle"} <= set(
        labels
    )


def test_seconds_and_milliseconds_draw_the_same_bars():
    in_ms, in_s = (rects(draw_timeline(measured(), title="", alt="", unit=u), "comm") for u in ("ms", "s"))
    assert in_ms == in_s


def test_idle_time_is_hatched_behind_compute_only():
    figure = draw_timeline(measured(), title="t", alt="a")
    hatched = [
        r for r in parse(figure).iter("rect") if r.get("fill", "").startswith("url(#hatched-") and r.get("x") > "1"
    ]
    lanes = [r for r in hatched if float(r.get("width")) > 100]
    assert [float(r.get("y")) for r in lanes] == [r["y"] for r in rects(figure, "forward")]


def test_overlapping_messages_are_stacked():
    bars = [(0, "network", "comm", f"bucket {i}", 10 * i, 10 * i + 15) for i in range(3)]
    first, second, third = sorted(rects(draw_timeline(bars, title="t", alt="a"), "comm"), key=lambda r: r["x"])
    assert first["y"] == third["y"] < second["y"]
    assert first["y"] + first["height"] < second["y"]


def test_prediction_is_a_thin_track_below_on_the_same_axis():
    predicted = [(0, "compute", "forward", "", 0, 10), (0, "compute", "backward", "", 10, 40)]
    figure = draw_timeline(measured(), title="t", alt="a", predicted=predicted)
    bar, track, _ = rects(figure, "forward")
    assert track["width"] == pytest.approx(bar["width"], abs=0.2) and track["height"] < bar["height"] / 3
    assert bar["y"] + bar["height"] <= track["y"] < bar["y"] + 1.5 * bar["height"]
    assert rects(figure, "backward")[1]["width"] + 1 == pytest.approx(3 * (bar["width"] + 1), abs=0.3)
    assert "predicted" in [t.text for t in parse(figure).iter("text")]
    assert "predicted" not in draw_timeline(measured(), title="t", alt="a").svg


def end_lines(figure: Figure) -> list[tuple[float, float, float]]:
    """(x, top, bottom) of the lines at the ends of steps."""
    found = re.findall(r'<g stroke="var\(--pbh-text[^"]*" stroke-width="2">(.*?)</g>', figure.svg)
    return [tuple(map(float, line)) for line in re.findall(r'd="M([\d.]+) ([\d.]+)V([\d.]+)"', "".join(found))]


def test_behind_the_end_of_a_step_is_paper():
    """No hatching that could be taken for idle time, and a line where the step ends, with its idle shares."""
    bars = [(0, "compute", "forward", "", 0, 30), (1, "compute", "forward", "", 5, 15)]
    for end in (30, 60):
        figure = draw_timeline(bars, title="t", alt="a", end=end)
        bar, short = rects(figure, "forward")
        lanes = [r for r in parse(figure).iter("rect") if r.get("fill", "").startswith("url(#hatched-")][1:]
        assert [float(lane.get("width")) for lane in lanes] == [pytest.approx(bar["width"] + 1, abs=0.2)] * 2
        ((x, top, bottom),) = end_lines(figure)
        assert x == pytest.approx(bar["x"] + bar["width"] + 1, abs=0.2)
        assert top < bar["y"] and bottom > short["y"] + short["height"]
        words = [t.text for t in parse(figure).iter("text")]
        assert "ends at 30 ms" in words and {"0%", "67%"} <= set(words)


def test_steps_are_compared_on_one_axis():
    steps = {name: [(0, "compute", "forward", "", 0, end)] for name, end in (("a", 40), ("b", 30), ("c", 50))}
    figure = draw_timeline(steps, title="t", alt="a", unit="units")
    widths = [bar["width"] + 1 for bar in rects(figure, "forward")]
    assert widths == [pytest.approx(end * widths[0] / 40, abs=0.3) for end in (40, 30, 50)]
    words = " ".join(t.text for t in parse(figure).iter("text"))
    assert "−10 units, −25%" in words and "+10 units, +25%" in words
    assert len({x for x, *_ in end_lines(figure)}) == 3
    alone = draw_timeline({"a": steps["a"], "b": steps["a"]}, title="t", alt="a").svg
    assert "−" not in alone and "+0" not in alone


def test_the_next_step_begins_in_the_time_that_was_won():
    steps = {"a": [(0, "compute", "forward", "", 0, 40)], "b": [(0, "compute", "forward", "", 0, 30)]}
    plain, again = (draw_timeline(steps, title="t", alt="a", again=again) for again in (False, True))
    bars, more = rects(plain, "forward"), rects(again, "forward")
    (pale,) = [bar for bar in more if bar not in bars]
    assert pale["x"] == pytest.approx(bars[1]["x"] + bars[1]["width"] + 1, abs=0.2)
    assert pale["width"] + 1 == pytest.approx((bars[0]["width"] + 1) / 4, abs=0.3)


def test_either_all_numbers_are_written_or_none():
    bars = [(0, "compute", "forward", f"{k}", 10 * k, 10 * k + (9 if k else 2)) for k in range(9)]
    words = [t.text for t in parse(draw_timeline(bars[1:], title="t", alt="a")).iter("text")]
    assert {f"{k}" for k in range(1, 9)} <= set(words) and "too narrow for numbers" not in words
    words = [t.text for t in parse(draw_timeline(bars, title="t", alt="a", end=200)).iter("text")]
    assert "too narrow for numbers" in words and not {f"{k}" for k in range(1, 9)} & set(words)


def test_words_stand_only_where_they_fit():
    bars = [(0, "compute", "forward", "microbatch 7", 0, 100), (0, "compute", "backward", "microbatch 8", 100, 107)]
    words = [t.text for t in parse(draw_timeline(bars, title="t", alt="a", end=300, unit="forwards")).iter("text")]
    assert "microbatch 7" in words and "microbatch 8" not in words and "8" in words  # the number alone still fits
    tips = [
        t.text
        for t in parse(
            draw_timeline([(0, "compute", "backward", "long name", 0, 3)], title="", alt="", end=100)
        ).iter("title")
    ]
    assert tips == ["long name: 0 to 3 ms"]


def test_bars_too_short_for_words_are_dashes_of_one_path():
    """As high as other bars, where these would be, in some ten characters each."""
    bars = [(rank, "compute", "forward", "", 3 * k, 3 * k + 1) for rank in (0, 1) for k in range(100)]
    figure = draw_timeline(bars, title="t", alt="a", end=300)
    lanes = [r for r in parse(figure).iter("rect") if float(r.get("width")) > 100]
    (path,) = [p for p in parse(figure).iter("path") if p.get("stroke", "").startswith("var(--pbh-forward,")]
    assert path.get("stroke-width") == lanes[0].get("height") and len(path.get("d")) < 11 * len(bars)
    left, scale = (float(lanes[0].get(key)) for key in ("x", "width"))
    start, *steps = re.findall(r"[Mm]([-\d.]+) ([-\d.]+)h([\d.]+)", path.get("d"))
    assert len(steps) == 199 and rects(figure, "forward") == []
    x, y, long = map(float, start)
    places = [(x, y)]
    for across, down, next_long in steps:
        x, y, long = x + long + float(across), y + float(down), float(next_long)
        places.append((x, y))
        assert long == pytest.approx(scale / 298 - 1, abs=0.11)
    for (x, y), (rank, *_, begin, _) in zip(places, bars, strict=True):
        assert x == pytest.approx(left + begin * scale / 298, abs=0.11)
        assert y == pytest.approx(float(lanes[rank].get("y")) + float(lanes[rank].get("height")) / 2, abs=0.11)


def test_a_wait_is_named_and_measured():
    bars = [(0, "compute", "backward", "", 0, 10), (0, "compute", "idle", "waits 5 ms", 10, 15)]
    figure = draw_timeline(bars, title="t", alt="a", end=50)
    line, backward = rects(figure, "text")[0], rects(figure, "backward")[0]
    assert line["width"] == pytest.approx((backward["width"] + 1) / 2, abs=0.2)
    assert "waits 5 ms" in texts(figure)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "0 bars"),
        ([(0, "compute", "sleep", "", 0, 1)], {}, "'sleep'.*use one of forward"),
        ([(0, "compute", "forward", "", 2, 1)], {}, "start <= end"),
        ([(0, "compute", "forward", "", 0, math.nan)], {}, "both finite"),
        ([(0, "compute", "forward", "", 0, 9)], {"end": 5}, "end=5.*ends at 9 ms"),
        ([(0, "compute", "forward", "", 0, 9)], {"end": math.inf}, "end=inf.*ends at 9 ms"),
        (measured(), {"unit": "forwards"}, "use one of"),
    ],
)
def test_impossible_timelines_say_so(rows, options, message):
    with pytest.raises(ValueError, match=message):
        draw_timeline(rows, title="t", alt="a", **options)


# ---- Curves


INKS = ("series-1", "series-0", "series-2", "series-3", "series-4")  # of the first to the fifth curve


def test_coinciding_curves_all_stay_visible():
    values = [3.0, 2.0, 1.5]
    figure = draw_curves({name: values for name in "abcde"}, x="step", y="loss", title="t", alt="a")
    curves, samples = zip(*(paths(figure, stroke=ink) for ink in INKS), strict=True)
    assert [curve.lines for curve in curves] == [curves[0].lines] * 5 and len(curves[0].lines[0]) == 3  # one line,
    styles = [(float(curve.paint["stroke-width"]), curve.paint.get("stroke-dasharray")) for curve in curves]
    assert len(set(styles)) == 5 and styles[0][0] > styles[1][0] > styles[2][0]  # seen beside or through the next
    assert [(sample.paint["stroke-width"], sample.paint.get("stroke-dasharray")) for sample in samples] == [
        (curve.paint["stroke-width"], curve.paint.get("stroke-dasharray")) for curve in curves
    ]
    heights = {t.text: float(t.get("y")) for t in parse(figure).iter("text") if t.text in "abcde"}
    assert min(b - a for a, b in itertools.pairwise(sorted(heights.values()))) >= 17.9  # and their names apart,
    for name, sample in zip("abcde", samples, strict=True):  # each beside a sample of its line
        assert heights[name] == pytest.approx(sample.middle[1] + 4.5, abs=0.2)


def test_curve_points_are_where_the_values_are():
    figure = draw_curves({"a": ([0, 10, 20], [0, 1, 4])}, x="x", y="y", title="", alt="")
    (x0, y0), (x1, y1), (x2, y2) = paths(figure, stroke="series-1")[0].lines[0]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y0 - y2) == pytest.approx(4 * (y0 - y1), abs=0.4) and y2 < y1 < y0


def test_measured_points_are_circles_on_the_same_axes():
    """On the curve where they are equal to it; and the axes reach one that lies far from every curve."""
    figure = draw_curves({"a": [0, 1, 4]}, x="x", y="y", title="", alt="", points=([0, 2, 2], [0, 4, 40]))
    start, _, end = paths(figure, stroke="series-1")[0].lines[0]
    circles = paths(figure, fill="panel")
    assert [circle.middle for circle in circles[:2]] == [pytest.approx(start, abs=0.15), pytest.approx(end, abs=0.15)]
    assert 36 < circles[2].middle[1] < end[1] and len(circles) == 3
    for left, top, right, bottom in (circle.box for circle in circles):
        assert (right - left, bottom - top) == pytest.approx((8, 8), abs=0.3)


def test_reference_line_stands_at_its_value():
    figure = draw_curves({"a": [4.0, 1.0]}, x="x", y="y", title="", alt="", reference={"entropy": 4.0})
    (dashed,) = [line for line in paths(figure, stroke="soft") if "stroke-dasharray" in line.paint]
    curve = paths(figure, stroke="series-1")[0].lines[0]
    assert dashed.lines == [[curve[0], (curve[1][0], curve[0][1])]]
    assert "entropy 4" in texts(figure)


LOSS = [5.4, 4.8, 4.2, 3.8, 3.7, 3.5, 3.4, 4.1, 3.2, 3.5, 3.2, 3.3, 3.1, 3.2, 3.0, 3.15, 3.05, 3.2, 3.0, 3.1, 2.9]


@pytest.mark.parametrize("limit", [2.6, 3.0, 3.1, 3.14, 5.0])
@pytest.mark.parametrize(
    "values",
    [LOSS, [1, 2, 4, 4.2], [3.1, 3, 3, 1, 1, 1], [2.8, 2.75, 2.8, 2.8, 9]],
)
def test_words_at_a_reference_touch_no_line(values, limit):
    name = "as far as one gets"
    figure = draw_curves({"a": values}, x="x", y="y", title="", alt="", reference={name: limit})
    (dashed,) = [line for line in paths(figure, stroke="soft") if "stroke-dasharray" in line.paint]
    left, level, right, _ = dashed.box
    (words,) = [t for t in parse(figure).iter("text") if t.text == f"{name} {limit:g}"]
    x, middle = float(words.get("x")), float(words.get("y")) - 4
    long = text_width(words.text, 12.5)
    ground = max(line.box[3] for line in paths(figure, stroke="soft") if line.box[1] == line.box[3])
    assert left < x < x + long < right and 5 < abs(middle - level) < 20 and 46 < float(words.get("y")) < ground
    ((*curve,),) = paths(figure, stroke="series-1")[0].lines
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        for i in range(21):
            if x <= x0 + (x1 - x0) * i / 20 <= x + long:
                assert abs(y0 + (y1 - y0) * i / 20 - middle) > 6, "of the curve"
    assert min(abs(line.box[1] - middle) for line in paths(figure, stroke="rule")) > 2, "of the grid"


def test_a_gap_breaks_the_line():
    figure = draw_curves({"a": [3, 2, math.nan, 1, 5, math.inf, 2, 4]}, x="x", y="y", title="", alt="")
    lines = paths(figure, stroke="series-1")[0].lines
    assert [len(line) for line in lines] == [2, 2, 2]
    gaps = [b[0][0] - a[-1][0] for a, b in itertools.pairwise(lines)]
    assert gaps == [pytest.approx(2 * (lines[0][1][0] - lines[0][0][0]), abs=0.3)] * 2
    assert "nan" not in figure.svg and "inf" not in figure.svg


def test_a_flat_curve_and_a_single_point_can_be_drawn():
    for values in ([2.0, 2.0, 2.0], [0.0, 0.0], [5.0]):
        with warnings.catch_warnings(action="error"):  # here only: what an earlier test left open is not of this one
            assert "nan" not in draw_curves({"a": values}, x="x", y="y", title="", alt="").svg


def test_impossible_curves_say_so():
    for series, message in (
        ({}, "0 curves"),
        ({str(i): [1] for i in range(6)}, "6 curves; draw 1 to 5"),
        ({"a": ([1, 2, 3], [1, 2])}, "3 x values and 2 y values"),
        ({"a": [math.nan]}, "no finite point"),
        ({"a": []}, "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_curves(series, x="x", y="y", title="", alt="")


# ---- Bars


def test_bars_are_as_long_as_their_values():
    rows = {"plain": {"parameter": 2, "optimizer state": 6}, "ZeRO": {"parameter": 2, "optimizer state": 3}}
    figure = draw_bars(rows, unit="MB", title="t", alt="a")
    drawn = [r for r in parse(figure).iter("rect") if r.get("height") == "26"]
    widths = [float(r.get("width")) + 1 for r in drawn]
    assert [w / widths[0] for w in widths] == [pytest.approx(v, abs=0.02) for v in (1, 3, 1, 1.5)]
    assert float(drawn[1].get("x")) == pytest.approx(float(drawn[0].get("x")) + widths[0], abs=0.2)
    words = texts(figure)
    assert {"8 MB", "5 MB", "plain", "ZeRO", "parameters", "optimizer states", "6", "3"} <= set(words)


def test_colours_of_bars_can_have_names_of_the_picture():
    rows = {"one": {"comm": 2}, "two": {"compute": 3}}
    words = texts(draw_bars(rows, unit="%", title="t", alt="a", names={"comm": "planner"}))
    assert "planner" in words and "compute" in words and "communication" not in words


def test_numbers_on_bars_are_as_people_write_them():
    rows = {"small": {"parameter": 0.5, "gradient": 1.25}, "large": {"parameter": 10_860, "gradient": 10_960.4}}
    svg = draw_bars(rows, unit="GB", title="t", alt="a").svg
    assert "21,820 GB" in svg and "10,860" in svg and "1.75 GB" in svg and "e+" not in svg
    assert "21820.4 GB" in draw_bars(rows, unit="GB", title="t", alt="a", form="{:.1f}").svg


def test_fixed_end_makes_bars_comparable():
    def width(value):
        figure = draw_bars({"a": {"parameter": value}}, unit="MB", title="", alt="", end=16, form="{:05.2f}")
        return [float(r.get("width")) + 1 for r in parse(figure).iter("rect") if r.get("height") == "26"][0]

    assert width(16) == pytest.approx(4 * width(4), abs=0.3)


def test_predicted_total_is_an_outline():
    figure = draw_bars({"a": {"parameter": 8}}, unit="MB", title="", alt="", outline={"a": 4})
    frame = next(r for g in parse(figure).iter("g") if g.get("stroke-dasharray") for r in g.iter("rect"))
    bar = next(r for r in parse(figure).iter("rect") if r.get("height") == "26")
    assert float(frame.get("width")) - 5 == pytest.approx((float(bar.get("width")) + 1) / 2, abs=0.2)


def test_impossible_bars_say_so():
    for rows, options, message in (
        ({}, {}, "0 rows"),
        ({"a": {}}, {}, "no parts"),
        ({"a": {"weights": 1}}, {}, "a: weights = 1.*parameter"),
        ({"a": {"parameter": -1}}, {}, "a: parameter = -1"),
        ({"a": {"parameter": 3}}, {"end": 2}, "end=2 MB is shorter.*3 MB"),
        ({"a": {"parameter": 3}}, {"outline": {"b": 2}}, "b: predicted, not measured"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_bars(rows, unit="MB", title="", alt="", **options)


def test_curves_over_named_stretches():
    """The names stand in the middle of their stretches, a line between them, and no number below the axis."""
    figure = draw_curves(
        {"a": ([0.5, 1.5, 2.5], [1, 2, 3])}, x=("forward", "backward", "step"), y="MB", title="t", alt="a"
    )
    places = [
        float(re.search(rf'x="([\d.]+)"[^>]*>{name}<', figure.svg)[1]) for name in ("forward", "backward", "step")
    ]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2) and places[0] < places[1]
    assert figure.svg.count("<text") == 6 + len(marks(0.88, 3.12, 7))  # title, y, three names, the curve's own
    between = [line.lines[0] for line in paths(figure, stroke="soft") if line.box[0] == line.box[2]]
    assert [line[0][0] for line in between] == [
        pytest.approx(sum(pair) / 2, abs=0.2) for pair in itertools.pairwise(places)
    ]
