"""Token orders: tokens in the hue of their rank, bars as long as the pairs of a rank, and the ratio to the mean."""

import re

import pytest

from book.figures.orders import TOKEN, TOKENS, busiest_in_means, draw_token_orders
from book.figures.svg import NARROW, RANKS, WIDE, Figure
from lib.cost.token_orders import TOKEN_ORDERS, causal_pairs, tokens_of_rank
from tests.book.drawn import painted, parse, texts

RANK_COUNTS = 2, 3, 4


def rects(svg, rank):
    """(x, y, width) of all rectangles in the hue of a rank, but for its legend."""
    ink = f"var(--pbh-{RANKS[rank]},"
    found = [own for element, own in painted(parse(svg)) if element.tag == "rect" and own["fill"].startswith(ink)]
    return [(float(own["x"]), float(own["y"]), float(own["width"])) for own in found if own["width"] != "12"]


def both(n):
    figure = draw_token_orders(n)
    return [(Figure(figure.svg, ""), WIDE), (Figure(figure.narrow, ""), NARROW)]


@pytest.mark.parametrize("n", RANK_COUNTS)
def test_each_token_has_the_hue_of_its_rank(n):
    for figure, _ in both(n):
        rows = sorted({y for rank in range(n) for _, y, wide in rects(figure.svg, rank) if wide == TOKEN - 1})
        assert len(rows) == len(TOKEN_ORDERS)
        for order, row in zip(TOKEN_ORDERS, rows, strict=True):
            for rank in range(n):
                drawn = [round(x / TOKEN) for x, y, wide in rects(figure.svg, rank) if (y, wide) == (row, TOKEN - 1)]
                owned = [token for tokens in tokens_of_rank(order, TOKENS, n, rank) for token in tokens]
                assert drawn == owned, (order, rank)


@pytest.mark.parametrize("n", RANK_COUNTS)
def test_bars_have_one_axis_and_their_ratio_is_said(n):
    mean = TOKENS * (TOKENS + 1) / 2 / n
    for figure, _ in both(n):
        pairs = [causal_pairs(order, TOKENS, n, rank) for rank in range(n) for order in TOKEN_ORDERS]
        long = [wide for rank in range(n) for _, _, wide in rects(figure.svg, rank) if wide != TOKEN - 1]
        assert long == pytest.approx([count * max(long) / max(pairs) for count in pairs], abs=0.06)
        words = texts(figure)
        assert [text for text in words if re.fullmatch(r"[\d.]+ × mean", text)] == [
            f"{max(causal_pairs(order, TOKENS, n, rank) for rank in range(n)) / mean:.3g} × mean"
            for order in TOKEN_ORDERS
        ]
        assert sorted(text for text in words if re.fullmatch(r"\d{2,}", text)) == sorted(map(str, pairs))
        assert f"pairs of a rank; dashed: mean {mean:.0f}" in words


@pytest.mark.parametrize("n", RANK_COUNTS)
@pytest.mark.parametrize("order", TOKEN_ORDERS)
def test_many_tokens_come_near_to_the_limit(n, order):
    many = 10_000 * n * 2
    pairs = [causal_pairs(order, many, n, rank) for rank in range(n)]
    assert max(pairs) * n / sum(pairs) == pytest.approx(busiest_in_means(order, n), abs=1e-4)


def test_words_below_and_for_those_who_do_not_see_it_are_its_numbers():
    figure = draw_token_orders(4)
    assert (
        re.findall(r"\d[\d.]*(?= times)", figure.caption) == ["1.73", "1.06"]
        and "the mean in zig-zag" in figure.caption
    )
    assert "78 to 510 in contiguous order, 294 in zig-zag order, 276 to 312 in striped order" in figure.alt
