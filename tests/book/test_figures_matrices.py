"""What the drawings of cut layers must contain."""

import re

import pytest

from book.figures.activations import Activation, Sent, draw_activations
from book.figures.matrices import (
    Communication,
    HeadCut,
    Matrix,
    attention_cut,
    column_cut,
    draw_layer,
    mlp_cut,
    part_of,
    row_cut,
)
from book.figures.svg import color
from tests.book.drawn import texts

SENT, ACTIVATION, PARAMETER = (f'fill="{color(name, True)}"' for name in ("comm", "activation", "param"))


def drawn(items, ranks, **more):
    return draw_layer(items, ranks, title="t", alt="a", **more)


def blocks(figure, fill):
    """(in full colour, pale) rectangles of a fill."""
    found = re.findall(rf"<rect[^>]*{re.escape(fill)}[^>]*>", figure.svg)
    pale = sum("fill-opacity" in one for one in found)
    return len(found) - pale, pale


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_column_cut(n):
    figure = drawn(column_cut(4, 12, 24), n)
    words = texts(figure)
    assert {"x", "Wᵀ", "y", "[4, 12]", "on each", "[12, 24]", f"each [12, {24 // n}]", f"each [4, {24 // n}]"} <= set(
        words
    )
    assert "→ nothing" in words and "← all-reduce" in words
    assert blocks(figure, PARAMETER) == (1, n - 1), "rank 0's part stands out"
    assert blocks(figure, ACTIVATION) == (2, n - 1), "x is whole on each, y is in parts"
    assert blocks(figure, SENT) == (1, 0)


@pytest.mark.parametrize("n", [2, 4])
def test_a_row_cut_gives_partial_sums(n):
    figure = drawn(row_cut(4, 24, 12), n)
    words = texts(figure)
    assert {"[24, 12]", f"each [{24 // n}, 12]", f"each [4, {24 // n}]", "[4, 12]", "partial sums"} <= set(words)
    assert "→ all-reduce" in words and "← nothing" in words
    assert blocks(figure, ACTIVATION) == (2, n - 1 + n - 1), "parts of x, and a sheet for each other rank's term"


def test_backward_has_the_other_shape():
    column, row = (drawn(cut(4, 12, 24, backward=True), 4) for cut in (column_cut, row_cut))
    assert {"∂x", "∂y", "W", "[24, 12]", "each [6, 12]", "partial sums"} <= set(texts(column))
    assert {"[24, 12]", "each [24, 3]", "each [4, 3]"} <= set(texts(row)) and "partial sums" not in texts(row)


def test_a_pair_is_summed_once_in_each_direction():
    for backward, names in ((False, {"x", "y"}), (True, {"∂x", "∂y"})):
        words = texts(drawn(mlp_cut(4, 8, 32, backward), 4))
        assert names | {"upᵀ", "downᵀ", "GELU", "each [8, 8]"} <= set(words)
        assert [w for w in words if "all-reduce" in w] == ["← all-reduce", "→ all-reduce"]


def test_alone_nothing_is_sent():
    for items in (column_cut(4, 8, 8), row_cut(4, 8, 8), mlp_cut(4, 8, 32)):
        figure = drawn(items, 1)
        assert blocks(figure, SENT) == (0, 0) and not [w for w in texts(figure) if "all-reduce" in w]


def test_heads():
    figure = drawn(attention_cut(4, 16, 8, 8, 4), 4)
    words = texts(figure)
    assert {"qᵀ", "kᵀ", "vᵀ", "[16, 48]", "each [16, 12]", "8 heads", "each 2"} <= set(words)
    assert blocks(figure, PARAMETER) == (4, 12), "three sections and out, four parts each"
    assert blocks(figure, ACTIVATION) == (1 + 2, 6)


def test_fewer_heads_of_keys_than_ranks_are_shared():
    figure = drawn(attention_cut(4, 24, 4, 2, 4), 4)
    words = texts(figure)
    assert "each [24, 18]" in words
    assert [words.count(f"{r}") for r in range(4)] == [4] * 4, "once in queries, keys, values and out"
    assert part_of(Matrix("k", 8, 4, "columns", "parameter", (4,), (4,)), 4) == (8, 4), "all have the only one"


def test_frames_compare():
    frames = [drawn(mlp_cut(4, 8, 32), n, width=660).svg for n in (2, 8)]
    assert [re.search(r'viewBox="([^"]*)"', svg)[1] for svg in frames] == ["0 0 660 252"] * 2


@pytest.mark.parametrize(
    ("items", "ranks", "message"),
    [
        ([Matrix("w", 8, 10, "columns")], 4, "w: 10 cannot be split over 4 ranks"),
        ([Matrix("w", 10, 8, "rows")], 4, "w: 10 cannot be split over 4 ranks"),
        ([Matrix("w", 8, 8, "diagonal")], 2, "cut='diagonal' must be one of whole, columns, rows, partial"),
        ([Matrix("a b", 8, 8, "columns", sections=(4, 3))], 2, "do not make 8 columns"),
        ([HeadCut(6), Communication()], 4, "heads: 6 cannot be split over 4 ranks"),
    ],
)
def test_what_cannot_be_drawn(items, ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        drawn(items, ranks)


def test_activations_and_what_is_sent_between_them():
    row = [
        Activation("norm", "1/4 of the tokens", tokens=1 / 4),
        Sent("all-gather", "→", "gather x"),
        Activation("MLP", "1/4 of the width", width=1 / 4),
        Sent("", "←"),
        Activation("norm", "whole"),
    ]
    figure = draw_activations(row, title="t", alt="a")
    sizes = re.findall(
        r'<rect[^>]* width="(\d+)" height="(\d+)"[^>]*' + re.escape(color("activation", True)), figure.svg
    )
    assert sizes == [("64", "16"), ("16", "64"), ("64", "64")]
    assert {"norm", "MLP", "→ all-", "gather", "gather x", "← nothing", "whole"} <= set(texts(figure))
    assert figure.svg.count(re.search(rf'<g fill="{re.escape(color("comm", True))}">.*?</g>', figure.svg)[0]) == 1
    assert re.search(rf'<g fill="{re.escape(color("comm", True))}">(.*?)</g>', figure.svg)[1].count("<rect") == 2
