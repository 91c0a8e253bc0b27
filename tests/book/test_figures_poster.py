"""The poster of the first page: four cuts at once, of which ZeRO and a pipeline are two different drawings."""

import pytest

from book.figures.poster import CUTS, draw_poster
from book.figures.svg import NARROW, WIDE
from tests.book.drawn import painted, parse, texts

ALT = {"title": "Four cuts", "alt": "a"}


def boxes(figure, ink: str) -> list[tuple[float, float, float, float]]:
    """(x, y, width, height) of what is painted in this colour, without the legend."""
    found = [e for e, own in painted(parse(figure)) if e.tag == "rect" and f"-{ink}," in own.get("fill", "")]
    return [tuple(float(e.get(name)) for name in ("x", "y", "width", "height")) for e in found][1:]


def panels(ink: str) -> list[list[tuple[float, float, float, float]]]:
    """The boxes of each cut, on a wide page."""
    step = (WIDE - 54) / 4 + 18
    found = boxes(draw_poster(**ALT), ink)
    return [[box for box in found if k * step <= box[0] < (k + 1) * step] for k in range(4)]


def test_who_stores_how_much():
    area = [sum(wide * high for _, _, wide, high in of_cut) for of_cut in panels("param")]
    data, zero, tensor, pipeline = area
    assert zero == pytest.approx(data / 4, rel=0.01), "a quarter of every copy"
    assert tensor < data and pipeline < data


def test_zero_has_a_quarter_of_every_layer_and_a_pipeline_rank_has_full_layers():
    _, zero, _, pipeline = panels("param")
    assert len(zero) == 16 and len({y for _, y, *_ in zero}) == 4 and len({x for x, *_ in zero}) == 4
    assert len(pipeline) == 4 and len({y for _, y, *_ in pipeline}) == 4, "one after the next, and none twice"
    assert min(wide for _, _, wide, _ in pipeline) > 3.9 * max(wide for _, _, wide, _ in zero)
    rows = panels("activation")
    assert [len({x for x, *_ in of_cut}) for of_cut in rows] == [4, 4, 1, 1], "rows of its own, or all of them"


def test_it_names_cuts_and_messages_on_both_widths():
    figure = draw_poster(**ALT)
    for words in (texts(figure), texts(figure.narrow)):
        assert set(CUTS) < set(words) and all(f"→ {sent}" in words for sent in CUTS.values())
    assert f'viewBox="0 0 {NARROW:g} ' in figure.narrow
