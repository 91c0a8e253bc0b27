"""A canvas and its layers."""

import re

from book.figures.canvas import FRAMES, Canvas
from book.figures.svg import color


def test_layers_lie_in_front_by_level_and_not_by_when_they_were_made():
    canvas = Canvas("a")
    canvas.words_on("comm").text(1, 2, "word")
    canvas.layer(FRAMES, fill="none").rect(0, 0, 5, 5)
    canvas.bars("comm").rect(0, 0, 5, 5)
    canvas.rect(0, 0, 9, 9)
    canvas.bars("comm").rect(6, 0, 3, 5)
    drawn = canvas.figure(10, 10).svg
    order = [
        drawn.index(what) for what in ('width="9"', f'<g fill="{color("comm", True)}"', '<g fill="none"', "word")
    ]
    assert order == sorted(order) and drawn.count("<g ") == 3, "what shares its colour shares a group"


def test_words_and_tips_are_no_markup():
    canvas = Canvas('What "you" see & <hear>')
    canvas.text(0, 0, "<b>")
    canvas.rect(0, 0, 1, 1, tip="a & b")
    figure = canvas.figure(10, 10, "<i>")
    assert "<b>" not in figure.svg and "<title>a &amp; b</title>" in figure.svg
    assert 'aria-label="What &quot;you&quot; see &amp; &lt;hear&gt;"' in figure.svg
    assert figure._repr_html_().count("&lt;i&gt;</figcaption>") == 1 and "<i>" not in figure._repr_html_()
    assert figure.alt == repr(figure) == 'What "you" see & <hear>'


def test_the_hatching_is_there_if_it_is_used_and_has_the_pictures_own_name():
    plain, one, other = Canvas("a"), Canvas("a"), Canvas("b")
    for canvas in (one, other):
        canvas.rect(0, 0, 1, 1, fill=canvas.hatched)
    ids = [re.findall(r'id="([\w-]+)"', canvas.figure(1, 1).svg) for canvas in (plain, one, other)]
    assert ids[0] == [] and len({*ids[1], *ids[2]}) == 2 and f"url(#{ids[1][0]})" in one.figure(1, 1).svg


def test_lengths_are_short_and_a_bar_can_always_be_seen():
    canvas = Canvas("a")
    canvas.rect(1 / 3, 2.0, 0, 5, fill_opacity=0.28)
    assert '<rect x="0.3" y="2" width="0.8" height="5" rx="2" fill-opacity="0.28"/>' in canvas.figure(1, 1).svg


def test_a_click_on_a_path_opens_its_address():
    canvas = Canvas("a")
    canvas.path("M0 0l9 9", tip="a & b")
    assert (
        canvas.figure(10, 10).svg.count("<title>a &amp; b</title></path>") == 1
        and 'role="img"' in canvas.figure(1, 1).svg
    )
    canvas.path("M0 0l9 9", tip="a & b", href="https://example.org/?a=1&b=2")
    drawn = canvas.figure(10, 10).svg
    assert '<a href="https://example.org/?a=1&amp;b=2" aria-label="a &amp; b"><path' in drawn
    assert 'role="group"' in drawn, "an image would hide its links from a screen reader"
