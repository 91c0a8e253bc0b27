"""Who is the fastest where: changes lie where the times are equal, and every frame of the chapter can be read."""

import re
from itertools import product

import pytest

from book.figures.fastest import bytes_text, draw_fastest, fastest, seconds_text
from book.figures.svg import color, text_width
from lib.cost import steps
from tests.book.drawn import check_words, words_of

LINKS = {"NVLink": (3e-6, 450e9), "InfiniBand": (5e-6, 50e9), "Ethernet": (50e-6, 1.25e9)}
RANKS = [2**k for k in range(2, 11)]
SIZES = [10 ** (k / 6) for k in range(18, 58)]


def times(n, link):
    return {name: (SIZES, [steps.all_reduce_s(name, S, n, *LINKS[link]) for S in SIZES]) for name in steps.ALL_REDUCE}


def drawn(n, link):
    return draw_fastest(times(n, link), seconds=(5e-6, 6e3), title=f"Who wins with {n} ranks, {link}", alt="a")


@pytest.mark.parametrize(("n", "link"), list(product(RANKS, LINKS)))
def test_the_tree_wins_until_both_take_as_long(n, link):
    """α·B·(n - 1 - ⌈log₂n⌉) / (⌈log₂n⌉ - (n-1)/n): where the latency of more steps is what more bytes cost."""
    (small, *_), (large, n_bytes, seconds) = fastest(times(n, link))
    (alpha_s, bandwidth_Bps), rounds = LINKS[link], (n - 1).bit_length()
    assert (small, large) == ("tree", "ring")
    assert n_bytes == pytest.approx(alpha_s * bandwidth_Bps * (n - 1 - rounds) / (rounds - (n - 1) / n), rel=0.01)
    assert seconds == pytest.approx(steps.all_reduce_s("ring", n_bytes, n, *LINKS[link]), rel=0.01)


def test_who_wins_everywhere_and_who_wins_twice():
    xs = [1, 10, 100]
    assert fastest({"a": (xs, [1, 1, 1]), "b": (xs, [2, 2, 2])}) == [("a", 1, 1)]
    found = fastest({"a": (xs, [1, 4, 1]), "b": (xs, [2, 2, 2])})
    assert [(name, round(n_bytes, 2)) for name, n_bytes, _ in found] == [("a", 1), ("b", 3.16), ("a", 31.62)]


@pytest.mark.parametrize(("n", "link"), list(product(RANKS, LINKS)))
def test_every_frame_can_be_read(n, link):
    figure, (_, change) = drawn(n, link), fastest(times(n, link))
    for svg in (figure.svg, figure.narrow):
        check_words(svg)
        assert {"time", "size of the array"} <= {words for words, *_ in words_of(svg)}, "both axes have a name"
        grounds = re.findall(r'<rect x="([\d.]+)" y="30" width="([\d.]+)"', svg)
        (left, wide), (middle, narrow) = (map(float, ground) for ground in grounds)
        assert min(wide, narrow) > text_width("tree"), "each has its name"
        ((begin, end),) = [(box[0], box[2]) for words, *box in words_of(svg) if words == bytes_text(change.n_bytes)]
        assert left < begin and end < middle + narrow, "and the number stands on the ground"


def curve(svg, ink):
    """x to y of a curve's points."""
    path = re.search(rf'<g stroke-width="2.4" stroke="{re.escape(color(ink, True))}"[^>]*><path d="M([^M]*)M', svg)[1]
    return {float(x): float(y) for x, y in (point.split() for point in path.split("L"))}


def test_the_ground_has_the_colour_of_who_wins_and_changes_where_the_lines_cross():
    svg = drawn(64, "InfiniBand").svg
    grounds = [part for part in svg.split("<rect ") if 'fill-opacity="0.2"' in part]
    assert [color(ink, True) in part for part, ink in zip(grounds, ("series-1", "series-2"), strict=True)] == [
        True,
        True,
    ]
    edge = float(re.search(r'x="([\d.]+)"', grounds[1])[1])
    tree, ring = curve(svg, "series-1"), curve(svg, "series-2")
    assert len(tree) == len(SIZES) and min(tree) < edge < max(tree)
    assert all((tree[x] > ring[x]) == (x < edge) for x in tree), "what is lower is faster"


def test_numbers_are_what_people_say():
    said = [bytes_text(x) for x in (900, 1e3, 49_800, 2.84e6, 999e6, 28e9)]
    assert said == ["900 bytes", "1.0 kB", "50 kB", "2.8 MB", "999 MB", "28 GB"]
    said = [seconds_text(x) for x in (2e-7, 35e-6, 0.00996, 0.25, 3, 300, 9000)]
    assert said == ["0.2 µs", "35 µs", "10 ms", "250 ms", "3.0 s", "5.0 minutes", "2.5 hours"]


def test_four_curves_are_too_many():
    with pytest.raises(ValueError, match="4 curves; draw 1 to 3"):
        draw_fastest({name: ([1, 2], [1, 2]) for name in "abcd"}, seconds=(1, 2), title="t", alt="a")
