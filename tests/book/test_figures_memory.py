"""The picture of a step is drawn to scale, and from what the tracker saw."""

import re
from bisect import bisect_left

import pytest
import torch

from book.figures.memory import draw_memory, memory_totals
from book.figures.svg import color
from lib.memory import MemoryTracker
from tests.book.drawn import parse, paths

TEXT = {"title": "A <step>", "alt": "What you see & hear", "caption": "Look."}


@pytest.fixture
def memory():
    """1000 bytes of parameters, then twice 2000 bytes of activations, the second time beside the first."""
    model = torch.nn.Linear(250, 1, bias=False)
    with MemoryTracker(model) as memory:
        with memory.phase("a rather long first phase"):
            model.weight.detach().abs()  # seen, and 1000 bytes that die at once
        with memory.phase("x"):
            held = [torch.ones(500)]
            held.append(torch.ones(500))
    del held
    return memory


def areas(figure) -> dict[str, list[tuple[float, float]]]:
    """The corners of each filled area, by colour; a sample in the legend is no area."""
    filled = [path for path in paths(figure) if "stroke" not in path.paint and path.box[1] > 60]
    return {path.paint["fill"].split(",")[0].removeprefix("var(--pbh-"): path.lines[0] for path in filled}


def axis_scale(figure) -> float:
    """Pixels for one unit of the vertical axis, from two of its grid lines and their labels."""
    labels = [t for g in parse(figure).iter("g") for t in g.iter("text") if t.get("text-anchor") == "end"]
    numbers = [(float(t.text), float(t.get("y"))) for t in labels if re.fullmatch(r"[\d.]+", t.text)]
    (low, a), (high, b) = numbers[0], numbers[-1]
    return (a - b) / (high - low)


def test_areas_are_drawn_to_scale_and_stacked(memory):
    figure = draw_memory(memory, unit="kB", predicted={"sum": 5000}, **TEXT)
    found, scale = areas(figure), axis_scale(figure)
    assert set(found) == {"param", "activation"}, "kinds that never were are not drawn"
    for fill, peak_kB in (("param", 1.0), ("activation", 5.0)):
        levels = [y for _, y in found[fill]]
        assert (max(y for _, y in found["param"]) - min(levels)) / scale == pytest.approx(peak_kB, abs=0.02)
    (dashed,) = [path for path in paths(figure, stroke="text") if "stroke-dasharray" in path.paint]
    assert dashed.box[1] == dashed.box[3] == pytest.approx(min(y for _, y in found["activation"]), abs=0.2)
    assert "sum 5 kB" in figure.svg


def test_area_equals_bytes_summed_over_moments(memory):
    """Every sample takes equally much width, so the area under a kind is its mean."""
    figure = draw_memory(memory, unit="kB", **TEXT)
    scale = axis_scale(figure)
    for fill, kind in (("param", "parameter"), ("activation", "activation")):
        corners = areas(figure)[fill]
        twice = sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True))
        width = max(x for x, _ in corners) - min(x for x, _ in corners)
        mean_kB = abs(twice) / 2 / width / scale
        wanted = sum(usage[kind] for _, usage in memory.timeline) / len(memory.timeline) / 1000
        assert mean_kB == pytest.approx(wanted, rel=0.02)


def test_phases_are_marked_and_named_where_there_is_room(memory):
    figure = draw_memory(memory, **TEXT)
    assert ">x</text>" in figure.svg and "rather long" in figure.svg
    memory.phases[0].end_s = memory.phases[0].start_s
    again = draw_memory(memory, **TEXT)
    assert ">x</text>" in again.svg and "rather long" not in again.svg
    lines = [path.box for path in paths(figure, stroke="text")]
    begins = [bisect_left([time_s for time_s, _ in memory.timeline], phase.start_s) for phase in memory.phases]
    ground = areas(figure)["param"]
    left, right = min(x for x, _ in ground), max(x for x, _ in ground)
    wide = (right - left) / len(memory.timeline)
    assert [x0 for x0, *_ in lines] == [x1 for _, _, x1, _ in lines]
    assert [x for x, *_ in lines] == [pytest.approx(left + i * wide, abs=0.2) for i in begins]
    order = [path.paint.get("stroke", path.paint["fill"]) for path in paths(again) if path.box[1] > 60]
    assert order.index(color("text")) < order.index(color("param")), "what is alive lies in front of them"


def test_it_says_what_it_shows(memory):
    figure = draw_memory(memory, **TEXT)
    root = parse(figure)
    assert root.get("aria-label") == figure.alt == "What you see & hear"
    words = [t.text for t in root.iter("text")]
    assert {"A <step>", "MB", "parameters", "activations"} <= set(words)
    assert "gradients" not in words and "Look." in figure._repr_html_()


def test_kinds_are_named_as_in_the_other_figures(memory):
    memory.timeline[-1][1]["optimizer"] = 8
    assert ">optimizer states</text>" in draw_memory(memory, **TEXT).svg


def test_a_step_without_any_tensor_is_an_empty_picture(memory):
    memory.timeline = [(time_s, dict.fromkeys(usage, 0)) for time_s, usage in memory.timeline]
    figure = draw_memory(memory, **TEXT)
    assert areas(figure) == {} and "changes of memory" in figure.svg


def test_wrong_use(memory):
    with pytest.raises(ValueError, match="unit='GiB' must be one of B, kB, MB, GB"):
        draw_memory(memory, unit="GiB", **TEXT)
    with pytest.raises(ValueError, match="the tracker has seen nothing"):
        draw_memory(MemoryTracker(), **TEXT)
    with pytest.raises(ValueError, match="not finite"):
        draw_memory(memory, predicted={"x": float("inf")}, **TEXT)


def test_totals_lie_phase_by_phase_on_one_axis(memory):
    xs, ys = memory_totals(memory, "kB")
    assert len(xs) == len(ys) and xs == sorted(xs) and 0 < xs[0] and xs[-1] < 2
    seen = {k: [y for x, y in zip(xs, ys, strict=True) if k <= x < k + 1] for k in range(2)}
    for k, phase in enumerate(memory.phases):
        inside = [u["total"] / 1000 for t, u in memory.timeline if phase.start_s <= t <= phase.end_s]
        assert seen[k] == inside and max(inside) == phase.peak["total"] / 1000
    assert max(seen[1]) == 5 and max(seen[0]) == 2
    first = [x for x in xs if x < 1]
    gaps = [b - a for a, b in zip(first, first[1:], strict=False)]
    assert first[0] == pytest.approx(1 / (2 * len(first))) and gaps == pytest.approx([1 / len(first)] * len(gaps))
    assert memory_totals(MemoryTracker()) == ([], [])
