"""What the drawings of collectives must contain."""

import pytest

from book.figures.curves import draw_log_log
from book.figures.moves import draw_before_after, draw_step
from book.figures.svg import color
from lib.cost import steps
from tests.book.drawn import paths, texts

COMM = f'fill="{color("comm", True)}"'
IDLE = f'fill="{color("idle")}"'


def test_before_and_after():
    figure = draw_before_after([[1, 2], [10, 20]], [[1, 20], None], title="t", alt="a")
    assert sorted(texts(figure)) == sorted(["t", "rank 0", "rank 1", "1", "2", "1", "20", "10", "20", "nothing"])
    assert figure.svg.count(COMM) == 1, "only the 20 came over the network"
    # A part of the own array at another length is another thing, even where the number is the same.
    assert draw_before_after([[1, 2], [3, 4]], [[1], [7]], title="t", alt="a").svg.count(COMM) == 2
    for before, after in (([], []), ([[1]], [[1], [1]])):
        with pytest.raises(ValueError, match="a collective keeps its ranks, at least one"):
            draw_before_after(before, after, title="t", alt="a")


@pytest.mark.parametrize("name", steps.ALL_REDUCE)
@pytest.mark.parametrize("n", [2, 4, 5])
def test_a_step_shows_what_is_held_and_what_moved(name, n):
    moves = steps.ALL_REDUCE[name](n)
    for k in range(len(moves) + 1):
        figure = draw_step(moves, n, k, alt="a")
        held = steps.after(moves[:k], n)
        digits = [t for t in texts(figure) if t.isdigit()]
        assert len(digits) == n + sum(len(chunk) for rank in held for chunk in rank), "chunks, and what is in them"
        new = {(m.dst, c) for m in moves[k - 1] for c in m.chunks} if k else set()
        assert figure.svg.count(COMM) == len(new) and figure.svg.count(IDLE) == n * n - len(new)
        full = sum(len(chunk) == n for rank in held for chunk in rank)
        assert figure.svg.count('stroke-width="1.6"') == full
        assert figure.svg.count('fill="none" stroke=') == (len(moves[k - 1]) if k else 0), "an arrow for each move"
    with pytest.raises(ValueError, match=f"step {len(moves) + 1} is none of the {len(moves)}"):
        draw_step(moves, n, len(moves) + 1, alt="a")


def test_logarithmic_axes():
    def figure(**more):
        return draw_log_log({"fit": ([1, 10, 1000], [2, 20, 200])}, x="bytes", y="µs", title="t", alt="a", **more)

    (x0, y0), (x1, y1), (x2, y2) = paths(figure(), stroke="series-0")[0].lines[0]
    assert (x2 - x1) == pytest.approx(2 * (x1 - x0), abs=0.3) and (y1 - y2) == pytest.approx(y0 - y1, abs=0.3)
    assert {"1", "10", "100", "1 k", "bytes", "µs", "fit", "t"} <= set(texts(figure()))
    (dot,) = paths(figure(points=([10], [20])), fill="panel")
    assert dot.middle == pytest.approx((x1, y1), abs=0.15), "a point lies where the curve does"
    wide = figure(height_range=(0.001, 1e9))
    assert {"0.01", "100 M"} <= set(texts(wide)) and "200" not in texts(wide)
    narrow = draw_log_log({"fit": ([30, 4000], [20, 30])}, x="x", y="y", title="t", alt="a")
    assert {"50", "100", "200", "500", "1 k", "2 k"} <= set(texts(narrow)), "few powers of ten: others between them"
    assert "an H100 5000" in texts(figure(reference={"an H100": 5000}))


def test_what_cannot_be_drawn():
    for curves, message in (({}, "0 curves"), (dict.fromkeys("abcd", ([1], [1])), "4 curves")):
        with pytest.raises(ValueError, match=message):
            draw_log_log(curves, x="x", y="y", title="t", alt="a")
    for line in (([1, 2], [1]), ([0], [1]), ([1], [-1]), ([1], [float("nan")])):
        with pytest.raises(ValueError, match="all finite and above 0"):
            draw_log_log({"a": line}, x="x", y="y", title="t", alt="a")
